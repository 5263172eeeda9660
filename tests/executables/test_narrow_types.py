"""State of less than 8 bits an element, as quantised parameters are: it runs as any other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes


def step(state, batch):
    def loss(w):
        hidden = jnp.tanh(batch @ (w[0] * state["codes"].astype(jnp.float32)))
        return jnp.square(hidden @ w[1]).mean()

    value, gradients = jax.value_and_grad(loss)(state["w"])
    codes = (state["codes"].astype(jnp.float32) * jnp.sign(gradients[0])).astype(state["codes"].dtype)
    return {"w": [w - 0.1 * g for w, g in zip(state["w"], gradients, strict=True)], "codes": codes}, value


@pytest.mark.parametrize("plan", [None, recipes.zero(3), recipes.pipeline(2, num_microbatches=2)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2, jnp.float4_e2m1fn])
def test_state_of_less_than_8_bits_runs_as_any_other(plan, dtype):
    def state():
        codes = (jnp.arange(64.0).reshape(8, 8) % 2).astype(dtype)
        return {"w": [jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)] * 2, "codes": codes}

    batch = jnp.linspace(0.1, 1.0, 64).reshape(8, 8)
    planned, plain = autopar.parallelize(step, plan=plan, cache_dir=None), jax.jit(step)
    got, expected = state(), state()
    for _ in range(3):
        got, value = planned(got, batch)
        expected, right = plain(expected, batch)
        np.testing.assert_allclose(value, right, rtol=1e-5)
    assert got["codes"].dtype == dtype
    np.testing.assert_array_equal(got["codes"].astype(jnp.float32), expected["codes"].astype(jnp.float32))
    for a, b in zip(got["w"], expected["w"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
