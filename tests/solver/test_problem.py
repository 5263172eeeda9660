"""Tied nodes share one choice, and their costs add up; edges of equal costs share one matrix, also when
reduced.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from autopar.solver import Edge, Problem, evaluate, tie
from autopar.solver.presolve import keep_strategies, merge_followers, merge_parallel


def test_tie_adds_costs_and_spreads_choices() -> None:
    share = np.array([[0.0, 5.0], [5.0, 0.0]])
    problem = Problem(
        node_cost=(np.array([1.0, 2.0]), np.array([3.0, 1.0]), np.array([0.0, 0.0])),
        edges=(
            Edge(source=0, target=1, cost=share),
            Edge(source=0, target=2, cost=np.array([[1.0, 2.0], [3.0, 4.0]])),
            Edge(source=2, target=1, cost=np.array([[1.0, 2.0], [3.0, 4.0]])),
        ),
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


A = np.array([[0.0, 1.0, 4.0], [2.0, 0.0, 5.0], [3.0, 7.0, 0.0]])
B = np.array([[1.0, 0.0, 2.0], [6.0, 1.0, 0.0], [0.0, 8.0, 1.0]])


def problem(edges, nodes):
    return Problem(
        node_cost=(np.zeros(3),) * nodes,
        edges=tuple(Edge(source=a, target=b, cost=cost) for a, b, cost in edges),
    )


def matrices(problem):
    """The numbers of the edges' matrices, in the order in which they first occur, and the matrices."""
    numbers = {}
    of_edge = [numbers.setdefault(id(edge.cost), len(numbers)) for edge in problem.edges]
    return of_edge, [edge.cost for i, edge in enumerate(problem.edges) if of_edge[i] not in of_edge[:i]]


def test_equal_sums_of_tied_nodes():
    # Nodes 0 and 1 choose alike, so do 2 and 3, and 4 and 5: each pair of classes has A forth and B back.
    edges = [(0, 2, A), (3, 1, B), (2, 4, A), (5, 3, B), (0, 4, A), (1, 5, A)]
    of_edge, (forth_and_back, twice) = matrices(tie(problem(edges, 6), [0, 0, 1, 1, 2, 2])[0])
    assert of_edge == [0, 0, 1]
    np.testing.assert_array_equal(forth_and_back, A + B.T)
    np.testing.assert_array_equal(twice, 2 * A)


def test_equal_sums_of_parallel_edges():
    edges = [(0, 1, A), (1, 0, B), (1, 2, A), (2, 1, B), (3, 2, A), (4, 3, A)]
    of_edge, (both, turned) = matrices(merge_parallel(problem(edges, 5)).problem)
    assert of_edge == [0, 0, 1, 1]
    np.testing.assert_array_equal(both, A + B.T)
    np.testing.assert_array_equal(turned, A.T)


def test_equal_parts_of_the_strategies():
    all_, some = np.arange(3), np.array([0, 2])
    whole = problem([(0, 1, A), (1, 2, A), (2, 3, A), (3, 4, A)], 5)
    of_edge, (one_side, both, untouched) = matrices(
        keep_strategies(whole, [all_, some, some, some.copy(), all_]).problem
    )
    assert of_edge == [0, 1, 1, 2]
    np.testing.assert_array_equal(one_side, A[:, [0, 2]])
    np.testing.assert_array_equal(both, A[[0, 2]][:, [0, 2]])
    np.testing.assert_array_equal(untouched, A[[0, 2]])


def test_equal_edges_of_followers():
    # Nodes 2 and 3 follow 0 and 1, by the same rule: what leads to them comes from these.
    rule = np.where(np.eye(3)[[1, 2, 0]] == 1, 0.0, np.inf)
    whole = problem([(0, 2, rule), (1, 3, rule), (2, 4, A), (3, 4, A)], 5)
    of_edge, (spread,) = matrices(merge_followers(whole).problem)
    assert of_edge == [0, 0]
    np.testing.assert_array_equal(spread, A[[1, 2, 0]])
