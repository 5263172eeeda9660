"""Stages x submeshes x options at the least step time, over several numbers of micro-batches and schedules.

A first plan comes from stages of one size, a first bound from the programme as if every stage
were the last: then the place from the end falls away, and if that plan fits all the same it is the best. Else the
programme is run with what is in flight at every place. The best plan over all problems prunes each of these.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.solver.stage_problem import (
    PUTS_OFF_WEIGHT_GRADIENTS,
    NoStages,
    Schedule,
    Stage,
    StageOption,
    StagePlan,
    StageProblem,
    StageTerms,
    combine,
    deferred_bytes,
    fullness,
    held_bytes,
    in_flight,
    most_stages,
    stage_peak_bytes,
    step_time_s,
    terms,
    validate,
    weight_seconds,
)

# Every range of layers with every option, as arrays: feasibility, terms of the step time, memory.

NO_LIMIT = np.int64(2**40)  # micro-batches in flight of a stage that holds nothing of them


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RangeSums:
    """Sums over the layers [first, last) of every option: (options, ranges) float64, bytes int64."""

    first: np.ndarray
    last: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    once_s: np.ndarray
    send_s: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    deferred_bytes: np.ndarray
    working_bytes: np.ndarray


class SharedSums:
    """The sums of the options last seen: problems that share their options share them."""

    def __init__(self) -> None:
        self._options: tuple[StageOption, ...] = ()
        self._sums: RangeSums | None = None

    def of(self, problem: StageProblem) -> RangeSums:
        same = len(self._options) == len(problem.options) and all(
            a is b for a, b in zip(self._options, problem.options, strict=True)
        )
        if self._sums is None or not same:
            self._options, self._sums = problem.options, range_sums(problem.options, problem.num_layers)
        return self._sums


def range_sums(options: Sequence[StageOption], layers: int) -> RangeSums:
    """Each sum is added up from its first layer on, so that ranges of equal layers have equal sums to the last bit."""
    from autopar.solver import stage_loops

    loops: Any = stage_loops
    first, last = np.triu_indices(layers)

    def over(values: list[np.ndarray], kind: type, largest: bool = False) -> np.ndarray:
        return loops.over_ranges(np.stack(values).astype(kind), largest)

    return RangeSums(
        first=first,
        last=last + 1,
        forward_s=over([o.forward_s for o in options], np.float64),
        backward_s=over([o.backward_s for o in options], np.float64),
        weight_s=over([weight_seconds(o) for o in options], np.float64),
        once_s=over([o.once_s for o in options], np.float64),
        send_s=np.stack([np.append(o.send_s[:-1], 0.0) for o in options])[:, last],
        state_bytes=over([o.state_bytes for o in options], np.int64),
        saved_bytes=over([o.saved_bytes for o in options], np.int64),
        deferred_bytes=over([deferred_bytes(o) for o in options], np.int64),
        working_bytes=over([o.working_bytes for o in options], np.int64, largest=True),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moves:
    """Stages that could be, sorted by first layer; add_s = fill + drain, last_s = add + once.

    allowed: micro-batches that fit in flight.
    """

    first: np.ndarray
    to: np.ndarray
    option: np.ndarray
    devices: np.ndarray
    fill_s: np.ndarray
    add_s: np.ndarray
    last_s: np.ndarray
    steady_s: np.ndarray
    once_s: np.ndarray
    allowed: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def take(self, which: np.ndarray) -> Moves:
        return Moves(**{name: getattr(self, name)[which] for name in self.__slots__})

    def stages(self, path: Sequence[int]) -> tuple[Stage, ...]:
        return tuple(Stage(first=int(self.first[i]), last=int(self.to[i]), option=int(self.option[i])) for i in path)

    def step_time_s(self, path: Sequence[int]) -> float:
        return combine(
            [
                StageTerms(
                    fill_s=float(self.fill_s[i]),
                    drain_s=float(self.add_s[i] - self.fill_s[i]),
                    steady_s=float(self.steady_s[i]),
                    once_s=float(self.once_s[i]),
                )
                for i in path
            ]
        )


def moves_under(problem: StageProblem, sums: RangeSums, under_s: float) -> Moves:
    """All that fit as the last stage and take less than under_s by themselves, the dominated left out."""
    from autopar.solver import stage_loops

    loops: Any = stage_loops
    devices = np.array([o.num_devices for o in problem.options], dtype=np.int64)
    # No schedule is faster than its slowest stage's own passes: most moves go here, before anything else is made.
    alone_s = sums.forward_s if problem.schedule is Schedule.INFERENCE else sums.forward_s + sums.backward_s
    could = (alone_s * problem.num_microbatches < under_s) & (devices <= problem.num_devices)[:, None]
    if problem.fixed_num_stages == 1 and problem.chunks == 1:  # all layers on all devices
        could &= (devices == problem.num_devices)[:, None] & (sums.last - sums.first == problem.num_layers)
    at = option, where = np.nonzero(could)
    room = problem.limit_bytes - sums.state_bytes[at] - sums.working_bytes[at]
    held = held_bytes(problem, sums.saved_bytes[at], sums.deferred_bytes[at])
    fits = room >= least_flight(problem) * held
    at = option, where = option[fits], where[fits]
    held = held[fits]
    passes = sums.forward_s[at], sums.backward_s[at], sums.weight_s[at]
    made = terms(problem, devices[option], *passes, sums.once_s[at], sums.send_s[at])
    add = made.fill_s + made.drain_s
    moves = Moves(
        first=sums.first[where],
        to=sums.last[where],
        option=option,
        devices=devices[option],
        fill_s=made.fill_s,
        add_s=add,
        last_s=add + made.once_s,
        steady_s=made.steady_s,
        once_s=made.once_s,
        allowed=np.where(held > 0, room[fits] // np.maximum(held, 1), NO_LIMIT),
    )
    moves = moves.take(moves.add_s + moves.steady_s < under_s)
    moves = moves.take(np.lexsort((moves.add_s, moves.devices, moves.to, moves.first)))
    ranking = (moves.fill_s, moves.add_s, moves.last_s, moves.steady_s, moves.allowed)
    return moves.take(loops.undominated(moves.first, moves.to, moves.devices, *ranking))


def least_flight(problem: StageProblem) -> int:
    """What every stage has in flight; interleaved: nothing is known before the groups are."""
    return 0 if problem.schedule is Schedule.INTERLEAVED else in_flight(problem, 0, 1)


def why_no_layer_fits(problem: StageProblem, sums: RangeSums) -> str | None:
    """Names the first layer that no option can run or hold by itself, None if there is none."""
    alone = sums.last == sums.first + 1
    held = held_bytes(problem, sums.saved_bytes, sums.deferred_bytes)
    need = sums.state_bytes + least_flight(problem) * held + sums.working_bytes
    over = np.where(np.isfinite(sums.forward_s), need - problem.limit_bytes, np.inf)[:, alone].min(axis=0)
    bad = np.flatnonzero(over > 0)
    if not len(bad):
        return None
    layer = int(bad[0])
    if np.isinf(over[layer]):
        return f"layer {layer}: no option can run it"
    return (
        f"layer {layer} alone is {int(over[layer]):,} bytes over the limit of {problem.limit_bytes:,} with every option"
    )


# The dynamic programme under a bound on the slowest stage, and the search over that bound.
#
# The model (`problem`) is a sum over the stages, plus a maximum, plus the update that shows at the end. As in Alpa
# (OSDI 2022, section 5.2) the maximum is enumerated, and for each of its values a programme minimises the rest:
#
# 1. sum(k, a, d) = min over moves (a, b, n): fill + drain + sum(k - 1, b, d - n)
# 2. end(k, a, d) = min over moves: max(sum(k - 1, b, d - n) + fill + drain + once, end(k - 1, b, d - n) + fill)
#
# for the layers from a on in k stages on d devices. k is the place from the end, which says what is in flight, so that
# memory only allows or forbids a move. (2) takes both minima apart and so may promise too much: where no plan keeps the
# promise, the programme is run again on pairs (sum, end) of which none is as good as another, which is exact.
#
# Not every maximum is tried. The rest falls as the maximum grows: of an interval of maxima, the rest at its upper end
# and the maximum at its lower end bound every plan within. Intervals are halved, the most promising first, until none
# promises less than the best plan. A state is dropped when it promises no less either, with a bound on the layers
# before it.

EQUAL = 1e-9  # plans that differ by less than this part of their time are as good as another
FIRST_LABELS = 1 << 14  # room for pairs at first; more as needed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DynamicProgramResult:
    """path: moves of the best plan found, empty if none; step_time_s: its, inf if none."""

    path: tuple[int, ...]
    step_time_s: float


class DynamicProgram:
    """Moves, levels and device units bound to the compiled loops.

    unit: devices of a unit; total: units of all stages.
    flight: (levels + 1,) in flight at each level. open_end: the last level stands for its number of stages or more.
    exact: only plans of as many stages as there are levels count.
    """

    def __init__(
        self, moves: Moves, layers: int, unit: int, total: int, flight: np.ndarray, open_end: bool, exact: bool
    ):
        from autopar.solver import stage_loops

        self.loops: Any = stage_loops
        self.moves, self.layers, self.total = moves, layers, total
        self.flight, self.open_end, self.exact = flight, open_end, exact
        begin = np.searchsorted(moves.first, np.arange(layers + 1))
        units = moves.devices // unit
        self.graph = (
            begin, moves.to, units, moves.add_s, moves.last_s, moves.fill_s, moves.steady_s, moves.allowed,
        )  # fmt: skip
        levels = len(flight) - 1
        self.sums = np.empty((levels + 1, layers + 1, total + 1))
        self.ends = np.empty((levels + 1, layers + 1, total + 1))
        self.low = np.empty((levels + 1, layers + 1), dtype=np.int64)
        self.high = np.empty((levels + 1, layers + 1), dtype=np.int64)
        self.prefix_s = self._prefix(moves.last_s, moves.add_s)
        self.prefix_fill_s = self._prefix(moves.fill_s, moves.fill_s)
        self.prefix_hidden_s: np.ndarray | None = None
        self.room = FIRST_LABELS

    def _prefix(self, first_s: np.ndarray, other_s: np.ndarray) -> np.ndarray:
        prefix_s = np.empty((self.layers + 1, self.total + 1))
        self.loops.prefixes(self.graph, first_s, other_s, prefix_s)
        return prefix_s

    def promise_s(self, steady_most_s: float, room_s: float) -> float:
        """The rest (sum, update) that no plan of stages within steady_most_s undercuts; inf if none is below room_s."""
        state = (self.sums, self.ends, self.low, self.high)
        self.loops.suffixes(
            self.graph, self.flight, self.open_end, steady_most_s, self.prefix_s, self.prefix_fill_s, room_s, *state
        )
        return min((self.ends[k, 0, self.total] for k in self._full_levels()), default=math.inf)

    def _full_levels(self) -> list[int]:
        levels = len(self.flight) - 1
        return [k for k in ([levels] if self.exact else range(1, levels + 1)) if self.high[k, 0] == self.total]

    def best_path(self, steady_most_s: float) -> tuple[int, ...]:
        """The better of two plans behind the promise last made."""
        level = min(self._full_levels(), key=lambda k: float(self.ends[k, 0, self.total]))
        found: list[tuple[int, ...]] = []
        for turn in (False, True):
            path = np.empty(self.layers, dtype=np.int64)
            state = (self.sums, self.ends, self.low, self.high, level, turn, path)
            count = self.loops.follow(self.graph, self.flight, self.open_end, steady_most_s, *state)
            found.append(tuple(path[:count].tolist()))
        return min((path for path in found if path), key=self.moves.step_time_s)

    def best_label(self, steady_most_s: float, room_s: float) -> tuple[float, tuple[int, ...]]:
        """The least rest itself, and a plan that has it; call `promise_s` with the same arguments before."""
        if self.prefix_hidden_s is None:
            drain_s = self.moves.add_s - self.moves.fill_s
            self.prefix_hidden_s = self._prefix(drain_s + self.moves.once_s, drain_s)
        prefixes = (self.prefix_s, self.prefix_fill_s, self.prefix_hidden_s)
        head = np.empty(self.sums.shape, dtype=np.int64)
        while True:
            pool, link = np.empty((self.room, 2)), np.empty((self.room, 3), dtype=np.int64)
            state = (*prefixes, room_s, self.low, self.high, head, pool, link)
            if self.loops.labels(self.graph, self.flight, self.open_end, steady_most_s, *state) >= 0:
                break
            self.room *= 4
        ends: list[tuple[float, int]] = []
        for level in self._full_levels():
            label = int(head[level, 0, self.total])
            while label >= 0:
                ends.append((float(pool[label, 1]), label))
                label = int(link[label, 0])
        if not ends:
            return math.inf, ()
        rest, label = min(ends)
        path = []
        while link[label, 1] >= 0:
            path.append(int(link[label, 1]))
            label = int(link[label, 2])
        return rest, tuple(path)

    def search(self, under_s: float) -> DynamicProgramResult:
        """The best plan below under_s, if any."""
        slowest, fastest = clusters(self.moves.steady_s)
        best_s = under_s
        best: tuple[int, ...] = ()
        intervals = [(-math.inf, 0, len(slowest) - 1)] if len(slowest) else []
        while intervals:
            promised, start, stop = heapq.heappop(intervals)
            if promised >= best_s * (1 - EQUAL):
                break
            room = best_s * (1 - EQUAL) - fastest[start]
            rest = self.promise_s(slowest[stop], room)
            if rest >= room:
                continue
            path = self.best_path(slowest[stop])
            time_s = self.moves.step_time_s(path)
            if time_s < best_s:
                best_s, best = time_s, path
            top = int(np.searchsorted(slowest, self.moves.steady_s[list(path)].max()))
            if rest + fastest[top] < best_s * (1 - EQUAL):
                rest, path = self.best_label(slowest[stop], room)
                if not path:
                    continue
                time_s = self.moves.step_time_s(path)
                if time_s < best_s:
                    best_s, best = time_s, path
                top = int(np.searchsorted(slowest, self.moves.steady_s[list(path)].max()))
            if start < top:  # slower than this plan's slowest stage has no smaller rest: only faster ones are left
                self._halve(intervals, fastest, rest, start, top - 1)
        return DynamicProgramResult(path=best, step_time_s=best_s if best else math.inf)

    @staticmethod
    def _halve(intervals: list, fastest: np.ndarray, rest: float, start: int, stop: int) -> None:
        """Adds both halves of the maxima from start to stop, of which none has a smaller rest."""
        middle = (start + stop + 1) // 2
        for begin, end in ((start, middle - 1), (middle, stop)):
            if begin <= end:
                heapq.heappush(intervals, (rest + fastest[begin], begin, end))


def clusters(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values, rising, those within rounding of one another as one: its largest and its smallest."""
    ordered = np.unique(values)
    if not len(ordered):
        return ordered, ordered
    new = np.concatenate([[True], np.diff(ordered) > 1e-12 * np.abs(ordered[1:])])
    starts = np.flatnonzero(new)
    return ordered[np.append(starts[1:], len(ordered)) - 1], ordered[starts]


# Interleaved stages: chunks of layers, all under one option, that keep the groups of devices busy.
#
# Round r of the groups is made of their r-th chunks, which follow one another in the model: a step takes mostly the sum
# over rounds of the largest chunk. Of few layers all cuts are tried. Of more, a programme over rounds finds the least
# such sum (`stage_loops.least_rounds`), sends and memory left out, and the least such sum of bytes where that does
# not fit. What all layers take on the mean group is a bound of what is possible.

FEW_CUTS = 20  # that are tried all


def _search_interleaved(problem: StageProblem, under_s: float) -> _First:
    """Chunks of all layers under one option, that fit and take less than `under_s`, with the bound of all others."""
    options = [(_least_s(problem, option, groups), number, groups) for number, option, groups in _possible(problem)]
    if not options:
        return _First(why_not="no option's groups hold a chunk of layers each and divide the micro-batches")
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
    return _First(stages=best, step_time_s=best_s if best else math.inf, bound_s=bound_s, none_fits=none_fits)


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
    from autopar.solver import stage_loops

    loops: Any = stage_loops
    passes = in_flight(problem, 0, groups * problem.chunks) / problem.chunks
    for cost in (option.forward_s + option.backward_s, option.state_bytes + passes * option.saved_bytes):
        yield tuple(int(end) for end in loops.least_rounds(np.asarray(cost, dtype=np.float64), groups, problem.chunks))


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
            peak_bytes=stage_peak_bytes(problem, best.stages),
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
    unit = math.gcd(*np.unique(moves.devices).tolist())
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
    for option in problem.options:
        count = min(max(problem.num_devices // option.num_devices, 1), problem.num_layers)
        once = float(option.forward_s.sum() + option.backward_s.sum())
        if option.state_bytes.sum() / count <= problem.limit_bytes:
            best = min(best, once + (problem.num_microbatches - 1) * once / count)
    return best
