"""A choice within memory, costs set aside, or the least excess: formula (4) with slack."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from autopar.solver.ilp.exact import ROWS_AT_ONCE, Settings, run
from autopar.solver.ilp.flat_arrays import Flat
from autopar.solver.ilp.formulas import build
from autopar.solver.ilp.memory_rows import can_bind, holders, row_at, shares, used, worst_rows
from autopar.solver.ilp.problem import Infeasibility, Problem


def fit(problem: Problem, flat: Flat, settings: Settings) -> tuple[int, ...] | Infeasibility | None:
    """A choice that fits, or why there is none; None when time ran out.

    Every row may pass its room by a shared z, and z is minimised; edges that allow every pair are left out. Rows are
    brought in as they are broken: an excess over some rows is one over all.
    """
    free = replace(
        problem,
        node_cost=tuple(np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.node_cost),
        edges=tuple(
            replace(e, cost=np.where(np.isfinite(e.cost), 0.0, np.inf))
            for e in problem.edges
            if not np.isfinite(e.cost).all()
        ),
    )
    binding = can_bind(flat)
    included = set(binding.tolist()) if len(binding) <= ROWS_AT_ONCE else set()
    while True:
        program = build(free, [row_at(flat, row) for row in sorted(included)], spare=True)
        values, answer = run(program, settings)
        if values is None or answer.choice is None:
            reason = "the strategies left exclude each other"
            return Infeasibility(times=(), nodes=(), bytes_over=0, reason=reason) if answer.proven else None
        over = np.rint(used(flat, shares(flat, answer.choice)) - flat.room).astype(np.int64)
        if not len(over) or over.max() <= 0:
            return answer.choice
        least = int(over[sorted(included)].max()) if included else 0
        fresh = worst_rows(np.where(over > max(least, 0), over, 0).astype(np.float64), most=ROWS_AT_ONCE)
        if not fresh and answer.proven:
            times = tuple(int(flat.times[row]) for row in np.flatnonzero(over == least))
            return Infeasibility(
                times=times,
                nodes=holders(problem, times[0]),
                bytes_over=least,
                reason="no choice that the edges allow fits at these times; this is the least excess",
            )
        if time.perf_counter() > settings.deadline:
            return None
        included.update(fresh)
