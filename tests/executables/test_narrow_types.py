"""Arrays of 4 bits: planned as any others, refused by their path when the step is compiled."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes


def step(state, batch):
    def loss(w):
        hidden = jnp.tanh(batch @ (w[0] * state["scale"].astype(jnp.float32)))
        return jnp.square(hidden @ w[1]).mean()

    value, gradients = jax.value_and_grad(loss)(state["w"])
    return {"w": [w - 0.1 * g for w, g in zip(state["w"], gradients, strict=True)], "scale": state["scale"]}, value


@pytest.mark.parametrize("plan", [None, recipes.pipeline(2, num_microbatches=2)], ids=["free", "stages"])
def test_arguments_of_4_bits_are_refused_by_their_path(plan):
    state, batch = {"w": [jnp.ones((8, 8))] * 2, "scale": jnp.arange(8, dtype=jnp.int4)}, jnp.ones((8, 8))
    planned = autopar.parallelize(step, plan=plan, cache_dir=None, show_progress=False)
    assert planned.plan(state, batch).predicted.step_time_s > 0
    with pytest.raises(autopar.errors.UnsupportedError) as refused:
        planned(state, batch)
    assert str(refused.value) == (
        "step, state['scale']: expected an array of 8 bits an element or more, got int4[8]\n"
        "  hint: pass it in a wider type that holds its numbers, and convert it in the step: x.astype(jnp.int4)"
    )
