"""The integer program, formulas (1), (2), (4) and (5) of DESIGN section 4 ((3) is in tying.py), built in bulk and solved by OR-tools.

Strategies and pairs of infinite cost are left out, not priced. Edge variables are continuous: given 0-1 node variables, the row and
column sums of (2) leave only 0 and 1.
"""

from __future__ import annotations

import datetime
import enum
import math
from dataclasses import dataclass

import numpy as np

from .livespans import Row
from .problem import Problem


class Backend(enum.Enum):
    """The solver behind MathOpt that takes what presolve leaves; benchmarks/results/solvers.md has the figures."""

    HIGHS = "highs"
    CP_SAT = "cp_sat"
    SCIP = "scip"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Columns, rows and coefficients; the first columns are x[g, s], node after node, then y[e, s, t] of the pairs allowed."""

    objective: np.ndarray
    row_lower: np.ndarray
    row_upper: np.ndarray
    entry_row: np.ndarray
    entry_column: np.ndarray
    entry_value: np.ndarray
    first: np.ndarray  # of node g: the column of x[g, 0]
    strategies: int  # columns below this are node variables


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a backend found: choice None when there is none; proven says that the search ended by itself."""

    choice: tuple[int, ...] | None
    bound: float
    proven: bool


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


def build(problem: Problem, memory: tuple[Row, ...]) -> Program:
    """The whole program; the problem must have no parallel edges and no edge from a node to itself."""
    sizes = np.array([len(cost) for cost in problem.node_cost], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = _Rows()
    one_strategy_per_node(rows, sizes)
    edge_cost = edge_variables(rows, problem, first)
    memory_limit(rows, memory, first)
    return Program(
        objective=total_cost(problem, edge_cost),
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
    ones = np.ones(len(sizes))
    total = int(sizes.sum())
    rows.add(ones, ones, np.repeat(np.arange(len(sizes)), sizes), np.arange(total), np.ones(total))


def edge_variables(rows: _Rows, problem: Problem, first: np.ndarray) -> list[np.ndarray]:
    """(2) sum over t of y[e, s, t] = x[g, s] and sum over s of y[e, s, t] = x[h, t], over the pairs allowed; returns their costs."""
    costs: list[np.ndarray] = []
    column = int(first[-1])
    for edge in problem.edges:
        s, t = np.nonzero(np.isfinite(edge.cost))
        costs.append(edge.cost[s, t])
        pairs = np.arange(column, column + len(s))
        column += len(s)
        for node, own, count in ((edge.source, s, edge.cost.shape[0]), (edge.target, t, edge.cost.shape[1])):
            zero = np.zeros(count)
            mine = np.arange(count)
            rows.add(
                zero,
                zero,
                np.concatenate([own, mine]),
                np.concatenate([pairs, first[node] + mine]),
                np.concatenate([np.ones(len(s)), np.full(count, -1.0)]),
            )
    return costs


def memory_limit(rows: _Rows, memory: tuple[Row, ...], first: np.ndarray) -> None:
    """(4) at each time that can bind: sum over live nodes and s of bytes[g, s] x[g, s] <= what the constant part leaves."""
    for row in memory:
        scale = float(max(1, row.room))  # bytes reach 1e11: solvers' tolerances are absolute
        columns = np.concatenate(
            [first[node] + np.arange(len(size)) for node, size in zip(row.nodes, row.bytes, strict=True)]
        )
        sizes = np.concatenate(row.bytes) / scale
        used = sizes > 0
        upper = np.array([row.room / scale])
        rows.add(np.array([-math.inf]), upper, np.zeros(int(used.sum()), dtype=np.int64), columns[used], sizes[used])


def total_cost(problem: Problem, edge_cost: list[np.ndarray]) -> np.ndarray:
    """(5) sum over x of node cost + sum over y of edge cost."""
    return np.concatenate([*problem.node_cost, *edge_cost])


def solve_program(
    program: Program,
    *,
    backend: Backend,
    time_limit_s: float,
    relative_gap: float,
    seed: int,
    threads: int,
    hint: tuple[int, ...] | None = None,
) -> Answer:
    """Run a backend on the program; costs are scaled to a largest absolute value of 1e6 before, for its tolerances."""
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

    scale = 1e6 / max(float(np.abs(program.objective).max(initial=0.0)), 1e-300)
    columns, rows = len(program.objective), len(program.row_lower)
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(columns))
    proto.variables.lower_bounds.extend(np.zeros(columns).tolist())
    proto.variables.upper_bounds.extend(np.ones(columns).tolist())
    proto.variables.integers.extend((np.arange(columns) < program.strategies).tolist())
    priced = np.flatnonzero(program.objective)
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend((program.objective[priced] * scale).tolist())
    proto.linear_constraints.ids.extend(range(rows))
    proto.linear_constraints.lower_bounds.extend(program.row_lower.tolist())
    proto.linear_constraints.upper_bounds.extend(program.row_upper.tolist())
    order = np.lexsort((program.entry_column, program.entry_row))
    proto.linear_constraint_matrix.row_ids.extend(program.entry_row[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(program.entry_column[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(program.entry_value[order].tolist())
    model = mathopt.Model.from_model_proto(proto)

    kinds = {
        Backend.HIGHS: mathopt.SolverType.HIGHS,
        Backend.CP_SAT: mathopt.SolverType.CP_SAT,
        Backend.SCIP: mathopt.SolverType.GSCIP,
    }
    settings = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(time_limit_s, 0.01)),
        relative_gap_tolerance=relative_gap,
        absolute_gap_tolerance=0.0,
        random_seed=seed,
        threads=threads if backend is Backend.CP_SAT else None,  # MathOpt does not pass it on to the others
    )
    hints = []
    if hint is not None:
        chosen = set((program.first[:-1] + np.asarray(hint)).tolist())
        values = {model.get_variable(i): float(i in chosen) for i in range(program.strategies)}
        hints.append(mathopt.SolutionHint(variable_values=values))
    result = mathopt.solve(
        model, kinds[backend], params=settings, model_params=mathopt.ModelSolveParameters(solution_hints=hints)
    )
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Answer(choice=None, bound=math.inf, proven=True)
    bound = result.dual_bound() / scale
    if not result.has_primal_feasible_solution():
        return Answer(choice=None, bound=bound, proven=False)
    values = result.variable_values()
    taken = np.array([values[model.get_variable(i)] for i in range(program.strategies)])
    choice = tuple(int(taken[a:b].argmax()) for a, b in zip(program.first[:-1], program.first[1:], strict=True))
    return Answer(choice=choice, bound=bound, proven=reason is mathopt.TerminationReason.OPTIMAL)
