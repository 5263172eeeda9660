"""A batch of fewer examples keeps the layouts of the plan at hand, moves no state, and gives what jit gives on it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.execute.smaller_batch import counts, fit
from autopar.ir.layout import Layout, LogicalMesh
from tests import small_steps as steps
from tests.execute.test_calls import RECIPES, parallel

WAYS = RECIPES | {"sharded state": autopar.recipes.zero(3), "two axes": autopar.recipes.combine(dp=4, tp=2)}


def test_batches_behind_an_empty_one():
    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grads, loss

    found, w = autopar.parallelize(step, cache_dir=None), jnp.ones((8, 4))
    assert [float(found(jnp.ones((8, 4)), jnp.ones((n, 8)))[1]) for n in (32, 16, 33)] == [64.0] * 3
    assert np.isnan(found(jnp.ones((8, 4)), jnp.ones((0, 8)))[1])
    for n in (8, 40):
        steps.assert_close(found(jnp.ones((8, 4)), jnp.ones((n, 8))), jax.jit(step)(w, jnp.ones((n, 8))))


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", WAYS.values(), ids=WAYS)
def test_a_short_last_batch(recipe, caplog):
    step, plain = parallel(steps.mlp_step, recipe), jax.jit(steps.mlp_step)
    state, expected = steps.new_mlp_state(), steps.new_mlp_state()
    caplog.set_level(logging.WARNING, "autopar")
    for examples in (16, 10, 16, 7):
        batch = steps.mlp_batch(examples, seed=examples)
        before = [x.sharding for x in jax.tree.leaves(state)]
        state, metrics = step(state, batch)
        expected, expected_metrics = plain(expected, batch)
        steps.assert_close((state, metrics), (expected, expected_metrics))
        after = [x.sharding for x in jax.tree.leaves(state)]
        if examples < 16:
            assert after == before
    assert len(step._plans) == 1
    assert not caplog.records  # no planning again
    short = step.plan(state, steps.mlp_batch(10))
    assert "plan for 16 examples" in short.record.notes[-1]
    assert "plan for 16 examples" in str(short)


def test_a_batch_that_divides_into_more_micro_batches_alone_is_told_of():
    step = parallel(steps.mlp_step, autopar.recipes.pipeline(2, num_microbatches=4))
    notes = [step.plan(steps.new_mlp_state(), steps.mlp_batch(n)).record.notes for n in (16, 12, 13)]
    assert not any("are cut into" in note for of_batch in notes[:2] for note in of_batch)
    assert "13 are cut into 13 micro-batches, as they divide into no larger ones of at most 4" in notes[2][-1]


def test_the_batch_is_split_as_far_as_it_divides():
    step = parallel(steps.mlp_step, autopar.recipes.combine(dp=4, tp=2))
    state = steps.new_mlp_state()
    whole, short = (step.plan(state, steps.mlp_batch(n)) for n in (16, 12))
    assert short.sharding("batch['x']") == whole.sharding("batch['x']")
    ten = step.plan(state, steps.mlp_batch(10))
    assert not any(ten.sharding("batch['x']").spec)
    for path in ("state['first']", "state['second']", "state['bias']"):
        assert whole.sharding(path) == ten.sharding(path) == short.sharding(path)


@pytest.mark.parametrize("examples", [32, 1])
def test_other_steps_are_planned_anew(examples, caplog):
    """A longer batch may not fit; of one example jax traces other operations."""

    def centred(params, batch):
        return steps.chain_step(params, {name: x - jnp.squeeze(x[:1]).mean() for name, x in batch.items()})

    step, plain = parallel(centred), jax.jit(centred)
    random = np.random.default_rng(0)
    params = [random.normal(size=(8, 8)).astype(np.float32) for _ in range(2)]
    for n in (16, examples):
        batch = {name: random.normal(size=(n, 8)).astype(np.float32) for name in "xy"}
        steps.assert_close(step([*params], batch), plain(params, batch))
    assert len(step._plans) == 2


@pytest.mark.cases(2)
@pytest.mark.parametrize("recipe", WAYS.values(), ids=WAYS)
def test_a_last_batch_of_one_example(recipe):
    """JAX traces other operations, so that it is planned anew, in as many micro-batches as divide it."""
    step, plain = parallel(steps.mlp_step, recipe), jax.jit(steps.mlp_step)
    state, expected = steps.new_mlp_state(), steps.new_mlp_state()
    for examples in (16, 1, 16):
        batch = steps.mlp_batch(examples, seed=examples)
        state, metrics = step(state, batch)
        expected, expected_metrics = plain(expected, batch)
        steps.assert_close((state, metrics), (expected, expected_metrics))


def test_values_may_have_other_numbers_on_other_sizes(caplog):
    """With one example, what multiplies each micro-batch is the same array for all of them."""
    step, plain = parallel(steps.chain_step, autopar.recipes.combine(num_microbatches=2)), jax.jit(steps.chain_step)
    caplog.set_level(logging.WARNING, "autopar")
    random = np.random.default_rng(0)
    state = [random.normal(size=(8, 8)).astype(np.float32) for _ in range(2)]
    for n in (16, 1):
        batch = {name: random.normal(size=(n, 8)).astype(np.float32) for name in "xy"}
        steps.assert_close(step([*state], batch), plain(state, batch))
    assert len(step._plans) == 1
    assert not caplog.records


def test_axes_that_divide_into_the_most_parts_are_kept():
    mesh = LogicalMesh(axis_sizes=(4, 2))
    assert fit(Layout(((0, 1), ())), (16, 3), mesh) == Layout(((0, 1), ()))
    assert fit(Layout(((0, 1), ())), (12, 3), mesh) == Layout(((0,), ()))
    assert fit(Layout(((0, 1), ())), (10, 3), mesh) == Layout(((1,), ()))
    assert fit(Layout(((0, 1), ()), (2,)), (7, 3), LogicalMesh(axis_sizes=(4, 2, 2))) == Layout(((), ()), (2,))


def test_micro_batches_are_no_larger_than_they_were():
    assert counts(4, 10) == [5, 10]
    assert counts(4, 7) == [7]
    assert counts(16, 10) == [1, 2, 5, 10]
    assert counts(4, 3) == [1, 3]


def test_results_of_each_example_of_a_short_batch_in_stages():
    """Of six examples a micro-batch has three, which the two devices of a stage do not divide."""

    def step(params, batch):
        def loss(params):
            x = batch["x"]
            for weights in params:
                x = x + jnp.tanh(x @ weights)
            errors = jnp.square(x - batch["y"]).mean(-1)
            return errors.mean(), errors

        (value, errors), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, errors)

    piped = autopar.parallelize(
        step,
        plan=autopar.recipes.combine(pp=2, num_microbatches=2),
        cluster=autopar.Cluster.local(4),
        cache_dir=None,
        donate_argnums=(),
    )
    random = np.random.default_rng(0)
    params = [random.normal(size=(8, 8)).astype(np.float32) for _ in range(2)]
    for n in (8, 6):
        batch = {name: random.normal(size=(n, 8)).astype(np.float32) for name in "xy"}
        steps.assert_close(piped(params, batch), jax.jit(step)(params, batch))
