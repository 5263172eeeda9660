"""Memory rows of formula (4): which times need a row, its bytes, and proofs that a problem cannot fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.ilp.flat_arrays import Flat
from autopar.solver.ilp.problem import Infeasibility, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """At one time: sum over nodes of bytes[node][choice] <= room; bytes are what is held beyond the node's least."""

    time: int
    nodes: tuple[int, ...]
    bytes: tuple[np.ndarray, ...]
    room: int  # the limit less the least that every live node holds; negative = cannot fit


def row_at(flat: Flat, number: int) -> Row:
    """The row of a number of the flat problem's rows."""
    spans = np.flatnonzero((flat.low <= number) & (flat.high > number))
    owners = np.searchsorted(flat.span_first, spans, side="right") - 1
    widths = np.diff(flat.first)[owners]
    return Row(
        time=int(flat.times[number]),
        nodes=tuple(owners.tolist()),
        bytes=tuple(
            flat.bytes[at : at + width]
            for at, width in zip(flat.span_bytes[spans].tolist(), widths.tolist(), strict=True)
        ),
        room=int(flat.room[number]),
    )


def used(flat: Flat, share: np.ndarray) -> np.ndarray:
    """Bytes beyond the least in every row, (R,), for shares of strategies (strategies,)."""
    if not len(flat.low):
        return np.zeros(len(flat.room))
    owners, width, begin, entry = _entries(flat)
    nbytes = np.add.reduceat(
        flat.bytes[np.repeat(flat.span_bytes, width) + entry] * share[np.repeat(flat.first[owners], width) + entry],
        begin,
    )
    change = np.zeros(len(flat.room) + 1)
    np.add.at(change, flat.low, nbytes)
    np.add.at(change, flat.high, -nbytes)
    return np.cumsum(change)[:-1]


def _entries(flat: Flat) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(node and number of strategies of each span; first entry of each span; strategy of each entry)"""
    owners = np.repeat(np.arange(flat.nodes), np.diff(flat.span_first))
    width = np.diff(flat.first)[owners]
    begin = np.concatenate([[0], np.cumsum(width)[:-1]])
    return owners, width, begin, np.arange(int(width.sum())) - np.repeat(begin, width)


def shares(flat: Flat, choice: Sequence[int]) -> np.ndarray:
    """A choice as a one for each strategy taken."""
    share = np.zeros(int(flat.first[-1]))
    share[flat.first[:-1] + np.asarray(choice, dtype=np.int64)] = 1.0
    return share


def can_bind(flat: Flat) -> np.ndarray:
    """The rows that the largest choices would break, as numbers."""
    if not len(flat.room):
        return np.zeros(0, dtype=np.int64)
    change = np.zeros(len(flat.room) + 1, dtype=np.int64)
    if len(flat.low):
        _, width, begin, entry = _entries(flat)
        largest = np.maximum.reduceat(flat.bytes[np.repeat(flat.span_bytes, width) + entry], begin)
        np.add.at(change, flat.low, largest)
        np.add.at(change, flat.high, -largest)
    return np.flatnonzero(change.cumsum()[:-1] > flat.room)


def worst_rows(over: np.ndarray, *, most: int) -> list[int]:
    """The rows most over, at most one of each stretch of time; over: (R,) positive = over."""
    over = over.copy()
    width = max(1, len(over) // 400)
    worst: list[int] = []
    while len(worst) < most and len(over):
        row = int(np.argmax(over))
        if over[row] <= 0:
            break
        worst.append(row)
        over[max(0, row - width) : row + width + 1] = 0
    return worst


def least_memory(flat: Flat) -> np.ndarray:
    """The choice of the least bytes times rows at every node, the cheapest of several: fits where most do."""
    choice = np.zeros(flat.nodes, dtype=np.int64)
    for node in range(flat.nodes):
        costs = flat.cost[flat.first[node] : flat.first[node + 1]]
        if len(costs) == 1:
            continue
        nbytes = np.zeros(len(costs))
        for span in range(flat.span_first[node], flat.span_first[node + 1]):
            at = flat.span_bytes[span]
            nbytes += flat.bytes[at : at + len(costs)] * float(flat.high[span] - flat.low[span])
        choice[node] = np.lexsort((costs, nbytes))[0]
    return choice


def cannot_fit(problem: Problem) -> Infeasibility | None:
    """The times at which even the smallest choice of every live node passes the limit, or None when there are none."""
    if problem.limit_bytes is None:
        return None
    changes: dict[int, int] = defaultdict(int)
    for use in problem.uses:
        if use.start < use.stop:
            least = int(use.bytes.min())
            changes[use.start] += least
            changes[use.stop] -= least
    level = 0
    times: list[int] = []
    worst, worst_time = 0, 0
    for when in sorted(changes):
        level += changes[when]
        if level > problem.limit_bytes:
            times.append(when)
            if level > worst:
                worst, worst_time = level, when
    if not times:
        return None
    return Infeasibility(
        times=tuple(times),
        nodes=holders(problem, worst_time),
        bytes_over=worst - problem.limit_bytes,
        reason="even the smallest strategies of the nodes live at these times pass the limit",
    )


def holders(problem: Problem, when: int) -> tuple[int, ...]:
    """The nodes that hold memory at a time whatever they choose or may choose, the largest least first."""
    live: dict[int, int] = defaultdict(int)
    for use in problem.uses:
        if use.start <= when < use.stop and use.bytes.any():
            live[use.node] += int(use.bytes.min())
    return tuple(sorted(live, key=lambda node: -live[node]))
