"""The entry point of the solver: reduce, solve each component by tables or else by rounds of the anytime solver, undo,
and report what is proven.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from autopar.solver.anytime import Core, Limits, Loops, TableSearch, improve
from autopar.solver.elimination import solve_by_tables
from autopar.solver.presolve import ConflictError, any_allowed, components, reduce_all
from autopar.solver.problem import Problem, Solution, Status, evaluate, flatten, validate


def solve(
    problem: Problem,
    *,
    time_limit_s: float = math.inf,
    relative_gap: float = 0.0,
    rounds: int | None = None,
    cutoff: float = math.inf,
    log: Callable[[str], None] = lambda line: None,
) -> Solution:
    """The cheapest choice, or the best found by the limits with its bound and gap.

    rounds: of the anytime solver, for each component that tables are too large for; None = until a proof or the time
        limit. With a time limit that is not reached, the answer is the same each time, on any machine.
    cutoff: stop once it is proven that every choice costs so much or more: the solution has that bound, and a choice
        that may cost more than the best.
    log: called with a line of progress now and then.

    Raises: ValueError when shapes or values of the problem are wrong.
    """
    validate(problem)
    deadline = time.perf_counter() + time_limit_s
    try:
        reduced = reduce_all(problem)
        parts = list(components(reduced.problem))
        full = [0] * len(reduced.problem.node_cost)
        least = [_least(part) for part, _ in parts] if cutoff < math.inf else [0.0] * len(parts)
        bound, all_solved = 0.0, True
        for number, (part, members) in enumerate(parts):
            before = bound + sum(least[number + 1 :])
            limits = Limits(
                deadline=deadline, rounds=rounds, relative_gap=relative_gap, cutoff=cutoff - reduced.offset - before
            )
            choice, proven = _solve_part(part, limits, log)
            bound, all_solved = bound + proven, all_solved and choice is not None
            for node, strategy in zip(members, choice or (), strict=choice is not None):
                full[node] = strategy
    except ConflictError:
        return Solution(choice=(), status=Status.INFEASIBLE, objective=math.inf, bound=math.inf, gap=math.inf)
    bound += reduced.offset
    if not all_solved:
        return Solution(choice=(), status=Status.UNKNOWN, objective=math.inf, bound=bound, gap=math.inf)
    return _solution(problem, reduced.undo(full), bound, relative_gap)


def _solution(problem: Problem, choice: tuple[int, ...], bound: float, wanted_gap: float) -> Solution:
    """A choice in the problem's own terms, checked by `evaluate`."""
    cost = evaluate(problem, choice)
    assert cost < math.inf, "the solver chose what is not allowed"
    gap = relative_gap(cost, bound)
    closed = gap <= 1e-8  # sums of floats in another order, and the core's safety margin, differ by less
    return Solution(
        choice=choice,
        status=Status.OPTIMAL if closed or gap <= wanted_gap else Status.FEASIBLE,
        objective=cost,
        bound=cost if closed else bound,
        gap=0.0 if closed else gap,
    )


def relative_gap(objective: float, bound: float) -> float:
    """How far a cost may be above the best, as a part of it: 0 when they meet, inf when either is missing."""
    if not (np.isfinite(objective) and np.isfinite(bound)):
        return math.inf
    return (objective - bound) / abs(objective) if objective > bound else 0.0


def _least(part: Problem) -> float:
    """No choice costs less: every node and edge at its cheapest."""
    costs = (*part.node_cost, *(edge.cost for edge in part.edges))
    return float(sum(cost.min() for cost in costs))


def _solve_part(part: Problem, limits: Limits, log: Callable[[str], None]) -> tuple[tuple[int, ...] | None, float]:
    """(a choice or None, the bound): by tables when these are small enough, else by the anytime core.

    Raises: ConflictError when no choice is allowed.
    """
    choice = solve_by_tables(part)
    if choice is not None:
        return choice, evaluate(part, choice)
    start = tuple(int(cost.argmin()) for cost in part.node_cost)
    if evaluate(part, start) == math.inf:
        allowed = any_allowed(part, limits.deadline)
        if allowed is None:
            return None, _least(part)
        start = allowed
    flat = flatten(part)
    core, tables = Core(Loops(flat), np.array(start), seed=0), TableSearch(part, flat, limits.relative_gap, log)
    improve(core, limits, tables.settle, log)
    assert core.choice is not None, "its start is allowed"
    return tuple(core.choice.tolist()), max(core.bound, min(tables.bound, core.cost))
