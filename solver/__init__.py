"""The solver: one strategy for each node at least cost in limited memory; pipeline stages at least step time.

In: `Problem` or `StageProblem`: numpy arrays of seconds and bytes.
Out: `Solution` with a proven bound; `StagePlan` or `NoStages`.
May import: numpy, numba and OR-tools; neither JAX nor the rest of autopar.
"""

from autopar.solver.exhaustive_search import brute_force, brute_force_stages, evaluate
from autopar.solver.integer_program import Backend
from autopar.solver.problem import Edge, Infeasibility, Problem, Solution, Status, Use, tie
from autopar.solver.solving import solve
from autopar.solver.stage_problem import (
    NoStages,
    Placement,
    Schedule,
    Stage,
    StageOption,
    StagePlan,
    StageProblem,
    fullness,
    step_time_s,
)
from autopar.solver.stage_search import best_stages, solve_stages

__all__ = [
    "Backend",
    "Edge",
    "Infeasibility",
    "NoStages",
    "Placement",
    "Problem",
    "Schedule",
    "Solution",
    "Stage",
    "StageOption",
    "StagePlan",
    "StageProblem",
    "Status",
    "Use",
    "best_stages",
    "brute_force",
    "brute_force_stages",
    "evaluate",
    "fullness",
    "solve",
    "solve_stages",
    "step_time_s",
    "tie",
]
