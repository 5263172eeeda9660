"""One strategy a node at the least cost within the memory limit; pipeline stages at the least step time."""

from autopar.solver.ilp.brute_force import brute_force, evaluate
from autopar.solver.ilp.exact import Backend
from autopar.solver.ilp.problem import Edge, Infeasibility, Problem, Solution, Status, Use
from autopar.solver.ilp.tied import tie
from autopar.solver.solve import solve
from autopar.solver.stages.brute_force import brute_force_stages
from autopar.solver.stages.problem import NoStages, Schedule, Stage, StageOption, StagePlan, StageProblem, step_time_s
from autopar.solver.stages.search import best_stages, solve_stages

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
