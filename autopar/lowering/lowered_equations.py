"""The equations of a graph as they were lowered last: the candidates of one step on one mesh differ in few of them."""

from __future__ import annotations

import dataclasses

from autopar.ir.graph import Op
from autopar.ir.layout import Layout
from autopar.lowering.instructions import Compute, Place
from autopar.sharding.strategies import Strategy


@dataclasses.dataclass(frozen=True, slots=True)
class _Lowered:
    compute: Compute
    homes: tuple[Layout, ...]
    reduced: tuple[Layout | None, ...]


class LoweredEquations:
    """The last instruction of each equation, for programs of one graph on one mesh, and of the same graph with other
    counts of its operations.

    An instruction depends on the equation, its strategy, the places that it reads, where its results lie as it leaves
    them (`homes`), and where they are reduced to. An instruction that is taken again also keeps what was worked out of
    it: its keys, and its work on the streams.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, float], _Lowered] = {}

    def find(
        self,
        op: Op,
        strategy: Strategy | None,
        reads: tuple[Place | None, ...],
        homes: tuple[Layout, ...],
        reduced: tuple[Layout | None, ...],
    ) -> Compute | None:
        """The instruction of before; None where something about it differs."""
        last = self._last.get((op.id, op.count))
        if last is None:
            return None
        compute = last.compute
        same_operation = compute.op is op and compute.strategy is strategy
        if same_operation and compute.reads == reads and last.homes == homes and last.reduced == reduced:
            return compute
        return None

    def keep(self, compute: Compute, homes: tuple[Layout, ...], reduced: tuple[Layout | None, ...]) -> None:
        """Takes an instruction as the last one of its equation."""
        self._last[compute.op.id, compute.op.count] = _Lowered(compute, homes, reduced)
