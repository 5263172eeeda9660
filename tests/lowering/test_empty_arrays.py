"""Arrays without elements, which XLA's partitioner folds away, among the operands of sums over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes

W = np.linspace(-0.3, 0.4, 8 * 16, dtype=np.float32).reshape(8, 16)
BATCH = {"x": np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8), "extra": np.zeros((8, 0, 8), np.float32)}


def step(w, batch):
    """`extra` has no tokens: the gradient of the weight by it is a sum over nothing."""

    def loss(w):
        return jnp.square(batch["x"] @ w).mean() + jnp.einsum("bnd,de->bne", batch["extra"], w).sum()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


@pytest.mark.parametrize("plan", [recipes.data_parallel(), recipes.zero(3), recipes.pipeline(1, num_microbatches=2)])
def test_products_of_empty_arrays(plan):
    found = autopar.parallelize(step, plan=plan, cache_dir=None)(W, BATCH)
    for seen, expected in zip(found, jax.jit(step)(W, BATCH), strict=True):
        np.testing.assert_allclose(seen, expected, rtol=2e-5)
