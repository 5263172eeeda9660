"""The integer program within the anytime solver: it searches among the best choices, and completes the proof."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.solver.anytime.anytime import Best, Settled, combine, drop_costly, keep_cheap, rises
from autopar.solver.anytime.compiled_loops import SAFETY
from autopar.solver.ilp.brute_force import evaluate
from autopar.solver.ilp.exact import EXACT_ENTRIES, Answer, Settings, solve_lazily
from autopar.solver.ilp.flat_arrays import Flat, flatten
from autopar.solver.ilp.problem import Problem
from autopar.solver.presolve.elimination import solve_by_tables
from autopar.solver.presolve.reduction import ConflictError, Reduction

# Tables within the anytime solver: the cheapest choice of strategies that the messages leave cheap, often with proof.
#
# Without memory rows the bound of the messages mostly is within a millionth of the optimum long before moves find the
# optimum itself. Every strategy of a choice that costs so little more than the bound raises the bound by no more than
# that, so that few strategies of each node are left, and tables over them are small (reduced-cost fixing, with the room
# that is tried in place of the one that is proven). The clock plays no part.

STEP = 8.0  # by how much a room is widened or narrowed
TRIES = 6


class TableSearch:
    """Called by `improve` for a reduced problem without memory rows; keeps the bound that it proved."""

    def __init__(self, problem: Problem, flat: Flat, relative_gap: float, log: Callable[[str], None]) -> None:
        self.problem, self.flat, self.relative_gap, self.log = problem, flat, relative_gap, log
        self.bound = -np.inf
        self.has_searched = False

    def settle(self, best: Best) -> Settled:
        """The cheapest choice among strategies that raise the bound by little, in a room as wide as tables allow.

        Every choice outside of a room costs the bound and the room at least. The search ends with a proof, and where
        messages that have come nearer to the optimum since the last time lead to nothing better.
        """
        rise, found, cost = rises(self.flat, best), None, best.cost
        slack = SAFETY * abs(best.cost)
        room, widest, too_wide = (cost - best.bound) / STEP**3, 0.0, np.inf
        for _ in range(TRIES):
            choice, fits = self._cheapest(rise, room)
            if fits:
                widest = room
                its_cost = np.inf if choice is None else evaluate(self.problem, choice.tolist())[0]
                if its_cost < cost - slack:
                    found, cost = choice, its_cost
                self.bound = max(self.bound, min(cost, best.bound + room - slack))
                self.log(f"tables in a room of {room:.3g}: cost {cost:.10g}, bound {self.bound:.10g}")
                if cost - self.bound <= self.relative_gap * abs(cost) + 2 * slack:
                    return Settled(choice=found, finished=True)
            else:
                too_wide = room
            wider = min(widest * STEP, cost - best.bound + slack) if widest else room / STEP
            room = wider if wider < too_wide else math.sqrt(widest * too_wide)
        again, self.has_searched = self.has_searched, self.has_searched or widest > 0
        return Settled(choice=found, finished=again and widest > 0 and found is None)

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


PROOF_PART = 0.4  # of the time left that an attempt at the proof may take
COMBINE_PART = 0.08  # of the time left that a search among recent choices may take


class Finish:
    """Called by `improve` when prices have settled; keeps the bound that the program proved."""

    def __init__(self, problem: Problem, flat: Flat, settings: Settings, log: Callable[[str], None]):
        self.problem = problem
        self.flat = flat
        self.settings = settings
        self.log = log
        self.bound = -math.inf
        self.longest_s = 0.0

    def settle(self, best: Best) -> Settled:
        """Finish the proof if fixing leaves little; if not, look for a better choice in what recent ones take."""
        begun = time.perf_counter()
        if self.settings.deadline - begun < 2 * self.longest_s + 1:
            return Settled(choice=None, finished=False)
        settled = self._prove(best)
        if settled is None:
            settled = Settled(choice=self._search_recent(best), finished=False)
        self.longest_s = max(self.longest_s, time.perf_counter() - begun)
        return settled

    def _prove(self, best: Best) -> Settled | None:
        """The cheapest choice of all, by the program on the strategies not ruled out; None when these are too many."""
        try:
            smaller = drop_costly(self.problem, self.flat, best)
        except ConflictError:
            smaller = None
        if smaller is None:
            self.bound = best.cost
            return Settled(choice=None, finished=True)
        entries = smaller.problem.num_pairs
        self.log(f"fixing leaves {len(smaller.problem.node_cost)} nodes, {entries} pairs")
        if entries > EXACT_ENTRIES:
            return None
        now = time.perf_counter()
        deadline = now + PROOF_PART * (self.settings.deadline - now)
        answer, choice = self._solve(smaller, best, replace(self.settings, deadline=deadline))
        self.bound = max(self.bound, min(best.cost, answer.bound + smaller.offset))
        return Settled(choice=choice, finished=answer.proven)

    def _search_recent(self, best: Best) -> np.ndarray | None:
        assert best.choice is not None, "prices are only settled around a choice that fits"
        recent = list({choice.tobytes(): choice for choice in best.recent}.values())
        while True:
            smaller = combine(self.problem, (best.choice, *recent))
            entries = smaller.problem.num_pairs
            self.log(f"{len(recent)} recent choices leave {len(smaller.problem.node_cost)} nodes, {entries} pairs")
            if entries <= EXACT_ENTRIES:
                break
            recent = recent[len(recent) // 2 + 1 :]
        now = time.perf_counter()
        deadline = now + COMBINE_PART * (self.settings.deadline - now)
        _, choice = self._solve(smaller, best, replace(self.settings, deadline=deadline))
        return choice

    def _solve(self, smaller: Reduction, best: Best, settings: Settings) -> tuple[Answer, np.ndarray | None]:
        """The program on a smaller problem, begun with the rows that have a price."""
        if not smaller.problem.node_cost:
            return Answer(choice=(), bound=0.0, proven=True), np.array(smaller.undo(()), dtype=np.int64)
        flat = flatten(smaller.problem)
        rows = np.flatnonzero(np.isin(flat.times, self.flat.times[best.price > 0])).tolist()
        answer = solve_lazily(smaller.problem, flat, settings, rows=rows)
        if answer.choice is None:
            return answer, None
        return answer, np.array(smaller.undo(answer.choice), dtype=np.int64)
