"""Ragged and grouped products, and convolutions in groups: every way to split one computes the same as plain jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

import autopar
from autopar.common import jax_compat
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import FactorKind
from autopar.ir.jax_sharding import concrete_mesh
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.ir.strategies import Signature, enumerate_strategies
from autopar.lowering.emit import Emitter, run_on_parts
from autopar.lowering.instructions import Compute
from autopar.ops.kernels.grouped import as_grouped_product, grouped_rule, is_grouped_product
from autopar.ops.kernels.local import admits
from tests.small_steps import assert_close, slow_cluster, verified_step

M, K, N, E = 64, 16, 32, 4
SIZES = jnp.array([10, 0, 33, 21], jnp.int32)  # no part of the rows ends where a group does


def ragged(x, w, sizes):
    return jax.lax.ragged_dot(x, w, sizes)


def megablox(x, w, sizes):
    return gmm(x, w, sizes, jnp.float32, (8, 16, 16), interpret=True)


def step(product):
    def of(state, batch):
        def loss(state):
            return jnp.mean(jnp.sin(product(jnp.tanh(product(batch["x"], state["a"], SIZES)), state["b"], SIZES)))

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, gradients), value

    return of


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    state = {"a": jax.random.normal(keys[0], (E, K, N)), "b": jax.random.normal(keys[1], (E, N, K))}
    return state, {"x": jax.random.normal(keys[2], (M, K))}


def parallel(product, recipe, devices):
    return autopar.parallelize(step(product), plan=recipe, cluster=slow_cluster(devices), cache_dir=None)


def products(product):
    """The operations of a call, and of its gradient in the rows and in the matrices."""
    graph = build_graph(parallel(product, None, 1).compile(*arguments()).traced, RuleBook())
    return [op for op in graph.ops() if is_grouped_product(op.eqn)][1:4]


def on_parts(op, strategy, sizes, operands):
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("x", "y")[: len(sizes)])
    run = jax.jit(lambda *args: run_on_parts(op.eqn, strategy.operands, strategy.results, mesh, args)[0])
    return jnp.sum(run(*operands), 0) if strategy.results[0].partial else run(*operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("product", "sizes"),
    [
        (ragged, (4,)),
        pytest.param(ragged, (2, 2), marks=pytest.mark.slow),
        pytest.param(megablox, (4,), marks=pytest.mark.slow),
        pytest.param(megablox, (2, 2), marks=pytest.mark.slow),
    ],
)
def test_every_split_of_a_product_computes_the_same(product, sizes):
    """Of rows, groups, columns and the inner dimension."""
    tried = 0
    for op in products(product):
        signature = Signature(
            rule=op.rule, operand_shapes=tuple(v.aval.shape for v in op.eqn.invars),
            result_shapes=(op.eqn.outvars[0].aval.shape,), sums_partially=True, admits=admits(op.eqn),
        )  # fmt: skip
        operands = [jax.random.normal(jax.random.key(i), v.aval.shape) for i, v in enumerate(op.eqn.invars[:2])]
        whole, *split = enumerate_strategies(signature, LogicalMesh(axis_sizes=sizes))
        expected = on_parts(op, whole, sizes, [*operands, SIZES])
        for strategy in split:
            assert_close(on_parts(op, strategy, sizes, [*operands, SIZES]), expected)
            tried += 1
    assert tried == 3 * ((1 + 4) ** len(sizes) - 1)  # rows, groups, columns, inner dimension


@pytest.mark.cases(1)
@pytest.mark.parametrize("devices", [2, 8])
def test_a_step_with_ragged_products_equals_plain_jit(devices):
    args = arguments()
    made = parallel(ragged, None, devices)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step(ragged))(*args))


def test_groups_among_devices_and_what_is_sent_is_what_was_predicted():
    pins = autopar.constrain({f"state/{n}": PartitionSpec("expert") for n in "ab"}, axis_sizes={"expert": 4})
    made, args = parallel(ragged, pins, 4), arguments()
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step(ragged))(*args))
    compared = autopar.verify(made, *args)
    assert {c.name: c.compiled for c in compared.collectives} == {c.name: c.predicted for c in compared.collectives}


def test_a_call_of_megablox_is_one_product_for_each_of_its_kernels():
    (state, batch) = arguments()
    jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: megablox(x, w, SIZES).sum(), (0, 1)))(state["a"], batch["x"])
    calls = [e for e in jaxpr.eqns if e.params.get("name") in ("gmm", "tgmm")]
    found = [as_grouped_product(e) for e in calls]
    assert [e.outvars[0].aval.shape for e in found] == [(M, N), (M, K), (E, K, N)]
    assert {e.params["call"].tiling for e in found} == {(8, 16, 16)}
    assert [e.params["call"].transposed for e in found] == [False, True, False]
    sums = [[f.kind is FactorKind.SUM for f in grouped_rule(e).factors[:4]] for e in found]
    inner_and_groups, rows = [False, True, False, True], [True, False, False, False]
    assert sums == [inner_and_groups, inner_and_groups, rows]


@pytest.mark.parametrize("transposed", [False, True])
def test_square_matrices_are_read_the_way_the_call_reads_them(transposed):
    x, w = jnp.ones((16, K)), jnp.ones((E, K, K))
    call = lambda x, w: gmm(x, w, SIZES, jnp.float32, (8, 16, 16), None, None, transposed, True)
    equations = jax_compat.equations_in(jax_compat.plain_jaxpr(call, x, w))
    inner = next(e for e in equations if e.params.get("name") == "gmm" and e.primitive.name != "pallas_call")
    assert as_grouped_product(inner).params["dims"].inner == (1, 2 if transposed else 1)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_step_with_megablox_equals_plain_jit(devices):
    args = arguments()
    made = parallel(megablox, None, devices)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step(megablox))(*args))


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


@pytest.mark.cases(2)
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


@pytest.mark.cases(2)
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
