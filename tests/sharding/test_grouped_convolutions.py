"""Convolutions in groups, forward and gradients, split in every way that the search may choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.jax_sharding import concrete_mesh
from autopar.ir.mesh import LogicalMesh
from autopar.lowering.emit import Emitter
from autopar.lowering.instructions import Compute
from autopar.sharding.rules import RuleBook
from autopar.sharding.strategies import Signature, enumerate_strategies
from tests.small_steps import assert_close, slow_cluster, verified_step

BOOK = RuleBook()
NUMBERS = ("NHWC", "HWIO", "NHWC")
# Channels in and out, groups of channels, groups of examples, stride.
CASES = [
    (8, 8, 2, 1, 1),
    (4, 6, 2, 1, 1),
    (8, 16, 4, 1, 2),
    (8, 8, 8, 1, 1),
    (8, 16, 8, 1, 2),
    (4, 8, 1, 2, 1),
    (4, 8, 1, 4, 2),
    (8, 8, 1, 8, 1),
]


def convolve(x, kernel, case):
    _, _, groups, batch_groups, stride = case
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=NUMBERS, feature_group_count=groups,
        batch_group_count=batch_groups,
    )  # fmt: skip


def arrays(case):
    channels_in, channels_out, groups, _, _ = case
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 6, 6, channels_in)).astype(np.float32)
    return x, random.normal(size=(3, 3, channels_in // groups, channels_out)).astype(np.float32)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_strategy_of_a_convolution_and_of_its_gradients_gives_its_numbers(case, sizes):
    def both_passes(x, kernel):
        y, transpose = jax.vjp(lambda x, kernel: convolve(x, kernel, case), x, kernel)
        return y, transpose(jnp.sin(y))

    traced = trace(both_passes, arrays(case), names=("x", "kernel"), donate=(), batch=())
    mesh, random = LogicalMesh(axis_sizes=sizes), np.random.default_rng(1)
    graph = build_graph(traced, BOOK)
    devices = concrete_mesh(mesh)
    emitter = Emitter(graph, devices)
    found = [op for op in graph.block.ops if op.primitive == "conv_general_dilated"]
    assert len(found) == 3
    for op in found:
        (result,) = op.eqn.outvars
        shapes = [tuple(v.aval.shape) for v in op.eqn.invars]
        args = [random.normal(size=shape).astype(np.float32) for shape in shapes]
        ways = []
        for partially in (True, False):
            signature = Signature(op.rule, tuple(shapes), (tuple(result.aval.shape),), partially)
            ways += enumerate_strategies(signature, mesh)
        assert len(ways) > 2

        def all_ways(args, op=op, ways=ways):
            outs = []
            for strategy in ways:
                instruction = Compute(
                    op=op, reads=(), results=strategy.results, strategy=strategy,
                    written_out=bool(strategy.results[0].partial), reduced=strategy.combined,
                )  # fmt: skip
                operands = [emitter.pin(a, layout) for a, layout in zip(args, strategy.operands, strict=True)]
                (out,) = emitter.grouped_convolution(instruction, operands)
                out = emitter.pin(out, strategy.results[0])
                outs.append(out.sum(0) if strategy.results[0].partial else out)
            return outs

        (expected,) = jax.jit(lambda args, op=op: op.eqn.primitive.bind(*args, **op.eqn.params)[None])(args)
        for out, strategy in zip(jax.jit(all_ways)(args), ways, strict=True):
            error = np.abs(np.asarray(out) - expected).max() / np.abs(expected).max()
            assert error < 1e-5, strategy


def training_step(case):
    def loss(params, batch):
        y = jnp.tanh(convolve(batch["x"], params["kernel"], case)).mean((1, 2))
        return jnp.mean((y @ params["out"]) ** 2)

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    x, kernel = arrays(case)
    out = np.random.default_rng(2).normal(size=(case[1], 8)).astype(np.float32)
    return step, {"kernel": kernel, "out": out}, {"x": x}


PLANS = {
    "free": None,
    "2d": autopar.recipes.tensor_parallel("2d"),
    "grid": autopar.recipes.combine(dp=2, tp=2),
    "pins": autopar.constrain({"kernel": P(None, None, None, "m")}, axis_sizes={"m": 2}),
}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("case", [(8, 8, 2, 1, 1), (4, 6, 2, 1, 1), (8, 8, 8, 1, 1), (4, 8, 1, 2, 1)], ids=str)
def test_a_step_with_grouped_convolutions_equals_jit(case, plan):
    step, params, batch = training_step(case)
    parallel = autopar.parallelize(step, plan=PLANS[plan], cluster=slow_cluster(4), cache_dir=None, donate_argnums=())
    assert_close(parallel(params, batch), jax.jit(step)(params, batch))


def test_what_a_grouped_convolution_sends_is_predicted():
    step, params, batch = training_step((8, 16, 8, 1, 2))
    parallel = autopar.parallelize(step, plan=PLANS["grid"], cluster=slow_cluster(4), cache_dir=None)
    verified_step(parallel, (params, batch), 1e-5)
