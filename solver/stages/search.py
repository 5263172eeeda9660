"""Stages x submeshes x options at the least step time, over several numbers of micro-batches and schedules.

A first plan comes from stages of one size, a first bound from the programme (`dynamic_program`) as if every stage
were the last: then the place from the end falls away, and if that plan fits all the same it is the best. Else the
programme is run with what is in flight at every place. The best plan over all problems prunes each of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.stages.dynamic_program import DynamicProgram
from autopar.solver.stages.interleaved import interleaved_stages
from autopar.solver.stages.layer_ranges import Moves, RangeSums, SharedSums, moves_under, why_no_layer_fits
from autopar.solver.stages.problem import (
    PUTS_OFF_WEIGHT_GRADIENTS,
    NoStages,
    Schedule,
    Stage,
    StagePlan,
    StageProblem,
    fullness,
    in_flight,
    limit_of,
    most_stages,
    peak_bytes,
    step_time_s,
)
from autopar.solver.stages.validation import validate


def solve_stages(problem: StageProblem) -> StagePlan | NoStages:
    """The plan of the least step time by `step_time_s`, proven, or why there is none; of interleaved stages the best
    that is found, with a bound.

    Raises: ValueError when the problem is not well formed.
    """
    return best_stages((problem,))[0]


def best_stages(
    problems: Sequence[StageProblem], within: float = 1.0, under_s: float = math.inf
) -> tuple[StagePlan | NoStages, ...]:
    """An answer for each problem; the best of them is proven the least over all, if it takes less than `under_s`. Of
    interleaved stages the best that is found counts, with a bound.

    A problem whose plans all take more than `within` times the best so far is not searched through: its answer is the
    best plan seen on the way, or NoStages, with the bound proven. Problems should share their options' arrays where
    they can (several schedules at one number of micro-batches): sums over layers are then made once.

    Raises: ValueError when a problem is not well formed.
    """
    for problem in problems:
        validate(problem)
    shared = SharedSums()
    first: dict[int, _First] = {}
    best_s = under_s / within
    for number in sorted(range(len(problems)), key=lambda number: _guess_s(problems[number])):
        first[number] = _first(problems[number], shared, best_s * within)
        best_s = min(best_s, first[number].step_time_s)
    answers: dict[int, StagePlan | NoStages] = {}
    for number in sorted(first, key=lambda number: first[number].step_time_s):
        answers[number] = _solve(problems[number], shared, first[number], best_s * within)
        answer = answers[number]
        if isinstance(answer, StagePlan):
            best_s = min(best_s, answer.step_time_s)
    return tuple(answers[number] for number in range(len(problems)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _First:
    """The best stages of one size, or, interleaved, of all; none if stages is empty. why_not: nothing is possible.
    bound_s: interleaved, what all take at least; none_fits: no cut that was tried fits into the memory; room: as many
    micro-batches may be in flight in each stage, by its option.
    """

    stages: tuple[Stage, ...] = ()
    step_time_s: float = math.inf
    why_not: str | None = None
    bound_s: float = math.inf
    none_fits: bool = False
    room: int = 0


def _first(problem: StageProblem, shared: SharedSums, under_s: float) -> _First:
    """The first plan, if there is one below under_s."""
    if not problem.options:
        return _First(why_not="there are no options")
    sums = shared.of(problem)
    why_not = _why_not(problem, sums)
    if why_not is not None:
        return _First(why_not=why_not)
    if problem.schedule is Schedule.INTERLEAVED:
        return _search_interleaved(problem, under_s)
    return _search_sizes(problem, moves_under(problem, sums, under_s), under_s)


def _solve(problem: StageProblem, shared: SharedSums, first: _First, best_s: float) -> StagePlan | NoStages:
    """The best plan if it is below best_s or the first; else the first, if any, with best_s as bound."""
    if first.why_not is not None:
        return NoStages(reason=first.why_not)
    best, under_s = first, min(first.step_time_s, best_s)
    if problem.schedule is not Schedule.INTERLEAVED:
        moves = moves_under(problem, shared.of(problem), under_s)
        found = _search(problem, moves, under_s, in_memory=False)
        if found.stages and fullness(problem, found.stages) > 1:
            found = _search_in_memory(problem, moves, under_s)
        if found.stages:
            best, under_s = found, found.step_time_s
    if best.stages:
        return StagePlan(
            stages=best.stages,
            step_time_s=step_time_s(problem, best.stages),
            bound_s=min(under_s, first.bound_s),
            peak_bytes=peak_bytes(problem, best.stages),
        )
    bound_s = min(under_s, first.bound_s)
    if first.none_fits and math.isfinite(first.bound_s):
        return NoStages(reason="no cut of the layers into chunks that was tried fits into the memory", bound_s=bound_s)
    if math.isfinite(bound_s):
        return NoStages(reason=f"nothing takes less than {bound_s:.6g} s", bound_s=bound_s)
    return NoStages(
        reason="every layer fits by itself, but no stages of all layers and devices do: spread evenly, their state "
        f"alone takes {math.ceil(_least_state_bytes(problem)):,} of {problem.limit_bytes:,} bytes on each device"
    )


def _least_state_bytes(problem: StageProblem) -> float:
    """State on a device, were each layer's on the option that spreads it best, and all devices equally full."""
    total = np.min([option.state_bytes * option.num_devices for option in problem.options], axis=0).sum()
    return float(total) / problem.num_devices


def _search_sizes(problem: StageProblem, moves: Moves, under_s: float) -> _First:
    """The best plan below under_s of stages of one size, if any."""
    best = _First()
    for size in np.unique(moves.devices):
        count, odd = divmod(problem.num_devices, int(size))
        if odd or count > most_stages(problem) or problem.fixed_num_stages not in (None, count):
            continue
        part = moves.take(moves.devices == size)
        fixed = replace(problem, fixed_num_stages=count)
        found = _search(fixed, part, min(under_s, best.step_time_s), in_memory=True)
        if found.stages:
            best = found
    return best


def _search_in_memory(problem: StageProblem, moves: Moves, under_s: float) -> _First:
    """The best stages below under_s that fit, if any.

    Where what is in flight depends on the number of stages, one number after the other is tried. More stages hold
    more: once no plan of any number is left whose moves hold as much, no larger number has one.
    """
    if problem.schedule not in PUTS_OFF_WEIGHT_GRADIENTS or problem.fixed_num_stages is not None:
        return _search(problem, moves, under_s, in_memory=True)
    best, of_any_number = _First(), _First()
    for count in range(1, most_stages(problem) + 1):
        limit_s, held = min(under_s, best.step_time_s), in_flight(problem, 0, count)
        moves = moves.take(moves.allowed >= held)
        if of_any_number.room < held:  # else the best of more moves is the best of these too
            of_any_number = _search(problem, moves, limit_s, in_memory=False)
        if not of_any_number.stages or of_any_number.step_time_s >= limit_s:
            break
        if len(of_any_number.stages) == count:
            best = of_any_number
            continue
        found = _search(replace(problem, fixed_num_stages=count), moves, limit_s, in_memory=True)
        if found.stages:
            best = found
    return best


def _search(problem: StageProblem, moves: Moves, under_s: float, *, in_memory: bool) -> _First:
    """The best stages below under_s, if any; in_memory False: as if the moves held no more than they must."""
    moves = moves.take(moves.add_s + moves.steady_s < under_s)
    if not len(moves):
        return _First()
    edges = [edge for lies in problem.placements for edge in (lies.begin, lies.end)]
    unit = math.gcd(*np.unique(moves.devices).tolist(), *edges)
    total, odd = divmod(problem.num_devices, unit)
    if odd:
        return _First()
    most = min(most_stages(problem), total)
    exact = problem.fixed_num_stages is not None
    if problem.fixed_num_stages is not None:
        if problem.fixed_num_stages > most:
            return _First()
        most = problem.fixed_num_stages
    free = most == min(problem.num_layers, total)  # the number of stages is not limited
    flight = np.array([0, *(in_flight(problem, most - k, most) for k in range(1, most + 1))], dtype=np.int64)
    open_end = free and not exact
    if open_end:
        levels = _levels_that_matter(moves, flight) if in_memory else 1
        flight = flight[: levels + 1]
    if not in_memory:
        flight[:] = 0
    programme = DynamicProgram(moves, problem.num_layers, unit, total, flight, open_end, exact)
    found = programme.search(under_s)
    room = int(moves.allowed[list(found.path)].min()) if found.path else 0
    return _First(stages=moves.stages(found.path), step_time_s=found.step_time_s, room=room)


def _levels_that_matter(moves: Moves, flight: np.ndarray) -> int:
    """The first level from which on every move is allowed at all levels or at none."""
    at_most = flight[-1]
    for k in range(1, len(flight)):
        if not ((moves.allowed >= flight[k]) & (moves.allowed < at_most)).any():
            return k
    return len(flight) - 1


def _search_interleaved(problem: StageProblem, under_s: float) -> _First:
    """The best that is found, with the bound of all others."""
    found = interleaved_stages(problem, under_s)
    if not found.tried:
        return _First(why_not="no option's groups hold a chunk of layers each and divide the micro-batches")
    step_s = found.step_time_s if found.stages else math.inf
    return _First(stages=found.stages, step_time_s=step_s, bound_s=found.bound_s, none_fits=found.none_fits)


def _why_not(problem: StageProblem, sums: RangeSums) -> str | None:
    """A reason that is plain before any search."""
    if problem.fixed_num_stages is not None and problem.fixed_num_stages > most_stages(problem):
        return (
            f"{problem.fixed_num_stages} stages: {problem.schedule} runs at most {most_stages(problem)} of "
            f"{problem.num_layers} layers with {problem.num_microbatches} micro-batches"
        )
    reach = np.zeros(problem.num_devices + 1, dtype=bool)
    reach[0] = True
    sizes = {option.num_devices for option in problem.options}
    for total in range(1, problem.num_devices + 1):
        reach[total] = any(size <= total and reach[total - size] for size in sizes)
    if not reach[-1]:
        return f"no sizes of submeshes add up to {problem.num_devices} devices"
    return why_no_layer_fits(problem, sums)


def _guess_s(problem: StageProblem) -> float:
    """Roughly what a step takes: the best option's layers spread evenly, memory set aside but for the state."""
    best = math.inf
    for number, option in enumerate(problem.options):
        count = min(max(problem.num_devices // option.num_devices, 1), problem.num_layers)
        once = float(option.forward_s.sum() + option.backward_s.sum())
        if option.state_bytes.sum() / count <= limit_of(problem, number):
            best = min(best, once + (problem.num_microbatches - 1) * once / count)
    return best
