"""The search on problems small enough to check: bounds hold, tables prove, rounds repeat themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.solver import Edge, Problem, Status, evaluate, solve, solving
from autopar.solver.presolve import ConflictError, Reduction, merge_parallel, reduce_all
from autopar.solver.solving import Limits, Search, keep_cheap
from tests.solver.brute_force import brute_force
from tests.solver.cases import layered_problem, random_problem

SEEDS = st.integers(0, 2**32 - 1)


def searched(problem: Problem, *, rounds: int, cutoff: float = math.inf, lines: list[str] | None = None) -> Search:
    start = tuple(int(cost.argmin()) for cost in problem.node_cost)
    search = Search(problem, start, Limits(rounds=rounds, cutoff=cutoff), [].append if lines is None else lines.append)
    search.run()
    return search


def merged(seed: int) -> Problem:
    """A random problem in which all is allowed, without parallel edges."""
    return merge_parallel(random_problem(seed, nodes=5, forbidden=0.0, follows=False)).problem


def hard_problem(seed: int = 0) -> Problem:
    """72 nodes of which messages alone prove nothing."""
    return layered_problem(12, width=6, strategies=5, seed=seed)


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tables are small enough, and nothing is reduced."""
    monkeypatch.setattr(solving, "reduce_all", lambda problem: Reduction(problem=problem, undo=tuple))
    monkeypatch.setattr(solving, "solve_by_tables", lambda problem: None)


@pytest.mark.usefixtures("too_large")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=SEEDS)
def test_bounds_of_messages_never_exceed_costs(seed: int) -> None:
    problem = merged(seed)
    expected, _ = brute_force(problem)
    search = searched(problem, rounds=3)
    assert search.bound - 1e-9 <= expected <= search.cost + 1e-9
    assert evaluate(problem, search.choice) == search.cost


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_tables_prove_the_optimum(seed: int) -> None:
    try:
        problem = reduce_all(random_problem(seed, nodes=7, forbidden=0.2)).problem
    except ConflictError:
        return
    start = tuple(int(cost.argmin()) for cost in problem.node_cost)
    if problem.node_cost and evaluate(problem, start) < math.inf:
        expected, _ = brute_force(problem)
        search = searched(problem, rounds=2)
        assert search.cost == pytest.approx(expected)
        assert search.bound <= expected + 1e-9


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS)
def test_fixing_keeps_every_cheaper_choice(seed: int) -> None:
    problem = merged(seed)
    search = searched(problem, rounds=0)
    bound = search.loops.bound(search.messages)
    try:
        smaller = keep_cheap(problem, search.loops.flat, search.loops.extra, search.cost - bound + 1e-9)
    except ConflictError:
        smaller = None
    left = math.inf if smaller is None else brute_force(smaller.problem)[0] + smaller.offset
    assert min(search.cost, left) == pytest.approx(brute_force(problem)[0])


def test_tables_prove_a_hard_problem_and_messages_alone_do_not(monkeypatch: pytest.MonkeyPatch):
    search = searched(hard_problem(), rounds=4)
    assert search.bound == pytest.approx(search.cost, rel=1e-8)
    monkeypatch.setattr(solving, "solve_by_tables", lambda problem: None)
    alone = searched(hard_problem(), rounds=4)
    assert alone.bound < search.cost - 1e-6
    assert alone.cost >= search.cost


def test_the_search_ends_once_the_bound_is_at_the_cutoff():
    lines: list[str] = []
    best = searched(hard_problem(), rounds=4, lines=lines)
    assert lines
    lines.clear()
    early = searched(hard_problem(), rounds=4, cutoff=0.5 * best.bound, lines=lines)
    assert 0.5 * best.bound <= early.bound <= best.bound
    assert not lines
    assert searched(hard_problem(), rounds=4, cutoff=2 * best.cost).cost == best.cost


def side_by_side(one: Problem, other: Problem) -> Problem:
    """One problem of two that have nothing to do with each other."""
    shift = len(one.node_cost)
    moved = tuple(replace(e, source=e.source + shift, target=e.target + shift) for e in other.edges)
    return Problem(node_cost=one.node_cost + other.node_cost, edges=one.edges + moved)


@pytest.mark.usefixtures("too_large")
def test_a_cutoff_is_shared_out_over_the_components_of_a_problem(monkeypatch: pytest.MonkeyPatch):
    """The first component may use what the least of the second leaves, the second what the first has not proven."""
    begun = []
    sweep = solving.Loops.sweep
    monkeypatch.setattr(solving.Loops, "sweep", lambda loops, *given: (begun.append(loops), sweep(loops, *given))[1])
    problem = side_by_side(hard_problem(), hard_problem())
    whole = solve(problem, rounds=2)
    assert [sum(loops is each for loops in begun) > 3 for each in dict.fromkeys(begun)] == [True, True]
    found = solve(problem, rounds=2, cutoff=whole.bound - 1.0)
    assert whole.bound - 1.0 <= found.bound <= whole.bound
    assert 1.0 <= solve(problem, rounds=2, cutoff=1.0).bound <= whole.bound


@pytest.mark.usefixtures("too_large")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31 - 1), above=st.integers(-20, 20))
def test_a_cutoff_never_makes_a_bound_wrong(seed: int, above: int) -> None:
    one, other = merged(seed), merged(seed + 1)
    optimum = brute_force(one)[0] + brute_force(other)[0]
    found = solve(side_by_side(one, other), rounds=2, cutoff=optimum + above)
    assert found.bound <= optimum + 1e-9
    assert found.objective >= optimum - 1e-9


def test_a_search_repeats_itself_and_reaches_what_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered_problem(8, width=4, strategies=6, seed=7)
    expected = solve(problem)
    assert expected.status is Status.OPTIMAL
    small = solving.solve_by_tables
    monkeypatch.setattr(solving, "solve_by_tables", lambda part: small(part) if len(part.node_cost) < 16 else None)
    found = [solve(problem, rounds=4) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].objective == pytest.approx(expected.objective)


def test_dense_problems_without_proof_keep_what_is_found() -> None:
    """Where every node has an edge to every other, tables are too large but for few strategies."""
    random = np.random.default_rng(0)
    costs = tuple(random.random(4) for _ in range(24))
    pairs = [(i, j) for i in range(24) for j in range(i)]
    edges = tuple(Edge(source=i, target=j, cost=random.random((4, 4))) for i, j in pairs)
    found = solve(Problem(node_cost=costs, edges=edges), rounds=2)
    assert found.status is Status.FEASIBLE
    assert found.bound <= found.objective
