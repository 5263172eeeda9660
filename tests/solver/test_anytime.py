"""The anytime core on problems small enough to check: bounds hold, rounds repeat themselves, tables prove."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.solver import Edge, Problem, Status, anytime, evaluate, solve, solving
from autopar.solver.anytime import Core, Limits, Loops, TableSearch, improve, keep_cheap, rises
from autopar.solver.presolve import ConflictError, Reduction, merge_parallel, reduce_all
from autopar.solver.problem import flatten
from tests.solver.brute_force import brute_force
from tests.solver.cases import layered_problem, random_problem


def run(
    problem: Problem, *, rounds: int, seed: int = 0, cutoff: float = math.inf, lines: list[str] | None = None
) -> Core:
    """The core after its rounds, without tables."""
    lines = [] if lines is None else lines
    core = Core(Loops(flatten(problem)), np.array([cost.argmin() for cost in problem.node_cost]), seed)
    improve(core, Limits(rounds=rounds, cutoff=cutoff), lambda core: (None, False), lines.append)
    return core


def reduced(seed: int, **options: float) -> Problem | None:
    """What reductions leave of a random problem; None where it is nothing, or has no choice that is allowed."""
    try:
        problem = reduce_all(random_problem(seed, nodes=7, **options)).problem
    except ConflictError:
        return None
    return problem if problem.node_cost and brute_force(problem)[1] is not None else None


def merged(seed: int) -> Problem:
    """A random problem in which all is allowed, without parallel edges."""
    return merge_parallel(random_problem(seed, nodes=5, forbidden=0.0, follows=False)).problem


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_bounds_never_exceed_costs(seed: int) -> None:
    problem = merged(seed)
    expected, _ = brute_force(problem)
    core = run(problem, rounds=6)
    assert core.bound - 1e-9 <= expected <= core.cost + 1e-9
    assert core.choice is not None
    assert evaluate(problem, core.choice.tolist()) == pytest.approx(core.cost)


def hard_problem(seed: int = 0) -> Problem:
    """72 nodes on which the core uses all rounds that it gets."""
    return layered_problem(12, width=6, strategies=5, seed=seed)


def test_the_search_ends_once_the_bound_is_at_the_cutoff():
    """A core that goes on for 64 rounds does none where messages prove the cutoff, and as many above it."""
    lines: list[str] = []
    best = run(hard_problem(), rounds=64, lines=lines)
    assert 0 < best.bound <= best.cost
    assert len(lines) == 64
    lines.clear()
    early = run(hard_problem(), rounds=64, cutoff=0.5 * best.bound, lines=lines)
    assert 0.5 * best.bound <= early.bound <= best.bound
    assert not lines
    assert run(hard_problem(), rounds=64, cutoff=2 * best.cost).cost == best.cost


@pytest.fixture
def only_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """`solve` by the anytime core alone."""
    monkeypatch.setattr(solving, "reduce_all", lambda problem: Reduction(problem=problem, undo=tuple))
    monkeypatch.setattr(solving, "solve_by_tables", lambda problem: None)
    monkeypatch.setattr(TableSearch, "settle", lambda search, core: (None, False))


def side_by_side(one: Problem, other: Problem) -> Problem:
    """One problem of two that have nothing to do with each other."""
    shift = len(one.node_cost)
    moved = tuple(replace(e, source=e.source + shift, target=e.target + shift) for e in other.edges)
    return Problem(node_cost=one.node_cost + other.node_cost, edges=one.edges + moved)


@pytest.mark.usefixtures("only_the_core")
def test_a_cutoff_is_shared_out_over_the_components_of_a_problem():
    """The first component may use what the least of the second leaves, the second what the first has not proven."""
    problem = side_by_side(hard_problem(), hard_problem())
    lines: list[str] = []
    whole = solve(problem, rounds=64, log=lines.append)
    assert len(lines) == 2 * 64
    lines.clear()
    found = solve(problem, rounds=64, cutoff=whole.bound - 1.0, log=lines.append)
    assert whole.bound - 1.0 <= found.bound <= whole.bound
    assert len(lines) == 64
    lines.clear()
    assert 1.0 <= solve(problem, rounds=64, cutoff=1.0, log=lines.append).bound <= whole.bound
    assert not lines


@pytest.mark.usefixtures("only_the_core")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31 - 1), above=st.integers(-20, 20))
def test_a_cutoff_never_makes_a_bound_wrong(seed: int, above: int) -> None:
    one, other = merged(seed), merged(seed + 1)
    optimum = brute_force(one)[0] + brute_force(other)[0]
    problem = side_by_side(one, other)
    found = solve(problem, rounds=8, cutoff=optimum + above)
    assert found.bound <= optimum + 1e-9
    assert found.objective >= optimum - 1e-9
    if above > 0:
        assert found.objective == pytest.approx(solve(problem, rounds=8).objective)


def by_tables(problem: Problem, *, rounds: int, lines: list[str]) -> tuple[Core, float]:
    """The core with tables, and what they prove."""
    flat = flatten(problem)
    search = TableSearch(problem, flat, 0.0, lines.append)
    core = Core(Loops(flat), np.array([cost.argmin() for cost in problem.node_cost]), seed=0)
    improve(core, Limits(rounds=rounds), search.settle, lines.append)
    return core, max(core.bound, search.bound)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_tables_prove_the_optimum(seed: int) -> None:
    if (problem := reduced(seed, forbidden=0.2)) is not None:
        expected, _ = brute_force(problem)
        core, bound = by_tables(problem, rounds=2, lines=[])
        assert core.cost == pytest.approx(expected)
        assert bound <= expected + 1e-9


def test_tables_find_the_optimum_of_a_hard_problem_without_a_round():
    """72 nodes, of which 64 rounds of messages and moves prove nothing."""
    problem, lines = hard_problem(), list[str]()
    best, bound = by_tables(problem, rounds=64, lines=lines)
    assert bound == pytest.approx(best.cost, rel=1e-8)
    assert best.cost <= run(problem, rounds=64).cost
    assert not any(line.startswith("round") for line in lines)


def test_tables_that_are_too_large_leave_the_rounds_to_the_core(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(anytime, "solve_by_tables", lambda problem: None)
    lines: list[str] = []
    by_tables(hard_problem(), rounds=8, lines=lines)
    assert [line.split(":")[0] for line in lines] == [f"round {i}" for i in range(1, 9)]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_fixing_keeps_every_cheaper_choice(seed: int) -> None:
    problem = merged(seed)
    expected, _ = brute_force(problem)
    core = run(problem, rounds=3)
    try:
        smaller = keep_cheap(problem, core.loops.flat, rises(core), core.cost - core.bound + 1e-9)
    except ConflictError:
        smaller = None
    left = math.inf if smaller is None else brute_force(smaller.problem)[0] + smaller.offset
    assert min(core.cost, left) == pytest.approx(expected)


def test_rounds_repeat_themselves_and_reach_what_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered_problem(8, width=4, strategies=6, seed=7)
    expected = solve(problem)
    assert expected.status is Status.OPTIMAL
    monkeypatch.setattr(solving, "solve_by_tables", lambda _: None)
    found = [solve(problem, rounds=16) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].objective == pytest.approx(expected.objective)


def test_rounds_leave_what_tree_moves_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every node has an edge to every other, trees are pairs, and moves of pairs end at what is not the best."""

    def dense(seed: int) -> Problem:
        random = np.random.default_rng(seed)
        costs = tuple(random.random(4) for _ in range(24))
        pairs = [(i, j) for i in range(24) for j in range(i)]
        edges = tuple(Edge(source=i, target=j, cost=random.random((4, 4))) for i, j in pairs)
        return Problem(node_cost=costs, edges=edges)

    found = [run(dense(seed), rounds=16).cost for seed in range(6)]
    monkeypatch.setattr(anytime, "DRAWN", 0.0)
    stuck = [run(dense(seed), rounds=16).cost for seed in range(6)]
    assert all(a <= b for a, b in zip(found, stuck, strict=True))
    assert found != stuck
