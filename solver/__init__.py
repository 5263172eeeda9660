"""One strategy a node at the least cost within the memory limit; pipeline stages at the least step time."""

from .checking import brute_force, evaluate
from .ilp import Backend
from .problem import Edge, Infeasibility, Problem, Solution, Status, Use
from .solving import solve
from .stage_checking import brute_force_stages
from .stage_search import best_stages, solve_stages
from .stages import NoStages, Schedule, Stage, StageOption, StagePlan, StageProblem, step_time_s
from .tying import tie

__all__ = [
    "Backend",
    "Edge",
    "Infeasibility",
    "NoStages",
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
    "solve",
    "solve_stages",
    "step_time_s",
    "tie",
]
