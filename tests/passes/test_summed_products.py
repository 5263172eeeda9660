"""Sums over micro-batches of products of 8 and 16 bits: in their type from the product on, equal to plain `jax.jit`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.execute import aot
from autopar.frontend.tracing import trace
from autopar.ir.graph import SUMMED_PRODUCT, OpKind
from autopar.ir.rules import RuleBook
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from autopar.passes.summed_products import with_summed_products
from benchmarks.zoo.float8 import float8_product
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
    assert not summed(graph_of(exact_step, weights(), batch()))
    assert not summed(graph_of(step, weights(), batch(), num_microbatches=1))


def test_sums_of_16_bits_are_those_of_their_products():
    graph = graph_of(step, weights("bfloat16"), batch())
    products = summed(graph)
    assert [op.primitive for op in products] == ["dot_general"] * 3
    assert {graph.values[op.outputs[0]].dtype for op in products} == {"bfloat16"}
    # As the parameters lie, so that a result that was transposed is not any more.
    assert {graph.values[op.outputs[0]].shape for op in products} == {(12, 32), (32, 4, 8), (4, 8, 12)}


def float8_step(params, x, *, scale=None):
    """Products whose results are multiplied with a number, and whose gradients take the shape of heads."""
    scales = None if scale is None else jnp.full(3, scale)

    def loss(params):
        p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
        hidden = jnp.tanh(float8_product(x.astype(jnp.bfloat16), p["first"], 1, scales) + p["bias"])
        heads = jnp.tanh(float8_product(hidden, p["heads"], 1, scales))
        return jnp.mean(float8_product(heads, p["out"], 2, scales).astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def test_products_of_8_bits_that_a_number_scales_make_what_is_summed():
    given = functools.partial(float8_step, scale=0.03125)
    graph = graph_of(given, weights(), batch())
    makers = {v: op for op in graph.block.ops for v in op.outputs}
    chains = []
    for op in summed(graph):
        chain = [op]
        while chain[-1].primitive != "dot_general":
            chain.append(makers[chain[-1].inputs[0]])
        chains.append([each.primitive for each in chain])
        assert {graph.values[each.outputs[0]].dtype for each in chain} == {"float32"}
    assert sorted(chains) == [["mul", "dot_general"], *[["reshape", "mul", "dot_general"]] * 2]
    # No number is added to a sum twice over, and none in 16 bits: the results of all 16 examples at once.
    leaves = jax.tree.leaves((weights(), batch()))
    got = jax.tree.unflatten(jax.tree.structure((weights(), 0.0)), jax.jit(lambda a: run_graph(graph, a))(leaves))
    assert_close(got, jax.jit(given)(weights(), batch()), 2**-8)


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


@pytest.mark.extra("gpu")
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


@pytest.mark.extra("gpu")
@pytest.mark.parametrize("of_sum", ["float32", "bfloat16"])
def test_a_compiler_for_gpus_scales_and_adds_up_within_products_of_8_bits(of_sum):
    def add(total, x, y, scale):
        product = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=of_sum)
        return total + (product * scale.astype(of_sum)).reshape(total.shape)

    where = jax.sharding.NamedSharding(aot.target_mesh("gpu:h100:1", (1,), ("x",)), jax.sharding.PartitionSpec())
    sizes = ((2048, 8, 832), of_sum), ((4096, 2048), "float8_e4m3fn"), ((4096, 6656), "float8_e5m2"), ((), "float32")
    shapes = [jax.ShapeDtypeStruct(shape, of, sharding=where) for shape, of in sizes]
    text = jax.jit(add, donate_argnums=0).lower(*shapes).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert len(re.findall(r"= \S+ (?:fusion|custom-call|dot|add|multiply)\(", entry)) == 1
