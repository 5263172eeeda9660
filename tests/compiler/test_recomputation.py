"""A plan says what its step would take without `jax.checkpoint`, as the plan of that step does."""

import re

import jax
import jax.numpy as jnp
import pytest

import autopar

WIDTH, INNER, ROWS, LAYERS = 2048, 8192, 32768, 4


def plan(checkpoint: bool, scanned: bool = False, **options) -> autopar.Plan:
    def layer(x, weights):
        return x + jnp.tanh(x @ weights[0]) @ weights[1]

    layer = jax.checkpoint(layer) if checkpoint else layer

    def step(state, batch):
        def loss(layers):
            if scanned:
                return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), batch, layers)[0] ** 2)
            x = batch
            for weights in layers:
                x = layer(x, weights)
            return jnp.mean(x**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))

    shapes = [(WIDTH, INNER), (INNER, WIDTH)]
    if scanned:
        state = [jax.ShapeDtypeStruct((LAYERS, *shape), "bfloat16") for shape in shapes]
    else:
        state = [[jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]] * LAYERS
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16")
    step = autopar.parallelize(step, cache_dir=None, show_progress=False, **options)
    return autopar.plan(step, state, batch, cluster="dgx-h100")


def told(plan: autopar.Plan) -> list[str]:
    return [note for note in plan.record.notes if "without jax.checkpoint" in note]


def test_the_time_and_the_peak_are_those_of_the_step_without_it():
    with_it, without_it = plan(True), plan(False)
    (note,) = told(with_it)
    peak, part = re.search(r"peak about ([\d.]+) .B of the 72 GB available, and take about (\d+) % less", note).groups()
    spared = 1 - without_it.predicted.step_time_s / with_it.predicted.step_time_s
    assert int(part) / 100 == pytest.approx(spared, abs=0.03)
    predicted_bytes = max(without_it.predicted.peak_bytes)
    assert float(peak) * 10 ** (9 if " GB of" in note else 6) == pytest.approx(predicted_bytes, rel=0.15)
    assert not told(without_it)


def test_nothing_is_told_where_it_would_not_fit_or_layers_are_one_body():
    assert not told(plan(True, memory_limit_bytes=max(plan(True).predicted.peak_bytes) + 50_000_000))
    assert not told(plan(True, scanned=True))


def test_a_step_that_takes_no_time_has_no_note():
    step = autopar.parallelize(lambda state, batch: (state, batch), cache_dir=None, show_progress=False)
    found = autopar.plan(step, {}, jax.ShapeDtypeStruct((8, 4), "float32"), cluster="dgx-h100")
    assert found.predicted.step_time_s == 0.0
    assert not told(found)


def test_what_is_computed_twice_without_it_is_none_of_its_doing():
    def step(state, batch):
        def loss(weights):
            return jnp.mean(jnp.tanh(batch @ weights) * jnp.sin(batch @ weights))

        return state - 0.1 * jax.grad(loss)(state)

    shapes = jax.ShapeDtypeStruct((WIDTH, INNER), "bfloat16"), jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16")
    step = autopar.parallelize(step, cache_dir=None, show_progress=False)
    assert not told(autopar.plan(step, *shapes, cluster="dgx-h100"))
