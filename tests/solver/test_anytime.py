"""The anytime core on problems small enough to check: bounds hold, choices fit, rounds repeat themselves."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.solver import Edge, Problem, Status, anytime, brute_force, evaluate, solve, solving
from autopar.solver.anytime import Best, Limits, Loops, Settled, TableSearch, combine, drop_costly, improve
from autopar.solver.integer_program import least_memory, shares, used
from autopar.solver.presolve import ConflictError, Reduction, reduce_all
from autopar.solver.problem import flatten
from tests.solver.cases import layered_problem, random_problem


def run(
    problem: Problem, *, rounds: int, seed: int = 0, cutoff: float = math.inf, lines: list[str] | None = None
) -> Best:
    flat = flatten(problem)
    return improve(
        flat,
        start=least_memory(flat),
        seed=seed,
        limits=Limits(deadline=time.perf_counter() + 60, rounds=rounds, relative_gap=0.0, cutoff=cutoff),
        report=lambda choice, cost: None,
        settle=lambda best: Settled(choice=None, finished=False),
        log=(lambda line: None) if lines is None else lines.append,
    )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), limited=st.booleans())
def test_bounds_never_exceed_costs(seed: int, limited: bool) -> None:
    problem = random_problem(seed, limited=limited, nodes=7, forbidden=0.0)
    try:
        reduced = reduce_all(problem)
    except ConflictError:
        return
    expected = brute_force(reduced.problem)
    best = run(reduced.problem, rounds=6) if reduced.problem.node_cost else None
    if best is None or expected.status is Status.INFEASIBLE:
        assert best is None or best.choice is None
        return
    assert best.bound <= expected.objective + 1e-9
    assert best.cost >= expected.objective - 1e-9
    if best.choice is not None:
        cost, peak = evaluate(reduced.problem, best.choice.tolist())
        assert cost == pytest.approx(best.cost)
        assert problem.limit_bytes is None or peak <= problem.limit_bytes


def hard_problem(seed: int = 0) -> Problem:
    """72 nodes on which the core uses all rounds that it gets. Presolve would leave nothing of it."""
    return replace(layered_problem(12, width=6, strategies=5, seed=seed), uses=(), limit_bytes=None)


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
    monkeypatch.setattr(TableSearch, "settle", lambda search, best: Settled(choice=None, finished=False))
    monkeypatch.setattr(solving, "EXACT_ENTRIES", -1)


def side_by_side(one: Problem, other: Problem) -> Problem:
    """One problem of two that have nothing to do with each other, without memory."""
    shift = len(one.node_cost)
    moved = tuple(replace(e, source=e.source + shift, target=e.target + shift) for e in other.edges)
    return Problem(node_cost=one.node_cost + other.node_cost, edges=one.edges + moved, uses=(), limit_bytes=None)


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
    one, other = (random_problem(seed + i, limited=False, nodes=5, forbidden=0.0) for i in range(2))
    optimum = brute_force(one).objective + brute_force(other).objective
    problem = side_by_side(one, other)
    found = solve(problem, rounds=8, cutoff=optimum + above)
    assert found.bound <= optimum + 1e-9
    assert found.objective >= optimum - 1e-9
    if above > 0:
        assert found.objective == pytest.approx(solve(problem, rounds=8).objective)


def by_tables(problem: Problem, *, rounds: int, lines: list[str]) -> tuple[Best, float]:
    """The best choice of the core with tables, and what they prove."""
    flat = flatten(problem)
    search = TableSearch(problem, flat, 0.0, lines.append)
    best = improve(
        flat,
        start=least_memory(flat),
        seed=0,
        limits=Limits(deadline=math.inf, rounds=rounds, relative_gap=0.0),
        report=lambda choice, cost: None,
        settle=search.settle,
        log=lines.append,
    )
    return best, max(best.bound, search.bound)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_tables_prove_the_optimum(seed: int) -> None:
    problem = random_problem(seed, limited=False, nodes=7, forbidden=0.2)
    try:
        reduced = reduce_all(problem)
    except ConflictError:
        return
    expected = brute_force(reduced.problem)
    if expected.status is Status.INFEASIBLE or not reduced.problem.node_cost:
        return
    best, bound = by_tables(reduced.problem, rounds=2, lines=[])
    assert best.cost == pytest.approx(expected.objective)
    assert bound <= expected.objective + 1e-9


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
    try:
        problem = reduce_all(random_problem(seed, limited=True, nodes=7, forbidden=0.0)).problem
    except ConflictError:
        return
    expected = brute_force(problem)
    if not problem.node_cost or expected.status is Status.INFEASIBLE:
        return
    best = run(problem, rounds=3)
    if best.choice is None:
        return
    try:
        smaller = drop_costly(problem, flatten(problem), best)
    except ConflictError:
        smaller = None
    if smaller is None:
        assert best.cost == pytest.approx(expected.objective)
        return
    left = brute_force(smaller.problem)
    assert min(best.cost, left.objective + smaller.offset) == pytest.approx(expected.objective)


@pytest.mark.parametrize("tight", [None, 1.3, 1.1])
def test_a_whole_solve_through_the_core_is_proven(monkeypatch: pytest.MonkeyPatch, tight: float | None) -> None:
    problem = layered_problem(6, width=4, strategies=5, seed=3, tight=tight)
    expected = solve(problem)
    assert expected.status is Status.OPTIMAL
    monkeypatch.setattr(solving, "EXACT_ENTRIES", -1)
    monkeypatch.setattr(solving, "EXACT_NODES", -1)
    found = solve(problem, time_limit_s=30, rounds=200)
    assert found.objective == pytest.approx(expected.objective)
    assert found.bound <= found.objective
    assert found.incumbents[-1][1] == found.objective


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_infeasible_and_forbidden_through_the_core(seed: int) -> None:
    problem = random_problem(seed, limited=True, nodes=6)
    expected = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "EXACT_ENTRIES", -1)
        patch.setattr(solving, "EXACT_NODES", -1)
        found = solve(problem, time_limit_s=30, rounds=15)
    if expected.status is Status.INFEASIBLE:
        assert found.status is Status.INFEASIBLE
        return
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert found.bound <= expected.objective + 1e-9
    assert found.objective >= expected.objective - 1e-9


def test_rounds_repeat_themselves() -> None:
    problem = reduce_all(layered_problem(15, width=4, strategies=6, seed=5, tight=1.15)).problem
    first, second = run(problem, rounds=12, seed=4), run(problem, rounds=12, seed=4)
    assert first.choice is not None
    assert second.choice is not None
    assert first.choice.tolist() == second.choice.tolist()
    assert (first.cost, first.bound) == (second.cost, second.bound)


def test_rounds_without_memory_reach_what_is_best_and_ask_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered_problem(8, width=4, strategies=6, seed=7)
    expected = solve(problem)
    assert expected.status is Status.OPTIMAL

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the program stops by the clock")

    monkeypatch.setattr(solving, "solve_lazily", refuse)
    monkeypatch.setattr(solving, "solve_by_tables", lambda _: None)
    found = solve(problem, time_limit_s=60, rounds=16)
    assert found.objective == pytest.approx(expected.objective)


def test_rounds_without_memory_leave_what_tree_moves_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every node has an edge to every other, trees are pairs, and moves of pairs end at what is not the best."""

    def dense(seed: int) -> Problem:
        random = np.random.default_rng(seed)
        costs = tuple(random.random(4) for _ in range(24))
        pairs = [(i, j) for i in range(24) for j in range(i)]
        edges = tuple(Edge(source=i, target=j, cost=random.random((4, 4))) for i, j in pairs)
        return Problem(node_cost=costs, edges=edges, limit_bytes=None)

    found = [run(dense(seed), rounds=16).cost for seed in range(6)]
    monkeypatch.setattr(anytime, "DRAWN", 0.0)
    stuck = [run(dense(seed), rounds=16).cost for seed in range(6)]
    assert all(a <= b for a, b in zip(found, stuck, strict=True))
    assert found != stuck


def test_the_time_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "EXACT_ENTRIES", -1)
    problem = layered_problem(120, width=5, strategies=16, seed=2, tight=1.1)
    begun = time.perf_counter()
    found = solve(problem, time_limit_s=4.0)
    assert time.perf_counter() - begun < 6.0
    assert found.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert math.isfinite(found.gap)


def test_combining_choices_keeps_each_of_them() -> None:
    problem = layered_problem(5, width=3, strategies=4, seed=1, tight=1.5)
    rng = np.random.default_rng(0)
    choices = [rng.integers(0, 4, len(problem.node_cost)) for _ in range(2)]
    best = brute_force(combine(problem, choices).problem) if len(problem.node_cost) < 10 else None
    smaller = combine(problem, choices)
    assert best is None or best.status is Status.OPTIMAL
    assert sum(len(cost) for cost in smaller.problem.node_cost) <= 2 * len(problem.node_cost)


def test_the_compiled_memory_agrees_with_evaluate() -> None:
    problem = layered_problem(8, width=4, strategies=5, seed=9, tight=2.0)
    flat = flatten(problem)
    loops = Loops(flat)
    rng = np.random.default_rng(1)
    assert problem.limit_bytes is not None
    for _ in range(20):
        choice = rng.integers(0, 5, len(problem.node_cost))
        cost, peak = evaluate(problem, choice.tolist())
        assert loops.cost(choice) == pytest.approx(cost)
        assert problem.limit_bytes - int(loops.left(choice).min()) == peak
        assert np.allclose(loops.used(choice), used(flat, shares(flat, choice)))
