"""`Problem` and `Solution`; nodes that must choose alike; the problem as flat arrays, for the compiled loops.

Each node chooses one strategy. Cost is the sum of node costs and of pairwise edge costs. Nothing here solves anything.
Nodes that must choose alike share one variable, formula (3): state in and state out, repeated layers.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


class Status(enum.Enum):
    """What is known about the answer."""

    OPTIMAL = "optimal"  # no choice is cheaper by more than the relative gap asked for
    FEASIBLE = "feasible"  # time ran out: the best found, with its bound and gap
    INFEASIBLE = "infeasible"  # proven: no choice is allowed
    UNKNOWN = "unknown"  # time or rounds ran out before any choice that is allowed was found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Edge:
    """Cost of the pair of strategies chosen by two nodes; parallel edges add up.

    cost: (strategies of source, strategies of target) float64; inf = the pair is not allowed.
    """

    source: int
    target: int
    cost: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """One strategy for each node, at the least cost.

    node_cost: one (strategies,) float64 array a node, in any unit; inf = the strategy is not allowed.
    """

    node_cost: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A choice of strategies and what is known about it.

    choice: a strategy a node; empty when INFEASIBLE or UNKNOWN. objective: its cost, inf when there is none.
    bound: no choice costs less. gap: (objective - bound) / |objective|, 0 when proven, inf when there is no choice.
    """

    choice: tuple[int, ...]
    status: Status
    objective: float
    bound: float
    gap: float


def validate(problem: Problem) -> None:
    """Check shapes and values of a problem that a user made.

    Raises: ValueError naming the node or edge at fault.
    """
    for node, cost in enumerate(problem.node_cost):
        if cost.ndim != 1 or len(cost) == 0:
            raise ValueError(f"node {node}: costs must be a vector of one or more strategies, got shape {cost.shape}")
        if not (cost > -np.inf).all():
            raise ValueError(f"node {node}: costs must be numbers or inf, got {cost}")
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


def evaluate(problem: Problem, choice: Sequence[int]) -> float:
    """Cost of a choice, inf when it uses something not allowed: independent of the solving code, to check it.

    Raises: ValueError when the choice does not have one existing strategy for each node.
    """
    if len(choice) != len(problem.node_cost):
        raise ValueError(f"expected {len(problem.node_cost)} choices, got {len(choice)}")
    for node, (strategy, costs) in enumerate(zip(choice, problem.node_cost, strict=True)):
        if not 0 <= strategy < len(costs):
            raise ValueError(f"node {node}: strategy {strategy} does not exist, it has {len(costs)}")
    terms = [float(costs[s]) for costs, s in zip(problem.node_cost, choice, strict=True)]
    terms += [float(e.cost[choice[e.source], choice[e.target]]) for e in problem.edges]
    return math.fsum(terms) if math.inf not in terms else math.inf


Undo = Callable[[Sequence[int]], tuple[int, ...]]


def tie(problem: Problem, classes: Sequence[int]) -> tuple[Problem, Undo]:
    """Formula (3): give the nodes of a class one shared choice; undo(choice) spreads a choice back to the nodes.

    classes: a number a node; the new nodes are the classes in rising order. Node costs add, edges of the same two
    classes add up, and edges inside a class become node cost by their diagonal.

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
    tied = Problem(node_cost=tuple(node_cost), edges=tuple(edges))

    def undo(choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(choice[group] for group in of_node)

    return tied, undo


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Flat:
    """Nodes n, edges m; strategies of node v are the numbers first[v] to first[v+1] of a joint list.

    cost: (strategies,) float64. matrix: all edges' costs, row by row, edge e's from start[e]; equal matrices are
    stored once. near_first, near: edges of each node in one list.
    """

    first: np.ndarray
    cost: np.ndarray
    source: np.ndarray
    target: np.ndarray
    start: np.ndarray
    matrix: np.ndarray
    near_first: np.ndarray
    near: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All arrays, in this order."""
        return (
            self.first, self.cost, self.source, self.target, self.start, self.matrix, self.near_first, self.near,
        )  # fmt: skip

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
    return Flat(
        first=first,
        cost=np.concatenate([np.zeros(0), *problem.node_cost]),
        source=source,
        target=target,
        start=start,
        matrix=np.concatenate(parts) if parts else np.zeros(0),
        near_first=near_first,
        near=near,
    )
