"""Tied nodes share one choice, and their costs and uses add up."""

from __future__ import annotations

import time

import numpy as np
import pytest

from autopar.solver import Edge, Problem, Use, evaluate, tie


def test_tie_adds_costs_and_spreads_choices() -> None:
    share = np.array([[0.0, 5.0], [5.0, 0.0]])
    problem = Problem(
        node_cost=(np.array([1.0, 2.0]), np.array([3.0, 1.0]), np.array([0.0, 0.0])),
        edges=(
            Edge(source=0, target=1, cost=share),
            Edge(source=0, target=2, cost=np.array([[1.0, 2.0], [3.0, 4.0]])),
            Edge(source=2, target=1, cost=np.array([[1.0, 2.0], [3.0, 4.0]])),
        ),
        uses=(Use(node=1, start=0, stop=3, bytes=np.array([4, 2])),),
    )
    tied, undo = tie(problem, (7, 7, 3))
    assert [cost.tolist() for cost in tied.node_cost] == [[0.0, 0.0], [4.0, 3.0]]
    (edge,) = tied.edges
    assert (edge.source, edge.target, edge.cost.tolist()) == (0, 1, [[2.0, 5.0], [5.0, 8.0]])
    for choice in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert evaluate(tied, choice) == evaluate(problem, undo(choice))


def test_tie_of_many_edges_counts_each_matrix_once() -> None:
    rng = np.random.default_rng(0)
    matrices = [rng.integers(0, 9, (30, 30)).astype(np.float64) for _ in range(4)]
    problem = Problem(
        node_cost=tuple(np.zeros(30) for _ in range(400)),
        edges=tuple(
            Edge(source=int(a), target=int(b), cost=matrices[int(k)])
            for a, b, k in zip(*rng.integers(0, 400, (2, 40_000)), rng.integers(0, 4, 40_000), strict=True)
        ),
    )
    begun = time.perf_counter()
    tied, undo = tie(problem, [node % 3 for node in range(400)])
    assert time.perf_counter() - begun < 2.0
    assert len(tied.node_cost) == 3
    for choice in rng.integers(0, 30, (5, 3)).tolist():
        assert evaluate(tied, choice) == evaluate(problem, undo(choice))


def test_tied_nodes_must_have_as_many_strategies() -> None:
    with pytest.raises(ValueError, match="node 1 has 3 strategies"):
        tie(Problem(node_cost=(np.zeros(2), np.zeros(3))), (0, 0))
