"""Sums over micro-batches of products of 16 bits: in 32 bits from the product on, equal to plain `jax.jit`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.frontend.tracing import trace
from autopar.ir.graph import SUMMED_PRODUCT, OpKind
from autopar.microbatch.microbatch import micro_batched
from autopar.microbatch.plain_loop import run_graph
from autopar.passes.summed_products import with_summed_products
from autopar.sharding.rules import RuleBook
from autopar.xla import aot
from tests.small_steps import assert_close

RULES = RuleBook()


def weights(dtype="float32"):
    random = np.random.default_rng(0)
    shapes = {"first": (12, 32), "heads": (32, 4, 8), "out": (4, 8, 12), "bias": (32,)}
    return {name: jnp.asarray(random.normal(size=shape) / 4, dtype) for name, shape in shapes.items()}


def batch(examples=16):
    return jnp.asarray(np.random.default_rng(1).normal(size=(examples, 12)), jnp.float32)


def loss(params, x, dtype=jnp.bfloat16):
    p = jax.tree.map(lambda a: a.astype(dtype), params)
    hidden = jnp.tanh(x.astype(dtype) @ p["first"] + p["bias"])
    heads = jnp.tanh(jnp.einsum("bi,ihd->bhd", hidden, p["heads"]))
    return jnp.mean(jnp.einsum("bhd,hdo->bo", heads, p["out"]).astype(jnp.float32) ** 2)


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def exact_step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x, jnp.float32)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def graph_of(fun, params, x, num_microbatches=4):
    traced = trace(fun, (params, x), names=("params", "x"), donate=(0,), batch=(1,))
    return with_summed_products(micro_batched(traced, num_microbatches, RULES), RULES)


def summed(graph):
    makers = {v: op for op in graph.block.ops for v in op.outputs}
    return [makers[op.inputs[0]] for op in graph.block.ops if op.primitive == SUMMED_PRODUCT]


def test_products_make_what_is_summed():
    graph = graph_of(step, weights(), batch())
    products = summed(graph)
    assert [op.primitive for op in products] == ["dot_general"] * 3
    assert {graph.values[op.outputs[0]].dtype for op in products} == {"float32"}
    # As the parameters lie.
    assert {graph.values[op.outputs[0]].shape for op in products} == {(12, 32), (32, 4, 8), (4, 8, 12)}
    # The gradient of the bias is no product's.
    assert sum(op.kind is OpKind.ACCUMULATE for op in graph.block.ops) == 5


def test_results_are_those_of_the_step():
    params, x = weights(), batch()
    graph = graph_of(step, params, x)
    leaves = jax.tree.leaves((params, x))
    got = jax.tree.unflatten(jax.tree.structure((params, 0.0)), jax.jit(lambda a: run_graph(graph, a))(leaves))
    assert_close(got, jax.jit(step)(params, x), 2**-9)


def test_sums_of_other_types_stay_as_they_are():
    for fun, params in ((exact_step, weights()), (step, weights("bfloat16"))):
        assert not summed(graph_of(fun, params, batch()))
    assert not summed(graph_of(step, weights(), batch(), num_microbatches=1))


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "gather": "ahead", "schedule": "1f1b"}, marks=pytest.mark.slow
        ),
        {"dp": 4, "tp": 2, "zero": 2, "sequence_parallel": True},
    ],
    ids=["stages", "ZeRO-2"],
)
def test_on_devices(recipe):
    plan = recipes.combine(num_microbatches=4, **recipe)
    cluster = autopar.Cluster.parse("dgx-h100")
    planned = autopar.parallelize(step, plan=plan, cluster=cluster, cache_dir=None)
    params, x = weights(), batch()
    got = planned(jax.tree.map(jnp.array, params), x)
    assert_close(jax.tree.map(np.asarray, got), jax.jit(step)(params, x), 2**-8)


@pytest.mark.slow
@pytest.mark.skipif(not aot.has_gpu_compiler(), reason="needs the CUDA plugin (autopar[gpu])")
@pytest.mark.parametrize(("dtype", "kernels"), [("float32", 1), ("bfloat16", 2)])
def test_a_compiler_for_gpus_adds_up_within_products_of_32_bits(dtype, kernels):
    """As a device's summands are added up under data parallelism, of a size whose contraction XLA does not split."""
    mesh = aot.target_mesh("gpu:h100:2", (2,), ("x",))
    on_axis = jax.sharding.PartitionSpec("x")

    def summand(x, y):
        return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=dtype)[None]

    def add(total, x, y):
        part = jax.shard_map(summand, mesh=mesh, in_specs=(on_axis, on_axis), out_specs=on_axis, check_vma=False)(x, y)
        return total + part.astype("float32")

    sizes = ((2, 8192, 4096), "float32"), ((8192, 8192), "bfloat16"), ((8192, 4096), "bfloat16")
    where = jax.sharding.NamedSharding(mesh, on_axis)
    shapes = [jax.ShapeDtypeStruct(shape, of, sharding=where) for shape, of in sizes]
    text = jax.jit(add, donate_argnums=0).lower(*shapes).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert len(re.findall(r"= \S+ (?:fusion|custom-call|dot|add)\(", entry)) == kernels
