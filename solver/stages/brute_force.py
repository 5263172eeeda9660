"""Exhaustive search over the stages of a few layers, to check the search."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.solver.stages.problem import (
    NoStages,
    Schedule,
    Stage,
    StagePlan,
    StageProblem,
    check,
    peak_bytes,
    step_time_s,
    validate,
)


def brute_force_stages(problem: StageProblem) -> StagePlan | NoStages:
    """The plan of the least step time by trying all; exponential in the layers.

    Raises: ValueError when the problem is not well formed.
    """
    validate(problem)
    best_s = math.inf
    best: tuple[Stage, ...] = ()
    for stages in _choices(problem, 0, problem.num_devices * problem.chunks):
        if check(problem, stages) is None:
            time_s = step_time_s(problem, stages)
            if time_s < best_s:
                best, best_s = stages, time_s
    if not best:
        return NoStages(reason="none of all choices fits")
    return StagePlan(stages=best, step_time_s=best_s, bound_s=best_s, peak_bytes=peak_bytes(problem, best))


def _choices(problem: StageProblem, first: int, devices: int, only: int | None = None) -> Iterator[tuple[Stage, ...]]:
    """Stages of the layers from first on that use these devices."""
    if first == problem.num_layers:
        if devices == 0:
            yield ()
        return
    for number, option in enumerate(problem.options):
        if option.num_devices > devices or only not in (None, number):
            continue
        same = number if problem.schedule is Schedule.INTERLEAVED else None
        for last in range(first + 1, problem.num_layers + 1):
            stage = Stage(first=first, last=last, option=number)
            for rest in _choices(problem, last, devices - option.num_devices, same):
                yield (stage, *rest)
