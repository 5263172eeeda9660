"""Stages x submeshes x recomputation at the least step time, exactly: dynamic programming under a bound on the slowest
stage.

The model (`stages`) is a sum over the stages, plus a maximum, plus the update that shows at the end. As in Alpa (OSDI
2022, section 5.2) the maximum is enumerated, and for each of its values a programme minimises the rest:

1. sum(k, a, d) = min over moves (a, b, option): fill + drain + sum(k - 1, b, d - n)
2. end(k, a, d) = min over moves: max(sum(k - 1, b, d - n) + fill + drain + once, end(k - 1, b, d - n) + fill)

for the layers from a on in k stages on d devices. k is the place from the end, which says what is in flight, so that
memory only allows or forbids a move. (2) takes both minima apart and so may promise too much: where no plan keeps the
promise, the programme is run again on pairs (sum, end) of which none is as good as another, which is exact.

Not every maximum is tried. The rest falls as the maximum grows: of an interval of maxima, the rest at its upper end
and the maximum at its lower bound every plan within. Intervals are halved, the most promising first, until none
promises less than the best plan. A state is dropped when it promises no less either, with a bound on the layers
before it. A first plan comes from stages of one size, a first bound from the programme without memory in flight (k
falls away).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .stages import (
    NoStages,
    Schedule,
    Stage,
    StageOption,
    StagePlan,
    StageProblem,
    StageTerms,
    combine,
    in_flight,
    most_stages,
    peak_bytes,
    step_time_s,
    terms,
    validate,
    weight_seconds,
)

EQUAL = 1e-9  # plans that differ by less than this part of their time are as good as another
FIRST_LABELS = 1 << 14  # room for pairs at first; doubled as needed
NO_LIMIT = np.int64(2**40)  # micro-batches in flight of a stage that saves nothing


def solve_stages(problem: StageProblem) -> StagePlan | NoStages:
    """The plan of the least step time by `step_time_s`, proven, or why there is none.

    Raises: ValueError when the problem is not well formed.
    """
    return best_stages((problem,))[0]


def best_stages(problems: Sequence[StageProblem]) -> tuple[StagePlan | NoStages, ...]:
    """An answer for each problem; the best of them is proven the least over all.

    A problem that cannot beat the best so far is not searched through: its answer is the best plan seen on the way,
    or NoStages, with the bound proven. Problems should share their options' arrays where they can (several schedules
    at one number of micro-batches): sums over layers are then made once.

    Raises: ValueError when a problem is not well formed.
    """
    for problem in problems:
        validate(problem)
    sums = _SharedSums()
    order = sorted(range(len(problems)), key=lambda number: _guess_s(problems[number]))
    answers: dict[int, StagePlan | NoStages] = {}
    best_s = math.inf
    for number in order:
        answer = _solve(problems[number], sums, best_s)
        answers[number] = answer
        if isinstance(answer, StagePlan):
            best_s = min(best_s, answer.step_time_s)
    return tuple(answers[number] for number in range(len(problems)))


# What can be a stage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
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
    working_bytes: np.ndarray


class _SharedSums:
    """The sums of the options last seen: problems that share their options share them."""

    def __init__(self) -> None:
        self._options: tuple[StageOption, ...] = ()
        self._sums: _Sums | None = None

    def of(self, problem: StageProblem) -> _Sums:
        same = len(self._options) == len(problem.options) and all(
            a is b for a, b in zip(self._options, problem.options, strict=True)
        )
        if self._sums is None or not same:
            self._options, self._sums = problem.options, _range_sums(problem.options, problem.num_layers)
        return self._sums


def _range_sums(options: Sequence[StageOption], layers: int) -> _Sums:
    """Each sum is added up from its first layer on, so that ranges of equal layers have equal sums to the last bit."""
    first, last = np.triu_indices(layers)
    from_first = np.tri(layers, dtype=bool).T  # (first, layer): whether the layer is in ranges from first on

    def over(values: list[np.ndarray], combined: Any, kind: type) -> np.ndarray:
        rows = np.where(from_first, np.stack(values).astype(kind)[:, None, :], kind(0))
        return combined.accumulate(rows, axis=2)[:, first, last]

    return _Sums(
        first=first,
        last=last + 1,
        forward_s=over([o.forward_s for o in options], np.add, np.float64),
        backward_s=over([o.backward_s for o in options], np.add, np.float64),
        weight_s=over([weight_seconds(o) for o in options], np.add, np.float64),
        once_s=over([o.once_s for o in options], np.add, np.float64),
        send_s=np.stack([np.append(o.send_s[:-1], 0.0) for o in options])[:, last],
        state_bytes=over([o.state_bytes for o in options], np.add, np.int64),
        saved_bytes=over([o.saved_bytes for o in options], np.add, np.int64),
        working_bytes=over([o.working_bytes for o in options], np.maximum, np.int64),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Moves:
    """Stages that could be, sorted by first layer; allowed: micro-batches that fit in flight."""

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

    def take(self, which: np.ndarray) -> _Moves:
        return _Moves(**{name: getattr(self, name)[which] for name in self.__slots__})

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


def _moves(problem: StageProblem, sums: _Sums, least_flight: int, under_s: float) -> _Moves:
    """All that fit with least_flight in flight and take less than under_s by themselves, the dominated left out."""
    room = problem.limit_bytes - problem.chunks * sums.state_bytes - sums.working_bytes
    fits = (room >= least_flight * sums.saved_bytes) & np.isfinite(sums.forward_s)
    option, where = np.nonzero(fits)
    at = (option, where)
    made = terms(problem, sums.forward_s[at], sums.backward_s[at], sums.weight_s[at], sums.once_s[at], sums.send_s[at])
    add = made.fill_s + made.drain_s
    saved = sums.saved_bytes[at]
    devices = np.array([o.num_devices for o in problem.options], dtype=np.int64)[option]
    moves = _Moves(
        first=sums.first[where],
        to=sums.last[where],
        option=option,
        devices=devices,
        fill_s=made.fill_s,
        add_s=add,
        last_s=add + made.once_s,
        steady_s=made.steady_s,
        once_s=made.once_s,
        allowed=np.where(saved > 0, room[at] // np.maximum(saved, 1), NO_LIMIT),
    )
    moves = moves.take((moves.add_s + moves.steady_s < under_s) & (devices <= problem.num_devices))
    # Options of one size stand for one another, but not where all stages have one option.
    kind = moves.option if problem.schedule is Schedule.INTERLEAVED else moves.devices
    order = np.lexsort((moves.add_s, kind, moves.to, moves.first))
    return _undominated(moves.take(order), kind[order])


def _undominated(moves: _Moves, kind: np.ndarray) -> _Moves:
    """Without moves that another of the same layers and kind is as good as in all respects."""
    from . import stage_loops

    loops: Any = stage_loops
    kept = loops.undominated(
        moves.first,
        moves.to,
        kind,
        moves.fill_s,
        moves.add_s,
        moves.last_s,
        moves.steady_s,
        moves.allowed,
    )
    return moves.take(kept)


# The programme under a bound on the slowest stage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    """path: moves of the best plan found, empty if none; step_time_s: its, inf if none; bound_s: none takes less."""

    path: tuple[int, ...]
    step_time_s: float
    bound_s: float


class _Programme:
    """Moves, levels and device units bound to the compiled loops.

    flight: (levels + 1,) in flight at each level. open_end: the last level stands for its number of stages or more.
    exact: only plans of as many stages as there are levels count.
    """

    def __init__(
        self, moves: _Moves, layers: int, units: np.ndarray, total: int, flight: np.ndarray, open_end: bool, exact: bool
    ):
        from . import stage_loops

        self.loops: Any = stage_loops
        self.moves, self.layers, self.total = moves, layers, total
        self.flight, self.open_end, self.exact = flight, open_end, exact
        begin = np.searchsorted(moves.first, np.arange(layers + 1))
        self.graph = (begin, moves.to, units, moves.add_s, moves.last_s)
        self.rest = (moves.fill_s, moves.steady_s, moves.allowed, flight, open_end)
        levels = len(flight) - 1
        self.sums = np.empty((levels + 1, layers + 1, total + 1))
        self.ends = np.empty((levels + 1, layers + 1, total + 1))
        self.low = np.empty((levels + 1, layers + 1), dtype=np.int64)
        self.high = np.empty((levels + 1, layers + 1), dtype=np.int64)
        self.prefix_s = np.empty((layers + 1, total + 1))
        self.loops.prefixes(*self.graph, self.prefix_s)
        self.runs = 0

    def promise_s(self, steady_most_s: float, room_s: float) -> float:
        """The rest (sum, update) that no plan of stages within steady_most_s undercuts; inf if none is below room_s."""
        self.runs += 1
        state = (self.sums, self.ends, self.low, self.high)
        self.loops.suffixes(*self.graph, *self.rest, steady_most_s, self.prefix_s, room_s, *state)
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
            count = self.loops.follow(*self.graph, *self.rest, steady_most_s, *state)
            found.append(tuple(path[:count].tolist()))
        return min((path for path in found if path), key=self.moves.step_time_s)

    def best_label(self, steady_most_s: float, room_s: float) -> tuple[float, tuple[int, ...]]:
        """The least rest itself, and a plan that has it; call `promise_s` with the same arguments before."""
        size = FIRST_LABELS
        head = np.empty(self.sums.shape, dtype=np.int64)
        while True:
            pool, link = np.empty((size, 2)), np.empty((size, 3), dtype=np.int64)
            state = (self.prefix_s, room_s, self.low, self.high, head, pool, link)
            if self.loops.labels(*self.graph, *self.rest, steady_most_s, *state) >= 0:
                break
            size *= 4
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

    def search(self, under_s: float) -> _Found:
        """The best plan below under_s; the bound is that plan's time, or under_s where there is none."""
        slowest, fastest = _clusters(self.moves.steady_s)
        best_s = under_s
        best: tuple[int, ...] = ()
        intervals = [(-math.inf, 0, len(slowest) - 1, -math.inf)] if len(slowest) else []
        while intervals:
            promised, start, stop, rest = heapq.heappop(intervals)
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
                exact, path = self.best_label(slowest[stop], room)
                time_s = self.moves.step_time_s(path) if path else math.inf
                if time_s < best_s:
                    best_s, best = time_s, path
                if not path:
                    continue
                rest = exact
                top = int(np.searchsorted(slowest, self.moves.steady_s[list(path)].max()))
            # Slower than the plan's own slowest stage and no smaller rest: only faster maxima are left.
            middle = (start + top) // 2
            for begin, end in ((start, middle), (middle, top)):
                if begin < end:
                    heapq.heappush(intervals, (rest + fastest[begin], begin, end - 1, rest))
        return _Found(path=best, step_time_s=best_s if best else math.inf, bound_s=best_s)


def _clusters(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values, rising, those within rounding of one another as one: its largest and its smallest."""
    ordered = np.unique(values)
    if not len(ordered):
        return ordered, ordered
    new = np.concatenate([[True], np.diff(ordered) > 1e-12 * np.abs(ordered[1:])])
    starts = np.flatnonzero(new)
    return ordered[np.append(starts[1:], len(ordered)) - 1], ordered[starts]


# One problem


def _solve(problem: StageProblem, shared: _SharedSums, under_s: float) -> StagePlan | NoStages:
    """The best plan if it is below under_s; else the best seen, or none, with under_s as bound."""
    if not problem.options:
        return NoStages(reason="there are no options")
    sums = shared.of(problem)
    if problem.schedule is Schedule.INTERLEAVED:
        return _solve_interleaved(problem, sums, under_s)
    least = in_flight(problem, 0, 1)
    moves = _moves(problem, sums, least, math.inf)
    why = _why_not(problem, sums, moves, least)
    if why is not None:
        return NoStages(reason=why)
    best = _search_sizes(problem, moves, under_s)
    limit_s = min(under_s, best[0])
    bounded = _search(problem, moves, limit_s, in_memory=False)
    if bounded is not None:
        stages, time_s = bounded
        if max(peak_bytes(problem, stages)) <= problem.limit_bytes:
            best = (time_s, stages)
        else:
            found = _search(problem, moves, limit_s, in_memory=True)
            if found is not None:
                best = (found[1], found[0])
    return _answer(problem, best[1], min(best[0], under_s))


def _answer(problem: StageProblem, stages: tuple[Stage, ...], bound_s: float) -> StagePlan | NoStages:
    if not stages:
        if math.isfinite(bound_s):
            return NoStages(reason=f"nothing takes less than {bound_s:.6g} s", bound_s=bound_s)
        return NoStages(reason="every layer fits by itself, but no stages of all layers and devices do")
    return StagePlan(
        stages=stages,
        step_time_s=step_time_s(problem, stages),
        bound_s=bound_s,
        peak_bytes=peak_bytes(problem, stages),
    )


def _search_sizes(problem: StageProblem, moves: _Moves, under_s: float) -> tuple[float, tuple[Stage, ...]]:
    """The best plan below under_s of stages of one size, if any: (seconds, stages)."""
    best: tuple[float, tuple[Stage, ...]] = (math.inf, ())
    for size in np.unique(moves.devices):
        count, odd = divmod(problem.num_devices, int(size))
        if odd or count > most_stages(problem) or problem.fixed_num_stages not in (None, count):
            continue
        part = moves.take(moves.devices == size)
        one = replace(problem, fixed_num_stages=count)
        found = _search(one, part, min(under_s, best[0]), in_memory=True)
        if found is not None:
            best = (found[1], found[0])
    return best


def _search(
    problem: StageProblem, moves: _Moves, under_s: float, *, in_memory: bool
) -> tuple[tuple[Stage, ...], float] | None:
    """The best stages below under_s and their time; in_memory False: as if every stage were the last."""
    moves = moves.take(moves.add_s + moves.steady_s < under_s)
    if not len(moves):
        return None
    unit = int(np.gcd.reduce(moves.devices))
    total, odd = divmod(problem.num_devices, unit)
    if odd:
        return None
    units = moves.devices // unit
    most = min(most_stages(problem), total)
    exact = problem.fixed_num_stages is not None
    if problem.fixed_num_stages is not None:
        if problem.fixed_num_stages > most:
            return None
        most = problem.fixed_num_stages
    free = most == min(problem.num_layers, total)  # the number of stages is not limited
    flight = np.array([0, *(in_flight(problem, most - k, most) for k in range(1, most + 1))], dtype=np.int64)
    open_end = free and not exact
    if open_end:
        levels = _levels_that_matter(moves, flight) if in_memory else 1
        flight = flight[: levels + 1]
    elif not in_memory:
        flight[1:] = flight[1]
    programme = _Programme(moves, problem.num_layers, units, total, flight, open_end, exact)
    found = programme.search(under_s)
    return (moves.stages(found.path), found.step_time_s) if found.path else None


def _levels_that_matter(moves: _Moves, flight: np.ndarray) -> int:
    """The first level from which on every move is allowed at all levels or at none."""
    at_most = flight[-1]
    for k in range(1, len(flight)):
        if not ((moves.allowed >= flight[k]) & (moves.allowed < at_most)).any():
            return k
    return len(flight) - 1


def _solve_interleaved(problem: StageProblem, sums: _Sums, under_s: float) -> StagePlan | NoStages:
    """The best of each option by itself: chunks are stages of one unit, their number is given."""
    moves = _moves(problem, sums, 0, math.inf)
    best_s, tried = under_s, False
    best: tuple[Stage, ...] = ()
    for number, option in enumerate(problem.options):
        groups, odd = divmod(problem.num_devices, option.num_devices)
        if odd or groups > most_stages(problem) or problem.num_microbatches % groups:
            continue
        if problem.fixed_num_stages not in (None, groups):
            continue
        tried = True
        part = moves.take(moves.option == number)
        part = part.take(part.add_s + part.steady_s < best_s)
        if not len(part):
            continue
        count = groups * problem.chunks
        flight = np.array([0, *(in_flight(problem, count - k, count) for k in range(1, count + 1))], dtype=np.int64)
        programme = _Programme(part, problem.num_layers, np.ones(len(part), np.int64), count, flight, False, True)
        found = programme.search(best_s)
        if found.path:
            best_s, best = found.step_time_s, part.stages(found.path)
    if not tried:
        return NoStages(reason="no option's groups hold a chunk of layers each and divide the micro-batches")
    return _answer(problem, best, best_s)


def _why_not(problem: StageProblem, sums: _Sums, moves: _Moves, least: int) -> str | None:
    """A reason that is plain before any search."""
    if problem.fixed_num_stages is not None and problem.fixed_num_stages > most_stages(problem):
        return (
            f"{problem.fixed_num_stages} stages: {problem.schedule} runs at most {most_stages(problem)} of "
            f"{problem.num_layers} layers with {problem.num_microbatches} micro-batches"
        )
    reach = np.zeros(problem.num_devices + 1, dtype=bool)
    reach[0] = True
    for total in range(1, problem.num_devices + 1):
        reach[total] = any(
            option.num_devices <= total and reach[total - option.num_devices] for option in problem.options
        )
    if not reach[-1]:
        return f"no sizes of submeshes add up to {problem.num_devices} devices"
    if len(moves):
        covered = np.zeros(problem.num_layers + 1, dtype=np.int64)
        np.add.at(covered, moves.first, 1)
        np.add.at(covered, moves.to, -1)
        missing = np.flatnonzero(np.cumsum(covered)[:-1] == 0)
    else:
        missing = np.arange(problem.num_layers)
    if not len(missing):
        return None
    layer = int(missing[0])
    alone = (sums.first == layer) & (sums.last == layer + 1)
    need = problem.chunks * sums.state_bytes + least * sums.saved_bytes + sums.working_bytes
    possible = np.isfinite(sums.forward_s[:, alone]).ravel()
    if not possible.any():
        return f"layer {layer}: no option can run it"
    over = int(need[:, alone].ravel()[possible].min()) - problem.limit_bytes
    return f"layer {layer} alone is {over} bytes over the limit of {problem.limit_bytes} with every option"


def _guess_s(problem: StageProblem) -> float:
    """Roughly what a step takes: the best option's layers spread evenly, memory set aside but for the state."""
    best = math.inf
    for option in problem.options:
        count = min(max(problem.num_devices // option.num_devices, 1), problem.num_layers)
        once = float(option.forward_s.sum() + option.backward_s.sum())
        if option.state_bytes.sum() / count <= problem.limit_bytes:
            best = min(best, once + (problem.num_microbatches - 1) * once / count)
    return best
