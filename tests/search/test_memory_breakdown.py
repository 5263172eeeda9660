"""What memory is held for: sums that add up, and published figures."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.plan.schema import MemoryKind
from autopar.runtime.emit import pairs
from autopar.search.inter_op import build_stages
from benchmarks.zoo import CASES as MODELS
from tests.search.published_memory import (
    ACTIVATION_TARGET,
    CASES,
    DEVICES,
    PARAMETERS,
    WIDTHS,
    ZERO_GB,
    Sizes,
    gpt_plan,
    is_printed,
    layer_bytes,
    matrices,
    published_bytes,
    zero_plan,
)

GPT = MODELS["gpt"](layers=4, width=64, length=32, batch=16)


def model_state_bytes(use):
    """Parameters, optimizer state, and the gradients that are summed over micro-batches."""
    kinds = (MemoryKind.PARAMETER, MemoryKind.OPTIMIZER, MemoryKind.GRADIENT)
    return sum(use.throughout.get(kind, 0) for kind in kinds)


def planned(recipe, step=GPT.step, state=None, batch=None, devices=4):
    state = jax.eval_shape(GPT.init, jax.random.key(0)) if state is None else state
    batch = GPT.batch(0) if batch is None else batch
    cluster = autopar.Cluster.flat(devices)
    return autopar.plan(step, state, batch, cluster=cluster, plan=recipe, cache_dir=None)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe",
    [
        recipes.data_parallel(),
        recipes.zero(3),
        recipes.combine(tp=2, num_microbatches=2),
        recipes.combine(pp=2, num_microbatches=4),
        recipes.combine(pp=2, schedule="interleaved", num_microbatches=4),
        recipes.combine(pp=2, schedule="zb-v", num_microbatches=4),
    ],
    ids=["whole", "zero", "one stage", "1f1b", "interleaved", "zb-v"],
)
def test_what_is_held_adds_up_to_the_peak(recipe):
    plan = planned(recipe)
    made = plan.predicted
    assert [sum(use.at_peak.values()) for use in made.memory] == list(made.peak_bytes)
    assert all(use.largest[0].nbytes >= use.largest[-1].nbytes > 0 for use in made.memory)
    text = plan.table()
    assert "saved for backward" in text
    assert "largest at the peak of" in text


def test_what_neighbours_of_two_stages_hold_adds_up(monkeypatch):
    """Under dualpipev a program has a pass of either stage of its devices."""

    def join_pairs(staged, limit_bytes):
        found = pairs(staged.simulated.pipeline, staged.schedule)
        return build_stages.with_joined(staged, [build_stages.joined_task(staged, chain) for chain in found])

    monkeypatch.setattr(build_stages, "join_where_it_pays", join_pairs)
    plan = planned(recipes.combine(pp=2, schedule="dualpipev", num_microbatches=4))
    assert ("F of stage 0", "B of stage 3", "W of stage 3") in plan.record.pipeline.joined
    made = plan.predicted
    assert [sum(use.at_peak.values()) for use in made.memory] == list(made.peak_bytes)


def sgd_step(state, batch):
    def loss(w):
        return jnp.mean(jnp.tanh(batch @ w) ** 2)

    grads = jax.grad(loss)(state["w"])
    moved = 0.9 * state["m"] + grads
    return {"w": state["w"] - 0.1 * moved, "m": moved}


def test_what_lies_there_throughout_a_step():
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    plan = planned(recipes.combine(zero=2, num_microbatches=2), sgd_step, {"w": w, "m": w}, batch)
    (use,) = plan.predicted.memory
    whole = 64 * 32 * 4
    assert use.throughout == {
        MemoryKind.PARAMETER: whole,
        MemoryKind.OPTIMIZER: whole // 4,
        MemoryKind.GRADIENT: whole // 4,
        MemoryKind.BATCH: 32 * 64 * 4 // 4,
    }
    assert model_state_bytes(use) == whole + whole // 2


def test_checkpoints_keep_less():
    def kept(remat):
        case = MODELS["gpt"](layers=2, width=64, length=32, batch=16, remat=remat)
        state = jax.eval_shape(case.init, jax.random.key(0))
        plan = planned(recipes.data_parallel(), case.step, state, case.batch(0))
        return sum(row.saved_bytes for row in plan.record.modules if "layer1" in row.module)

    layer_input_bytes = 16 // 4 * 32 * 64 * 4
    assert kept(remat=True) == layer_input_bytes
    assert kept(remat=False) > 10 * layer_input_bytes


@pytest.mark.parametrize("billions", PARAMETERS)
def test_matrices_have_exactly_so_many_parameters(billions):
    shapes = matrices(PARAMETERS[billions], WIDTHS[billions])
    assert sum(jax.ShapeDtypeStruct(shape, jnp.float16).size for shape in shapes) == PARAMETERS[billions]


@pytest.mark.cases(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("billions", "devices"), [("7.5", 64), ("7.5", 1024), ("1000", 16)])
def test_model_states_of_zero_are_as_published(billions, stage, devices):
    plan = zero_plan(PARAMETERS[billions], WIDTHS[billions], stage, devices)
    found = model_state_bytes(plan.predicted.memory[0]) / 1e9
    assert is_printed(found, ZERO_GB[billions, stage][DEVICES.index(devices)]), found


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_activations_of_a_layer_are_as_published(case):
    sizes = Sizes(batch=2, length=128, width=256, heads=8)
    plan = gpt_plan(case, sizes, 4)
    for layer in (1, 2):
        assert layer_bytes(plan, layer) == pytest.approx(published_bytes(case, sizes, 4), rel=ACTIVATION_TARGET)
