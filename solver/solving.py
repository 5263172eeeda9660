"""The entry point of the solver: reduce, solve each component by tables or else by a search, undo, and report what is
proven.

The search has the bound of messages, which mostly is within a millionth of the optimum. Every strategy of a choice that
costs so little more than the bound raises the bound by no more than that, so that few strategies of each node are left,
and tables over them are small (reduced-cost fixing, with the room that is tried in place of the one that is proven).
The clock plays no part but for the deadline: a number of rounds gives the same answer again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.presolve import (
    ConflictError,
    Reduction,
    any_allowed,
    chain,
    components,
    keep_strategies,
    reduce_all,
    solve_by_tables,
)
from autopar.solver.problem import Flat, Problem, Solution, Status, evaluate, flatten, validate


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

    rounds: of the search, for each component that tables are too large for; None = any number. With a time limit that
        is not reached, the answer is the same each time, on any machine.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the search ends: at a time on the clock of time.perf_counter, after so many rounds (None = any number), once
    choice and bound are as near as the gap, or once the bound has reached the cutoff.
    """

    deadline: float = math.inf
    rounds: int | None = None
    relative_gap: float = 0.0
    cutoff: float = math.inf


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
    return (objective - bound) / max(abs(objective), 1e-300) if objective > bound else 0.0


def _least(part: Problem) -> float:
    """No choice costs less: every node and edge at its cheapest."""
    costs = (*part.node_cost, *(edge.cost for edge in part.edges))
    return float(sum(cost.min() for cost in costs))


def _solve_part(part: Problem, limits: Limits, log: Callable[[str], None]) -> tuple[tuple[int, ...] | None, float]:
    """(a choice or None, the bound): by tables when these are small enough, else by a search.

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
    search = Search(part, start, limits, log)
    search.run()
    return search.choice, min(search.bound, search.cost)


SAFETY = 1e-9  # of the bound: sums of floats in another order differ by less


class Loops:
    """The compiled loops bound to one problem's arrays; node costs are `theta`."""

    def __init__(self, flat: Flat) -> None:
        from autopar.solver import message_passing

        self.flat = flat
        self._messages: Any = message_passing  # numba's types do not know the arguments of what it compiles
        sizes = np.diff(flat.first)
        lengths = sizes[flat.source] + sizes[flat.target]
        self.head = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        self.tail = self.head + sizes[flat.source]
        self.length = int(lengths.sum())
        self.work = np.zeros(2 * int(sizes.max(initial=1)) + 2)
        self.extra = np.zeros(int(flat.first[-1]))
        self.theta = flat.cost.copy()

    @property
    def _graph(self) -> tuple[np.ndarray, ...]:
        first, _, *edges = self.flat.arrays
        return (first, self.theta, *edges, self.head, self.tail)

    def sweep(self, messages: np.ndarray, pairs: int) -> None:
        """Passes back and forth."""
        for _ in range(pairs):
            self._messages.sweep(self._graph, messages, False, self.work)
            self._messages.sweep(self._graph, messages, True, self.work)

    def bound(self, messages: np.ndarray) -> float:
        """The bound that messages prove; `extra` is how much it rises at least with each strategy."""
        value = self._messages.bound(self._graph, messages, self.extra)
        return value - SAFETY * abs(value)

    def decode(self, messages: np.ndarray) -> np.ndarray:
        """A choice read off the messages; a sweep is made first."""
        choice = np.zeros(self.flat.nodes, dtype=np.int64)
        self._messages.sweep(self._graph, messages, False, self.work)
        self._messages.decode(self._graph, messages, True, self.work, choice)
        return choice

    def cost(self, choice: np.ndarray) -> float:
        """Cost of a choice."""
        f = self.flat
        width = np.diff(f.first)[f.target]
        edges = f.matrix[f.start + choice[f.source] * width + choice[f.target]]
        return float(f.cost[f.first[:-1] + choice].sum() + edges.sum())


def settle(loops: Loops, messages: np.ndarray, deadline: float, cutoff: float) -> float:
    """Sweeps until they raise the bound by little, or prove the cutoff; the bound."""
    bound, last = -math.inf, -math.inf
    while bound < cutoff and time.perf_counter() < deadline:
        loops.sweep(messages, 10)
        last, bound = bound, loops.bound(messages)
        if bound - last <= 1e-4 * abs(bound):
            break
    return bound


SWEEPS = 80  # a round: messages that come nearer to the optimum leave fewer strategies
STEP = 8.0  # by how much a room is widened or narrowed
TRIES = 6


class Search:
    """A search from a choice that is allowed: the cheapest choice found, its cost, and the bound that is proven.

    A round makes sweeps, and looks among the strategies that the messages leave cheap.
    """

    def __init__(self, problem: Problem, start: tuple[int, ...], limits: Limits, log: Callable[[str], None]) -> None:
        self.problem, self.limits, self.log = problem, limits, log
        self.loops = Loops(flatten(problem))
        self.messages = np.zeros(self.loops.length)
        self.choice, self.cost, self.bound = start, evaluate(problem, start), -math.inf

    def run(self) -> None:
        """Improve choice and bound until a limit is reached, or more sweeps lead to nothing better."""
        limits, rounds, was_fruitless = self.limits, 0, False
        self.bound = settle(self.loops, self.messages, limits.deadline, limits.cutoff)
        self._offer(self.loops.decode(self.messages))
        while not self._is_over():
            cost, has_tables = self.cost, self._tables()
            is_fruitless = has_tables and self.cost == cost
            if self._is_over() or (is_fruitless and was_fruitless) or rounds == limits.rounds:
                break
            rounds, was_fruitless = rounds + 1, was_fruitless or has_tables
            self.loops.sweep(self.messages, SWEEPS)
            self._offer(self.loops.decode(self.messages))

    def _is_over(self) -> bool:
        gap, cutoff = self.cost - self.bound, self.limits.cutoff
        is_near = gap <= (self.limits.relative_gap + 2 * SAFETY) * abs(self.cost)
        return is_near or self.bound >= cutoff or time.perf_counter() >= self.limits.deadline

    def _offer(self, choice: np.ndarray) -> None:
        found = tuple(choice.tolist())
        cost = evaluate(self.problem, found)
        if cost < self.cost - SAFETY * abs(self.cost):
            self.choice, self.cost = found, cost

    def _tables(self) -> bool:
        """The cheapest choice among strategies that raise the bound by little, in a room as wide as tables allow; false
        where they allow none.

        Every choice outside of a room costs the messages' bound and the room at least.
        """
        bound = self.loops.bound(self.messages)
        rise, slack = self.loops.extra.copy(), SAFETY * abs(self.cost)
        self.bound = max(self.bound, bound)
        room, widest, too_wide = (self.cost - bound) / STEP**3, 0.0, np.inf
        for _ in range(TRIES):
            choice, fits = self._cheapest(rise, room)
            if fits:
                widest = room
                if choice is not None:
                    self._offer(choice)
                self.bound = max(self.bound, min(self.cost, bound + room - slack))
                self.log(f"tables in a room of {room:.3g}: cost {self.cost:.10g}, bound {self.bound:.10g}")
                if self._is_over():
                    break
            else:
                too_wide = room
            wider = min(widest * STEP, self.cost - bound + slack) if widest else room / STEP
            room = wider if wider < too_wide else math.sqrt(widest * too_wide)
        return widest > 0

    def _cheapest(self, rise: np.ndarray, room: float) -> tuple[np.ndarray | None, bool]:
        """The cheapest choice in a room, None where there is none; and whether its tables are small enough."""
        try:
            smaller = keep_cheap(self.problem, self.loops.flat, rise, room)
        except ConflictError:
            return None, True
        if smaller is None:
            return None, True
        choice = solve_by_tables(smaller.problem)
        return (None, False) if choice is None else (np.array(smaller.undo(choice), dtype=np.int64), True)


def keep_cheap(problem: Problem, flat: Flat, rise: np.ndarray, most: float) -> Reduction | None:
    """Keep the strategies with which the bound rises by at most so much, then reduce; None when a node has none.

    Raises: ConflictError when the strategies left exclude each other.
    """
    strategies = [np.flatnonzero(rise[a:b] <= most) for a, b in zip(flat.first[:-1], flat.first[1:], strict=True)]
    if any(len(keep) == 0 for keep in strategies):
        return None
    smaller = keep_strategies(problem, strategies)
    return chain(smaller, reduce_all(smaller.problem))
