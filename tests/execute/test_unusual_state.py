"""State that a step sets to literals (a flag, a counter begun anew), and state of less than 8 bits an element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from tests.small_steps import assert_close, grouped

BATCH = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def state():
    layers = [np.full((8, 8), 0.1 * (i + 1), np.float32) for i in range(4)]
    return {"layers": layers, "first": np.array(True), "count": np.int32(3)}


def step(state, batch):
    def loss(layers):
        h = batch
        for w in layers:
            h = h + jnp.tanh(h @ w)
        return jnp.square(h).mean()

    value, gradients = jax.value_and_grad(loss)(state["layers"])
    layers = [w - 0.1 * g for w, g in zip(state["layers"], gradients, strict=True)]
    return {"layers": layers, "first": False, "count": 0}, value


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_microbatches": 2},
        {"plan": recipes.pipeline(2, num_microbatches=2)},
        {"memory_limit_bytes": 3000},
    ],
    ids=["free", "micro-batches", "stages", "little memory"],
)
def test_state_that_is_set_to_a_literal(options):
    parallel = autopar.parallelize(step, cache_dir=None, **grouped(**options))
    expected, seen = (state(), None), (state(), None)
    for _ in range(3):
        expected, seen = jax.jit(step)(expected[0], BATCH), parallel(seen[0], BATCH)
        assert_close(seen, expected)


def quantised_step(state, batch):
    def loss(w):
        hidden = jnp.tanh(batch @ (w[0] * state["codes"].astype(jnp.float32)))
        return jnp.square(hidden @ w[1]).mean()

    value, gradients = jax.value_and_grad(loss)(state["w"])
    codes = (state["codes"].astype(jnp.float32) * jnp.sign(gradients[0])).astype(state["codes"].dtype)
    return {"w": [w - 0.1 * g for w, g in zip(state["w"], gradients, strict=True)], "codes": codes}, value


@pytest.mark.cases(3)
@pytest.mark.parametrize("plan", [None, recipes.zero(3), recipes.pipeline(2, num_microbatches=2)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2, jnp.float4_e2m1fn])
def test_state_of_less_than_8_bits_runs_as_any_other(plan, dtype):
    def state():
        codes = (jnp.arange(64.0).reshape(8, 8) % 2).astype(dtype)
        return {"w": [jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)] * 2, "codes": codes}

    batch = jnp.linspace(0.1, 1.0, 64).reshape(8, 8)
    planned, plain = autopar.parallelize(quantised_step, plan=plan, cache_dir=None), jax.jit(quantised_step)
    got, expected = state(), state()
    for _ in range(3):
        got, value = planned(got, batch)
        expected, right = plain(expected, batch)
        np.testing.assert_allclose(value, right, rtol=1e-5)
    assert got["codes"].dtype == dtype
    np.testing.assert_array_equal(got["codes"].astype(jnp.float32), expected["codes"].astype(jnp.float32))
    for a, b in zip(got["w"], expected["w"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
