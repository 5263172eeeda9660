"""The cost and memory of a choice, and exhaustive search: independent of the solving code, to check it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.solver.problem import Infeasibility, Problem, Solution, Status
from autopar.solver.stage_problem import (
    NoStages,
    Schedule,
    Stage,
    StagePlan,
    StageProblem,
    check,
    stage_peak_bytes,
    step_time_s,
    validate,
)


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, int]:
    """Cost of a choice (inf when it uses something not allowed) and its peak of memory in bytes.

    Raises: ValueError when the choice does not have one existing strategy for each node.
    """
    if len(choice) != len(problem.node_cost):
        raise ValueError(f"expected {len(problem.node_cost)} choices, got {len(choice)}")
    for node, (strategy, costs) in enumerate(zip(choice, problem.node_cost, strict=True)):
        if not 0 <= strategy < len(costs):
            raise ValueError(f"node {node}: strategy {strategy} does not exist, it has {len(costs)}")
    terms = [float(costs[s]) for costs, s in zip(problem.node_cost, choice, strict=True)]
    terms += [float(e.cost[choice[e.source], choice[e.target]]) for e in problem.edges]
    cost = math.fsum(terms) if math.inf not in terms else math.inf
    return cost, peak_bytes(problem, choice)


def peak_bytes(problem: Problem, choice: Sequence[int]) -> int:
    """The largest sum of bytes live at any one time."""
    changes: dict[int, int] = {}
    for use in problem.uses:
        if use.start < use.stop:
            size = int(use.bytes[choice[use.node]])
            changes[use.start] = changes.get(use.start, 0) + size
            changes[use.stop] = changes.get(use.stop, 0) - size
    level = peak = 0
    for when in sorted(changes):
        level += changes[when]
        peak = max(peak, level)
    return peak


def brute_force(problem: Problem) -> Solution:
    """The best choice by trying every one of them; for tests, on problems of up to about a million choices."""
    begun = time.perf_counter()
    best: tuple[float, tuple[int, ...], int] | None = None
    smallest_peak: int | None = None
    for choice in itertools.product(*(range(len(costs)) for costs in problem.node_cost)):
        cost, peak = evaluate(problem, choice)
        if cost == math.inf:
            continue
        smallest_peak = peak if smallest_peak is None else min(smallest_peak, peak)
        if (problem.limit_bytes is None or peak <= problem.limit_bytes) and (best is None or cost < best[0]):
            best = (cost, choice, peak)
    wall_s = time.perf_counter() - begun
    if best is None:
        over = (
            smallest_peak - problem.limit_bytes if smallest_peak is not None and problem.limit_bytes is not None else 0
        )
        why = Infeasibility(times=(), nodes=(), bytes_over=over, reason="every choice was tried")
        return infeasible(why, wall_s)
    cost, choice, peak = best
    return Solution(
        choice=choice,
        status=Status.OPTIMAL,
        objective=cost,
        bound=cost,
        gap=0.0,
        wall_s=wall_s,
        peak_bytes=peak,
        incumbents=((wall_s, cost),),
    )


def infeasible(why: Infeasibility, wall_s: float) -> Solution:
    """The answer to a problem that is proven to have none."""
    return Solution(
        choice=(),
        status=Status.INFEASIBLE,
        objective=math.inf,
        bound=math.inf,
        gap=math.inf,
        wall_s=wall_s,
        peak_bytes=0,
        infeasibility=why,
    )


def relative_gap(objective: float, bound: float) -> float:
    """How far a cost may be above the best, as a part of it: 0 when they meet, inf when either is missing."""
    if not (np.isfinite(objective) and np.isfinite(bound)):
        return math.inf
    return max(0.0, objective - bound) / abs(objective) if objective != bound else 0.0


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
