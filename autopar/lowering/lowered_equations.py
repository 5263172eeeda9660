"""The equations of a graph as they were lowered last: the candidates of one step on one mesh differ in few of them."""

from __future__ import annotations

import dataclasses

from autopar.ir.graph import UNREDUCED, Op
from autopar.ir.layout import Layout
from autopar.lowering.decisions import ShardingPlan
from autopar.lowering.instructions import Compute


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredEquation:
    """The last instruction of an equation, and the decisions that it was made of: those for the `values` that it reads
    and makes. `moves`: whether an operand had to be brought to another place for it.
    """

    compute: Compute
    values: tuple[int, ...]
    unreduced: tuple[Layout | None, ...]
    reduced: tuple[Layout | None, ...]
    moves: bool

    def is_of(self, op: Op, plan: ShardingPlan) -> bool:
        """Whether a plan decides the same for the equation and its values, copies apart."""
        return (
            self.compute.op is op
            and self.compute.strategy is plan.strategy.get(op.id)
            and self.unreduced == tuple(map(plan.unreduced.get, self.values))
            and self.reduced == tuple(map(plan.reduced.get, self.values))
        )


class LoweredEquations:
    """The last instruction of each equation, for programs of one graph on one mesh, and of the same graph with other
    counts of its operations.

    An instruction that is taken again also keeps what was worked out of it: its keys, and its work on the streams.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, float], LoweredEquation] = {}

    def last(self, op: Op, plan: ShardingPlan) -> LoweredEquation | None:
        """The equation as it was lowered last, if a plan decides the same for it."""
        last = self._last.get((op.id, op.count))
        return last if last is not None and last.is_of(op, plan) else None

    def keep(self, compute: Compute, plan: ShardingPlan) -> None:
        """Takes an instruction as the last one of its equation."""
        op = compute.op
        values = tuple([a for a in (*op.inputs, *op.outputs) if isinstance(a, int)])
        unreduced, reduced = tuple(map(plan.unreduced.get, values)), tuple(map(plan.reduced.get, values))
        moves = any(place is not None and place[1] != UNREDUCED for place in compute.reads)
        self._last[op.id, op.count] = LoweredEquation(compute, values, unreduced, reduced, moves)
