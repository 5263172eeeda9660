"""Memory over time, reduced to the rows that can bind: formula (4) needs no others."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from .problem import Infeasibility, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """At one time: sum over nodes of bytes[node][choice] <= room; bytes are what is held beyond the node's least."""

    time: int
    nodes: tuple[int, ...]
    bytes: tuple[np.ndarray, ...]
    room: int  # the limit less the least that every live node holds; negative = cannot fit


def binding_rows(problem: Problem) -> tuple[Row, ...]:
    """The rows of formula (4) that some choice can break, without those that the row before or after them implies.

    A row implies another when it has all of its live nodes and no less constant memory: what is left are the maximal cliques
    of the interval graph, but for those that the largest choices cannot break.
    """
    if problem.limit_bytes is None:
        return ()
    starts: dict[int, list[int]] = defaultdict(list)
    stops: dict[int, list[int]] = defaultdict(list)
    least = [int(use.bytes.min()) for use in problem.uses]
    most = [int(use.bytes.max()) for use in problem.uses]
    for number, use in enumerate(problem.uses):
        if use.start < use.stop:
            starts[use.start].append(number)
            stops[use.stop].append(number)
    live: set[int] = set()  # uses that depend on a choice
    base = peak = 0
    rows: list[Row] = []
    held: tuple[int, int, frozenset[int]] | None = None  # time, constant part and live uses of the last row
    gained = lost = 0  # uses live now and not in the last row; in the last row and not live now
    for when in sorted(starts.keys() | stops.keys()):
        for number in stops[when]:
            base -= least[number]
            peak -= most[number]
            if most[number] > least[number]:
                live.discard(number)
                if held is not None:
                    inside = number in held[2]
                    lost, gained = lost + inside, gained - (not inside)
        for number in starts[when]:
            base += least[number]
            peak += most[number]
            if most[number] > least[number]:
                live.add(number)
                gained += 1
        if peak <= problem.limit_bytes:
            continue
        if held is not None:
            if gained == 0 and base <= held[1]:
                continue
            if lost > 0 or base < held[1]:
                rows.extend(_row(problem, held[2], least, held[0], held[1]))
        held = (when, base, frozenset(live))
        gained = lost = 0
    if held is not None:
        rows.extend(_row(problem, held[2], least, held[0], held[1]))
    return tuple(rows)


def _row(problem: Problem, live: frozenset[int], least: list[int], time: int, base: int) -> list[Row]:
    limit = problem.limit_bytes
    assert limit is not None, "rows are made only where there is a limit"
    extra: dict[int, np.ndarray] = {}
    for number in sorted(live):
        use = problem.uses[number]
        size = use.bytes - least[number]
        extra[use.node] = extra[use.node] + size if use.node in extra else size
    room = limit - base
    assert extra or room >= 0, "the constant memory alone is over the limit: cannot_fit comes first"
    if sum(int(size.max()) for size in extra.values()) <= room:
        return []
    return [Row(time=time, nodes=tuple(extra), bytes=tuple(extra.values()), room=room)]


def cannot_fit(problem: Problem) -> Infeasibility | None:
    """The times at which even the smallest choice of every live node passes the limit, or None when there are none."""
    if problem.limit_bytes is None:
        return None
    changes: dict[int, int] = defaultdict(int)
    for use in problem.uses:
        if use.start < use.stop:
            changes[use.start] += int(use.bytes.min())
            changes[use.stop] -= int(use.bytes.min())
    level, worst, worst_time = 0, 0, 0
    times: list[int] = []
    for when in sorted(changes):
        level += changes[when]
        if level > problem.limit_bytes:
            times.append(when)
            if level > worst:
                worst, worst_time = level, when
    if not times:
        return None
    live: dict[int, int] = defaultdict(int)
    for use in problem.uses:
        if use.start <= worst_time < use.stop:
            live[use.node] += int(use.bytes.min())
    return Infeasibility(
        times=tuple(times),
        nodes=tuple(sorted((n for n in live if live[n] > 0), key=lambda n: -live[n])),
        bytes_over=worst - problem.limit_bytes,
        reason="even the smallest strategies of the nodes live at these times pass the limit",
    )
