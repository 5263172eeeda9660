"""`Reduction`: a smaller problem and the map back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.solver.ilp.problem import Infeasibility, Problem

Choice = tuple[int, ...]
Undo = Callable[[Sequence[int]], Choice]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """A smaller problem, the choice for the larger one that belongs to a choice of it, and the cost left out of it.

    origin: the larger problem's node that each node stands for; None = the nodes are the same.
    """

    problem: Problem
    undo: Undo
    offset: float = 0.0
    origin: tuple[int, ...] | None = None


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
        origin=_compose(first.origin, second.origin),
    )


def _compose(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if first is None or second is None:
        return first if second is None else second
    return tuple(first[node] for node in second)


def size(problem: Problem) -> tuple[int, int, int]:
    """Nodes, edges and strategies: what reductions make smaller."""
    return len(problem.node_cost), len(problem.edges), sum(len(cost) for cost in problem.node_cost)
