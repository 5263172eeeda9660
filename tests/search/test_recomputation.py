"""The search leaves `jax.checkpoint` out where memory is ample; a recipe's plan says what its step takes without it."""

import re
import sys

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.small_steps import grouped

WIDTH, INNER, ROWS, LAYERS = 2048, 8192, 32768, 4


def plan(checkpoint: bool, scanned: bool = False, recipe="data_parallel()", **options) -> autopar.Plan:
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
    step = autopar.parallelize(step, plan=recipe, cache_dir=None, **grouped(**options))
    return autopar.plan(step, state, batch, cluster="dgx-h100")


@pytest.mark.parametrize("scanned", [False, True])
def test_with_ample_memory_the_search_recomputes_what_costs_no_time(scanned):
    with_it, without_it = plan(True, scanned, recipe=None), plan(False, scanned, recipe=None)
    assert with_it.predicted.step_time_s <= 1.01 * without_it.predicted.step_time_s
    assert with_it.predicted.step_time_s < 0.9 * plan(True, scanned).predicted.step_time_s
    assert with_it.record.scan_recompute in ("nothing", "matmuls")
    assert not told(with_it)


@pytest.fixture
def tiny(monkeypatch):
    """Layers whose kernels take their own time alone, however many devices share them."""
    for name, size in {"WIDTH": 32, "INNER": 64, "ROWS": 64}.items():
        monkeypatch.setattr(sys.modules[__name__], name, size)


def test_kernels_that_copy_what_is_kept_take_as_much_as_those_that_run_again(tiny):
    with_it, without_it = plan(True, scanned=True), plan(False, scanned=True)
    assert with_it.predicted.step_time_s == pytest.approx(without_it.predicted.step_time_s, rel=0.01)
    assert not told(with_it)


def told(plan: autopar.Plan) -> list[str]:
    return [note for note in plan.record.notes if "without jax.checkpoint" in note]


def without_checkpoint(with_it: autopar.Plan, without_it: autopar.Plan, about: str) -> tuple[float, int]:
    """(bytes of the peak that the note tells, those that are predicted). The time that it tells is as predicted."""
    (note,) = told(with_it)
    found = re.search(rf"peak {about} ([\d.]+) (.)B of the 72 GB available, and take about ([\d.]+) % less", note)
    peak, unit, part = found.groups()
    spared = 1 - without_it.predicted.step_time_s / with_it.predicted.step_time_s
    assert float(part) / 100 == pytest.approx(spared, abs=0.03)
    assert not told(without_it)
    return float(peak) * {"G": 1e9, "M": 1e6}[unit], max(without_it.predicted.peak_bytes)


def test_the_time_and_the_peak_are_those_of_the_step_without_it():
    peak_bytes, predicted_bytes = without_checkpoint(plan(True), plan(False), "about")
    assert peak_bytes == pytest.approx(predicted_bytes, rel=0.15)


def test_of_a_scan_over_layers_the_time_is_known_and_the_peak_is_bounded():
    peak_bytes, predicted_bytes = without_checkpoint(plan(True, scanned=True), plan(False, scanned=True), "at most")
    assert peak_bytes >= 0.99 * predicted_bytes


@pytest.mark.parametrize("scanned", [False, True])
def test_what_is_recomputed_is_no_work_of_the_model(scanned):
    with_it, without_it = plan(True, scanned=scanned).predicted, plan(False, scanned=scanned).predicted
    product = 2 * ROWS * WIDTH * INNER  # of each layer one is computed again: nothing reads the result of the other
    assert with_it.recomputed_flops == pytest.approx(LAYERS * product, rel=0.02)
    assert with_it.model_flops == pytest.approx(without_it.flops, rel=0.01)
    assert without_it.recomputed_flops == 0
    assert with_it.mfu * with_it.step_time_s == pytest.approx(without_it.mfu * without_it.step_time_s, rel=0.01)


def test_attention_in_blocks_is_not_computed_again_without_it():
    def layer(x, weights):
        query, key, value = (x @ weights[:, i] for i in range(3))
        scores = jnp.einsum("bqc,bkc->bqk", query, key).astype(jnp.float32)
        return x + jnp.einsum("bqk,bkc->bqc", jax.nn.softmax(scores).astype(x.dtype), value)

    def plan(layer):
        def step(state, batch):
            def loss(layers):
                x = batch
                for weights in layers:
                    x = layer(x, weights)
                return jnp.mean(x**2)

            return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))

        step = autopar.parallelize(
            step, plan="data_parallel()", search=autopar.Search(attention="blockwise"), cache_dir=None
        )
        state = [jax.ShapeDtypeStruct((128, 3, 128), "bfloat16")] * 2
        return autopar.plan(step, state, jax.ShapeDtypeStruct((32, 4096, 128), "bfloat16"), cluster="dgx-h100:1")

    with_it, without_it = plan(jax.checkpoint(layer)), plan(layer)
    (note,) = told(with_it)
    part = float(re.search(r"take about ([\d.]+) % less", note).group(1)) / 100
    spared = 1 - without_it.predicted.step_time_s / with_it.predicted.step_time_s
    assert part == pytest.approx(spared, abs=0.03)


def test_nothing_is_told_where_it_would_not_fit():
    assert not told(plan(True, memory_limit_bytes=max(plan(True).predicted.peak_bytes) + 50_000_000))


def test_a_step_that_takes_no_time_has_no_note():
    step = autopar.parallelize(lambda state, batch: (state, batch), cache_dir=None)
    found = autopar.plan(step, {}, jax.ShapeDtypeStruct((8, 4), "float32"), cluster="dgx-h100")
    assert found.predicted.step_time_s == 0.0
    assert not told(found)


def test_what_is_computed_twice_without_it_is_none_of_its_doing():
    def step(state, batch):
        def loss(weights):
            return jnp.mean(jnp.tanh(batch @ weights) * jnp.sin(batch @ weights))

        return state - 0.1 * jax.grad(loss)(state)

    shapes = jax.ShapeDtypeStruct((WIDTH, INNER), "bfloat16"), jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16")
    step = autopar.parallelize(step, cache_dir=None)
    assert not told(autopar.plan(step, *shapes, cluster="dgx-h100"))


def test_as_written_keeps_to_the_code():
    asked = plan(True, recipe=None, remat="as written")
    assert asked.record.scan_recompute == ""
    assert asked.predicted.recomputed_flops == plan(True).predicted.recomputed_flops
