"""What a reduction is: a smaller problem and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .problem import Infeasibility, Problem

Choice = tuple[int, ...]
Undo = Callable[[Sequence[int]], Choice]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """A smaller problem, the choice for the larger one that belongs to a choice of it, and the cost left out of it."""

    problem: Problem
    undo: Undo
    offset: float = 0.0


class ConflictError(Exception):
    """No choice is allowed whatever the memory; carries the reason."""

    def __init__(self, why: Infeasibility):
        super().__init__(why.reason)
        self.why = why


def chain(first: Reduction, second: Reduction) -> Reduction:
    """One reduction after another."""
    return Reduction(
        problem=second.problem,
        undo=lambda choice: first.undo(second.undo(choice)),
        offset=first.offset + second.offset,
    )


def size(problem: Problem) -> tuple[int, int, int]:
    """Nodes, edges and strategies: what reductions make smaller."""
    return len(problem.node_cost), len(problem.edges), sum(len(cost) for cost in problem.node_cost)
