"""One strategy a node at the least cost within the memory limit."""

from .checking import brute_force, evaluate
from .ilp import Backend
from .problem import Edge, Infeasibility, Problem, Solution, Status, Use
from .solving import solve
from .tying import tie

__all__ = [
    "Backend",
    "Edge",
    "Infeasibility",
    "Problem",
    "Solution",
    "Status",
    "Use",
    "brute_force",
    "evaluate",
    "solve",
    "tie",
]
