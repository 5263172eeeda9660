"""Reduced-cost fixing: strategies that no choice cheaper than the incumbent can take, by the bound of the messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.anytime.anytime import Best
from autopar.solver.anytime.compiled_loops import SAFETY, Loops
from autopar.solver.ilp.flat_arrays import Flat
from autopar.solver.ilp.problem import Problem
from autopar.solver.presolve.presolve import keep_strategies, reduce_all
from autopar.solver.presolve.reduction import Reduction, chain


def drop_costly(problem: Problem, flat: Flat, best: Best) -> Reduction | None:
    """Keep the strategies with which the bound stays below the cost at hand, then reduce; None when a node has none.

    None proves that no choice is cheaper. What is left has every choice that is cheaper, if there is any.

    Raises: ConflictError when the strategies left exclude each other, which proves the same.
    """
    return keep_cheap(problem, flat, rises(flat, best), best.cost - best.bound + SAFETY * abs(best.cost))


def rises(flat: Flat, best: Best) -> np.ndarray:
    """By how much the bound rises at least with each strategy."""
    loops = Loops(flat)
    loops.set_price(best.price)
    return loops.extra(best.messages.copy())


def keep_cheap(problem: Problem, flat: Flat, rise: np.ndarray, most: float) -> Reduction | None:
    """Keep the strategies with which the bound rises by at most so much, then reduce; None when a node has none.

    Raises: ConflictError when the strategies left exclude each other.
    """
    strategies = [np.flatnonzero(rise[a:b] <= most) for a, b in zip(flat.first[:-1], flat.first[1:], strict=True)]
    if any(len(keep) == 0 for keep in strategies):
        return None
    smaller = keep_strategies(problem, strategies)
    return chain(smaller, reduce_all(smaller.problem))


def combine(problem: Problem, choices: Sequence[np.ndarray]) -> Reduction:
    """Keep the strategies that some of the choices take, then reduce: where they agree, nothing is left to choose.

    After relaxation induced neighbourhoods (Danna, Rothberg and Le Pape, Mathematical Programming 2005), with the
    Lagrangian's minimisers in place of the linear program's.
    """
    strategies_of = np.array(choices)
    strategies = [np.unique(strategies_of[:, node]) for node in range(strategies_of.shape[1])]
    smaller = keep_strategies(problem, strategies)
    return chain(smaller, reduce_all(smaller.problem))
