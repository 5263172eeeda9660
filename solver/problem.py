"""`Problem` and `Solution`; nodes that must choose alike; the problem as flat arrays, for the compiled loops.

Each node chooses one strategy. Cost is the sum of node costs and of pairwise edge costs; memory at a time is the sum of
the bytes of the uses live then, and may not pass the limit at any time. Nothing here solves anything. Nodes that must
choose alike share one variable, formula (3): state in and state out, repeated layers.

In the flat arrays memory is ranges of rows, one list of disjoint ranges a node. Rows are the times that can bind: a
time is kept when something starts there and something stops before the next start. Every other time holds part of what
a kept time holds.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


class Status(enum.Enum):
    """What is known about the answer."""

    OPTIMAL = "optimal"  # no choice is cheaper by more than the relative gap asked for
    FEASIBLE = "feasible"  # time ran out: the best found, with its bound and gap
    INFEASIBLE = "infeasible"  # proven: no choice is allowed and fits
    UNKNOWN = "unknown"  # time ran out before any choice that fits was found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Edge:
    """Cost of the pair of strategies chosen by two nodes; parallel edges add up.

    cost: (strategies of source, strategies of target) float64; inf = the pair is not allowed.
    """

    source: int
    target: int
    cost: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Use:
    """Memory that a node holds from start to stop, the interval half open; an empty interval holds nothing.

    bytes: (strategies of node,) int64.
    """

    node: int
    start: int
    stop: int
    bytes: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """One strategy for each node, at the least cost, within the memory limit at every time.

    node_cost: one (strategies,) float64 array a node, in any unit; inf = the strategy is not allowed.
    limit_bytes: None = memory is not limited.
    """

    node_cost: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...] = ()
    uses: tuple[Use, ...] = ()
    limit_bytes: int | None = None
    node_names: tuple[str, ...] | None = None

    @property
    def num_pairs(self) -> int:
        """The pairs of strategies over all edges: the edge variables of the integer program, before presolve."""
        return sum(edge.cost.size for edge in self.edges)

    def save(self, path: str | Path) -> None:
        """Write the problem to an .npz file that `load` reads; a matrix shared by edges is written once."""
        pool: dict[int, int] = {}
        matrices: list[np.ndarray] = []
        for edge in self.edges:
            if id(edge.cost) not in pool:
                pool[id(edge.cost)] = len(matrices)
                matrices.append(edge.cost)
        np.savez_compressed(
            path,
            strategies=np.array([len(cost) for cost in self.node_cost], dtype=np.int64),
            node_cost=_join(self.node_cost, np.float64),
            edge_ends=np.array([(e.source, e.target) for e in self.edges], dtype=np.int64).reshape(-1, 2),
            edge_matrix=np.array([pool[id(e.cost)] for e in self.edges], dtype=np.int64),
            matrix_shape=np.array([m.shape for m in matrices], dtype=np.int64).reshape(-1, 2),
            matrix_cost=_join([m.ravel() for m in matrices], np.float64),
            use_span=np.array([(u.node, u.start, u.stop) for u in self.uses], dtype=np.int64).reshape(-1, 3),
            use_bytes=_join([u.bytes for u in self.uses], np.int64),
            limit=np.array([] if self.limit_bytes is None else [self.limit_bytes], dtype=np.int64),
            names=np.array(self.node_names if self.node_names is not None else [], dtype=np.str_),
        )

    @staticmethod
    def load(path: str | Path) -> Problem:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            data = {key: stored[key] for key in stored.files}
        strategies = data["strategies"]
        shapes = data["matrix_shape"]
        flat = np.split(data["matrix_cost"], np.cumsum(shapes.prod(axis=1))[:-1])
        matrices = [part.reshape(shape) for part, shape in zip(flat, shapes, strict=False)]
        spans = data["use_span"].tolist()
        use_sizes = [int(strategies[node]) for node, _, _ in spans]
        use_bytes = np.split(data["use_bytes"], np.cumsum(use_sizes)[:-1].astype(np.int64)) if spans else []
        limit = data["limit"]
        return Problem(
            node_cost=tuple(np.split(data["node_cost"], np.cumsum(strategies)[:-1])) if len(strategies) else (),
            edges=tuple(
                Edge(source=a, target=b, cost=matrices[m])
                for (a, b), m in zip(data["edge_ends"].tolist(), data["edge_matrix"].tolist(), strict=True)
            ),
            uses=tuple(
                Use(node=node, start=start, stop=stop, bytes=size)
                for (node, start, stop), size in zip(spans, use_bytes, strict=True)
            ),
            limit_bytes=int(limit[0]) if len(limit) else None,
            node_names=tuple(data["names"].tolist()) if len(data["names"]) else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Infeasibility:
    """Why no choice is possible: what cannot be made to fit, and by how much.

    times: the starts of the time spans at which even the smallest choice that was proven possible is over the limit.
    nodes: the nodes live then, largest first; or the nodes whose strategies exclude each other.
    bytes_over: the smallest excess proven at the worst time; 0 when the conflict is not one of memory.
    """

    times: tuple[int, ...]
    nodes: tuple[int, ...]
    bytes_over: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A choice of strategies and what is known about it.

    choice: a strategy a node; empty when INFEASIBLE or UNKNOWN. objective: its cost, inf when there is none.
    bound: no choice that fits costs less. gap: (objective - bound) / |objective|, 0 when proven, inf when there is no
    choice.
    incumbents: (seconds since the start, cost) of each improvement.
    """

    choice: tuple[int, ...]
    status: Status
    objective: float
    bound: float
    gap: float
    wall_s: float
    peak_bytes: int
    incumbents: tuple[tuple[float, float], ...] = ()
    infeasibility: Infeasibility | None = None


def validate(problem: Problem) -> None:
    """Check shapes and values of a problem that a user made.

    Raises: ValueError naming the node, edge or use at fault.
    """
    for node, cost in enumerate(problem.node_cost):
        where = f"node {node}" + (f" ({problem.node_names[node]})" if problem.node_names else "")
        if cost.ndim != 1 or len(cost) == 0:
            raise ValueError(f"{where}: costs must be a vector of one or more strategies, got shape {cost.shape}")
        if not (cost > -np.inf).all():
            raise ValueError(f"{where}: costs must be numbers or inf, got {cost}")
    if problem.node_names is not None and len(problem.node_names) != len(problem.node_cost):
        raise ValueError(f"{len(problem.node_names)} names for {len(problem.node_cost)} nodes")
    checked: set[int] = set()
    for number, edge in enumerate(problem.edges):
        for end in (edge.source, edge.target):
            if not 0 <= end < len(problem.node_cost):
                raise ValueError(f"edge {number}: node {end} does not exist")
        expected = (len(problem.node_cost[edge.source]), len(problem.node_cost[edge.target]))
        if edge.cost.shape != expected:
            raise ValueError(f"edge {number}: expected costs of shape {expected}, got {edge.cost.shape}")
        if id(edge.cost) not in checked:
            checked.add(id(edge.cost))
            if not (edge.cost > -np.inf).all():
                raise ValueError(f"edge {number}: costs must be numbers or inf")
    for number, use in enumerate(problem.uses):
        if not 0 <= use.node < len(problem.node_cost):
            raise ValueError(f"use {number}: node {use.node} does not exist")
        expected = problem.node_cost[use.node].shape
        if use.bytes.shape != expected:
            raise ValueError(f"use {number}: expected bytes of shape {expected}, got {use.bytes.shape}")
        if use.bytes.dtype.kind not in "iu":
            raise ValueError(f"use {number}: bytes must be whole numbers, got {use.bytes.dtype}")


def _join(parts: tuple[np.ndarray, ...] | list[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=kind) for part in parts]) if len(parts) else np.zeros(0, dtype=kind)


Undo = Callable[[Sequence[int]], tuple[int, ...]]


def tie(problem: Problem, classes: Sequence[int]) -> tuple[Problem, Undo]:
    """Formula (3): give the nodes of a class one shared choice; undo(choice) spreads a choice back to the nodes.

    classes: a number a node; the new nodes are the classes in rising order. Node costs add, uses follow their node,
    edges of the same two classes add up, and edges inside a class become node cost by their diagonal.

    Raises: ValueError when the nodes of a class differ in their number of strategies.
    """
    if len(classes) != len(problem.node_cost):
        raise ValueError(f"expected a class for each of {len(problem.node_cost)} nodes, got {len(classes)}")
    labels, numbers = np.unique(np.asarray(classes, dtype=np.int64), return_inverse=True)
    of_node: list[int] = numbers.tolist()
    first: dict[int, int] = {}
    for node, group in enumerate(of_node):
        lead = first.setdefault(group, node)
        if len(problem.node_cost[node]) != len(problem.node_cost[lead]):
            raise ValueError(
                f"class {labels[group]}: node {node} has {len(problem.node_cost[node])} strategies, "
                f"node {lead} has {len(problem.node_cost[lead])}; tied nodes must have the same"
            )
    node_cost = [np.zeros(len(problem.node_cost[first[group]])) for group in range(len(labels))]
    for node, group in enumerate(of_node):
        node_cost[group] = node_cost[group] + problem.node_cost[node]

    # Edges of one pair of classes mostly share a few matrices: count each matrix once and multiply.
    counts: dict[tuple[int, int], dict[tuple[int, bool], int]] = defaultdict(lambda: defaultdict(int))
    matrices: dict[int, np.ndarray] = {}
    for edge in problem.edges:
        a, b = of_node[edge.source], of_node[edge.target]
        matrices[id(edge.cost)] = edge.cost
        counts[(a, b) if a <= b else (b, a)][id(edge.cost), a > b] += 1
    edges: list[Edge] = []
    sums: dict[tuple[tuple[tuple[int, bool], int], ...], np.ndarray] = {}  # equal ones are one array
    for (a, b), terms in counts.items():
        added = tuple(terms.items())
        if added not in sums:
            parts = [
                oriented if count == 1 else oriented * float(count)
                for (key, turned), count in added
                for oriented in (matrices[key].T if turned else matrices[key],)
            ]
            sums[added] = sum(parts[1:], start=parts[0])
        total = sums[added]
        if a == b:
            node_cost[a] = node_cost[a] + np.diagonal(total)
        else:
            edges.append(Edge(source=a, target=b, cost=total))
    names = problem.node_names
    tied = Problem(
        node_cost=tuple(node_cost),
        edges=tuple(edges),
        uses=tuple(Use(node=of_node[u.node], start=u.start, stop=u.stop, bytes=u.bytes) for u in problem.uses),
        limit_bytes=problem.limit_bytes,
        node_names=tuple(names[first[group]] for group in range(len(labels))) if names is not None else None,
    )

    def undo(choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(choice[group] for group in of_node)

    return tied, undo


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
