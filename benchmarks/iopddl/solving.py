"""From a problem in limited memory to an answer: what is tried in which order, and what is proven.

Memory seldom binds: a problem is first solved without it. If the answer exceeds the limit, the problem is reduced with
its memory, and solved by the integer program if that is small, otherwise by the anytime solver with prices on memory.
Strategies that the bound of the anytime solver excludes are dropped until the integer program can finish the proof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver import Status, evaluate, solve
from autopar.solver.presolve import ConflictError, Reduction
from autopar.solver.problem import validate
from autopar.solver.solving import Limits, relative_gap
from benchmarks.iopddl.integer_program import EXACT_ENTRIES, fit, solve_lazily
from benchmarks.iopddl.memory import (
    FlatLimited,
    Infeasibility,
    Limited,
    NothingFitsError,
    can_bind,
    cannot_fit,
    fits,
    flatten_limited,
    holders,
    least_memory,
    num_pairs,
    peak_bytes,
    reduce_limited,
)
from benchmarks.iopddl.priced_core import Finish, PricedCore, PricedLoops, improve

EXACT_PART = 0.3  # of the time left that the program may take before the anytime core does better
FIT_PART = 0.25  # of the time left that finding any choice that fits, or why there is none, may take
EXACT_NODES = 5_000  # nodes up to which a problem is tried without its memory first
FREE_ROUNDS = 4  # of the anytime solver for a problem without its memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """As `autopar.solver.Solution`. incumbents: (seconds since the start, cost) of each improvement."""

    status: Status
    choice: tuple[int, ...] = ()
    objective: float = math.inf
    bound: float = -math.inf
    gap: float = math.inf
    wall_s: float
    peak_bytes: int = 0
    incumbents: tuple[tuple[float, float], ...] = ()
    infeasibility: Infeasibility | None = None


def solve_limited(
    limited: Limited, *, time_limit_s: float = 60.0, seed: int = 0, log: Callable[[str], None] = lambda line: None
) -> Found:
    """The cheapest choice that fits, or the best found by the time limit with its bound and gap.

    Raises: ValueError when shapes or values of the problem are wrong.
    """
    validate(limited.problem)
    _check_uses(limited)
    limited = replace(limited, uses=tuple(use for use in limited.uses if use.start < use.stop))
    run = _Run(limited, time_limit_s, seed, log)
    try:
        choice, bound = run.answer()
    except NothingFitsError as error:
        return Found(status=Status.INFEASIBLE, bound=math.inf, wall_s=run.seconds(), infeasibility=error.why)
    except ConflictError as error:
        why = Infeasibility(times=(), nodes=(), bytes_over=0, reason=str(error))
        return Found(status=Status.INFEASIBLE, bound=math.inf, wall_s=run.seconds(), infeasibility=why)
    if choice is None:
        return Found(status=Status.UNKNOWN, bound=bound, wall_s=run.seconds())
    cost = evaluate(limited.problem, choice)
    assert cost < math.inf, "the solver chose what is not allowed"
    assert fits(limited, choice), "the solver chose what does not fit"
    run.offer(cost)
    gap = relative_gap(cost, bound)
    closed = gap <= 1e-8  # sums of floats in another order, and the core's safety margin, differ by less
    return Found(
        choice=choice,
        status=Status.OPTIMAL if closed else Status.FEASIBLE,
        objective=cost,
        bound=cost if closed else bound,
        gap=0.0 if closed else gap,
        wall_s=run.seconds(),
        peak_bytes=peak_bytes(limited, choice),
        incumbents=tuple(run.incumbents),
    )


def _check_uses(limited: Limited) -> None:
    costs = limited.problem.node_cost
    for number, use in enumerate(limited.uses):
        if not 0 <= use.node < len(costs):
            raise ValueError(f"use {number}: node {use.node} does not exist")
        if use.bytes.shape != costs[use.node].shape:
            raise ValueError(f"use {number}: expected bytes of shape {costs[use.node].shape}, got {use.bytes.shape}")
        if use.bytes.dtype.kind not in "iu":
            raise ValueError(f"use {number}: bytes must be whole numbers, got {use.bytes.dtype}")


class _Run:
    """One call's problem, clock and incumbents."""

    def __init__(self, limited: Limited, time_limit_s: float, seed: int, log: Callable[[str], None]) -> None:
        self.limited, self.seed = limited, seed
        self.begun = time.perf_counter()
        self.deadline = self.begun + time_limit_s
        self.log = lambda line: log(f"{self.seconds():.1f} s: {line}")
        self.incumbents: list[tuple[float, float]] = []

    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def part(self, part: float) -> float:
        """A deadline after a part of the time left."""
        now = time.perf_counter()
        return now + part * (self.deadline - now)

    def offer(self, cost: float) -> None:
        if not self.incumbents or cost < self.incumbents[-1][1]:
            self.incumbents.append((self.seconds(), cost))

    def answer(self) -> tuple[tuple[int, ...] | None, float]:
        """(a choice that fits or None, the bound).

        Raises: NothingFitsError, ConflictError.
        """
        limited = self.limited
        if (why := cannot_fit(limited)) is not None:
            raise NothingFitsError(why)
        binds = len(can_bind(flatten_limited(limited))) > 0
        if not binds or len(limited.problem.node_cost) <= EXACT_NODES:
            rounds, deadline = (FREE_ROUNDS, self.part(FIT_PART)) if binds else (None, self.deadline)
            free = solve(limited.problem, time_limit_s=deadline - time.perf_counter(), rounds=rounds)
            if free.status is Status.INFEASIBLE:
                raise ConflictError("the strategies exclude each other")
            if not binds or (free.status is Status.OPTIMAL and fits(limited, free.choice)):
                return free.choice or None, free.bound
        smaller, reduction = reduce_limited(limited)
        self.log(f"reduced to {len(smaller.problem.node_cost)} nodes, {num_pairs(smaller.problem)} pairs")
        try:
            choice, bound = self.of_reduced(smaller, reduction)
        except NothingFitsError as error:  # times are the problem's own; reduced nodes may stand for many
            nodes = holders(limited, error.why.times[0]) if error.why.times else ()
            raise NothingFitsError(replace(error.why, nodes=nodes)) from None
        return None if choice is None else reduction.undo(choice), bound + reduction.offset

    def of_reduced(self, limited: Limited, reduction: Reduction) -> tuple[tuple[int, ...] | None, float]:
        """The same for what reductions leave: by the program when it can do it, by the anytime core when not."""
        problem, offset = limited.problem, reduction.offset
        if (why := cannot_fit(limited)) is not None:
            raise NothingFitsError(why)
        if not problem.node_cost:
            return (), 0.0
        flat = flatten_limited(limited)
        start = self.start(limited, flat)
        if fits(limited, start) and (cost := evaluate(problem, start)) < math.inf:
            self.offer(cost + offset)
        bound = -math.inf
        if num_pairs(problem) <= EXACT_ENTRIES:
            answer = solve_lazily(problem, flat, self.part(EXACT_PART))
            bound = answer.bound
            if answer.choice is not None:
                if answer.proven:
                    return answer.choice, evaluate(problem, answer.choice)
                start = answer.choice
        core = PricedCore(PricedLoops(flat), np.array(start), self.seed, lambda cost: self.offer(cost + offset))
        finish = Finish(limited, flat, self.deadline, self.log)
        improve(core, Limits(deadline=self.deadline), finish.settle, self.log)
        choice = tuple(core.choice.tolist()) if core.choice is not None else None
        return choice, max(core.bound, bound, min(finish.bound, core.cost))

    def start(self, limited: Limited, flat: FlatLimited) -> tuple[int, ...]:
        """A choice that fits, or one of little memory when none was found in time."""
        start = tuple(least_memory(flat).tolist())
        if fits(limited, start) and evaluate(limited.problem, start) < math.inf:
            return start
        found = fit(limited, flat, self.part(FIT_PART))
        if isinstance(found, Infeasibility):
            raise NothingFitsError(found)
        return start if found is None else found
