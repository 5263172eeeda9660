"""Recipes beside what training steps ask for: cut batches, recomputation, half precision, every schedule.

Numbers are held against plain `jax.jit` of the same step, collectives against the compiled program.
"""

import dataclasses
import re

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autopar import constrain, recipes
from autopar.errors import InvalidArgumentError
from benchmarks.zoo import CASES
from tests.small_steps import verified

RECIPES = {
    "data": {},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "tensor": {"tp": 4},
}
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "zb-1p", "zb-2p", "dualpipev")
GPT = CASES["gpt"](layers=1, batch=16)
BFLOAT16 = CASES["gpt_bf16"](layers=1, batch=16)
DEEP = {"gpt": CASES["gpt"](layers=4, batch=16), "moe": CASES["moe"](layers=4, batch=16)}
# A scale under which no gradient overflows in float16, and one under which they all do, whatever is summed first.
NONE_OVERFLOWS, ALL_OVERFLOW = 2.0**10, 2.0**26


def scaled(scale):
    """Training in float16 from a loss scale on."""
    case = CASES["loss_scaling"](batch=32)
    return dataclasses.replace(case, init=lambda key: {**case.init(key), "scale": jnp.float32(scale)})


def all_but(*fast):
    """Every recipe, of which only some are fast enough for every run."""
    return [pytest.param(o, id=name, marks=[] if name in fast else pytest.mark.slow) for name, o in RECIPES.items()]


GRIDS = {
    "2d": (recipes.tensor_parallel("2d", size=4), 4, ("row", "column")),
    "2.5d": (recipes.tensor_parallel("2.5d", depth=2), 8, ("depth", "row", "column")),
    "3d": (recipes.tensor_parallel("3d"), 8, ("depth", "row", "column")),
}


@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("recipe", "devices", "axes"),
    [pytest.param(*grid, marks=[] if name == "2d" else pytest.mark.slow, id=name) for name, grid in GRIDS.items()],
)
def test_recomputation_and_micro_batches_of_grids(recipe, devices, axes, num_microbatches):
    cut = recipes.cut(recipe, num_microbatches=num_microbatches, recompute="input")
    _, plan = verified(GPT, cut, devices)
    assert plan.record.pipeline.num_microbatches == num_microbatches
    assert set(plan.record.pipeline.recomputed) == {"input"}
    assert plan.mesh.axis_names == axes


@pytest.mark.slow
def test_stages_of_squares():
    cut = recipes.cut(recipes.tensor_parallel("2d", size=4), stages=2, num_microbatches=2)
    _, plan = verified(DEEP["gpt"], cut, 8)
    assert [stage.axis_sizes for stage in plan.record.pipeline.stages] == [(2, 2), (2, 2)]
    assert plan.mesh.axis_names == ("row", "column")


def test_combine_cuts():
    options = {"schedule": "gpipe", "num_microbatches": 4, "recompute": "matmuls"}
    assert recipes.cut(recipes.zero(3), stages=2, **options) == recipes.combine(zero=3, pp=2, **options)


@pytest.mark.parametrize(
    "recipe", [recipes.pipeline(2), recipes.combine(recompute="input"), constrain({"x": P("data")})]
)
def test_what_is_cut_is_not_cut_again(recipe):
    with pytest.raises(InvalidArgumentError, match="expected a recipe for one program"):
        recipes.cut(recipe, stages=2)


def test_no_such_recomputation():
    with pytest.raises(InvalidArgumentError, match=r"recipes.cut\(recompute=...\)"):
        recipes.cut(recipes.zero(1), recompute="all")


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: recipes.cut(recipes.zero), "recipes.cut(recipe)"),
        (lambda: recipes.cut(recipes.zero(1), stages=None, recompute="input"), "recipes.cut(stages=...)"),
        (lambda: recipes.combine(pp=None, recompute="input"), "recipes.combine(pp=...)"),
        (lambda: recipes.pipeline(None), "recipes.pipeline(stages=...)"),
        (lambda: recipes.pipeline(2, None), "recipes.pipeline(schedule=...)"),
    ],
)
def test_what_must_be_given(make, where):
    with pytest.raises(InvalidArgumentError, match=re.escape(where)):
        make()


@pytest.mark.parametrize("options", all_but())
def test_a_batch_in_parts(options):
    _, plan = verified(GPT, recipes.combine(**options, num_microbatches=2))
    assert plan.record.pipeline.num_microbatches == 2


@pytest.mark.parametrize("recompute", ["matmuls", pytest.param("input", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", all_but("zero 3"))
def test_recomputation_in_a_batch_in_parts(options, recompute):
    _, plan = verified(GPT, recipes.combine(**options, recompute=recompute, num_microbatches=2))
    assert set(plan.record.pipeline.recomputed) == {recompute}


@pytest.mark.parametrize("num_microbatches", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", all_but())
def test_bfloat16_with_master_weights_in_float32(options, num_microbatches):
    _, plan = verified(BFLOAT16, recipes.combine(**options, num_microbatches=num_microbatches))
    assert {v.dtype for v in plan.record.arguments if ".params[" in v.path} == {"float32"}


@pytest.mark.parametrize(
    ("scale", "num_microbatches"),
    [
        (NONE_OVERFLOWS, 2),
        pytest.param(NONE_OVERFLOWS, None, marks=pytest.mark.slow),
        pytest.param(ALL_OVERFLOW, None, marks=pytest.mark.slow),
        pytest.param(ALL_OVERFLOW, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("options", all_but("zero 3"))
def test_float16_with_a_loss_scale(options, scale, num_microbatches):
    # The update stands in a `lax.cond` over all parameters, which is taken where no gradient has overflowed.
    verified(scaled(scale), recipes.combine(**options, num_microbatches=num_microbatches))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_on_every_schedule(name, schedule):
    _, plan = verified(DEEP[name], recipes.pipeline(2, schedule, num_microbatches=4), 4)
    assert plan.record.pipeline.schedule == schedule
    assert len(plan.record.pipeline.stages) == (4 if schedule in ("interleaved", "zb-v", "dualpipev") else 2)


@pytest.mark.slow
@pytest.mark.parametrize("options", all_but(*RECIPES))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_stages_of_recipes(options, schedule):
    options = {**options, "tp": min(options.get("tp", 1), 2)}
    recipe = recipes.combine(pp=2, **options, schedule=schedule, num_microbatches=4)
    _, plan = verified(DEEP["gpt"], recipe, 4)
    assert plan.record.pipeline.schedule == schedule
    assert "pipeline" in plan.groups()
