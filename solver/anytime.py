"""The anytime solver: message passing for the bound and a first choice, tree moves for better ones.

A round: sweeps of messages (the bound), beside them two searches by tree moves, from the last candidate and from the
best choice; then two more, from a choice decoded from the messages and from the candidate. The next candidate is the
best choice with most nodes drawn anew (iterated local search, Lourenço, Martin and Stützle 2003). Both cores work.
Rounds depend on the seed and on each other, never on time, so that a number of rounds gives the same answer again.

Between rounds tables search among the strategies that the messages leave cheap (`TableSearch`), and mostly end the
search with a proof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.elimination import solve_by_tables
from autopar.solver.presolve import ConflictError, Reduction, chain, keep_strategies, reduce_all
from autopar.solver.problem import Flat, Problem, evaluate

TREE_NODES = 300  # the largest tree of a move
SAFETY = 1e-9  # of the bound: sums of floats in another order differ by less


class Loops:
    """The compiled loops bound to one problem's arrays; node costs are `theta`."""

    def __init__(self, flat: Flat) -> None:
        from autopar.solver import local_search, message_passing

        self.flat = flat
        self._messages: Any = message_passing  # numba's types do not know the arguments of what it compiles
        self._search: Any = local_search
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

    def search(self, choice: np.ndarray, *, seed: int, moves: int) -> None:
        """Tree moves; the choice is updated."""
        self._search.search(self.flat.arrays, choice, seed % 2**32, moves, TREE_NODES)


FEW_SWEEPS, MANY_SWEEPS = 5, 80  # a round, at first and at most
DRAWN = 0.6  # of the nodes drawn anew before a round: tree moves put right what they can


class Core:
    """The state between rounds: the cheapest choice found (None = none yet), and messages with the bound they prove."""

    settles_after, settled = 0, True  # rounds until tables are asked; whether they may be

    def __init__(self, loops: Loops, start: np.ndarray, seed: int) -> None:
        self.loops = loops
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        multi = int((np.diff(loops.flat.first) > 1).sum())
        self.moves = int(np.clip(multi // 8, 100, 1000))
        self.choice: np.ndarray | None = None
        self.cost = np.inf
        self.candidate = start.copy()
        self.messages = self.best_messages = np.zeros(loops.length)
        self.bound = -np.inf
        self.pairs = FEW_SWEEPS
        self.done = 0

    def offer(self, choice: np.ndarray) -> None:
        """Take a choice for the best one if it costs less."""
        cost = self.loops.cost(choice)
        if cost < self.cost:
            self.choice, self.cost = choice.copy(), cost

    def warm_up(self, deadline: float, cutoff: float) -> None:
        """Tree moves from the start, and messages until they settle, or prove the cutoff."""
        self.offer(self.candidate)
        for step in range(3):
            self.loops.search(self.candidate, seed=self.seed + step, moves=self.moves)
            self.offer(self.candidate)
            if time.perf_counter() >= deadline:
                return
        self.settle_messages(deadline, cutoff)

    def settle_messages(self, deadline: float, cutoff: float) -> None:
        """Sweeps until they raise the bound by little."""
        settled = False
        while not settled and self.bound < cutoff and time.perf_counter() < deadline:
            self.loops.sweep(self.messages, 10)
            last_bound, self.bound = self.bound, self.loops.bound(self.messages)
            settled = self.bound - last_bound <= 1e-4 * abs(self.bound)
        self.best_messages = self.messages.copy()

    def raise_bound(self) -> float:
        """A round's sweeps, and the bound after them; the best one is kept."""
        self.loops.sweep(self.messages, self.pairs)
        bound = self.loops.bound(self.messages)
        if bound > self.bound:
            self.bound, self.best_messages = bound, self.messages.copy()
        return bound

    def round(self, pool: Executor) -> str:
        """One round, as the head of this file has it; returns a line on it."""
        self.done += 1
        base = self.seed * 1_000_003 + self.done * 10

        def searched(choice: np.ndarray, *seeds: int) -> np.ndarray:
            for seed in seeds:
                self.loops.search(choice, seed=base + seed, moves=self.moves)
            return choice

        polishing = [pool.submit(searched, self.candidate.copy(), 0, 1)]
        if self.choice is not None:
            polishing.append(pool.submit(searched, self.choice.copy(), 2, 3))
        bound = self.raise_bound()
        for task in polishing:
            self.offer(task.result())
        decoded = self.loops.decode(self.messages)
        relaxing = [pool.submit(searched, decoded, 4), pool.submit(searched, self.candidate.copy(), 6)]
        self.candidate, _ = found = sorted((task.result() for task in relaxing), key=self.loops.cost)
        for choice in found:
            self.offer(choice)
        self.pairs = min(self.pairs * 2, MANY_SWEEPS)
        if self.choice is not None:
            self.candidate = self._drawn_anew(self.choice)
        return f"round {self.done}: bound {bound:.7g} (best {self.bound:.9g}), cost {self.cost:.10g}"

    def _drawn_anew(self, choice: np.ndarray) -> np.ndarray:
        """The choice with some nodes at random strategies of theirs."""
        choice, flat = choice.copy(), self.loops.flat
        for node in np.flatnonzero(self.rng.random(len(choice)) < DRAWN).tolist():
            begin, end = int(flat.first[node]), int(flat.first[node + 1])
            choice[node] = self.rng.choice(np.flatnonzero(np.isfinite(flat.cost[begin:end])))
        return choice

    def closed(self, relative_gap: float) -> bool:
        """Whether the best choice is as good as asked for."""
        gap = self.cost - self.bound
        return bool(np.isfinite(gap)) and gap <= (relative_gap + 2 * SAFETY) * abs(self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the search ends: at a time on the clock of time.perf_counter, after so many rounds (None = any number), once
    choice and bound are as near as the gap, or once the bound has reached the cutoff.
    """

    deadline: float = math.inf
    rounds: int | None = None
    relative_gap: float = 0.0
    cutoff: float = math.inf


Settle = Callable[[Core], tuple[np.ndarray | None, bool]]


def improve(core: Core, limits: Limits, settle: Settle, log: Callable[[str], None]) -> None:
    """Improve choice and bound until a limit is reached.

    settle: called now and then, for a better choice or None, and whether the search may end. log: called each round.
    """
    core.warm_up(limits.deadline, limits.cutoff)
    next_settle = core.settles_after
    longest_s = 0.0
    with ThreadPoolExecutor(max_workers=2) as pool:
        while (limits.rounds is None or core.done < limits.rounds) and not core.closed(limits.relative_gap):
            if core.bound >= limits.cutoff:
                break
            if core.choice is not None and core.settled and core.done >= next_settle:
                choice, finished = settle(core)
                if choice is not None:
                    core.offer(choice)
                if finished:
                    break
                next_settle = core.done * 9 // 8 + 4
            begun = time.perf_counter()
            if begun + longest_s >= limits.deadline:
                break
            log(core.round(pool))
            longest_s = max(time.perf_counter() - begun, 0.7 * longest_s)


# Reduced-cost fixing: strategies that no choice cheaper than the incumbent can take, by the bound of the messages.


def rises(core: Core) -> np.ndarray:
    """By how much the best bound rises at least with each strategy."""
    core.loops.bound(core.best_messages)
    return core.loops.extra.copy()


def keep_cheap(problem: Problem, flat: Flat, rise: np.ndarray, most: float) -> Reduction | None:
    """Keep the strategies with which the bound rises by at most so much, then reduce; None when a node has none.

    Raises: ConflictError when the strategies left exclude each other.
    """
    strategies = [np.flatnonzero(rise[a:b] <= most) for a, b in zip(flat.first[:-1], flat.first[1:], strict=True)]
    if any(len(keep) == 0 for keep in strategies):
        return None
    smaller = keep_strategies(problem, strategies)
    return chain(smaller, reduce_all(smaller.problem))


# Tables within the anytime solver: the cheapest choice of strategies that the messages leave cheap, often with proof.
#
# The bound of the messages mostly is within a millionth of the optimum long before moves find the optimum itself. Every
# strategy of a choice that costs so little more than the bound raises the bound by no more than that, so that few
# strategies of each node are left, and tables over them are small (reduced-cost fixing, with the room that is tried in
# place of the one that is proven). The clock plays no part.

STEP = 8.0  # by how much a room is widened or narrowed
TRIES = 6


class TableSearch:
    """Called by `improve`; keeps the bound that it proved."""

    def __init__(self, problem: Problem, flat: Flat, relative_gap: float, log: Callable[[str], None]) -> None:
        self.problem, self.flat, self.relative_gap, self.log = problem, flat, relative_gap, log
        self.bound = -np.inf
        self.has_searched = False

    def settle(self, core: Core) -> tuple[np.ndarray | None, bool]:
        """The cheapest choice among strategies that raise the bound by little, in a room as wide as tables allow.

        Every choice outside of a room costs the bound and the room at least. The search ends with a proof, and where
        messages that have come nearer to the optimum since the last time lead to nothing better.
        """
        rise, found, cost, bound = rises(core), None, core.cost, core.bound
        slack = SAFETY * abs(cost)
        room, widest, too_wide = (cost - bound) / STEP**3, 0.0, np.inf
        for _ in range(TRIES):
            choice, fits = self._cheapest(rise, room)
            if fits:
                widest = room
                its_cost = np.inf if choice is None else evaluate(self.problem, choice.tolist())
                if its_cost < cost - slack:
                    found, cost = choice, its_cost
                self.bound = max(self.bound, min(cost, bound + room - slack))
                self.log(f"tables in a room of {room:.3g}: cost {cost:.10g}, bound {self.bound:.10g}")
                if cost - self.bound <= self.relative_gap * abs(cost) + 2 * slack:
                    return found, True
            else:
                too_wide = room
            wider = min(widest * STEP, cost - bound + slack) if widest else room / STEP
            room = wider if wider < too_wide else math.sqrt(widest * too_wide)
        again, self.has_searched = self.has_searched, self.has_searched or widest > 0
        return found, again and widest > 0 and found is None

    def _cheapest(self, rise: np.ndarray, room: float) -> tuple[np.ndarray | None, bool]:
        """The cheapest choice in a room, None where there is none; and whether its tables are small enough."""
        try:
            smaller = keep_cheap(self.problem, self.flat, rise, room)
        except ConflictError:
            return None, True
        if smaller is None:
            return None, True
        choice = solve_by_tables(smaller.problem)
        return (None, False) if choice is None else (np.array(smaller.undo(choice), dtype=np.int64), True)
