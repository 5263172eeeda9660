"""The dynamic programme under a bound on the slowest stage, and the search over that bound.

The model (`problem`) is a sum over the stages, plus a maximum, plus the update that shows at the end. As in Alpa (OSDI
2022, section 5.2) the maximum is enumerated, and for each of its values a programme minimises the rest:

1. sum(k, a, d) = min over moves (a, b, n): fill + drain + sum(k - 1, b, d - n)
2. end(k, a, d) = min over moves: max(sum(k - 1, b, d - n) + fill + drain + once, end(k - 1, b, d - n) + fill)

for the layers from a on in k stages on d devices. k is the place from the end, which says what is in flight, so that
memory only allows or forbids a move. (2) takes both minima apart and so may promise too much: where no plan keeps the
promise, the programme is run again on pairs (sum, end) of which none is as good as another, which is exact.

Not every maximum is tried. The rest falls as the maximum grows: of an interval of maxima, the rest at its upper end
and the maximum at its lower end bound every plan within. Intervals are halved, the most promising first, until none
promises less than the best plan. A state is dropped when it promises no less either, with a bound on the layers
before it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.stages.layer_ranges import Moves

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
        from autopar.solver.stages import compiled_loops

        self.loops: Any = compiled_loops
        self.moves, self.layers, self.total = moves, layers, total
        self.flight, self.open_end, self.exact = flight, open_end, exact
        begin = np.searchsorted(moves.first, np.arange(layers + 1))
        units = moves.devices // unit
        least, most = -(-moves.least_behind // unit), moves.most_behind // unit
        self.graph = (begin, moves.to, units, least, most, moves.add_s, moves.last_s)
        self.rest = (moves.fill_s, moves.steady_s, moves.allowed, flight, open_end)
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
        self.loops.prefixes(*self.graph[:5], first_s, other_s, prefix_s)
        return prefix_s

    def promise_s(self, steady_most_s: float, room_s: float) -> float:
        """The rest (sum, update) that no plan of stages within steady_most_s undercuts; inf if none is below room_s."""
        state = (self.sums, self.ends, self.low, self.high)
        self.loops.suffixes(*self.graph, *self.rest, steady_most_s, self.prefix_s, self.prefix_fill_s, room_s, *state)
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
        if self.prefix_hidden_s is None:
            drain_s = self.moves.add_s - self.moves.fill_s
            self.prefix_hidden_s = self._prefix(drain_s + self.moves.once_s, drain_s)
        prefixes = (self.prefix_s, self.prefix_fill_s, self.prefix_hidden_s)
        head = np.empty(self.sums.shape, dtype=np.int64)
        while True:
            pool, link = np.empty((self.room, 2)), np.empty((self.room, 3), dtype=np.int64)
            state = (*prefixes, room_s, self.low, self.high, head, pool, link)
            if self.loops.labels(*self.graph, *self.rest, steady_most_s, *state) >= 0:
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
