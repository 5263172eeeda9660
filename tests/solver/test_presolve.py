"""Each reduction keeps the best cost, and its inverse gives a choice of that cost."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import Edge, Problem, evaluate, presolve
from autopar.solver.presolve import (
    ConflictError,
    Reduction,
    any_allowed,
    chain,
    drop_forbidden,
    eliminate,
    fold_forced,
    merge_followers,
    merge_parallel,
    reduce_all,
)
from tests.solver.brute_force import brute_force
from tests.solver.cases import random_problem

STEPS = [merge_parallel, drop_forbidden, fold_forced, merge_followers, eliminate, reduce_all]


@pytest.mark.cases(4)
@pytest.mark.parametrize("reduce", STEPS, ids=lambda step: step.__name__)
@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_best_cost_is_kept(reduce: Callable[[Problem], Reduction], seed: int) -> None:
    problem = random_problem(seed, nodes=5)
    expected, _ = brute_force(problem)
    try:
        start = drop_forbidden(merge_parallel(problem).problem)
        smaller = chain(start, reduce(start.problem))
    except ConflictError:
        assert expected == math.inf
        return
    found, choice = brute_force(smaller.problem)
    assert found + smaller.offset == pytest.approx(expected)
    if choice is not None:
        assert evaluate(problem, smaller.undo(choice)) == pytest.approx(expected)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_choice_that_is_allowed_is_found_where_there_is_one(seed: int) -> None:
    problem = merge_parallel(random_problem(seed, forbidden=0.4)).problem
    if brute_force(problem)[1] is None:
        with pytest.raises(ConflictError):
            any_allowed(problem, math.inf)
    else:
        choice = any_allowed(problem, math.inf)
        assert choice is not None
        assert evaluate(problem, choice) < math.inf
    assert any_allowed(problem, -math.inf) is None


@pytest.mark.slow
def test_a_choice_that_is_allowed_is_found_in_a_long_chain() -> None:
    forbids = np.zeros((3, 3))
    forbids[0, 0] = math.inf
    cost = np.array([0.0, 1.0, 2.0])
    edges = tuple(Edge(source=at, target=at + 1, cost=forbids) for at in range(1499))
    problem = Problem(node_cost=(cost,) * 1500, edges=edges)
    choice = any_allowed(problem, math.inf)
    assert choice is not None
    assert evaluate(problem, choice) < math.inf


def test_a_follower_says_which_strategy_it_takes() -> None:
    follows = np.array([[math.inf, 2.0], [1.0, math.inf]])
    problem = Problem(
        node_cost=(np.array([0.0, 0.0]), np.array([5.0, 7.0])),
        edges=(Edge(source=0, target=1, cost=follows),),
    )
    merged = merge_followers(problem)
    (cost,) = merged.problem.node_cost
    assert cost.tolist() == [9.0, 6.0]
    assert merged.lead == [0, 0]
    assert [rule.tolist() for rule in merged.follow or ()] == [[0, 1], [1, 0]]
    assert merged.undo((0,)) == (0, 1)


def test_a_chain_is_eliminated_whole() -> None:
    swap = np.array([[0.0, 9.0], [9.0, 0.0]])
    problem = Problem(
        node_cost=(np.array([0.0, 4.0]), np.array([3.0, 0.0]), np.array([1.0, 2.0])),
        edges=(Edge(source=0, target=1, cost=swap), Edge(source=1, target=2, cost=swap)),
    )
    reduced = eliminate(problem)
    assert reduced.problem.node_cost == ()
    assert reduced.offset == 4.0
    assert reduced.undo(()) == (0, 0, 0)


@pytest.mark.parametrize("part", [1, 7, 1 << 16])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_tables_are_the_same_whatever_part_of_them_is_worked_out_at_a_time(part: int, seed: int) -> None:
    """To the bit, so that ties are broken alike; and their choice is the cheapest."""
    rng = np.random.default_rng(seed)
    around = tuple(rng.integers(1, 4, size=rng.integers(0, 4)))
    terms = [rng.random((5, *(n if rng.random() < 0.6 else 1 for n in around))) for _ in range(4)]
    whole = np.broadcast_to(terms[0] + terms[1] + terms[2] + terms[3], (5, *around)).min(axis=0)
    assert presolve.least_of_sum(terms, around, part).tobytes() == whole.tobytes()
    problem = merge_parallel(random_problem(seed, forbidden=0.0)).problem
    choice = presolve.solve_by_tables(problem)
    assert choice is not None
    assert evaluate(problem, choice) == pytest.approx(brute_force(problem)[0])
