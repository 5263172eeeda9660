"""Products of scaled blocks: every way to split one computes the same as plain jax, at the rates of their formats; and
compiled ahead of time for B200s.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import autopar
from autopar.common import jax_compat
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import FactorKind
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.ir.strategies import Signature, enumerate_strategies
from autopar.lowering.emit import run_on_parts
from autopar.ops.kernels.scaled import is_scaled_product, scaled_rule
from autopar.verification import compile_for_target
from tests.small_steps import assert_close, slow_cluster

E4M3, E8M0, E2M1 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu, jnp.float4_e2m1fn
BLOCK, WIDTH, TOKENS = 32, 128, 64
LAST = (((1,), (1,)), ((), ()))


def in_blocks(x):
    """(numbers of 8 bits, a power of two for each 32 along the last dimension), as MXFP8 has them."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    power = jnp.ceil(jnp.log2(jnp.max(jnp.abs(blocks), -1) / 448))
    return (blocks / jnp.exp2(power)[..., None]).reshape(x.shape).astype(E4M3), jnp.exp2(power).astype(E8M0)


def scaled(x, y):
    """x @ y.T"""
    (x, x_scale), (y, y_scale) = in_blocks(x), in_blocks(y)
    return jax.lax.scaled_dot(
        x, y, lhs_scale=x_scale, rhs_scale=y_scale, dimension_numbers=LAST, preferred_element_type=jnp.float32
    )


@jax.custom_vjp
def linear(x, w):
    return scaled(x, w.T)


linear.defvjp(lambda x, w: (linear(x, w), (x, w)), lambda xw, g: (scaled(g, xw[1]), scaled(xw[0].T, g.T)))


def step(form):
    def of(state, batch):
        layer = lambda x, w: jnp.tanh(linear(x.astype(jnp.bfloat16).astype(jnp.float32), w))
        layer = jax.checkpoint(layer) if form == "checkpoint" else layer

        def loss(state):
            x = batch["x"]
            if form == "scanned":
                x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, state)
            else:
                x = functools.reduce(layer, state, x)
            return jnp.mean(jnp.square(x - batch["y"]))

        value, gradients = jax.value_and_grad(loss)(state)
        return state - gradients, value

    return of


def arguments():
    state, x, y = (
        jax.random.normal(jax.random.key(i), shape) / 8
        for i, shape in enumerate([(2, WIDTH, WIDTH), *[(TOKENS, WIDTH)] * 2])
    )
    return state, {"x": x, "y": y}


TENSOR, ZERO = autopar.recipes.tensor_parallel(size=2), autopar.recipes.zero(3)
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("form", "recipe", "devices", "microbatches"),
    [
        ("scanned", TENSOR, 2, 1),
        pytest.param("unrolled", TENSOR, 2, 1, marks=slow),
        pytest.param("checkpoint", TENSOR, 2, 1, marks=slow),
        pytest.param("unrolled", ZERO, 2, 1, marks=slow),
        pytest.param("scanned", ZERO, 2, 1, marks=slow),
        pytest.param("checkpoint", ZERO, 2, 1, marks=slow),
        # 32 tokens in each: the blocks of the gradient of weights lie along them.
        pytest.param("unrolled", autopar.recipes.data_parallel(), 1, 2, marks=slow),
    ],
)
def test_a_step_with_scaled_products_equals_plain_jit(form, recipe, devices, microbatches):
    args, search = arguments(), autopar.Search(num_microbatches=microbatches)
    made = autopar.parallelize(step(form), plan=recipe, search=search, cluster=slow_cluster(devices), cache_dir=None)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step(form))(*args))
    assert "scaled_dot" not in str(made.plan(*args))


def scaled_equations(function, *avals):
    return [e for e in jax_compat.equations_in(jax_compat.plain_jaxpr(function, *avals)) if is_scaled_product(e)]


def shapes(lhs, rhs, lhs_scale, rhs_scale, dtype, scale):
    made = jax.ShapeDtypeStruct
    return made(lhs, dtype), made(rhs, dtype), made(lhs_scale, scale), made(rhs_scale, scale)


def test_batches_rows_columns_and_whole_blocks_may_be_split():
    """[3, 8, 64] @ [3, 16, 64] in blocks of 16; of scales for 32 numbers and for 64, a block is of 64."""
    (eqn,) = scaled_equations(jax.nn.scaled_matmul, *shapes((3, 8, 64), (3, 16, 64), (3, 8, 4), (3, 16, 4), E2M1, E4M3))
    rule = scaled_rule(eqn)
    kinds = [(f.size, f.kind) for f in rule.factors]
    passed, summed, fixed = FactorKind.PASS, FactorKind.SUM, FactorKind.FIXED
    assert kinds == [(3, passed), (4, summed), (16, fixed), (8, passed), (16, passed)]
    assert rule.operands == (((0,), (3,), (1, 2)), ((0,), (4,), (1, 2)), ((0,), (3,), (1,)), ((0,), (4,), (1,)))
    assert rule.results == (((0,), (3,), (4,)),)

    dot = lambda x, y, xs, ys: jax.lax.scaled_dot(x, y, lhs_scale=xs, rhs_scale=ys)
    (eqn,) = scaled_equations(dot, *shapes((8, 128), (128, 16), (8, 4), (2, 16), E4M3, E8M0))
    rule = scaled_rule(eqn)
    assert [(f.size, f.kind) for f in rule.factors] == [
        (2, summed), (64, fixed), (2, fixed), (8, passed), (16, passed)
    ]  # fmt: skip
    assert rule.operands == (((3,), (0, 1)), ((0, 1), (4,)), ((3,), (0, 2)), ((0,), (4,)))


@pytest.mark.parametrize("sizes", [(4,), pytest.param((2, 2), marks=slow)])
def test_every_split_of_a_product_computes_the_same(sizes):
    x, y = (jax.random.normal(jax.random.key(i), (n, 256)) for i, n in enumerate((64, 32)))
    (x, x_scale), (y, y_scale) = in_blocks(x), in_blocks(y)
    operands = x, y, x_scale, y_scale
    call = lambda x, y, xs, ys: jax.lax.scaled_dot(
        x, y, lhs_scale=xs, rhs_scale=ys, dimension_numbers=LAST, preferred_element_type=jnp.float32
    )
    (eqn,) = scaled_equations(call, *operands)
    signature = Signature(
        rule=scaled_rule(eqn), operand_shapes=tuple(v.aval.shape for v in eqn.invars),
        result_shapes=(eqn.outvars[0].aval.shape,), sums_partially=True,
    )  # fmt: skip
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(sizes), ("x", "y")[: len(sizes)])
    tried = 0
    for strategy in enumerate_strategies(signature, LogicalMesh(axis_sizes=sizes)):
        run = jax.jit(lambda *args, s=strategy: run_on_parts(eqn, s.operands, s.results, mesh, args)[0])
        made = run(*operands)
        assert_close(jnp.sum(made, 0) if strategy.results[0].partial else made, call(*operands))
        tried += 1
    assert tried == (1 + 3) ** len(sizes)  # none, rows, columns, blocks


def seconds(cluster, dtype, scale, block):
    n = 8192
    args = shapes((1, n, n), (1, n, n), (1, n, n // block), (1, n, n // block), dtype, scale)
    traced = trace(jax.nn.scaled_matmul, args, names=("x", "y", "x_scale", "y_scale"), donate=(), batch=())
    graph = build_graph(traced, RuleBook())
    (op,) = (op for op in graph.ops() if is_scaled_product(op.eqn))
    return NodeCosts(graph, cost_model(Cluster.preset(cluster), LogicalMesh(axis_sizes=(8,)))).compute_s(op, None)


@pytest.mark.parametrize(
    ("cluster", "dtype", "scale", "block", "tera", "share"),
    [
        ("dgx-b200", E4M3, E8M0, 32, 4500, 0.647 * 0.845),
        ("dgx-b200", E2M1, E4M3, 16, 9000, 0.647 * 0.845),
        ("gb300-nvl72", E2M1, E4M3, 16, 15_000, 0.647 * 0.955),
        ("vr200-nvl72", E2M1, E4M3, 16, 35_000, 0.647 * 0.845),
        ("mi355x", E4M3, E8M0, 32, 5033.2, 0.49),
        ("mi355x", E2M1, E4M3, 16, 2516.6, 0.49),  # no NVFP4: in bfloat16
        ("dgx-b200", E4M3, E8M0, 64, 2250, 0.647 * 0.845),  # no format
        ("dgx-h100", E4M3, E8M0, 32, 989, 0.80 * 0.75),
    ],
)
def test_a_product_runs_at_the_rate_of_its_format_or_in_bfloat16(cluster, dtype, scale, block, tera, share):
    device = Cluster.preset(cluster).device
    fill_s = device.float32_fill_s * device.peak_flops_per_s("float32") / (tera * 1e12)
    arithmetic_s = 2 * 8192**3 / (tera * 1e12 * share) + fill_s
    assert seconds(cluster, dtype, scale, block) == pytest.approx(device.launch_overhead_s + arithmetic_s, rel=1e-6)


@pytest.mark.extra("gpu")
@pytest.mark.parametrize(
    ("recipe", "forward", "gradient"),
    [(autopar.recipes.zero(3), "2048,512", "512,256"), (TENSOR, "8192,256", "256,256")],
)
def test_cudnn_multiplies_each_devices_part(recipe, forward, gradient):
    """Tokens among four devices, whose sums are over their own tokens' blocks; and columns among two. Without a card
    the compiler of jax 0.12 leaves the product a computation of its own.
    """
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3

    def step(state, batch):
        def loss(w):
            dims = (((2,), (0,)), ((), ()))
            made = jax.nn.scaled_dot_general(batch["x"], w, dims, preferred_element_type=jnp.float32, configs=configs)
            return jnp.mean(jnp.square(jnp.sin(made)))

        return state - jax.grad(loss)(state)

    devices = 2 if recipe is TENSOR else 4
    args = jax.ShapeDtypeStruct((256, 512), jnp.float32), {"x": jax.ShapeDtypeStruct((8, 1024, 256), jnp.bfloat16)}
    made = autopar.parallelize(step, plan=recipe, cluster=f"dgx-b200:{devices}", cache_dir=None)
    text = compile_for_target(made, f"gpu:b200:{devices}", *args).as_text()
    call = r"(?:custom-call\(.*\"__cudnn\$blockScaledDot\"|call\(.*to_apply=%scaled_matmul)"
    called = re.findall(rf"= \(?f32\[1,([\d,]+)\]\S* (?:\S+ )?{call}", text)
    assert {tuple(sorted(map(int, made.split(",")))) for made in called} == {
        tuple(sorted(map(int, made.split(",")))) for made in (forward, gradient)
    }
