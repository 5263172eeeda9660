"""The integer program in arrays: formulas (1), (2), (4) and (5) ((3) is in tied.py), built in bulk.

Strategies and pairs of infinite cost are left out, not priced. Edge variables are continuous: given 0-1 node
variables, the row and column sums of (2) leave only 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.ilp.memory_rows import Row
from autopar.solver.ilp.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerProgram:
    """Columns, rows and coefficients; the first columns are x[g, s], node after node, then y[e, s, t]."""

    objective: np.ndarray
    column_upper: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    entry_row: np.ndarray
    entry_column: np.ndarray
    entry_value: np.ndarray
    first: np.ndarray  # of node g: the column of x[g, 0]
    strategies: int  # columns below this are node variables


class _Rows:
    """Rows as they are added, in arrays."""

    def __init__(self) -> None:
        self.count = 0
        self.lower: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []
        self.row: list[np.ndarray] = []
        self.column: list[np.ndarray] = []
        self.value: list[np.ndarray] = []

    def add(self, lower: np.ndarray, upper: np.ndarray, row: np.ndarray, column: np.ndarray, value: np.ndarray) -> None:
        self.lower.append(lower)
        self.upper.append(upper)
        self.row.append(row + self.count)
        self.column.append(column)
        self.value.append(value)
        self.count += len(lower)


def build(problem: Problem, memory: Sequence[Row], *, spare: bool = False) -> IntegerProgram:
    """The whole program; the problem must have no edge from a node to itself.

    spare: add one last column, the bytes by which rows may be passed as a part of the largest room, and minimise it
    too.
    """
    sizes = np.array([len(cost) for cost in problem.node_cost], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = _Rows()
    one_strategy_per_node(rows, sizes)
    edge_cost = edge_variables(rows, problem, first)
    objective = total_cost(problem, edge_cost)
    upper = np.concatenate(
        [np.isfinite(objective[: first[-1]]).astype(np.float64), np.ones(len(objective) - first[-1])]
    )
    objective = np.where(np.isfinite(objective), objective, 0.0)
    if spare:
        objective, upper = np.append(objective, 1.0), np.append(upper, math.inf)
    memory_limit(rows, memory, first, len(objective) - 1 if spare else None)
    return IntegerProgram(
        objective=objective,
        column_upper=upper,
        row_lower=np.concatenate(rows.lower),
        row_upper=np.concatenate(rows.upper),
        entry_row=np.concatenate(rows.row),
        entry_column=np.concatenate(rows.column),
        entry_value=np.concatenate(rows.value),
        first=first,
        strategies=int(first[-1]),
    )


def one_strategy_per_node(rows: _Rows, sizes: np.ndarray) -> None:
    """(1) sum over s of x[g, s] = 1."""
    sums = np.ones(len(sizes))
    total = int(sizes.sum())
    rows.add(sums, sums, np.repeat(np.arange(len(sizes)), sizes), np.arange(total), np.ones(total))


def edge_variables(rows: _Rows, problem: Problem, first: np.ndarray) -> list[np.ndarray]:
    """(2) sum over t of y[e, s, t] = x[g, s] and sum over s = x[h, t], over the pairs allowed; returns their costs."""
    costs: list[np.ndarray] = []
    column = int(first[-1])
    for edge in problem.edges:
        s, t = np.nonzero(np.isfinite(edge.cost))
        costs.append(edge.cost[s, t])
        pairs = np.arange(column, column + len(s))
        column += len(s)
        for node, rows_of_pair, count in ((edge.source, s, edge.cost.shape[0]), (edge.target, t, edge.cost.shape[1])):
            zero = np.zeros(count)
            strategies = np.arange(count)
            rows.add(
                zero,
                zero,
                np.concatenate([rows_of_pair, strategies]),
                np.concatenate([pairs, first[node] + strategies]),
                np.concatenate([np.ones(len(s)), np.full(count, -1.0)]),
            )
    return costs


def memory_limit(rows: _Rows, memory: Sequence[Row], first: np.ndarray, spare: int | None) -> None:
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
        upper = np.array([row.room / scale])
        rows.add(np.array([-math.inf]), upper, np.zeros(len(columns), dtype=np.int64), columns, sizes)


def total_cost(problem: Problem, edge_cost: list[np.ndarray]) -> np.ndarray:
    """(5) sum over x of node cost + sum over y of edge cost."""
    return np.concatenate([*problem.node_cost, *edge_cost])
