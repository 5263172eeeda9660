"""Strategies that another one of the same node always beats (dead-end elimination; Desmet et al. 1992, Goldstein 1994).
Compiled.

Goldstein's criterion for strategies s and t of a node: c[t] - c[s] + the sum over edges of the maximum over u of
(e[t, u] - e[s, u]) <= 0, of the strategies u that the neighbour still has. Where an edge excludes s with u, t is no
worse. One node at a time, those of few strategies first, so that two equal strategies do not remove each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Sized

import numpy as np
from numba import njit

from autopar.solver import Problem
from autopar.solver.presolve import MOST_WORK, Reduction, keep_strategies, neighbours


@njit(cache=True, nogil=True)
def _dearer(matrix: np.ndarray, columns: int, is_first: bool, allowed: np.ndarray, size: int) -> np.ndarray:
    """[t, s]: how much dearer strategy t can be on an edge than s. Those of the node are the rows of the matrix where
    it is the edge's `is_first`; `allowed`: strategies of the other node.
    """
    dearer = np.full((size, size), -np.inf)
    row = np.empty(size)
    for u in range(len(allowed)):
        if not allowed[u]:
            continue
        for t in range(size):
            row[t] = matrix[t * columns + u if is_first else u * columns + t]
        for t in range(size):
            for s in range(size):
                difference = row[t] - row[s]
                dearer[t, s] = difference if difference > dearer[t, s] else dearer[t, s]
    return dearer


@njit(cache=True, nogil=True)
def _drop(worst: np.ndarray, may_beat: np.ndarray, kept: np.ndarray) -> int:
    """Drops strategies of a node from `kept`, and returns how many. worst[t, s]: how much dearer t can be than s.
    may_beat[t * size + s]: whether t may beat s; empty = all may.
    """
    size, dropped = len(kept), 0
    for s in range(size):
        for t in range(size):
            # Where both are infinite their difference is no number, and not below zero either.
            if t == s or not kept[t] or not worst[t, s] <= 0:
                continue
            if len(may_beat) == 0 or may_beat[t * size + s]:
                kept[s] = False
                dropped += 1
                break
    return dropped


@njit(cache=True, nogil=True)
def _undominated(
    first: np.ndarray,
    cost: np.ndarray,
    edges: np.ndarray,
    start: np.ndarray,
    matrices: np.ndarray,
    near_first: np.ndarray,
    near: np.ndarray,
    order: np.ndarray,
    beats_first: np.ndarray,
    may_beat: np.ndarray,
    most_work: int,
) -> np.ndarray:
    """Whether each strategy is kept, of a list in which those of node v are first[v] to first[v + 1].

    edges: (edges, 3) the two nodes and the number of the matrix, whose rows, of the first node's strategies, begin at
    start[number] of `matrices`. near: the edges of each node. order: the nodes in turn, until the comparisons would be
    more than `most_work`. may_beat: from beats_first[v] to beats_first[v + 1], whether strategies of v may beat others.
    """
    kept = np.ones(first[-1], dtype=np.bool_)
    left = np.diff(first)
    # What a matrix comes to, of which all columns count (rows), is kept for other edges that share it, by side.
    known = np.full((len(start), 2), -1, dtype=np.int64)
    found: list[np.ndarray] = [np.empty((0, 0))]
    work = 0
    for node in order:
        begin, size = first[node], first[node + 1] - first[node]
        if size == 1:
            continue
        around = 1
        for q in range(near_first[node], near_first[node + 1]):
            a, b = edges[near[q], 0], edges[near[q], 1]
            around += left[b if a == node else a]
        work += size * size * around
        if work > most_work:
            break
        worst = np.empty((size, size))
        for t in range(size):
            for s in range(size):
                worst[t, s] = cost[begin + t] - cost[begin + s]
        for q in range(near_first[node], near_first[node + 1]):
            a, b, number = edges[near[q], 0], edges[near[q], 1], edges[near[q], 2]
            side = 0 if a == node else 1
            other = b if a == node else a
            whole = left[other] == first[other + 1] - first[other]
            if whole and known[number, side] >= 0:
                worst += found[known[number, side]]
                continue
            first_side, columns = side == 0, first[b + 1] - first[b]
            dearer = _dearer(
                matrices[start[number] :], columns, first_side, kept[first[other] : first[other + 1]], size
            )
            if whole:
                known[number, side] = len(found)
                found.append(dearer)
            worst += dearer
        of_node = may_beat[beats_first[node] : beats_first[node + 1]]
        left[node] -= _drop(worst, of_node, kept[begin : begin + size])
    return kept


def drop_dominated(problem: Problem, may_beat: Mapping[int, np.ndarray], most_work: int = MOST_WORK) -> Reduction:
    """Remove strategies that another of the same node beats whatever its neighbours choose; `may_beat`: of some nodes,
    whether their strategy t may beat their strategy s, [t, s]. Nodes are passed over once there would be more than
    `most_work` comparisons.
    """
    near = neighbours(problem)
    sizes = np.array([len(cost) for cost in problem.node_cost], dtype=np.int64)
    first = _starts(problem.node_cost)
    beats = [may_beat[node].ravel() if node in may_beat else np.zeros(0, dtype=bool) for node in range(len(sizes))]
    numbers: dict[int, int] = {}
    matrices: list[np.ndarray] = []
    for edge in problem.edges:
        if numbers.setdefault(id(edge.cost), len(matrices)) == len(matrices):
            matrices.append(edge.cost.ravel())
    kept = _undominated(
        first,
        np.concatenate([np.zeros(0), *problem.node_cost]),
        np.array([(e.source, e.target, numbers[id(e.cost)]) for e in problem.edges], dtype=np.int64).reshape(-1, 3),
        _starts(matrices)[:-1],
        np.concatenate([np.zeros(0), *matrices]),
        _starts(near),
        np.array([number for numbers_near in near for number in numbers_near], dtype=np.int64),
        np.argsort(sizes, kind="stable"),
        _starts(beats),
        np.concatenate([np.zeros(0, dtype=bool), *beats]),
        most_work,
    )
    return keep_strategies(problem, [np.flatnonzero(kept[a:b]) for a, b in itertools.pairwise(first.tolist())])


def _starts(parts: Sequence[Sized]) -> np.ndarray:
    """Where each of some parts begins that stand one behind the other, and where the last one ends."""
    return np.array([0, *itertools.accumulate(map(len, parts))], dtype=np.int64)
