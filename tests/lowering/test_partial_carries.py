"""Loops that add sums to a literal: the carry stays a partial sum, of which one device holds the start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes

W = np.linspace(-0.3, 0.4, 8 * 16, dtype=np.float32).reshape(8, 16)
X = np.sin(np.arange(8 * 3 * 8, dtype=np.float32)).reshape(8, 3, 8)


def scanned(w, x, start):
    return jax.lax.scan(lambda a, h: (a + jnp.square(h @ w).sum(), None), start, x.swapaxes(0, 1))[0]


def in_a_tuple(w, x, start):
    def body(carry, h):
        rows, total = carry
        return (rows + jnp.tanh(h @ w), total + jnp.square(rows).sum()), None

    rows, total = jax.lax.scan(body, (jnp.zeros((8, 16)), start), x.swapaxes(0, 1))[0]
    return total + jnp.square(rows).sum()


def counted(w, x, start):
    return jax.lax.fori_loop(0, 3, lambda i, a: a + jnp.square(x[:, i] @ w).sum(), start)


@pytest.mark.parametrize("loss", [scanned, in_a_tuple, counted])
@pytest.mark.parametrize("start", [0.0, 2.5, jnp.zeros(())])
@pytest.mark.parametrize("plan", [recipes.data_parallel(), recipes.zero(3), recipes.combine(dp=4, tp=2)])
def test_a_literal_to_which_a_loop_adds_sums(loss, start, plan):
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x, start)
        return w - 0.1 * gradient, value

    expected = jax.jit(step)(W, X)
    seen = autopar.parallelize(step, plan=plan, cache_dir=None)(W, X)
    for a, b in zip(expected, seen, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
