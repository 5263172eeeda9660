"""Which strategies no other of the same node always beats, with no more memory.

Goldstein's criterion for strategies s and t of a node: c[t] - c[s] + the sum over edges of the maximum over u of
(e[t, u] - e[s, u]) <= 0, of the strategies u that the neighbour still has. Where an edge excludes s with u, t is no
worse. One node at a time, those of few strategies first, so that two equal strategies do not remove each other.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from autopar.solver.ilp.problem import Edge, Problem


def undominated(problem: Problem, near: Sequence[Sequence[int]], most_work: int) -> list[np.ndarray]:
    """The numbers of the strategies of each node that stay; `near`: the numbers of its edges. Nodes are passed over
    once there would be more than `most_work` comparisons.

    By compiled loops where their compiler is loaded anyway, for other parts of a larger problem: for small ones loading
    it takes longer than arrays do. Both give the same.
    """
    return (by_loops if "numba" in sys.modules else by_arrays)(problem, near, most_work)


def _uses(problem: Problem) -> list[list[np.ndarray]]:
    uses: list[list[np.ndarray]] = [[] for _ in problem.node_cost]
    for use in problem.uses:
        if use.start < use.stop:
            uses[use.node].append(use.bytes)
    return uses


def by_arrays(problem: Problem, near: Sequence[Sequence[int]], most_work: int) -> list[np.ndarray]:
    """`undominated` in arrays, a node and an edge at a time."""
    strategies, uses = [np.arange(len(cost)) for cost in problem.node_cost], _uses(problem)
    worst_of: dict[tuple[int, bool], np.ndarray] = {}  # of matrices that edges share, by the side of their node
    work = 0
    for node in sorted(range(len(strategies)), key=lambda node: len(strategies[node])):
        count = len(strategies[node])
        if count == 1:
            continue
        edges = [problem.edges[number] for number in near[node]]
        others = [edge.target if edge.source == node else edge.source for edge in edges]
        work += count * count * (1 + sum(len(strategies[other]) for other in others))
        if work > most_work:
            break
        cost = problem.node_cost[node]
        with np.errstate(invalid="ignore"):  # where both are infinite: not a number, and not below zero either
            worst = cost[:, None] - cost[None, :]  # [t, s]: how much dearer t can be than s, at worst
            for edge, other in zip(edges, others, strict=True):
                if len(strategies[other]) < len(problem.node_cost[other]):
                    worst = worst + _worst(_side(edge, node)[:, strategies[other]])
                    continue
                key = id(edge.cost), edge.source == node
                if key not in worst_of:
                    worst_of[key] = _worst(_side(edge, node))
                worst = worst + worst_of[key]
        beats = worst <= 0
        for nbytes in uses[node]:
            beats &= nbytes[:, None] <= nbytes[None, :]
        np.fill_diagonal(beats, False)
        beaten = np.flatnonzero(beats.any(axis=0)).tolist()
        alive = np.ones(count, dtype=bool)
        for s in beaten:
            alive[s] = not (beats[:, s] & alive).any()
        strategies[node] = np.flatnonzero(alive)
    return strategies


def _side(edge: Edge, node: int) -> np.ndarray:
    """The edge's costs with this node's strategies first."""
    return edge.cost if edge.source == node else edge.cost.T


def _worst(side: np.ndarray) -> np.ndarray:
    """[t, s]: how much dearer strategy t can be on an edge than s, whatever the other node chooses among what it may
    choose with s: where that excludes s, t is no worse.
    """
    turned = np.ascontiguousarray(side.T)  # the maximum over the first axis is taken along whole rows at a time
    dearer: np.ndarray = turned[:, :, None] - turned[:, None, :]
    return np.asarray(np.fmax.reduce(dearer, axis=0, keepdims=True, initial=-math.inf)[0])


def by_loops(problem: Problem, near: Sequence[Sequence[int]], most_work: int) -> list[np.ndarray]:
    """`undominated` in compiled loops."""
    from autopar.solver.presolve import compiled_dominance

    loops: Any = compiled_dominance  # numba's types do not know the arguments of what it compiles
    sizes = np.array([len(cost) for cost in problem.node_cost], dtype=np.int64)
    first, uses = _starts(problem.node_cost), _uses(problem)
    numbers: dict[int, int] = {}
    matrices: list[np.ndarray] = []
    for edge in problem.edges:
        if numbers.setdefault(id(edge.cost), len(matrices)) == len(matrices):
            matrices.append(edge.cost.ravel())
    kept = loops.undominated(
        first,
        np.concatenate([np.zeros(0), *problem.node_cost]),
        np.array([(e.source, e.target, numbers[id(e.cost)]) for e in problem.edges], dtype=np.int64).reshape(-1, 3),
        _starts(matrices)[:-1],
        np.concatenate([np.zeros(0), *matrices]),
        _starts(near),
        np.array([number for numbers_near in near for number in numbers_near], dtype=np.int64),
        np.argsort(sizes, kind="stable"),
        np.array([0, *itertools.accumulate(len(of) * n for of, n in zip(uses, sizes.tolist(), strict=True))]),
        np.concatenate([np.zeros(0, dtype=np.int64), *(nbytes for of in uses for nbytes in of)]).astype(np.int64),
        most_work,
    )
    return [np.flatnonzero(kept[a:b]) for a, b in itertools.pairwise(first.tolist())]


def _starts(parts: Sequence[Sized]) -> np.ndarray:
    """Where each of some parts begins that stand one behind the other, and where the last one ends."""
    return np.array([0, *itertools.accumulate(map(len, parts))], dtype=np.int64)
