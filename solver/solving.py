"""The solver's one door: reduce, solve what is left, undo, and say what is proven.

Memory mostly does not bind: the problem is first solved without it, exactly and by elimination as far as that goes. Only when the
answer is over the limit, or when time runs out, do the rows of formula (4) come in.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from . import checking
from .checking import relative_gap as gap_of
from .ilp import Answer, Backend, build, solve_program
from .livespans import Row, binding_rows, cannot_fit
from .presolve import ConflictError, Reduction, chain, components, fold_forced, reduce_all
from .problem import Infeasibility, Problem, Solution, Status, validate

THREADS = 2


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    relative_gap: float = 0.0,
    backend: Backend = Backend.HIGHS,
) -> Solution:
    """The cheapest choice that fits, or the best found by the time limit with its bound and gap.

    Raises: ValueError when shapes or values of the problem are wrong.
    """
    validate(problem)
    begun = time.perf_counter()
    deadline = begun + time_limit_s
    why = cannot_fit(problem)
    if why is not None:
        return checking.infeasible(why, time.perf_counter() - begun)
    try:
        free = reduce_all(replace(problem, uses=(), limit_bytes=None))
        choice, bound = _solve_parts(free, (), deadline, seed, relative_gap, backend)
        incumbents: list[tuple[float, float]] = []
        if choice is not None:
            _, peak = checking.evaluate(problem, choice)
            if problem.limit_bytes is not None and peak > problem.limit_bytes:
                choice = None
        if choice is None and binding_rows(problem):
            tight = reduce_all(problem)
            why = cannot_fit(tight.problem)
            if why is not None:
                raise ConflictError(why)
            choice, tight_bound = _solve_parts(
                tight, binding_rows(tight.problem), deadline, seed, relative_gap, backend
            )
            bound = max(bound, tight_bound)
    except ConflictError as conflict:
        return checking.infeasible(conflict.why, time.perf_counter() - begun)
    wall_s = time.perf_counter() - begun
    if choice is None:
        if bound == math.inf:
            why = Infeasibility(times=(), nodes=(), bytes_over=0, reason="the search proved that no choice fits")
            return checking.infeasible(why, wall_s)
        return Solution(
            choice=(), status=Status.UNKNOWN, objective=math.inf, bound=bound, gap=math.inf, wall_s=wall_s, peak_bytes=0
        )
    cost, peak = checking.evaluate(problem, choice)
    assert cost < math.inf, "the solver chose what is not allowed"
    assert problem.limit_bytes is None or peak <= problem.limit_bytes, "the solver chose what does not fit"
    bound = min(bound, cost)
    gap = gap_of(cost, bound)
    tolerance = max(relative_gap, 1e-9)  # below this, sums of floats in another order differ
    return Solution(
        choice=choice,
        status=Status.OPTIMAL if gap <= tolerance else Status.FEASIBLE,
        objective=cost,
        bound=cost if gap <= 1e-9 else bound,
        gap=0.0 if gap <= 1e-9 else gap,
        wall_s=wall_s,
        peak_bytes=peak,
        incumbents=(*incumbents, (wall_s, cost)),
    )


def _solve_parts(
    reduced: Reduction, rows: tuple[Row, ...], deadline: float, seed: int, relative_gap: float, backend: Backend
) -> tuple[tuple[int, ...] | None, float]:
    """Solve each component of a reduced problem; the choice for the whole (None when one has none) and the bound."""
    full = [0] * len(reduced.problem.node_cost)
    bound = reduced.offset
    found = True
    for part, members in components(reduced.problem, joined=[row.nodes for row in rows]):
        place = {node: at for at, node in enumerate(members)}
        memory = tuple(
            replace(row, nodes=tuple(place[node] for node in row.nodes)) for row in rows if row.nodes[0] in place
        )
        answer = _solve_part(part, memory, deadline, seed, relative_gap, backend)
        bound += answer.bound
        if answer.choice is None:
            found = False
            continue
        for node, strategy in zip(members, answer.choice, strict=True):
            full[node] = strategy
    return (reduced.undo(full) if found else None), bound


def _solve_part(
    part: Problem, memory: tuple[Row, ...], deadline: float, seed: int, relative_gap: float, backend: Backend
) -> Answer:
    if len(part.node_cost) == 1 and not memory:
        best = int(part.node_cost[0].argmin())
        return Answer(choice=(best,), bound=float(part.node_cost[0][best]), proven=True)
    folded = chain(Reduction(problem=part, undo=tuple), fold_forced(part))
    answer = solve_program(
        build(folded.problem, memory),
        backend=backend,
        time_limit_s=deadline - time.perf_counter(),
        relative_gap=relative_gap,
        seed=seed,
        threads=THREADS,
    )
    if answer.choice is None:
        return answer
    cost, _ = checking.evaluate(part, answer.choice)
    return replace(answer, bound=cost if answer.proven and relative_gap == 0.0 else min(answer.bound, cost))
