"""Plans that experts write by hand, in the search's own vocabulary: to compare with, or to start from."""

from __future__ import annotations

import dataclasses

from autopar.errors import InvalidArgumentError
from autopar.pipelining import PipelineOptions
from autopar.runtime.schedules import SCHEDULES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a plan must hold to; the search decides the rest. Made by the functions of this module."""

    pipeline: PipelineOptions = dataclasses.field(default_factory=PipelineOptions)


def pipeline(
    stages: int, schedule: str = "1f1b", *, num_microbatches: int | None = None, chunks: int | None = None
) -> Recipe:
    """Equal groups of devices run the model's layers one after the other, each about as much arithmetic.

    `chunks` is the number of stages that each group runs in turns (interleaved and zb-v schedules). Sources: Huang et
    al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019, and "Megatron-LM", 2021; Qi et al., "Zero bubble pipeline
    parallelism", 2024. Raises: InvalidArgumentError.
    """
    check_number("recipes.pipeline(stages=...)", stages)
    check_schedule("recipes.pipeline(schedule=...)", schedule)
    if num_microbatches is not None:
        check_number("recipes.pipeline(num_microbatches=...)", num_microbatches)
    if chunks is not None:
        check_number("recipes.pipeline(chunks=...)", chunks)
    options = PipelineOptions(num_stages=stages, num_microbatches=num_microbatches, schedule=schedule, chunks=chunks)
    return Recipe(pipeline=options)


def pipeline_options(recipe: Recipe, num_microbatches: int | str, schedule: str) -> PipelineOptions:
    """A recipe's options with those of `parallelize` over them.

    Raises: InvalidArgumentError.
    """
    options = recipe.pipeline
    if num_microbatches != "auto":
        number = check_number("parallelize(num_microbatches=...)", num_microbatches)
        options = dataclasses.replace(options, num_microbatches=number)
    if schedule != "auto":
        check_schedule("parallelize(schedule=...)", schedule)
        options = dataclasses.replace(options, schedule=schedule)
    return options


def check_number(where: str, number: object) -> int:
    """The number. Raises: InvalidArgumentError for what is no positive whole number."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise InvalidArgumentError(
            where=where, expected="a positive whole number", got=repr(number), hint="1 cuts nothing"
        )
    return number


def check_schedule(where: str, name: object) -> None:
    """Raises: InvalidArgumentError for a name that is not known."""
    if name not in SCHEDULES:
        raise InvalidArgumentError(
            where=where, expected=f"one of {', '.join(SCHEDULES)}", got=repr(name), hint="1f1b is always possible"
        )
