"""Tables within the anytime solver: the cheapest choice of strategies that the messages leave cheap, often with proof.

Without memory rows the bound of the messages mostly is within a millionth of the optimum long before moves find the
optimum itself. Every strategy of a choice that costs so little more than the bound raises the bound by no more than
that, so that few strategies of each node are left, and tables over them are small (reduced-cost fixing, with the room
that is tried in place of the one that is proven). The clock plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.solver.anytime.anytime import Best, Settled
from autopar.solver.anytime.compiled_loops import SAFETY
from autopar.solver.anytime.reduced_cost_fixing import keep_cheap, rises
from autopar.solver.ilp.brute_force import evaluate
from autopar.solver.ilp.flat_arrays import Flat
from autopar.solver.ilp.problem import Problem
from autopar.solver.presolve.elimination import solve_by_tables
from autopar.solver.presolve.reduction import ConflictError

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
