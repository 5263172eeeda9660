"""The integer program, formulas (1), (2), (4) and (5), solved by HiGHS; memory rows are added when an answer violates
them.

Formula (3) is `problem.tie`. The program is built in arrays, in bulk. Strategies and pairs of infinite cost are left
out, not priced. Edge variables are continuous: given 0-1 node variables, the row and column sums of (2) leave only 0
and 1. With slack in formula (4) and costs set aside it gives a choice within memory, or the least excess.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from autopar.solver import Problem
from benchmarks.iopddl.memory import FlatLimited, Infeasibility, Limited, can_bind, holders, shares, used, worst_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """At one time: sum over nodes of bytes[node][choice] <= room; bytes are what is held beyond the node's least."""

    nodes: tuple[int, ...]
    bytes: tuple[np.ndarray, ...]
    room: int  # the limit less the least that every live node holds; negative = cannot fit


def row_at(flat: FlatLimited, number: int) -> Row:
    """The row of a number of the flat problem's rows."""
    spans = np.flatnonzero((flat.low <= number) & (flat.high > number))
    owners = np.searchsorted(flat.span_first, spans, side="right") - 1
    widths = np.diff(flat.first)[owners]
    return Row(
        nodes=tuple(owners.tolist()),
        bytes=tuple(
            flat.bytes[at : at + width]
            for at, width in zip(flat.span_bytes[spans].tolist(), widths.tolist(), strict=True)
        ),
        room=int(flat.room[number]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerProgram:
    """Columns and rows; the first columns are x[g, s], node after node, then y[e, s, t]."""

    objective: np.ndarray
    column_upper: np.ndarray
    rows: LinearConstraint
    first: np.ndarray  # of node g: the column of x[g, 0]

    @property
    def strategies(self) -> int:
        """Columns below this are node variables."""
        return int(self.first[-1])


# Some rows: (lower, upper) of each, and (row, column, value) of each entry.
_Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def build(problem: Problem, memory: Sequence[Row], *, spare: bool = False) -> IntegerProgram:
    """The whole program; the problem must have no edge from a node to itself.

    spare: add one last column, the bytes by which rows may be passed as a part of the largest room, and minimise it
    too.
    """
    sizes = np.array([len(cost) for cost in problem.node_cost], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    # (5) sum over x of node cost + sum over y of edge cost
    objective = np.concatenate([*problem.node_cost, *(e.cost[np.isfinite(e.cost)] for e in problem.edges)])
    upper = np.isfinite(objective).astype(np.float64)
    objective = np.where(np.isfinite(objective), objective, 0.0)
    if spare:
        objective, upper = np.append(objective, 1.0), np.append(upper, math.inf)
    over = len(objective) - 1 if spare else None
    blocks = [one_strategy_per_node(sizes), *edge_variables(problem, first), *memory_limit(memory, first, over)]
    begins = np.cumsum([0, *(len(lower) for lower, *_ in blocks)])
    row = np.concatenate([row + begin for (_, _, row, _, _), begin in zip(blocks, begins, strict=False)])
    row_lower, row_upper, _, column, value = map(np.concatenate, zip(*blocks, strict=True))
    entries = csr_array((value, (row, column)), shape=(begins[-1], len(objective)))
    rows = LinearConstraint(entries, row_lower, row_upper)
    return IntegerProgram(objective=objective, column_upper=upper, rows=rows, first=first)


def one_strategy_per_node(sizes: np.ndarray) -> _Rows:
    """(1) sum over s of x[g, s] = 1."""
    sums = np.ones(len(sizes))
    total = int(sizes.sum())
    return sums, sums, np.repeat(np.arange(len(sizes)), sizes), np.arange(total), np.ones(total)


def edge_variables(problem: Problem, first: np.ndarray) -> Iterator[_Rows]:
    """(2) sum over t of y[e, s, t] = x[g, s] and sum over s = x[h, t], over the pairs allowed."""
    column = int(first[-1])
    for edge in problem.edges:
        s, t = np.nonzero(np.isfinite(edge.cost))
        pairs = np.arange(column, column + len(s))
        column += len(s)
        for node, rows_of_pair, count in ((edge.source, s, edge.cost.shape[0]), (edge.target, t, edge.cost.shape[1])):
            zero = np.zeros(count)
            strategies = np.arange(count)
            yield (
                zero,
                zero,
                np.concatenate([rows_of_pair, strategies]),
                np.concatenate([pairs, first[node] + strategies]),
                np.concatenate([np.ones(len(s)), np.full(count, -1.0)]),
            )


def memory_limit(memory: Sequence[Row], first: np.ndarray, spare: int | None) -> Iterator[_Rows]:
    """(4) at each time that can bind: sum over live nodes and s of bytes[g, s] x[g, s] <= the row's room."""
    largest = max((abs(row.room) for row in memory), default=1)
    for row in memory:
        scale = float(max(1, abs(row.room) if spare is None else largest))  # bytes reach 1e11, tolerances are absolute
        begins = first[np.asarray(row.nodes, dtype=np.int64)]
        spans = [at + np.arange(len(nbytes)) for at, nbytes in zip(begins, row.bytes, strict=True)]
        columns = np.concatenate([np.zeros(0, dtype=np.int64), *spans])
        sizes = np.concatenate([np.zeros(0), *row.bytes]) / scale
        used = sizes > 0
        columns, sizes = columns[used], sizes[used]
        if spare is not None:
            columns, sizes = np.append(columns, spare), np.append(sizes, -1.0)
        yield np.array([-math.inf]), np.array([row.room / scale]), np.zeros_like(columns), columns, sizes


EXACT_ENTRIES = 60_000  # edge variables with which a program takes some seconds
ROWS_AT_ONCE = 64  # rows added where the last answer broke them; a problem with no more gets all of them at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a backend found: choice None when there is none; proven says that the search ended by itself."""

    choice: tuple[int, ...] | None
    bound: float
    proven: bool


def solve_lazily(problem: Problem, flat: FlatLimited, deadline: float, *, rows: Sequence[int] = ()) -> Answer:
    """The program with the rows given, then with those its answer breaks, until it breaks none.

    The linear relaxation finds most of the rows that matter. A choice is returned only if it fits; the bound holds for
    all of the rows, being of fewer.
    """
    binding = can_bind(flat)
    included = set(binding.tolist()) if len(binding) <= ROWS_AT_ONCE else set(rows)
    relaxed = len(binding) > ROWS_AT_ONCE and not included
    bound = -math.inf
    while True:
        program = build(problem, [row_at(flat, row) for row in sorted(included)])
        values, answer = run(program, deadline, integers=not relaxed)
        bound = max(bound, answer.bound)
        if values is None:
            return Answer(choice=None, bound=bound, proven=answer.proven)
        share = values[: program.strategies] if relaxed else shares(flat, answer.choice or ())
        over = used(flat, share) - flat.room
        over[sorted(included)] = 0.0  # within the solver's tolerance, or exactly checked by the caller
        fresh = worst_rows(np.where(over > 1e-6 * np.maximum(flat.room, 1), over, 0.0), most=ROWS_AT_ONCE)
        if not fresh and not relaxed:
            fits = not len(flat.room) or bool((used(flat, share) <= flat.room).all())
            return Answer(choice=answer.choice if fits else None, bound=bound, proven=answer.proven and fits)
        if time.perf_counter() > deadline:
            return Answer(choice=None, bound=bound, proven=False)
        relaxed = relaxed and bool(fresh)
        included.update(fresh)


def run(program: IntegerProgram, deadline: float, *, integers: bool = True) -> tuple[np.ndarray | None, Answer]:
    """The values of all columns (None when none were found) and the answer. A relaxation's choice is None.

    Costs are scaled to a largest absolute value of 1e6 before, for the solver's absolute tolerances.
    """
    scale = 1e6 / max(float(np.abs(program.objective).max(initial=0.0)), 1e-300)
    left_s = max(deadline - time.perf_counter(), 0.01)
    result = milp(
        program.objective * scale,
        integrality=integers & (np.arange(len(program.objective)) < program.strategies),
        bounds=Bounds(0.0, program.column_upper),
        constraints=program.rows,
        options={"mip_rel_gap": 0.0} | ({"time_limit": left_s} if math.isfinite(left_s) else {}),
    )
    if result.status == 2:
        return None, Answer(choice=None, bound=math.inf, proven=True)
    proven = result.status == 0
    bound = -math.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) / scale
    if not integers:
        bound = float(result.fun) / scale if proven else -math.inf
    if result.x is None or not integers:
        return result.x, Answer(choice=None, bound=bound, proven=proven and result.x is not None)
    share = result.x[: program.strategies]
    choice = tuple(int(np.argmax(share[a:b])) for a, b in zip(program.first[:-1], program.first[1:], strict=True))
    return result.x, Answer(choice=choice, bound=bound, proven=proven)


def fit(limited: Limited, flat: FlatLimited, deadline: float) -> tuple[int, ...] | Infeasibility | None:
    """A choice that fits, or why there is none; None when time ran out.

    Every row may pass its room by a shared z, and z is minimised; edges that allow every pair are left out. Rows are
    brought in as they are broken: an excess over some rows is one over all.
    """
    problem = limited.problem
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
        values, answer = run(program, deadline)
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
                nodes=holders(limited, times[0]),
                bytes_over=least,
                reason="no choice that the edges allow fits at these times; this is the least excess",
            )
        if time.perf_counter() > deadline:
            return None
        included.update(fresh)
