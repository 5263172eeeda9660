"""A problem as flat arrays, for the compiled loops; memory as ranges of rows, one list of disjoint ranges a node.

Rows are the times that can bind: a time is kept when something starts there and something stops before the next start.
Every other time holds part of what a kept time holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.solver.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Flat:
    """Nodes n, edges m, rows R; strategies of node v are the numbers first[v] to first[v+1] of a joint list.

    cost: (strategies,) float64. matrix: all edges' costs, row by row, edge e's from start[e]; equal matrices are
    stored once. near_first, near: edges of each node in one list. span_first: spans of each node; a span holds
    bytes[span_bytes[k] + s] in rows low[k] to high[k], not counting the least any strategy holds, which is off room.
    """

    first: np.ndarray
    cost: np.ndarray
    source: np.ndarray
    target: np.ndarray
    start: np.ndarray
    matrix: np.ndarray
    near_first: np.ndarray
    near: np.ndarray
    span_first: np.ndarray
    low: np.ndarray
    high: np.ndarray
    span_bytes: np.ndarray
    bytes: np.ndarray
    room: np.ndarray
    times: np.ndarray

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.first) - 1


def flatten(problem: Problem) -> Flat:
    """The arrays of a problem without parallel edges and edges from a node to itself."""
    sizes = np.array([len(cost) for cost in problem.node_cost], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    pool: dict[int, int] = {}
    parts: list[np.ndarray] = []
    start = np.zeros(len(problem.edges), dtype=np.int64)
    filled = 0
    for number, edge in enumerate(problem.edges):
        if id(edge.cost) not in pool:
            pool[id(edge.cost)] = filled
            parts.append(np.ascontiguousarray(edge.cost, dtype=np.float64).ravel())
            filled += edge.cost.size
        start[number] = pool[id(edge.cost)]
    source = np.array([edge.source for edge in problem.edges], dtype=np.int64)
    target = np.array([edge.target for edge in problem.edges], dtype=np.int64)
    ends = np.concatenate([source, target])
    order = np.argsort(ends, kind="stable")
    near = np.concatenate([np.arange(len(source)), np.arange(len(source))])[order]
    near_first = np.searchsorted(ends[order], np.arange(len(sizes) + 1)).astype(np.int64)
    memory = _memory(problem)
    return Flat(
        first=first,
        cost=np.concatenate([np.zeros(0), *problem.node_cost]),
        source=source,
        target=target,
        start=start,
        matrix=np.concatenate(parts) if parts else np.zeros(0),
        near_first=near_first,
        near=near,
        **memory,
    )


def kept_times(problem: Problem) -> np.ndarray:
    """The times that hold no part of what a neighbouring time holds, in rising order."""
    starts = {use.start for use in problem.uses if use.start < use.stop}
    stops = {use.stop for use in problem.uses if use.start < use.stop}
    events = sorted(starts | stops)
    return np.array(
        [time for time, end in zip(events, [*events[1:], None], strict=True) if time in starts and end in stops],
        dtype=np.int64,
    )


def _memory(problem: Problem) -> dict[str, np.ndarray]:
    """The memory fields of Flat."""
    uses = [use for use in problem.uses if use.start < use.stop] if problem.limit_bytes is not None else []
    times = kept_times(problem) if uses else np.zeros(0, dtype=np.int64)
    of_node: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in problem.node_cost]
    begins = np.searchsorted(times, [use.start for use in uses]).tolist()
    ends = np.searchsorted(times, [use.stop for use in uses]).tolist()
    for use, begin, end in zip(uses, begins, ends, strict=True):
        if begin < end:
            of_node[use.node].append((begin, end, use.bytes))
    constant = np.zeros(len(times) + 1, dtype=np.int64)
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
    limit = problem.limit_bytes if problem.limit_bytes is not None else 0
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
