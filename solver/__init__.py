"""The solver: one strategy for each node at least cost in limited memory; pipeline stages at least step time.

In: `Problem` or `StageProblem`: numpy arrays of seconds and bytes.
Out: `Solution` with a proven bound; `StagePlan` or `NoStages`.
May import: its own packages, numpy, numba and OR-tools; neither JAX nor the rest of autopar.
"""

from autopar.solver.ilp.brute_force import brute_force, evaluate
from autopar.solver.ilp.exact import Backend
from autopar.solver.ilp.problem import Edge, Infeasibility, Problem, Solution, Status, Use
from autopar.solver.ilp.tied import tie
from autopar.solver.solving import solve
from autopar.solver.stages.brute_force import brute_force_stages
from autopar.solver.stages.problem import (
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
from autopar.solver.stages.search import best_stages, solve_stages

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
