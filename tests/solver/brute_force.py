"""Exhaustive search, independent of the solving code, to check it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from autopar.solver import NoStages, Problem, Schedule, Stage, StagePlan, StageProblem, evaluate, step_time_s
from autopar.solver.stage_problem import check, stage_peak_bytes, validate


def brute_force(
    problem: Problem, fits: Callable[[Sequence[int]], bool] = lambda choice: True
) -> tuple[float, tuple[int, ...] | None]:
    """The least cost of a choice that fits, and the choice; inf and None where there is none."""
    best: tuple[float, tuple[int, ...] | None] = (math.inf, None)
    for choice in itertools.product(*(range(len(costs)) for costs in problem.node_cost)):
        cost = evaluate(problem, choice)
        if cost < best[0] and fits(choice):
            best = cost, choice
    return best


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
    return StagePlan(stages=best, step_time_s=best_s, bound_s=best_s, peak_bytes=stage_peak_bytes(problem, best))


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
