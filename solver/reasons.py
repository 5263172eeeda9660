"""Why nothing fits: the smallest excess that some choice must have, by the program of formula (4) with room to spare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .flat import Flat
from .ilp import Settings, run
from .livespans import can_bind, holders, row_at, shares, used
from .problem import Infeasibility, Problem
from .program import build


def explain(problem: Problem, flat: Flat, settings: Settings) -> Infeasibility:
    """The times and nodes of the smallest excess over the limit, costs set aside.

    Called when the program has no solution: every row may pass its room by a shared z, and z is minimised.
    """
    free = replace(
        problem,
        node_cost=tuple(np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.node_cost),
        edges=tuple(replace(e, cost=np.where(np.isfinite(e.cost), 0.0, np.inf)) for e in problem.edges),
    )
    program = build(free, [row_at(flat, int(row)) for row in can_bind(flat)], spare=True)
    _, answer = run(program, settings)
    if answer.choice is None:
        reason = "the search proved that no choice fits"
        return Infeasibility(times=(), nodes=(), bytes_over=0, reason=reason)
    over = np.rint(used(flat, shares(flat, answer.choice)) - flat.room).astype(np.int64)
    worst = int(over.max())
    times = tuple(int(flat.times[row]) for row in np.flatnonzero(over == worst))
    return Infeasibility(
        times=times,
        nodes=holders(problem, times[0]),
        bytes_over=worst,
        reason="no choice that the edges allow fits at these times; this is the smallest excess"
        + ("" if answer.proven else " found"),
    )
