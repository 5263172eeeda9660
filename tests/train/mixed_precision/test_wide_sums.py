"""Gradients are summed in the type of reductions: within a device, and between devices."""

import collections as counters

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import verification
from autopar.common import jax_compat
from autopar.execute import collectives
from tests.small_steps import MLP_BATCH, slow_cluster
from tests.train.mixed_precision.small_training import training

NARROW = "params=float32,compute=bfloat16,output=float32,reductions=bfloat16"
SUMS = ("dot_general", "conv_general_dilated", "scatter-add", "reduce_sum")
IDS = jnp.arange(32) % 7


def scanned(p, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["stack"])[0]


def carried(p, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["first"]), None), x, None, length=3)[0]


def recomputed(p, x):
    return jax.checkpoint(lambda w, h: jnp.tanh(h @ w))(p["first"], x)


def recomputed_in_a_scan(p, x):
    return jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["stack"])[0]


def called(p, x):
    return jax.jit(lambda w, h: jnp.tanh(jnp.einsum("bi,io->bo", h, w)))(p["first"], x)


def branching(p, x):
    return jax.lax.cond(x.sum() > 0, lambda w, h: jnp.tanh(h @ w), lambda w, h: h * w[0], p["first"], x)


def tied(p, x):
    return jnp.tanh(p["table"][IDS] @ p["table"].T)


def scaled(p, x):
    return jnp.tanh(x @ (p["first"] * p["bias"][None]) + p["bias"])


def masked(p, x):
    return jnp.tanh(x @ jnp.where(jnp.arange(16)[:, None] < jnp.arange(16), p["first"], 0))


def convolved(p, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x.reshape(2, 4, 4, 16), p["window"], (1, 1), "SAME", dimension_numbers=numbers)


def recurrent(p, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w + x), None), jnp.broadcast_to(p["bias"], x.shape), p["stack"])[0]


# (a model, its sums in float32 that lead to gradients)
CASES = [
    (scanned, {"dot_general": 1}),
    (carried, {"dot_general": 1}),
    (recomputed, {"dot_general": 1}),
    (recomputed_in_a_scan, {"dot_general": 1}),
    (called, {"dot_general": 1}),
    (branching, {"dot_general": 1, "reduce_sum": 1}),
    (tied, {"dot_general": 1, "scatter-add": 1}),
    (scaled, {"dot_general": 1, "reduce_sum": 2}),
    (masked, {"dot_general": 1}),
    (convolved, {}),  # as it is: see autopar.train.mixed_precision.policy
    (recurrent, {"dot_general": 1, "reduce_sum": 1}),
]


def parameters():
    random = np.random.default_rng(0)
    shapes = {"stack": (4, 16, 16), "first": (16, 16), "table": (7, 16), "bias": (16,), "window": (3, 3, 16, 16)}
    return {name: jnp.asarray(random.normal(size=shape) / 4, jnp.float32) for name, shape in shapes.items()}


def differentiated(policy, model):
    policy = autopar.precision(policy)
    return policy.value_and_grad(lambda p, x: jnp.mean(policy.cast_to_output(model(p, x)) ** 2))


X = jnp.asarray(np.random.default_rng(1).normal(size=(32, 16)), jnp.float32)


def wide_sums(jaxpr):
    """By primitive, the equations that sum numbers of 16 bits, or what was cast from these, in float32."""
    found = counters.Counter()
    for inner in inner_jaxprs(jaxpr):
        cast = {v for eqn in inner.eqns if eqn.primitive.name == "convert_element_type" for v in eqn.outvars}
        for eqn in inner.eqns:
            if eqn.primitive.name in SUMS and eqn.outvars[0].aval.dtype == jnp.float32:
                summed = eqn.invars[-1]
                if summed.aval.dtype == jnp.bfloat16 or (summed in cast and eqn.outvars[0].aval.ndim):
                    found[eqn.primitive.name] += 1
    return found


def inner_jaxprs(jaxpr):
    jaxpr = jax_compat.open_jaxpr(jaxpr)
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in jax_compat.jaxprs_in(eqn):
            yield from inner_jaxprs(inner)


@pytest.mark.parametrize(("model", "expected"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_sums_of_gradients_are_wide(model, expected):
    wide = jax.make_jaxpr(differentiated("bf16", model))(parameters(), X)
    assert wide_sums(wide) == expected
    assert not wide_sums(jax.make_jaxpr(differentiated(NARROW, model))(parameters(), X))
    assert not wide_sums(jax.make_jaxpr(differentiated("params=bf16", model))(parameters(), X))


@pytest.mark.parametrize("model", [tied, recurrent], ids=lambda x: x.__name__)
def test_a_gradient_is_not_rounded_to_the_type_of_computation(model):
    loss, gradients = jax.jit(differentiated("bf16", model))(parameters(), X)
    narrow_loss, narrow = jax.jit(differentiated(NARROW, model))(parameters(), X)
    assert loss == narrow_loss
    for got, rounded in zip(jax.tree.leaves(gradients), jax.tree.leaves(narrow), strict=True):
        # The 32 examples' terms, and sums of some, were rounded to 8 bits, up and down.
        error = 2**-5 * np.abs(rounded).max()
        np.testing.assert_allclose(got, rounded, rtol=0, atol=error + 1e-30)
        if np.any(got):
            assert np.any(got != got.astype(jnp.bfloat16).astype(jnp.float32))


# Between devices

TARGETS = [
    pytest.param("tpu-v5e:2x4", "tpu:v5e:2x4", marks=pytest.mark.extra("tpu")),
    pytest.param("dgx-h100", "gpu:h100:8", marks=pytest.mark.extra("gpu")),
]


def types_of_sums(text):
    """The types that are summed over devices, but for the loss and whether all is finite."""
    kinds = ("all-reduce", "reduce-scatter")
    return {c.dtype for c in collectives.collectives(text) if c.kind in kinds and c.result_bytes > 64}


def shapes_of_state(policy):
    return jax.eval_shape(training(policy)[0], jax.random.key(0))


@pytest.mark.cases(3)
@pytest.mark.parametrize(("reductions", "dtype"), [("float32", "f32"), ("float16", "f16")])
@pytest.mark.parametrize("recipe", [autopar.recipes.data_parallel(), autopar.recipes.zero(3)], ids=["data", "ZeRO-3"])
def test_devices_exchange_gradients_in_the_type_of_reductions(recipe, reductions, dtype):
    # In float16: XLA sends bfloat16 between CPU devices in 32 bits.
    policy = f"params=float32,compute=float16,output=float32,reductions={reductions}"
    step = autopar.parallelize(training(policy)[1], plan=recipe, cluster=slow_cluster(), cache_dir=None)
    assert types_of_sums(step.compile(shapes_of_state(policy), MLP_BATCH).as_text()) == {dtype}
    found = autopar.verify(step, shapes_of_state(policy), MLP_BATCH)
    assert found.total.predicted == found.total.compiled > 0


def two_products(policy):
    """(the shapes of parameters, a step, those of a batch): wide enough that a TPU gathers no parameter by a sum."""
    policy = autopar.precision(policy)
    shapes = {"up": jax.ShapeDtypeStruct((256, 512), "float32"), "down": jax.ShapeDtypeStruct((512, 256), "float32")}

    def step(params, x):
        loss_of = lambda p, x: jnp.mean(policy.cast_to_output(jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)
        loss, gradients = policy.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, gradients), loss

    return shapes, step, jax.ShapeDtypeStruct((1024, 256), "float32")


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "target"), TARGETS)
@pytest.mark.parametrize(("policy", "dtype"), [("bf16", "f32"), (NARROW, "bf16")], ids=["bf16", "narrow"])
@pytest.mark.parametrize("kind", ["data", "ZeRO-3", "tensor"])
def test_compilers_for_accelerators_keep_the_type(cluster, target, policy, dtype, kind):
    recipes = autopar.recipes
    recipe = {"data": recipes.data_parallel(), "ZeRO-3": recipes.zero(3), "tensor": recipes.tensor_parallel(size=4)}
    shapes, function, batch = two_products(policy)
    step = autopar.parallelize(function, plan=recipe[kind], cluster=cluster, cache_dir=None)
    compiled = verification.compile_for_target(step, target, shapes, batch)
    of_activations = {"bf16"} if kind == "tensor" else set()
    assert types_of_sums(compiled.as_text()) == {dtype} | of_activations
    predicted = sum(c.sent_bytes for c in step.plan(shapes, batch).predicted.collectives)
    assert verification.traffic_of(compiled).total_bytes == pytest.approx(predicted, rel=1e-3)


def test_results_have_the_types_that_they_have_without_a_trace():
    """Parameters of several types, an unused one, and results that are constants."""
    policy = autopar.precision("bf16")
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4), jnp.bfloat16), "unused": jnp.ones(())}

    def loss(params, x):
        return jnp.sum((x @ params["a"] @ params["b"]) ** 2), jnp.zeros(())

    function = policy.value_and_grad(loss, has_aux=True)
    seen = []

    def traced(params, x):
        results = function(params, x)
        seen.extend(jax.tree.leaves(results))
        return results

    eager, compiled = function(params, jnp.ones((2, 4))), jax.jit(traced)(params, jnp.ones((2, 4)))
    assert [a.dtype for a in jax.tree.leaves(compiled)] == [a.dtype for a in jax.tree.leaves(eager)]
    assert all(isinstance(leaf, jax.Array) for leaf in seen)
