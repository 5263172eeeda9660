"""The entry point of the solver: reduce, solve the rest, undo, and report what is proven.

Memory seldom binds: a problem is first solved without it, exactly, and by elimination as far as possible. If the answer
exceeds the limit, the problem is reduced with its memory, and solved by the integer program if that is small, otherwise
by the anytime solver, which also serves a number of rounds without a limit. Strategies that the bound of the anytime
solver excludes are dropped until the integer program can finish the proof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.solver.elimination import solve_by_tables
from autopar.solver.exhaustive_search import evaluate, infeasible, peak_bytes, relative_gap
from autopar.solver.integer_program import (
    EXACT_ENTRIES,
    Answer,
    Backend,
    Settings,
    can_bind,
    cannot_fit,
    fit,
    holders,
    least_memory,
    solve_lazily,
)
from autopar.solver.presolve import ConflictError, Reduction, components, reduce_all
from autopar.solver.problem import Flat, Infeasibility, Problem, Solution, Status, flatten, validate

EXACT_PART = 0.3  # of the time left that the program may take before the anytime core does better
FIT_PART = 0.25  # of the time left that finding any choice that fits, or why there is none, may take
EXACT_NODES = 5_000  # nodes up to which a problem is tried without its memory first


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    relative_gap: float = 0.0,
    backend: Backend = Backend.HIGHS,
    rounds: int | None = None,
    cutoff: float = math.inf,
    log: Callable[[str], None] | None = None,
) -> Solution:
    """The cheapest choice that fits, or the best found by the time limit with its bound and gap.

    time_limit_s: may be infinite where `rounds` end the search.
    rounds: stop the anytime core after this many rounds, and give what has no limit to keep to nothing that stops by
    the clock: with a time limit that is not reached, its answer is the same each time, on any machine.
    cutoff: stop once it is proven that every choice costs so much or more: the solution has that bound, and a choice
        that may cost more than the best.
    log: called with a line of progress now and then.

    Raises: ValueError when shapes or values of the problem are wrong.
    """
    validate(problem)
    run = _Run(problem, time_limit_s, seed, relative_gap, backend, rounds, log, cutoff)
    why = cannot_fit(problem)
    if why is not None:
        return infeasible(why, run.seconds())
    try:
        if problem.limit_bytes is None or len(problem.node_cost) <= EXACT_NODES:
            free = _solve_free(run)
            if free is not None:
                return run.solution(free)
        return run.solution(_solve_limited(run))
    except ConflictError as conflict:
        return infeasible(conflict.why, run.seconds())


class _Run:
    """One call's settings, clock and incumbents."""

    def __init__(
        self,
        problem: Problem,
        time_limit_s: float,
        seed: int,
        relative_gap: float,
        backend: Backend,
        rounds: int | None,
        log: Callable[[str], None] | None,
        cutoff: float = math.inf,
    ):
        self.problem = problem
        self.begun = time.perf_counter()
        self.settings = Settings(
            backend=backend, deadline=self.begun + time_limit_s, relative_gap=relative_gap, seed=seed
        )
        self.rounds = rounds
        self.cutoff = cutoff
        self.log = log if log is not None else _silent
        self.incumbents: list[tuple[float, float]] = []

    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def offer(self, cost: float) -> None:
        if not self.incumbents or cost < self.incumbents[-1][1]:
            self.incumbents.append((self.seconds(), cost))

    def solution(self, answer: Answer) -> Solution:
        """The answer in the problem's own terms, checked by `evaluate`."""
        if answer.choice is None:
            return Solution(
                choice=(),
                status=Status.UNKNOWN,
                objective=math.inf,
                bound=answer.bound,
                gap=math.inf,
                wall_s=self.seconds(),
                peak_bytes=0,
            )
        cost, peak = evaluate(self.problem, answer.choice)
        assert cost < math.inf, "the solver chose what is not allowed"
        limit = self.problem.limit_bytes
        assert limit is None or peak <= limit, f"the solver chose {peak} bytes, {limit} fit"
        self.offer(cost)
        gap = relative_gap(cost, min(answer.bound, cost))
        closed = gap <= 1e-8  # sums of floats in another order, and the core's safety margin, differ by less
        return Solution(
            choice=answer.choice,
            status=Status.OPTIMAL if closed or gap <= self.settings.relative_gap else Status.FEASIBLE,
            objective=cost,
            bound=cost if closed else answer.bound,
            gap=0.0 if closed else gap,
            wall_s=self.seconds(),
            peak_bytes=peak,
            incumbents=tuple(self.incumbents),
        )


def _silent(_: str) -> None:
    pass


def _solve_free(run: _Run) -> Answer | None:
    """The answer without the limit, when it fits all the same; None otherwise, or when what is left is large.

    Raises: ConflictError when the strategies exclude each other.
    """
    reduced = reduce_all(replace(run.problem, uses=(), limit_bytes=None))
    limited = run.problem.limit_bytes is not None and len(can_bind(flatten(run.problem))) > 0
    if limited and reduced.problem.num_pairs > EXACT_ENTRIES:
        return None
    answer = _solve_reduced(run, reduced)
    if answer.choice is None:
        return None if limited else answer
    limit = run.problem.limit_bytes
    return answer if limit is None or peak_bytes(run.problem, answer.choice) <= limit else None


def _solve_limited(run: _Run) -> Answer:
    """The answer under the limit. Raises: ConflictError with the reason when nothing fits."""
    reduced = reduce_all(run.problem)
    run.log(
        f"{run.seconds():.1f} s: reduced to {len(reduced.problem.node_cost)} nodes, {reduced.problem.num_pairs} pairs"
    )
    try:
        why = cannot_fit(reduced.problem)
        if why is not None:
            raise ConflictError(why)
        return _solve_reduced(run, reduced)
    except ConflictError as conflict:  # times are the problem's own; nodes of the reduced problem may stand for many
        nodes = holders(run.problem, conflict.why.times[0]) if conflict.why.times else ()
        raise ConflictError(replace(conflict.why, nodes=nodes)) from None


def _solve_reduced(run: _Run, reduced: Reduction) -> Answer:
    """Each component of a reduced problem; components joined by a memory row are one."""
    problem = reduced.problem
    flat = flatten(problem) if problem.uses and problem.limit_bytes is not None else None
    cutoff = run.cutoff - reduced.offset
    if flat is not None and len(can_bind(flat)):
        answer = _solve_part(run, problem, flat, reduced.offset, cutoff)
    else:
        full = [0] * len(problem.node_cost)
        bound, all_solved, proven = 0.0, True, True
        parts = list(components(replace(problem, uses=(), limit_bytes=None)))
        least = [_least(part) for part, _ in parts] if run.cutoff < math.inf else [0.0] * len(parts)
        for number, (part, members) in enumerate(parts):
            piece = _solve_part(run, part, flatten(part), None, cutoff - bound - sum(least[number + 1 :]))
            bound, proven = bound + piece.bound, proven and piece.proven
            all_solved = all_solved and piece.choice is not None
            for node, strategy in zip(members, piece.choice or (), strict=piece.choice is not None):
                full[node] = strategy
        answer = Answer(choice=tuple(full) if all_solved else None, bound=bound, proven=proven)
    return Answer(
        choice=reduced.undo(answer.choice) if answer.choice is not None else None,
        bound=answer.bound + reduced.offset,
        proven=answer.proven,
    )


def _least(part: Problem) -> float:
    """No choice costs less: every node and edge at its cheapest."""
    costs = (*part.node_cost, *(edge.cost for edge in part.edges))
    return float(sum(cost.min() for cost in costs))


def _solve_part(run: _Run, part: Problem, flat: Flat, offset: float | None, cutoff: float) -> Answer:
    """Tables or the program when they can do it, the anytime core when not, until its bound is at the cutoff.

    offset: of costs reported as incumbents; None = report none.

    Raises: ConflictError with the reason when nothing fits.
    """
    limited = len(can_bind(flat)) > 0
    choice = None if limited else solve_by_tables(part)
    if choice is not None:
        return Answer(choice=choice, bound=evaluate(part, choice)[0], proven=True)
    start = least_memory(flat)
    if not _fits(part, start):
        now = time.perf_counter()
        fitting = fit(part, flat, replace(run.settings, deadline=now + FIT_PART * (run.settings.deadline - now)))
        if isinstance(fitting, Infeasibility):
            raise ConflictError(fitting)
        start = np.array(fitting, dtype=np.int64) if fitting is not None else start
    if offset is not None and _fits(part, start):
        run.offer(evaluate(part, start.tolist())[0] + offset)
    bound = -math.inf
    if part.num_pairs <= EXACT_ENTRIES and (limited or run.rounds is None):
        now = time.perf_counter()
        settings = replace(run.settings, deadline=now + EXACT_PART * (run.settings.deadline - now))
        answer = solve_lazily(part, flat, settings)
        bound = answer.bound
        if answer.choice is not None:
            cost, _ = evaluate(part, answer.choice)
            exact = answer.proven and run.settings.relative_gap == 0.0
            if answer.proven:
                return replace(answer, bound=cost if exact else min(bound, cost))
            start = np.array(answer.choice, dtype=np.int64)
    return _solve_anytime(run, part, flat, offset, start, bound, cutoff)


def _fits(part: Problem, choice: np.ndarray) -> bool:
    cost, peak = evaluate(part, choice.tolist())
    return cost < math.inf and (part.limit_bytes is None or peak <= part.limit_bytes)


def _solve_anytime(
    run: _Run, part: Problem, flat: Flat, offset: float | None, start: np.ndarray, bound: float, cutoff: float
) -> Answer:
    """The anytime core, with the exact program on what its bound and its choices leave; bound: known before."""
    from autopar.solver.anytime import Finish, Limits, TableSearch, improve

    settings = run.settings

    def report(_: np.ndarray, cost: float) -> None:
        if offset is not None:
            run.offer(cost + offset)

    finish: Finish | TableSearch
    if run.rounds is None or len(can_bind(flat)):
        finish = Finish(part, flat, settings, run.log)
    else:
        finish = TableSearch(part, flat, settings.relative_gap, run.log)
    best = improve(
        flat,
        start=start,
        seed=settings.seed,
        limits=Limits(deadline=settings.deadline, rounds=run.rounds, relative_gap=settings.relative_gap, cutoff=cutoff),
        report=report,
        settle=finish.settle,
        log=lambda line: run.log(f"{run.seconds():.1f} s: {line}"),
    )
    choice = tuple(best.choice.tolist()) if best.choice is not None else None
    return Answer(choice=choice, bound=max(best.bound, bound, min(finish.bound, best.cost)), proven=False)
