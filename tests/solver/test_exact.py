"""Small random problems: the solver against brute force, with and without limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import Backend, Edge, Problem, Status, Use, brute_force, evaluate, solve, tie


def random_problem(seed: int, *, limited: bool, nodes: int = 6, most: int = 4) -> Problem:
    """A problem of up to `nodes` nodes with forbidden strategies and pairs, parallel edges, self edges, several uses a node."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, most + 1, count)

    def costs(shape: tuple[int, ...], forbidden: float) -> np.ndarray:
        values = rng.integers(-3, 20, shape).astype(np.float64)
        values[rng.random(shape) < forbidden] = math.inf
        return values

    edges = []
    for _ in range(int(rng.integers(0, 2 * count + 1))):
        a, b = (int(x) for x in rng.integers(0, count, 2))
        edges.append(Edge(source=a, target=b, cost=costs((int(sizes[a]), int(sizes[b])), 0.15)))
    uses = []
    for _ in range(int(rng.integers(0, 2 * count + 1))):
        node = int(rng.integers(0, count))
        start = int(rng.integers(0, 8))
        size = rng.integers(0, 10, sizes[node]) if rng.random() < 0.8 else np.full(sizes[node], rng.integers(0, 10))
        uses.append(Use(node=node, start=start, stop=start + int(rng.integers(0, 5)), bytes=size.astype(np.int64)))
    limit = int(rng.integers(5, 30)) if limited else None
    return Problem(
        node_cost=tuple(costs((int(size),), 0.1) for size in sizes),
        edges=tuple(edges),
        uses=tuple(uses),
        limit_bytes=limit,
    )


def check(problem: Problem, backend: Backend) -> None:
    expected = brute_force(problem)
    found = solve(problem, time_limit_s=30, backend=backend)
    assert found.status is expected.status
    if expected.status is Status.OPTIMAL:
        assert found.objective == pytest.approx(expected.objective, abs=1e-9)
        assert found.bound <= found.objective and found.gap == 0.0
        assert evaluate(problem, found.choice) == (found.objective, found.peak_bytes)
        assert problem.limit_bytes is None or found.peak_bytes <= problem.limit_bytes
    else:
        assert found.infeasibility is not None and found.choice == ()


@pytest.mark.parametrize("limited", [False, True])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_agrees_with_brute_force(limited: bool, seed: int) -> None:
    check(random_problem(seed, limited=limited), Backend.HIGHS)


def test_tie_spreads_choices_and_adds_costs() -> None:
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
    turned = edge.cost if edge.source == 0 else edge.cost.T
    assert turned.tolist() == [[2.0, 5.0], [5.0, 8.0]]
    for choice in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert evaluate(tied, choice) == evaluate(problem, undo(choice))
