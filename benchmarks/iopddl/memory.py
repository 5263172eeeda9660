"""Problems in limited memory: reduced as `autopar.solver` reduces them, and as rows of the times that can bind.

Memory at a time is the sum of the bytes of the uses live then, and may not pass the limit at any time. A node whose
memory depends on its choice is not eliminated, and a strategy is dominated only by one that holds no more at any time.

Rows are the times that can bind: a time is kept when something starts there and something stops before the next start.
Every other time holds part of what a kept time holds. Memory is ranges of rows, one list of disjoint ranges a node.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver import Problem
from autopar.solver.presolve import (
    Reduction,
    chain,
    drop_forbidden,
    eliminate,
    fold_forced,
    keep_strategies,
    merge_followers,
    merge_parallel,
    size,
)
from autopar.solver.problem import Flat, flatten
from benchmarks.iopddl.dominance import drop_dominated


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Use:
    """Memory that a node holds from start to stop, the interval half open; an empty interval holds nothing.

    node: -1 = held whatever is chosen. bytes: (strategies of node,) int64.
    """

    node: int
    start: int
    stop: int
    bytes: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Limited:
    """A problem and the memory that its choices hold. limit_bytes: None = memory is not limited."""

    problem: Problem
    uses: tuple[Use, ...]
    limit_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Infeasibility:
    """Why no choice is possible: what cannot be made to fit, and by how much.

    times: the starts of the time spans at which even the smallest choice that was proven possible is over the limit.
    nodes: the nodes live then, largest first. bytes_over: the smallest excess proven at the worst time; 0 when the
    conflict is not one of memory.
    """

    times: tuple[int, ...]
    nodes: tuple[int, ...]
    bytes_over: int
    reason: str


class NothingFitsError(Exception):
    """No choice fits; carries the reason."""

    def __init__(self, why: Infeasibility) -> None:
        super().__init__(why.reason)
        self.why = why


def num_pairs(problem: Problem) -> int:
    """The pairs of strategies over all edges: the edge variables of the integer program."""
    return sum(edge.cost.size for edge in problem.edges)


def peak_bytes(limited: Limited, choice: Sequence[int]) -> int:
    """The largest sum of bytes live at any one time."""
    return max(_levels(limited, [int(u.bytes[choice[u.node] if u.node >= 0 else 0]) for u in limited.uses])[1])


def _levels(limited: Limited, nbytes: Sequence[int]) -> tuple[list[int], list[int]]:
    """(times, the bytes live from each on) where the uses hold so many bytes each; times begin with 0."""
    changes: dict[int, int] = defaultdict(int, {0: 0})
    for use, held in zip(limited.uses, nbytes, strict=True):
        if use.start < use.stop:
            changes[use.start] += held
            changes[use.stop] -= held
    times = sorted(changes)
    return times, np.cumsum([changes[when] for when in times]).tolist()


def fits(limited: Limited, choice: Sequence[int]) -> bool:
    """Whether a choice is within the limit at all times."""
    return limited.limit_bytes is None or peak_bytes(limited, choice) <= limited.limit_bytes


def cannot_fit(limited: Limited) -> Infeasibility | None:
    """The times at which even the smallest choice of every live node passes the limit, or None when there are none."""
    if limited.limit_bytes is None:
        return None
    times, levels = _levels(limited, [int(use.bytes.min()) for use in limited.uses])
    worst = int(np.argmax(levels))
    if levels[worst] <= limited.limit_bytes:
        return None
    return Infeasibility(
        times=tuple(when for when, level in zip(times, levels, strict=True) if level > limited.limit_bytes),
        nodes=holders(limited, times[worst]),
        bytes_over=levels[worst] - limited.limit_bytes,
        reason="even the smallest strategies of the nodes live at these times pass the limit",
    )


def holders(limited: Limited, when: int) -> tuple[int, ...]:
    """The nodes that hold memory at a time whatever they choose or may choose, the largest least first."""
    live: dict[int, int] = defaultdict(int)
    for use in limited.uses:
        if use.start <= when < use.stop and use.bytes.any():
            live[use.node] += int(use.bytes.min())
    return tuple(sorted(live, key=lambda node: -live[node]))


def carried(limited: Limited, reduction: Reduction) -> Limited:
    """The problem after a single reduction, with the memory of the nodes that are left."""
    lead, follow = reduction.lead, reduction.follow

    def moved(use: Use) -> Use:
        if use.node < 0:
            return use
        node = use.node if lead is None else lead[use.node]
        nbytes = use.bytes if follow is None else use.bytes[follow[use.node]]
        return dataclasses.replace(use, node=node, bytes=nbytes if node >= 0 else nbytes[:1])

    return dataclasses.replace(limited, problem=reduction.problem, uses=tuple(map(moved, limited.uses)))


def reduce_limited(limited: Limited) -> tuple[Limited, Reduction]:
    """Every reduction in turn until a turn changes nothing.

    Raises: ConflictError when the strategies left exclude each other.
    """
    total = Reduction(problem=limited.problem, undo=tuple)
    while True:
        size_before = size(limited.problem)
        merging = (merge_followers, merge_parallel, drop_forbidden)
        for step in (merge_parallel, drop_forbidden, fold_forced, *merging, eliminate, drop_dominated):
            if step is eliminate:
                varies = {use.node for use in limited.uses if (use.bytes != use.bytes[0]).any()}
                reduction = eliminate(limited.problem, varies)
            elif step is drop_dominated:
                reduction = drop_dominated(limited.problem, _may_beat(limited))
            else:
                reduction = step(limited.problem)
            if reduction.problem is not limited.problem:
                limited, total = carried(limited, reduction), chain(total, reduction)
        if size(limited.problem) == size_before:
            return limited, total


def _may_beat(limited: Limited) -> dict[int, np.ndarray]:
    """Of nodes that hold memory: whether strategy t holds no more than s at any time, [t, s]."""
    found: dict[int, np.ndarray] = {}
    for use in limited.uses:
        if use.node >= 0:
            no_more = use.bytes[:, None] <= use.bytes[None, :]
            found[use.node] = found[use.node] & no_more if use.node in found else no_more
    return found


def keep(limited: Limited, strategies: Sequence[np.ndarray]) -> tuple[Limited, Reduction]:
    """The problem with some of the strategies of each node, reduced.

    Raises: ConflictError when the strategies left exclude each other.
    """
    kept = keep_strategies(limited.problem, strategies)
    smaller, reduction = reduce_limited(carried(limited, kept))
    return smaller, chain(kept, reduction)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatLimited(Flat):
    """Rows R; span_first: spans of each node; a span holds bytes[span_bytes[k] + s] in rows low[k] to high[k], not
    counting the least any strategy holds, which is off room.
    """

    span_first: np.ndarray
    low: np.ndarray
    high: np.ndarray
    span_bytes: np.ndarray
    bytes: np.ndarray
    room: np.ndarray
    times: np.ndarray


def flatten_limited(limited: Limited) -> FlatLimited:
    """The arrays of a problem without parallel edges and edges from a node to itself."""
    flat = flatten(limited.problem)
    return FlatLimited(**{f.name: getattr(flat, f.name) for f in dataclasses.fields(flat)}, **_memory(limited))


def kept_times(limited: Limited) -> np.ndarray:
    """The times that hold no part of what a neighbouring time holds, in rising order."""
    starts = {use.start for use in limited.uses if use.start < use.stop}
    stops = {use.stop for use in limited.uses if use.start < use.stop}
    events = sorted(starts | stops)
    return np.array(
        [time for time, end in zip(events, [*events[1:], None], strict=True) if time in starts and end in stops],
        dtype=np.int64,
    )


def _memory(limited: Limited) -> dict[str, np.ndarray]:
    """The memory fields of FlatLimited."""
    uses = [use for use in limited.uses if use.start < use.stop] if limited.limit_bytes is not None else []
    times = kept_times(limited) if uses else np.zeros(0, dtype=np.int64)
    of_node: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in limited.problem.node_cost]
    begins = np.searchsorted(times, [use.start for use in uses]).tolist()
    ends = np.searchsorted(times, [use.stop for use in uses]).tolist()
    constant = np.zeros(len(times) + 1, dtype=np.int64)
    for use, begin, end in zip(uses, begins, ends, strict=True):
        if use.node < 0:
            constant[begin] += use.bytes[0]
            constant[end] -= use.bytes[0]
        elif begin < end:
            of_node[use.node].append((begin, end, use.bytes))
    low: list[np.ndarray] = []
    high: list[np.ndarray] = []
    parts: list[np.ndarray] = []
    counts = np.zeros(len(of_node) + 1, dtype=np.int64)
    widths: list[np.ndarray] = []
    for node, spans in enumerate(of_node):
        if not spans:
            continue
        begin = np.array([h[0] for h in spans])
        end = np.array([h[1] for h in spans])
        size = np.array([h[2] for h in spans])
        if len(spans) > 1:
            cuts = np.unique(np.concatenate([begin, end]))
            change = np.zeros((len(cuts), size.shape[1]), dtype=np.int64)
            np.add.at(change, np.searchsorted(cuts, begin), size)
            np.add.at(change, np.searchsorted(cuts, end), -size)
            size = change.cumsum(axis=0)[:-1]
            begin, end = cuts[:-1], cuts[1:]
        least = size.min(axis=1)
        np.add.at(constant, begin, least)
        np.add.at(constant, end, -least)
        extra = size - least[:, None]
        varies = extra.any(axis=1)
        counts[node + 1] = int(varies.sum())
        if counts[node + 1]:
            low.append(begin[varies])
            high.append(end[varies])
            parts.append(extra[varies].ravel())
            widths.append(np.full(counts[node + 1], extra.shape[1], dtype=np.int64))
    limit = limited.limit_bytes if limited.limit_bytes is not None else 0
    width = np.concatenate([np.zeros(1, dtype=np.int64), *widths])
    none = np.zeros(0, dtype=np.int64)
    return {
        "span_first": np.cumsum(counts),
        "low": np.concatenate(low).astype(np.int64) if low else none,
        "high": np.concatenate(high).astype(np.int64) if high else none,
        "span_bytes": np.cumsum(width)[:-1] if len(width) > 1 else none,
        "bytes": np.concatenate(parts) if parts else none,
        "room": limit - constant.cumsum()[:-1],
        "times": times,
    }


def used(flat: FlatLimited, share: np.ndarray) -> np.ndarray:
    """Bytes beyond the least in every row, (R,), for shares of strategies (strategies,)."""
    if not len(flat.low):
        return np.zeros(len(flat.room))
    owners, width, begin, entry = entries(flat)
    nbytes = np.add.reduceat(
        flat.bytes[np.repeat(flat.span_bytes, width) + entry] * share[np.repeat(flat.first[owners], width) + entry],
        begin,
    )
    change = np.zeros(len(flat.room) + 1)
    np.add.at(change, flat.low, nbytes)
    np.add.at(change, flat.high, -nbytes)
    return np.cumsum(change)[:-1]


def entries(flat: FlatLimited) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(node and number of strategies of each span; first entry of each span; strategy of each entry)"""
    owners = np.repeat(np.arange(flat.nodes), np.diff(flat.span_first))
    width = np.diff(flat.first)[owners]
    begin = np.concatenate([[0], np.cumsum(width)[:-1]])
    return owners, width, begin, np.arange(int(width.sum())) - np.repeat(begin, width)


def shares(flat: FlatLimited, choice: Sequence[int]) -> np.ndarray:
    """A choice as a one for each strategy taken."""
    share = np.zeros(int(flat.first[-1]))
    share[flat.first[:-1] + np.asarray(choice, dtype=np.int64)] = 1.0
    return share


def can_bind(flat: FlatLimited) -> np.ndarray:
    """The rows that the largest choices would break, as numbers."""
    if not len(flat.room):
        return np.zeros(0, dtype=np.int64)
    change = np.zeros(len(flat.room) + 1, dtype=np.int64)
    if len(flat.low):
        _, width, begin, entry = entries(flat)
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


def least_memory(flat: FlatLimited) -> np.ndarray:
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
