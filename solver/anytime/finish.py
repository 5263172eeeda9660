"""The integer program within the anytime solver: it searches among the best choices, and completes the proof."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.solver.anytime.anytime import Best, Settled
from autopar.solver.anytime.reduced_cost_fixing import combine, drop_costly
from autopar.solver.ilp.exact import EXACT_ENTRIES, Answer, Settings, solve_lazily
from autopar.solver.ilp.flat_arrays import Flat, flatten
from autopar.solver.ilp.problem import Problem
from autopar.solver.presolve.reduction import ConflictError, Reduction

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
