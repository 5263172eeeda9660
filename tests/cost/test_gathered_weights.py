"""Weights that ZeRO-3 gathers are freed behind each layer, casts of them too: planned and compiled."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from benchmarks.zoo import CASES

WIDTH, LAYERS = 256, 2
WEIGHTS_BYTES = 2 * LAYERS * 12 * WIDTH**2  # in half precision


def test_half_precision_weights_are_gathered_for_each_pass():
    case = CASES["gpt"](layers=LAYERS, width=WIDTH, heads=4, vocabulary=64, length=16, batch=8, dtype=jnp.bfloat16)
    step = autopar.parallelize(
        case.step,
        plan=recipes.combine(zero=3, recompute="input"),
        cluster=autopar.Cluster.local(4, measured=False),
        cache_dir=None,
    )
    state = jax.eval_shape(case.init, jax.random.key(0))
    verified = autopar.verify(step, state, case.batch(0))
    (gathers,) = (c for c in verified.collectives if c.name == "all-gather")
    assert gathers.compiled == pytest.approx(gathers.predicted, rel=0.01)
    # CPU devices send half precision in 32 bits. Three quarters of all weights in each of two passes.
    assert gathers.predicted > 2 * 2 * 3 / 4 * WEIGHTS_BYTES
