"""Recipes in pipeline stages and micro-batches, with recomputation and offloading."""

from __future__ import annotations

import dataclasses

from autopar.calls.search import check_number, check_schedule
from autopar.errors import InvalidArgumentError, expect_one_of, expect_type
from autopar.passes.remat_policy import FORMS, is_policy
from autopar.plan.options import PlanRequest
from autopar.recipes.recipe import Recipe, named

# What may be kept in the memory of the hosts: by its text, whether that is the optimizer state, and saved activations.
_OFFLOADS = {
    "nothing": (False, False),
    "optimizer": (True, False),
    "activations": (False, True),
    "optimizer and activations": (True, True),
}


@named
def pipeline(
    stages: int, schedule: str = "1f1b", *, num_microbatches: int | None = None, chunks: int | None = None
) -> Recipe:
    """Pipeline stages of about equal arithmetic on equal groups of devices.

    `chunks` is the number of stages of each group (interleaved and zb-v schedules). Sources: Huang et
    al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019, and "Megatron-LM", 2021; Qi et al., "Zero bubble pipeline
    parallelism", 2024. Raises: InvalidArgumentError.
    """
    check_schedule("recipes.pipeline(schedule=...)", schedule)
    return Recipe(request=checked_stages("recipes.pipeline", stages, schedule, num_microbatches, chunks))


@named
def cut(
    recipe: Recipe,
    *,
    stages: int = 1,
    schedule: str | None = None,
    num_microbatches: int | None = None,
    chunks: int | None = None,
    recompute: str = "nothing",
    offload: str = "nothing",
) -> Recipe:
    """A recipe for one program, in stages, micro-batches and with recomputation; it holds in each stage.

    Args:
        recipe: One without stages, micro-batches or recomputation, for example
            `tensor_parallel("2d", size=4)`, `expert_parallel(2)`.
        stages: Pipeline stages, of equal groups of devices.
        schedule: As in `pipeline`; "1f1b" where there are stages.
        num_microbatches: The number of parts of the batch. None is one part, where there are no stages and chunks.
        chunks: As in `pipeline`.
        recompute: As in `combine`.
        offload: As in `combine`, beside what the recipe offloads.

    Raises: InvalidArgumentError.
    """
    hint = "call a function of autopar.recipes: cut(recipes.zero(1), ...)"
    expect_type("recipes.cut(recipe)", recipe, Recipe, "a recipe", hint)
    if recipe.request != PlanRequest(binding=recipe.request.binding):
        raise InvalidArgumentError(
            where="recipes.cut(recipe)",
            expected="a recipe for one program",
            got="one with stages, micro-batches, recomputation or pins of its own",
            hint="give all of them in one call; autopar.constrain(pins, recipe=...) pins what is cut",
        )
    stages_request = checked_stages("recipes.cut", stages, schedule, num_microbatches, chunks)
    return cut_into("recipes.cut", recipe, stages_request, recompute, offload)


def cut_into(where: str, recipe: Recipe, stages: PlanRequest, recompute: str, offload: str) -> Recipe:
    """A recipe for one program, in these stages. Raises: InvalidArgumentError."""
    if not is_policy(recompute):
        raise InvalidArgumentError(
            where=f"{where}(recompute=...)",
            expected=FORMS,
            got=repr(recompute),
            hint="leave it out to keep everything",
        )
    expect_one_of(f"{where}(offload=...)", offload, _OFFLOADS, "leave it out to keep everything on the devices")
    binding, (optimizer, activations) = recipe.request.binding, _OFFLOADS[offload]
    if optimizer or activations:
        assert binding is not None, "pipelines are not cut"
        optimizer = optimizer or binding.offloads_optimizer
        binding = dataclasses.replace(binding, offloads_optimizer=optimizer, offloads_activations=activations)
    # Only what is cut into micro-batches has the passes apart; one stage and one micro-batch will do.
    if stages.num_stages == 1 and recompute == "nothing" and not activations:
        stages = dataclasses.replace(stages, num_stages=None)
    return Recipe(request=dataclasses.replace(stages, binding=binding, recompute=recompute))


def checked_stages(
    where: str, stages: int, schedule: str | None, num_microbatches: int | None, chunks: int | None
) -> PlanRequest:
    """The request of stages and micro-batches alone. Raises: InvalidArgumentError."""
    check_number(f"{where}(stages=...)", stages)
    for name, number in (("num_microbatches", num_microbatches), ("chunks", chunks)):
        if number is not None:
            check_number(f"{where}({name}=...)", number)
    if schedule is not None:
        check_schedule(f"{where}(schedule=...)", schedule)
    return PlanRequest(num_stages=stages, num_microbatches=num_microbatches, schedule=schedule, chunks=chunks)
