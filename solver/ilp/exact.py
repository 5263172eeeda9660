"""The integer program solved by OR-tools; memory rows are added when an answer violates them."""

from __future__ import annotations

import datetime
import enum
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.ilp.flat_arrays import Flat
from autopar.solver.ilp.formulas import IntegerProgram, build
from autopar.solver.ilp.memory_rows import can_bind, row_at, shares, used, worst_rows
from autopar.solver.ilp.problem import Problem

THREADS = 2
EXACT_ENTRIES = 60_000  # edge variables with which a program takes some seconds
ROWS_AT_ONCE = 64  # rows added where the last answer broke them; a problem with no more gets all of them at once


class Backend(enum.Enum):
    """The solver behind MathOpt that takes what presolve leaves; docs/solver.md has their figures."""

    HIGHS = "highs"
    CP_SAT = "cp_sat"
    SCIP = "scip"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a backend found: choice None when there is none; proven says that the search ended by itself."""

    choice: tuple[int, ...] | None
    bound: float
    proven: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to solve. deadline: on the clock of time.perf_counter; relative_gap: at which an answer is good enough."""

    backend: Backend
    deadline: float
    relative_gap: float
    seed: int


def solve_lazily(problem: Problem, flat: Flat, settings: Settings, *, rows: Sequence[int] = ()) -> Answer:
    """The program with the rows given, then with those its answer breaks, until it breaks none.

    flat: the arrays of the problem; its memory may count more than the problem's own uses. The linear relaxation finds
    most of the rows that matter. A choice is returned only if it fits; the bound holds for all of the rows, being of
    fewer.
    """
    binding = can_bind(flat)
    included = set(binding.tolist()) if len(binding) <= ROWS_AT_ONCE else set(rows)
    relaxed = len(binding) > ROWS_AT_ONCE and not included
    bound = -math.inf
    while True:
        program = build(problem, [row_at(flat, row) for row in sorted(included)])
        values, answer = run(program, settings, integers=not relaxed)
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
        if time.perf_counter() > settings.deadline:
            return Answer(choice=None, bound=bound, proven=False)
        relaxed = relaxed and bool(fresh)
        included.update(fresh)


def run(program: IntegerProgram, settings: Settings, *, integers: bool = True) -> tuple[np.ndarray | None, Answer]:
    """Run a backend; the values of all columns (None when it found none) and the answer. A relaxation's choice is None.

    Costs are scaled to a largest absolute value of 1e6 before, for the solvers' absolute tolerances.
    """
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

    scale = 1e6 / max(float(np.abs(program.objective).max(initial=0.0)), 1e-300)
    columns, rows = len(program.objective), len(program.row_lower)
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(columns))
    proto.variables.lower_bounds.extend(np.zeros(columns).tolist())
    proto.variables.upper_bounds.extend(program.column_upper.tolist())
    proto.variables.integers.extend((integers & (np.arange(columns) < program.strategies)).tolist())
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
    backend = settings.backend if integers else Backend.HIGHS  # the others have no relaxation to give
    left_s = max(settings.deadline - time.perf_counter(), 0.01)
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=left_s) if math.isfinite(left_s) else None,
        relative_gap_tolerance=settings.relative_gap if integers else None,
        absolute_gap_tolerance=0.0 if integers else None,
        random_seed=settings.seed,
        threads=THREADS if backend is Backend.CP_SAT else None,  # MathOpt does not pass it on to the others
    )
    result = mathopt.solve(model, kinds[backend], params=parameters)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return None, Answer(choice=None, bound=math.inf, proven=True)
    bound = result.dual_bound() / scale
    if not result.has_primal_feasible_solution():
        return None, Answer(choice=None, bound=bound, proven=False)
    stored = result.variable_values()
    values = np.array([stored[variable] for variable in model.variables()])
    proven = reason is mathopt.TerminationReason.OPTIMAL
    if not integers:
        return values, Answer(choice=None, bound=bound if proven else -math.inf, proven=proven)
    share = values[: program.strategies]
    choice = tuple(int(np.argmax(share[a:b])) for a, b in zip(program.first[:-1], program.first[1:], strict=True))
    return values, Answer(choice=choice, bound=bound, proven=proven)
