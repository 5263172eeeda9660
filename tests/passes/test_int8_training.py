"""Products in int8, forward and backward: stages of devices that split the batch against gradient accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.verification import leaf_difference
from tests import small_steps

WIDTH, EXAMPLES, LENGTH = 16, 8, 4
LARGEST, TIE = 127.0, 127.5  # what the largest number of a channel becomes: an integer, and between two


def int8_product(largest):
    """(x, w) to their product, of operands in int8 with a scale for each channel; so are those of its gradients."""

    def quantized(x, axis):
        scale = jnp.max(jnp.abs(x), axis, keepdims=True) / largest
        return jnp.round(x / scale).astype(jnp.int8), scale

    def multiply(x, w):
        (x8, x_scale), (w8, w_scale) = quantized(x, 1), quantized(w, 0)
        return jax.lax.dot(x8, w8, preferred_element_type=jnp.int32).astype(x.dtype) * x_scale * w_scale

    product = jax.custom_vjp(multiply)
    product.defvjp(
        lambda x, w: (multiply(x, w), (x, w)),
        lambda kept, g: (multiply(g, kept[1].T), multiply(kept[0].T, g)),  # of w: the scales are over all examples
    )
    return product


def step_of(largest):
    product = int8_product(largest)

    def loss(params, batch):
        x = jnp.tanh(batch["x"] @ params["first"])
        for w in params["layers"]:
            with jax.named_scope("quantized"):
                h = product(x.reshape(-1, WIDTH), w).reshape(x.shape)
            x = x + jnp.tanh(h)
        return jnp.square((x @ params["last"]).mean(1) - batch["y"]).mean()

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}

    return loss, step


def params_of():
    keys = jax.random.split(jax.random.key(0), 4)
    square = [jax.random.normal(key, (WIDTH, WIDTH)) / np.sqrt(WIDTH) for key in keys[:3]]
    return {"first": square[0], "layers": square[1:], "last": jax.random.normal(keys[3], (WIDTH,))}


def batch_of():
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, LENGTH, WIDTH)).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(random.normal(size=EXAMPLES).astype(np.float32))}


def test_two_stages_are_a_loop_over_micro_batches():
    loss, step = step_of(LARGEST)
    params, batch = params_of(), batch_of()
    parallel = autopar.parallelize(
        step,
        plan=recipes.pipeline(2, num_microbatches=2),
        search=autopar.Search(per_microbatch="quantized"),
        cluster=autopar.Cluster.local(4, measured=False),
        cache_dir=None,
    )
    halves = [jax.tree.map(lambda x, i=i: jnp.split(x, 2)[i], batch) for i in range(2)]
    values, grads = zip(*(jax.jit(jax.value_and_grad(loss))(params, half) for half in halves), strict=True)
    value, mean = sum(values) / 2, jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean), {"loss": value, "grads": mean}
    plan = parallel.plan(params, batch)
    assert "the batch split over 2" in str(plan), "no scale was taken over examples of two devices"
    small_steps.assert_close(parallel(jax.tree.map(jnp.copy, params), batch), expected)


@pytest.mark.parametrize("largest", [LARGEST, TIE])
def test_scales_that_put_the_largest_number_on_a_tie_let_rounding_decide(largest):
    """What docs/precision.md says of such scales: then plain `jax.jit` is as far from itself."""
    step, params = jax.jit(step_of(largest)[1]), params_of()
    other = params | {"first": params["first"] * (1 + 2**-23)}  # one unit in the last place, or two
    pairs = zip(jax.tree.leaves(step(params, batch_of())), jax.tree.leaves(step(other, batch_of())), strict=True)
    moved = max(leaf_difference(a, b) for a, b in pairs)
    assert (moved > 1e-3) == (largest == TIE), moved
    assert largest == TIE or moved < 1e-5, moved
