"""Interleaved stages: chunks of layers, all under one option, so that no group of devices has much more than others.

A step takes mostly what its busiest group takes, whose chunks lie apart in the model: no programme over layers from
front to back knows what a group has had. Of few layers all cuts are tried. Of more, a cut into chunks of equal time is
changed, by one layer of the busiest group at a time, as long as loads get more even. What the mean of all groups takes
is a bound of what is possible.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from autopar.solver.stages.problem import Stage, StageOption, StageProblem, fullness, most_stages, step_time_s

FEW_CUTS = 500  # that are tried all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedStages:
    """The best stages found below a time, none if empty; no others take less than `bound_s`. `tried`: some option has
    groups for which there are layers and micro-batches.
    """

    stages: tuple[Stage, ...]
    step_time_s: float
    bound_s: float
    tried: bool


def interleaved_stages(problem: StageProblem, under_s: float) -> InterleavedStages:
    """Chunks of all layers under one option, that fit and take less than `under_s`."""
    options = [(_least_s(problem, option, groups), number, groups) for number, option, groups in _possible(problem)]
    best: tuple[Stage, ...] = ()
    best_s, bound_s = under_s, under_s
    for least_s, number, groups in sorted(options):
        if least_s >= best_s:
            break
        few = math.comb(problem.num_layers - 1, groups * problem.chunks - 1) <= FEW_CUTS
        option = problem.options[number]
        cuts = _all_cuts(problem, option, groups) if few else [_even_cut(problem, option, groups)]
        option_s = math.inf
        for ends in cuts:
            stages = tuple(Stage(first=a, last=b, option=number) for a, b in itertools.pairwise((0, *ends)))
            time_s = step_time_s(problem, stages)
            if time_s < option_s and fullness(problem, stages) <= 1:
                option_s = time_s
                best, best_s = (stages, time_s) if time_s < best_s else (best, best_s)
        bound_s = min(bound_s, option_s if few else least_s)
    return InterleavedStages(stages=best, step_time_s=best_s, bound_s=bound_s, tried=bool(options))


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


def _all_cuts(problem: StageProblem, option: StageOption, groups: int) -> list[tuple[int, ...]]:
    """The ends of the chunks for every cut of the layers, those of the smallest largest chunk first: uneven chunks wait
    for one another, which the model of a group does not know.
    """
    before_s = [0.0, *np.cumsum(option.forward_s + option.backward_s).tolist()]
    between = itertools.combinations(range(1, problem.num_layers), groups * problem.chunks - 1)
    cuts = [(*ends, problem.num_layers) for ends in between]
    return sorted(cuts, key=lambda ends: max(before_s[b] - before_s[a] for a, b in itertools.pairwise((0, *ends))))


def _even_cut(problem: StageProblem, option: StageOption, groups: int) -> tuple[int, ...]:
    """The ends of the chunks of a cut whose groups have about equal loads."""
    before_s = np.concatenate([[0.0], np.cumsum(option.forward_s + option.backward_s)])
    number, layers = groups * problem.chunks, problem.num_layers
    ends = np.searchsorted(before_s, before_s[-1] * np.arange(1, number + 1) / number)
    for chunk in range(number):  # a layer or more for each
        least = ends[chunk - 1] + 1 if chunk else 1
        ends[chunk] = min(max(ends[chunk], least), layers - (number - 1 - chunk))
    ends[-1] = layers
    loads = _loads(before_s, ends[None], groups)[0]
    while True:
        cuts = _moved(ends, loads, groups)
        if not len(cuts):
            break
        of_cuts = _loads(before_s, cuts, groups)
        best = np.lexsort(((of_cuts**2).sum(axis=1), of_cuts.max(axis=1)))[0]
        found = of_cuts[best]
        if found.max() > loads.max() or (found**2).sum() >= (loads**2).sum() * (1 - 1e-12):
            break
        ends, loads = cuts[best], found
    return tuple(int(end) for end in ends)


def _loads(before_s: np.ndarray, cuts: np.ndarray, groups: int) -> np.ndarray:
    """[cut, group] -> seconds of the passes of one micro-batch. Chunk j is on group j mod `groups`."""
    starts = np.concatenate([np.zeros((len(cuts), 1), dtype=cuts.dtype), cuts[:, :-1]], axis=1)
    return (before_s[cuts] - before_s[starts]).reshape(len(cuts), -1, groups).sum(axis=1)


def _moved(ends: np.ndarray, loads: np.ndarray, groups: int) -> np.ndarray:
    """[cut, end]: a chunk of the busiest group has one layer less, a chunk of another one one more; those in between
    are shifted by one.
    """
    sizes, busiest, chunks = np.diff(ends, prepend=0), int(loads.argmax()), np.arange(len(ends))
    givers = [chunk for chunk in chunks[busiest::groups] if sizes[chunk] > 1]
    takers = chunks[chunks % groups != busiest]
    moved = []
    for giver in givers:
        forward = (takers[:, None] > giver) & (chunks >= giver) & (chunks < takers[:, None])
        back = (takers[:, None] < giver) & (chunks >= takers[:, None]) & (chunks < giver)
        moved.append(ends - forward + back)
    return np.concatenate(moved) if moved else np.zeros((0, len(ends)), dtype=ends.dtype)
