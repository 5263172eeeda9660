"""The solver against brute force on small random problems, with tables and with the search alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import Edge, Problem, Status, evaluate, solve, solving
from autopar.solver.presolve import Reduction
from tests.solver.brute_force import brute_force
from tests.solver.cases import layered_problem, random_problem

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=1000, deadline=None)
@given(seed=SEEDS, forbids=st.booleans())
def test_agrees_with_brute_force(seed: int, forbids: bool) -> None:
    problem = random_problem(seed) if forbids else random_problem(seed, nodes=8, most=3, forbidden=0.0)
    expected, _ = brute_force(problem)
    found = solve(problem)
    assert found.bound <= found.objective == pytest.approx(expected, abs=1e-9)
    if expected == math.inf:
        assert (found.status, found.choice) == (Status.INFEASIBLE, ())
    else:
        assert (found.status, found.gap) == (Status.OPTIMAL, 0.0)
        assert evaluate(problem, found.choice) == found.objective


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_infeasible_and_forbidden_through_the_core(seed: int) -> None:
    problem = random_problem(seed)
    expected, choice = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "solve_by_tables", lambda part: None)
        found = solve(problem, rounds=15)
    if choice is None:
        assert found.status is Status.INFEASIBLE
        return
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert found.bound - 1e-9 <= expected <= found.objective + 1e-9


def test_no_time_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cheapest strategies of two nodes exclude each other."""
    problem = layered_problem(4, width=3, strategies=4, seed=0)
    edges = (*problem.edges, Edge(source=0, target=1, cost=np.where(np.ones((4, 4)) - np.eye(4) > 0, 0.0, np.inf)))
    problem = Problem(node_cost=tuple(np.arange(4.0) for _ in problem.node_cost), edges=edges)
    monkeypatch.setattr(solving, "reduce_all", lambda problem: Reduction(problem=problem, undo=tuple))
    monkeypatch.setattr(solving, "solve_by_tables", lambda part: None)
    found = solve(problem, time_limit_s=0.0)
    assert (found.status, found.choice, found.objective) == (Status.UNKNOWN, (), math.inf)
    assert found.bound <= solve(problem, rounds=4).objective


def test_exclusive_strategies_are_infeasible() -> None:
    cost = np.full((2, 2), math.inf)
    found = solve(Problem(node_cost=(np.zeros(2), np.zeros(2)), edges=(Edge(source=0, target=1, cost=cost),)))
    assert found.status is Status.INFEASIBLE


def test_empty_problem() -> None:
    found = solve(Problem(node_cost=()))
    assert (found.status, found.choice, found.objective) == (Status.OPTIMAL, (), 0.0)


def test_planner_sized_problem_is_proven_quickly() -> None:
    found = solve(layered_problem(20, width=5, strategies=12, seed=1), time_limit_s=60)
    assert found.status is Status.OPTIMAL
    assert found.bound == found.objective


def test_users_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="edge 0: expected costs of shape"):
        solve(Problem(node_cost=(np.zeros(2), np.zeros(3)), edges=(Edge(source=0, target=1, cost=np.zeros((3, 2))),)))
    with pytest.raises(ValueError, match="node 0"):
        solve(Problem(node_cost=(np.array([math.nan]),)))


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
