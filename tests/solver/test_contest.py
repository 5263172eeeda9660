"""The contest's files read and solved by the command; problems in limited memory against brute force."""

from __future__ import annotations

import gzip
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import Edge, Problem, Status, evaluate
from autopar.solver.presolve import ConflictError, merge_parallel
from autopar.solver.solving import Limits
from benchmarks.iopddl import solving
from benchmarks.iopddl.__main__ import main, read_contest
from benchmarks.iopddl.dominance import drop_dominated
from benchmarks.iopddl.memory import Limited, Use, fits, flatten_limited, least_memory, peak_bytes, reduce_limited
from benchmarks.iopddl.priced_core import PricedCore, PricedLoops, combine, drop_costly, improve
from benchmarks.iopddl.solving import solve_limited
from tests.solver.brute_force import brute_force
from tests.solver.cases import layered_limited, random_limited, random_problem, relabelled

# The example of the contest's description.
EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def optimum(limited: Limited) -> float:
    """The least cost of a choice that fits, by trying every one."""
    return brute_force(limited.problem, lambda choice: fits(limited, choice))[0]


@pytest.mark.slow
def test_example_is_read_and_solved(tmp_path: Path) -> None:
    file = tmp_path / "example.json"
    file.write_text(json.dumps(EXAMPLE))
    limited = read_contest(file)
    assert limited.limit_bytes == 50
    assert (evaluate(limited.problem, (0, 0, 2, 1, 0)), peak_bytes(limited, (0, 0, 2, 1, 0))) == (445.0, 50)
    assert main([str(file), "--seconds", "20", "--out", str(tmp_path / "out")]) == 0
    choice = json.loads((tmp_path / "out" / "example.json").read_text())
    assert evaluate(limited.problem, choice) == optimum(limited)


def test_huge_costs_are_forbidden_and_equal_matrices_shared(tmp_path: Path) -> None:
    stored = {
        "nodes": {
            "intervals": [[0, 0], [5, 2], [0, 9]],
            "costs": [[1, 10**18], [0, 2**64 - 1], [3, 4]],
            "usages": [[9, 9], [9, 9], [0, 7]],
        },
        "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[0, 10**18, 3, 4], [0, 10**18, 3, 4]]},
    }
    file = tmp_path / "huge.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"problem": stored}).encode()))
    limited = read_contest(file)
    problem = limited.problem
    assert limited.limit_bytes is None
    assert problem.node_cost[1][1] == math.inf
    assert problem.edges[0].cost is problem.edges[1].cost
    assert problem.edges[0].cost.tolist() == [[0.0, math.inf], [3.0, 4.0]]
    assert [use.node for use in limited.uses] == [2]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"problem": {"nodes": {}}}')
    with pytest.raises(ValueError, match=r"x\.json: not a contest problem"):
        read_contest(tmp_path / "x.json")


SEEDS = st.integers(0, 2**32 - 1)


def check(limited: Limited) -> None:
    expected, found = optimum(limited), solve_limited(limited, time_limit_s=120)
    assert found.bound <= found.objective == pytest.approx(expected, abs=1e-9)
    if expected < math.inf:
        assert (found.status, found.gap) == (Status.OPTIMAL, 0.0)
        assert evaluate(limited.problem, found.choice) == found.objective
        assert peak_bytes(limited, found.choice) == found.peak_bytes <= (limited.limit_bytes or 0)
        return
    assert (found.status, found.choice) == (Status.INFEASIBLE, ())
    assert found.infeasibility is not None
    smallest: list[int] = []
    brute_force(limited.problem, lambda choice: smallest.append(peak_bytes(limited, choice)))
    if smallest:
        assert 0 < found.infeasibility.bytes_over <= min(smallest) - (limited.limit_bytes or 0)
        assert found.infeasibility.times


@settings(max_examples=500, deadline=None)
@given(seed=SEEDS, forbids=st.booleans())
def test_agrees_with_brute_force(seed: int, forbids: bool) -> None:
    check(random_limited(seed) if forbids else random_limited(seed, forbidden=0.0))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_agrees_with_brute_force_by_prices_alone(seed: int) -> None:
    limited = random_limited(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "EXACT_ENTRIES", -1)
        patch.setattr(solving, "EXACT_NODES", -1)
        check(limited)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_relabelling_never_changes_the_best_cost(seed: int) -> None:
    limited = random_limited(seed, nodes=9, forbidden=0.05)
    first, second = solve_limited(limited), solve_limited(relabelled(limited, seed))
    assert first.status is second.status
    assert first.objective == pytest.approx(second.objective)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_reductions_keep_the_best_cost_that_fits(seed: int) -> None:
    limited = random_limited(seed, nodes=5)
    expected = optimum(limited)
    try:
        smaller, reduction = reduce_limited(limited)
    except ConflictError:
        assert expected == math.inf
        return
    found, choice = brute_force(smaller.problem, lambda choice: fits(smaller, choice))
    assert found + reduction.offset == pytest.approx(expected)
    if choice is not None:
        undone = reduction.undo(choice)
        assert evaluate(limited.problem, undone) == pytest.approx(expected)
        assert peak_bytes(limited, undone) == peak_bytes(smaller, choice)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_what_is_dominated_is_not_needed(seed: int) -> None:
    problem = merge_parallel(random_problem(seed, nodes=5, most=5)).problem
    rng, sizes = np.random.default_rng(seed), [len(cost) for cost in problem.node_cost]
    may_beat = {node: rng.random((n, n)) < 0.5 for node, n in enumerate(sizes) if node % 2}
    kept, passed_over = drop_dominated(problem, may_beat), drop_dominated(problem, may_beat, most_work=0)
    assert passed_over.problem is problem
    assert brute_force(kept.problem)[0] == brute_force(problem)[0]
    for node, strategies in enumerate(kept.follow or ()):
        for s in set(range(sizes[node])) - set(strategies.tolist()):  # another one beat it, and was allowed to
            assert node not in may_beat or may_beat[node][:, s].any()


def test_a_strategy_that_costs_more_everywhere_is_dropped() -> None:
    edge = Edge(source=0, target=1, cost=np.array([[0.0, 1.0], [1.0, 2.0]]))
    problem = Problem(node_cost=(np.array([0.0, 0.0]), np.array([0.0, 0.0])), edges=(edge,))
    dropped = drop_dominated(problem, {1: np.zeros((2, 2), dtype=bool)})
    assert [strategies.tolist() for strategies in dropped.follow or ()] == [[0], [0, 1]]


def core_of(limited: Limited, *, rounds: int, seed: int = 0) -> PricedCore:
    flat = flatten_limited(limited)
    core = PricedCore(PricedLoops(flat), least_memory(flat), seed, lambda cost: None)
    improve(core, Limits(rounds=rounds), lambda core: (None, False), lambda line: None)
    return core


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=SEEDS)
def test_bounds_at_prices_hold_and_fixing_keeps_every_cheaper_choice(seed: int) -> None:
    try:
        limited, _ = reduce_limited(random_limited(seed, nodes=7, forbidden=0.0))
    except ConflictError:
        return
    expected = optimum(limited)
    if not limited.problem.node_cost or expected == math.inf:
        return
    core = core_of(limited, rounds=5)
    assert core.bound - 1e-9 <= expected <= core.cost + 1e-9
    if core.choice is not None:
        assert fits(limited, core.choice.tolist())
        smaller = drop_costly(limited, core)
        left = math.inf if smaller is None else optimum(smaller[0]) + smaller[1].offset
        assert min(core.cost, left) == pytest.approx(expected)


def test_rounds_repeat_themselves() -> None:
    limited, _ = reduce_limited(layered_limited(15, width=4, strategies=6, seed=5, tight=1.15))
    first, second = core_of(limited, rounds=12, seed=4), core_of(limited, rounds=12, seed=4)
    assert first.choice is not None
    assert second.choice is not None
    assert first.choice.tolist() == second.choice.tolist()
    assert (first.cost, first.bound) == (second.cost, second.bound)


@pytest.mark.parametrize("tight", [None, 1.3, 1.1])
def test_a_whole_solve_through_the_core_is_proven(monkeypatch: pytest.MonkeyPatch, tight: float | None) -> None:
    limited = layered_limited(6, width=4, strategies=5, seed=3, tight=tight)
    expected = solve_limited(limited)
    assert expected.status is Status.OPTIMAL
    monkeypatch.setattr(solving, "EXACT_ENTRIES", -1)
    monkeypatch.setattr(solving, "EXACT_NODES", -1)
    found = solve_limited(limited, time_limit_s=120)
    assert found.objective == pytest.approx(expected.objective)
    assert found.bound <= found.objective
    assert found.incumbents[-1][1] == found.objective


def test_the_time_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "EXACT_ENTRIES", -1)
    limited = layered_limited(120, width=5, strategies=16, seed=2, tight=1.1)
    begun = time.perf_counter()
    found = solve_limited(limited, time_limit_s=4.0)
    assert time.perf_counter() - begun < 6.0
    assert found.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert math.isfinite(found.gap)


def test_combining_choices_keeps_each_of_them() -> None:
    limited = layered_limited(2, width=3, strategies=4, seed=1, tight=4.0)
    choices = [np.random.default_rng(seed).integers(0, 4, 6) for seed in range(2)]
    smaller, reduction = combine(limited, choices)
    costs = [evaluate(limited.problem, choice.tolist()) for choice in choices if fits(limited, choice.tolist())]
    assert costs
    assert optimum(smaller) + reduction.offset <= min(costs)


def test_the_compiled_memory_agrees_with_peak_bytes() -> None:
    limited = layered_limited(8, width=4, strategies=5, seed=9, tight=2.0)
    loops = PricedLoops(flatten_limited(limited))
    rng = np.random.default_rng(1)
    assert limited.limit_bytes is not None
    for _ in range(20):
        choice = rng.integers(0, 5, len(limited.problem.node_cost))
        assert loops.cost(choice) == pytest.approx(evaluate(limited.problem, choice.tolist()))
        assert limited.limit_bytes - int(loops.left(choice).min()) == peak_bytes(limited, choice.tolist())


def test_memory_decides_between_cheap_and_small() -> None:
    problem = Problem(node_cost=(np.array([1.0, 5.0]), np.array([1.0, 3.0])))
    uses = (
        Use(node=0, start=0, stop=2, bytes=np.array([10, 2])),
        Use(node=1, start=1, stop=3, bytes=np.array([10, 2])),
    )
    found = solve_limited(Limited(problem=problem, uses=uses, limit_bytes=12))
    assert (found.choice, found.objective, found.peak_bytes) == ((0, 1), 4.0, 12)


def test_infeasible_says_when_who_and_by_how_much() -> None:
    edge = Edge(source=0, target=1, cost=np.array([[0.0, math.inf], [math.inf, 0.0]]))
    uses = (
        Use(node=0, start=0, stop=5, bytes=np.array([9, 1])),
        Use(node=1, start=3, stop=9, bytes=np.array([1, 7])),
    )
    problem = Problem(node_cost=(np.zeros(2), np.zeros(2)), edges=(edge,))
    why = solve_limited(Limited(problem=problem, uses=uses, limit_bytes=7)).infeasibility
    assert why is not None
    assert (why.times, set(why.nodes), why.bytes_over) == ((3,), {0, 1}, 1)


def test_bytes_must_be_whole_numbers() -> None:
    use = Use(node=0, start=0, stop=1, bytes=np.array([0.5]))
    with pytest.raises(ValueError, match="use 0: bytes"):
        solve_limited(Limited(problem=Problem(node_cost=(np.zeros(1),)), uses=(use,), limit_bytes=1))
