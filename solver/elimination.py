"""Exact elimination of every node, by tables over its neighbours: for graphs of small width.

Bucket elimination (Dechter, Artificial Intelligence 1999), the node of the smallest table first. The planner's graphs
mostly are a residual path with short branches, and need tables over three to five nodes; integer programming takes
seconds where this takes milliseconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from autopar.solver.problem import Problem

# Entries of all tables together: a fifth of a second at most.
MOST_WORK = 40_000_000
PART = 1 << 16  # entries of a table that are worked out at a time: 512 KB, which second-level caches hold


def solve_by_tables(problem: Problem) -> tuple[int, ...] | None:
    """The cheapest choice, or None when the tables would be too large.

    The problem must have a choice that is allowed.
    """
    sizes = [len(cost) for cost in problem.node_cost]
    order = _order(problem, sizes)
    if order is None:
        return None
    factors: list[list[tuple[tuple[int, ...], np.ndarray]]] = [[] for _ in sizes]  # of each node, those it is in
    for edge in problem.edges:
        pair = ((edge.source, edge.target), edge.cost)
        factors[edge.source].append(pair)
        factors[edge.target].append(pair)
    lone: list[np.ndarray] = [np.asarray(cost, dtype=np.float64) for cost in problem.node_cost]
    for node in order:
        around = tuple(sorted({neighbour for scope, _ in factors[node] for neighbour in scope if neighbour != node}))
        scope = (node, *around)  # the node first: the least over it is then taken along whole rows at a time
        terms = [lone[node].reshape(-1, *(1 for _ in around))]
        terms += [_broadcast(cost, nodes, scope) for nodes, cost in factors[node]]
        value = least_of_sum(terms, tuple(sizes[neighbour] for neighbour in around))
        for neighbour in around:
            factors[neighbour] = [factor for factor in factors[neighbour] if node not in factor[0]]
        if len(around) == 1:
            lone[around[0]] = lone[around[0]] + value
        elif around:
            for neighbour in around:
                factors[neighbour].append((around, value))
    # The table of a node is worked out again for the one choice of its neighbours that counts.
    choice = [0] * len(sizes)
    for node in reversed(order):
        at = lone[node]
        for nodes, cost in factors[node]:
            at = at + cost[tuple(slice(None) if neighbour == node else choice[neighbour] for neighbour in nodes)]
        choice[node] = int(np.argmin(at))
    return tuple(choice)


def least_of_sum(terms: Sequence[np.ndarray], around: tuple[int, ...], part: int = PART) -> np.ndarray:
    """The least, over the first axis, of a sum of tables that broadcast to it and to axes of the sizes `around`.

    Where the sum has more than `part` entries it is worked out for one choice of the leading axes after the other, so
    that it stays in the processor's cache. The numbers added are the same, in the same order.
    """
    leading = 0
    while leading < len(around) and len(terms[0]) * math.prod(around[leading:]) > part:
        leading += 1
    value = np.empty(around)
    for at in np.ndindex(around[:leading]):
        total = _part(terms[0], at)
        for term in terms[1:]:
            total = total + _part(term, at)
        value[at] = total.min(axis=0)
    return value


def _part(term: np.ndarray, at: tuple[int, ...]) -> np.ndarray:
    """A table where the axes behind the first are at some positions; what does not depend on an axis has one there."""
    index: tuple[slice | int, ...] = (slice(None),)
    index += tuple(i if n > 1 else 0 for i, n in zip(at, term.shape[1:], strict=False))
    part: np.ndarray = term[index]
    return part


def _order(problem: Problem, sizes: list[int]) -> list[int] | None:
    """Nodes by the table that eliminating them takes, least first; None when they are too large."""
    near: list[set[int]] = [set() for _ in sizes]
    for edge in problem.edges:
        near[edge.source].add(edge.target)
        near[edge.target].add(edge.source)

    def table(node: int) -> int:
        return sizes[node] * math.prod(sizes[neighbour] for neighbour in near[node])

    weight = {node: table(node) for node in range(len(sizes))}
    least = [(size, node) for node, size in weight.items()]  # a heap, which keeps a node's earlier weights
    heapq.heapify(least)
    order: list[int] = []
    total = 0
    while weight:
        size, node = heapq.heappop(least)
        if weight.get(node) != size:
            continue
        total += size
        if total > MOST_WORK:
            return None
        order.append(node)
        del weight[node]
        for neighbour in near[node]:
            near[neighbour] |= near[node] - {neighbour}
            near[neighbour].discard(node)
        for neighbour in near[node]:
            weight[neighbour] = table(neighbour)
            heapq.heappush(least, (weight[neighbour], neighbour))
    return order


def _broadcast(cost: np.ndarray, nodes: tuple[int, ...], scope: tuple[int, ...]) -> np.ndarray:
    """A table over some nodes with an axis for each node of the scope."""
    axes = sorted(range(len(nodes)), key=lambda axis: scope.index(nodes[axis]))
    turned = cost.transpose(axes)
    present = {nodes[axis]: size for axis, size in zip(axes, turned.shape, strict=True)}
    return turned.reshape([present.get(node, 1) for node in scope])
