"""The solver against brute force on small random problems, with and without limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import Backend, Edge, Problem, Status, Use, brute_force, evaluate, solve
from tests.solver.cases import layered_problem, random_problem, relabelled

SEEDS = st.integers(0, 2**32 - 1)


def check(problem: Problem, backend: Backend = Backend.HIGHS) -> None:
    expected = brute_force(problem)
    found = solve(problem, time_limit_s=30, backend=backend)
    assert found.status is expected.status
    assert found.bound <= found.objective
    if expected.status is Status.OPTIMAL:
        assert found.objective == pytest.approx(expected.objective, abs=1e-9)
        assert found.gap == 0.0
        assert evaluate(problem, found.choice) == (found.objective, found.peak_bytes)
        assert problem.limit_bytes is None or found.peak_bytes <= problem.limit_bytes
    else:
        assert found.choice == ()
        assert found.infeasibility is not None
        if expected.infeasibility is not None and expected.infeasibility.bytes_over > 0:
            assert 0 < found.infeasibility.bytes_over <= expected.infeasibility.bytes_over
            assert found.infeasibility.times


@pytest.mark.parametrize("limited", [False, True])
@settings(max_examples=1000, deadline=None)
@given(seed=SEEDS)
def test_agrees_with_brute_force(limited: bool, seed: int) -> None:
    check(random_problem(seed, limited=limited))


@pytest.mark.parametrize("limited", [False, True])
@settings(max_examples=200, deadline=None)
@given(seed=SEEDS)
def test_agrees_where_little_is_forbidden(limited: bool, seed: int) -> None:
    check(random_problem(seed, limited=limited, nodes=8, most=3, forbidden=0.0))


@pytest.mark.parametrize("backend", [Backend.CP_SAT, Backend.SCIP])
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_every_backend_agrees(backend: Backend, seed: int) -> None:
    check(random_problem(seed, limited=True), backend)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_relabelling_never_changes_the_best_cost(seed: int) -> None:
    problem = random_problem(seed, limited=True, nodes=9, forbidden=0.05)
    first, second = solve(problem), solve(relabelled(problem, seed))
    assert first.status is second.status
    assert first.objective == pytest.approx(second.objective)


def test_memory_decides_between_cheap_and_small() -> None:
    problem = Problem(
        node_cost=(np.array([1.0, 5.0]), np.array([1.0, 3.0])),
        uses=(
            Use(node=0, start=0, stop=2, bytes=np.array([10, 2])),
            Use(node=1, start=1, stop=3, bytes=np.array([10, 2])),
        ),
        limit_bytes=12,
    )
    found = solve(problem)
    assert (found.choice, found.objective, found.peak_bytes) == ((0, 1), 4.0, 12)


def test_infeasible_says_when_who_and_by_how_much() -> None:
    problem = Problem(
        node_cost=(np.zeros(2), np.zeros(2)),
        edges=(Edge(source=0, target=1, cost=np.array([[0.0, math.inf], [math.inf, 0.0]])),),
        uses=(
            Use(node=0, start=0, stop=5, bytes=np.array([9, 1])),
            Use(node=1, start=3, stop=9, bytes=np.array([1, 7])),
        ),
        limit_bytes=7,
    )
    why = solve(problem).infeasibility
    assert why is not None
    assert (why.times, set(why.nodes), why.bytes_over) == ((3,), {0, 1}, 1)


def test_exclusive_strategies_are_named() -> None:
    cost = np.full((2, 2), math.inf)
    found = solve(Problem(node_cost=(np.zeros(2), np.zeros(2)), edges=(Edge(source=0, target=1, cost=cost),)))
    assert found.status is Status.INFEASIBLE
    assert found.infeasibility is not None
    assert set(found.infeasibility.nodes) == {0, 1}


def test_empty_problem() -> None:
    found = solve(Problem(node_cost=()))
    assert (found.status, found.choice, found.objective) == (Status.OPTIMAL, (), 0.0)


@pytest.mark.parametrize("tight", [None, 3.0])
def test_planner_sized_problem_is_proven_quickly(tight: float | None) -> None:
    found = solve(layered_problem(20, width=5, strategies=12, seed=1, tight=tight), time_limit_s=60)
    assert found.status is Status.OPTIMAL
    assert found.bound == found.objective


def test_users_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="edge 0: expected costs of shape"):
        solve(Problem(node_cost=(np.zeros(2), np.zeros(3)), edges=(Edge(source=0, target=1, cost=np.zeros((3, 2))),)))
    with pytest.raises(ValueError, match="node 0"):
        solve(Problem(node_cost=(np.array([math.nan]),)))
    with pytest.raises(ValueError, match="use 0: bytes"):
        solve(Problem(node_cost=(np.zeros(1),), uses=(Use(node=0, start=0, stop=1, bytes=np.array([0.5])),)))


def test_rules_in_a_circle_can_exclude_everything() -> None:
    same = np.array([[0.0, np.inf], [np.inf, 0.0]])
    other = np.array([[np.inf, 0.0], [0.0, np.inf]])
    problem = Problem(
        node_cost=(np.zeros(2), np.ones(2), np.zeros(2), np.array([1.0, 2.0])),
        edges=(
            Edge(source=0, target=1, cost=other),
            Edge(source=1, target=2, cost=same),
            Edge(source=0, target=2, cost=same),
            Edge(source=2, target=3, cost=np.ones((2, 2))),
        ),
    )
    assert solve(problem).status is Status.INFEASIBLE
