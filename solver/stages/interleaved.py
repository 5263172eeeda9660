"""Interleaved stages: chunks of layers, all under one option, that keep the groups of devices busy.

Round r of the groups is made of their r-th chunks, which follow one another in the model: a step takes mostly the sum
over rounds of the largest chunk. Of few layers all cuts are tried. Of more, a programme over rounds finds the least
such sum (`compiled_loops.least_rounds`), sends and memory left out, and the least such sum of bytes where that does
not fit. What all layers take on the mean group is a bound of what is possible.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autopar.solver.stages.problem import (
    Stage,
    StageOption,
    StageProblem,
    fullness,
    in_flight,
    most_stages,
    step_time_s,
)

FEW_CUTS = 20  # that are tried all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedStages:
    """The best stages found below a time, none if empty; no others take less than `bound_s`. `tried`: some option has
    groups for which there are layers and micro-batches; `none_fits`: no cut that was tried fits into the memory.
    """

    stages: tuple[Stage, ...]
    step_time_s: float
    bound_s: float
    tried: bool
    none_fits: bool


def interleaved_stages(problem: StageProblem, under_s: float) -> InterleavedStages:
    """Chunks of all layers under one option, that fit and take less than `under_s`."""
    options = [(_least_s(problem, option, groups), number, groups) for number, option, groups in _possible(problem)]
    best: tuple[Stage, ...] = ()
    best_s, bound_s, tried_fits = under_s, under_s, list[bool]()
    for least_s, number, groups in sorted(options):
        if least_s >= best_s:
            break
        few = math.comb(problem.num_layers - 1, groups * problem.chunks - 1) <= FEW_CUTS
        option = problem.options[number]
        option_s = math.inf
        for ends in _all_cuts(problem, option, groups) if few else _even_cuts(problem, option, groups):
            if not few and _least_of_cut_s(problem, option, groups, ends) >= best_s:
                break
            stages = tuple(Stage(first=a, last=b, option=number) for a, b in itertools.pairwise((0, *ends)))
            time_s = step_time_s(problem, stages)
            fits = fullness(problem, stages) <= 1
            tried_fits.append(fits)
            if fits and time_s < option_s:
                option_s = time_s
                best, best_s = (stages, time_s) if time_s < best_s else (best, best_s)
            if fits and not few:
                break
        bound_s = min(bound_s, option_s if few else least_s)
    none_fits = bool(tried_fits) and not any(tried_fits)
    return InterleavedStages(stages=best, step_time_s=best_s, bound_s=bound_s, tried=bool(options), none_fits=none_fits)


def _possible(problem: StageProblem) -> list[tuple[int, StageOption, int]]:
    """The options, by number, with the groups that they make, for which there are layers and micro-batches."""
    found = []
    for number, option in enumerate(problem.options):
        groups, odd = divmod(problem.num_devices, option.num_devices)
        runs = not odd and groups <= most_stages(problem) and problem.num_microbatches % groups == 0
        if runs and problem.fixed_num_stages in (None, groups):
            found.append((number, option, groups))
    return found


def _least_s(problem: StageProblem, option: StageOption, groups: int) -> float:
    """What a step takes at least: the passes of the mean group, and all layers once to fill and drain the pipeline."""
    m, v = problem.num_microbatches, problem.chunks
    alone_s = float((option.forward_s + option.backward_s).sum())
    return alone_s / v + (m - 1 / v) * alone_s / groups


def _least_of_cut_s(problem: StageProblem, option: StageOption, groups: int, ends: Sequence[int]) -> float:
    """What a step takes at least, sends left out, with chunks that end there."""
    m, v = problem.num_microbatches, problem.chunks
    before_s = np.concatenate([[0.0], np.cumsum(option.forward_s + option.backward_s)])
    rounds_s = np.diff(before_s[[0, *ends]]).reshape(v, groups).max(axis=1).sum()
    return float(before_s[-1] / v + (m - 1 / v) * rounds_s)


def _all_cuts(problem: StageProblem, option: StageOption, groups: int) -> list[tuple[int, ...]]:
    """The ends of the chunks for every cut of the layers, those of the smallest largest chunk first: of equal ones the
    first is taken.
    """
    before_s = [0.0, *np.cumsum(option.forward_s + option.backward_s).tolist()]
    between = itertools.combinations(range(1, problem.num_layers), groups * problem.chunks - 1)
    cuts = [(*ends, problem.num_layers) for ends in between]
    return sorted(cuts, key=lambda ends: max(before_s[b] - before_s[a] for a, b in itertools.pairwise((0, *ends))))


def _even_cuts(problem: StageProblem, option: StageOption, groups: int) -> Iterator[tuple[int, ...]]:
    """The ends of the chunks of the cut whose rounds take least, sends left out; then of that whose rounds hold least,
    for where the first does not fit.
    """
    from autopar.solver.stages import compiled_loops

    loops: Any = compiled_loops
    passes = in_flight(problem, 0, groups * problem.chunks) / problem.chunks
    for cost in (option.forward_s + option.backward_s, option.state_bytes + passes * option.saved_bytes):
        yield tuple(int(end) for end in loops.least_rounds(np.asarray(cost, dtype=np.float64), groups, problem.chunks))
