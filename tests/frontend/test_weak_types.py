"""Numbers, weakly typed arrays and strongly typed ones: one plan where they compute the same, jit's types always."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests import small_steps as steps
from tests.execute.test_calls import RECIPES, assert_same, parallel

ADAM = optax.adamw(1e-2)


def create(key):
    """A state in which Python's numbers make weakly typed leaves: a parameter, its moments, the count of steps."""
    params = steps.mlp_state(key) | {"scale": 1.0}
    return {"params": params, "optimizer": ADAM.init(params), "step": 0}


def train(state, batch):
    def loss(params):
        return steps.mlp_loss(params, batch) * params["scale"]

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = ADAM.update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    rate = jax.lax.cond(state["step"] > 1, lambda s: 0.5 * s, lambda s: s + 1.0, state["step"])
    return {"params": params, "optimizer": optimizer, "step": state["step"] + 1}, {"loss": value, "rate": rate}


def restored(state):
    """As a checkpoint gives it back: numpy arrays, which know no weak types."""
    return jax.tree.map(lambda x: np.asarray(jnp.asarray(x)), state)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_plan_for_shapes_is_the_plan_of_restored_state(recipe, caplog):
    step, plain, batch = parallel(train, recipe), jax.jit(train), steps.mlp_batch()
    key = jax.random.key(0)
    plan = step.plan(jax.eval_shape(create, key), batch)
    with caplog.at_level(logging.WARNING, "autopar"):
        for make in (create, lambda key: restored(create(key))):
            state, expected = make(key), make(key)
            for _ in range(3):
                state, metrics = step(state, batch)
                expected, expected_metrics = plain(expected, batch)
                assert_same((state, metrics), (expected, expected_metrics), 1e-5)
            assert step.plan(make(key), batch).record is plan.record
    assert not caplog.records


def scaled(state, batch):
    return state + (batch * state).astype(state.dtype), batch * state


def test_what_jit_tells_apart_has_programs_of_its_own():
    """A number keeps the array's 16 bits, an array of 32 bits does not: two steps, two plans, and both remembered."""
    step, plain = parallel(scaled, donate_argnums=()), jax.jit(scaled)
    batch = jnp.ones((16, 8), jnp.bfloat16)
    for number in (2.0, np.float32(2), jnp.float32(2), np.float64(2), jnp.asarray(2.0), 2.0, 3, True):
        assert_same(step(number, batch), plain(number, batch))


def test_a_plan_of_the_cache_is_that_of_restored_state(tmp_path):
    """Another process, which has the state from a checkpoint, finds the plan that was made for shapes."""
    options = {"cluster": steps.slow_cluster(), "cache_dir": tmp_path}
    first = autopar.parallelize(train, **options)
    first.plan(jax.eval_shape(create, jax.random.key(0)), steps.mlp_batch())
    second = autopar.parallelize(train, **options)
    second.plan(restored(create(jax.random.key(0))), steps.mlp_batch())
    assert "graph" in first.last_progress.spent_s
    assert "graph" not in second.last_progress.spent_s
