"""Every range of layers with every option, as arrays: feasibility, terms of the step time, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.stages.problem import (
    Schedule,
    Stage,
    StageOption,
    StageProblem,
    StageTerms,
    combine,
    deferred_bytes,
    held_bytes,
    in_flight,
    limit_of,
    terms,
    weight_seconds,
)

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
    from autopar.solver.stages import compiled_loops

    loops: Any = compiled_loops
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

    allowed: micro-batches that fit in flight. least_behind, most_behind: devices of the stages behind it.
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
    least_behind: np.ndarray
    most_behind: np.ndarray

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
    from autopar.solver.stages import compiled_loops

    loops: Any = compiled_loops
    devices = np.array([o.num_devices for o in problem.options], dtype=np.int64)
    # No schedule is faster than its slowest stage's own passes: most moves go here, before anything else is made.
    alone_s = sums.forward_s if problem.schedule is Schedule.INFERENCE else sums.forward_s + sums.backward_s
    could = (alone_s * problem.num_microbatches < under_s) & (devices <= problem.num_devices)[:, None]
    if problem.fixed_num_stages == 1 and problem.chunks == 1:  # all layers on all devices
        could &= (devices == problem.num_devices)[:, None] & (sums.last - sums.first == problem.num_layers)
    at = option, where = np.nonzero(could)
    room = limits_of(problem)[option] - sums.state_bytes[at] - sums.working_bytes[at]
    held = held_bytes(problem, sums.saved_bytes[at], sums.deferred_bytes[at])
    fits = room >= least_flight(problem) * held
    at = option, where = option[fits], where[fits]
    held = held[fits]
    passes = sums.forward_s[at], sums.backward_s[at], sums.weight_s[at]
    made = terms(problem, devices[option], *passes, sums.once_s[at], sums.send_s[at])
    add = made.fill_s + made.drain_s
    least, most = behind(problem)
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
        least_behind=least[option],
        most_behind=most[option],
    )
    moves = moves.take(moves.add_s + moves.steady_s < under_s)
    kind = _kinds(devices, least, most)[moves.option]  # options of one size, in one place, stand for one another
    order = np.lexsort((moves.add_s, kind, moves.to, moves.first))
    moves, kind = moves.take(order), kind[order]
    ranking = (moves.fill_s, moves.add_s, moves.last_s, moves.steady_s, moves.allowed)
    return moves.take(loops.undominated(moves.first, moves.to, kind, *ranking))


def _kinds(devices: np.ndarray, least_behind: np.ndarray, most_behind: np.ndarray) -> np.ndarray:
    """Equal numbers for options on as many devices in the same place."""
    keys = np.stack([devices, least_behind, most_behind], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def limits_of(problem: StageProblem) -> np.ndarray:
    """Bytes of a device, for each option."""
    return np.array([limit_of(problem, number) for number in range(len(problem.options))], dtype=np.int64)


def behind(problem: StageProblem) -> tuple[np.ndarray, np.ndarray]:
    """(least, most) devices behind a stage, for each option."""
    placed = zip(problem.placements, problem.options, strict=True) if problem.placements else ()
    ranges = [lies.behind(option.num_devices) for lies, option in placed]
    ranges = ranges or [(0, problem.num_devices)] * len(problem.options)
    least, most = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    return least, most


def least_flight(problem: StageProblem) -> int:
    """What every stage has in flight; interleaved: nothing is known before the groups are."""
    return 0 if problem.schedule is Schedule.INTERLEAVED else in_flight(problem, 0, 1)


def why_no_layer_fits(problem: StageProblem, sums: RangeSums) -> str | None:
    """Names the first layer that no option can run or hold by itself, None if there is none."""
    alone = sums.last == sums.first + 1
    held = held_bytes(problem, sums.saved_bytes, sums.deferred_bytes)
    need = sums.state_bytes + least_flight(problem) * held + sums.working_bytes
    room = limits_of(problem)[:, None]
    over = np.where(np.isfinite(sums.forward_s), need - room, np.inf)[:, alone].min(axis=0)
    bad = np.flatnonzero(over > 0)
    if not len(bad):
        return None
    layer = int(bad[0])
    if np.isinf(over[layer]):
        return f"layer {layer}: no option can run it"
    return (
        f"layer {layer} alone is {int(over[layer]):,} bytes over the limit of {problem.limit_bytes:,} with every option"
    )
