"""The solver: one strategy for each node at least cost; pipeline stages at least step time.

In: `Problem` or `StageProblem`: numpy arrays of seconds and bytes.
Out: `Solution` with a proven bound; `StagePlan` or `NoStages`.
May import: numpy, scipy and numba; neither JAX nor the rest of autopar.
"""

from autopar.solver.problem import Edge, Problem, Solution, Status, evaluate, tie
from autopar.solver.solving import solve
from autopar.solver.stage_problem import (
    NoStages,
    Schedule,
    Stage,
    StageOption,
    StagePlan,
    StageProblem,
    fullness,
    step_time_s,
)
from autopar.solver.stage_search import best_stages

__all__ = [
    "Edge",
    "NoStages",
    "Problem",
    "Schedule",
    "Solution",
    "Stage",
    "StageOption",
    "StagePlan",
    "StageProblem",
    "Status",
    "best_stages",
    "evaluate",
    "fullness",
    "solve",
    "step_time_s",
    "tie",
]
