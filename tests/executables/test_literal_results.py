"""Steps that set leaves of their state to literals: a flag that is off after the first step, a counter begun anew."""

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
