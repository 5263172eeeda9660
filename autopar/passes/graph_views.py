"""What several sources of candidates read of one graph, each worked out when it is first asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autopar.common.records import lazy, replaced
from autopar.ir.graph import Block, Op, OpGraph, without_numbers
from autopar.passes.fold_step import FoldedStep, fold_step
from autopar.sharding.partial_sums import Partials, find_partials, same_partials
from autopar.sharding.semantics import annotate_semantics


class GraphViews:
    """The graph of a step with its repeated layers folded, and with what its values and their dimensions are for.

    `flops(op)` is the arithmetic of one run of an equation.
    """

    def __init__(self, graph: OpGraph, flops: Callable[[Op], float]) -> None:
        self.graph, self._flops = graph, flops
        # With the block by whose id they are known, so that the id stays its own.
        self._partials: dict[int, tuple[Block, Partials]] = {}

    @property
    def partials(self) -> Partials:
        """Which values of the whole graph may stay partial sums."""
        return self.partials_of(self.graph)

    def partials_of(self, graph: OpGraph) -> Partials:
        """Which values may stay partial sums, of the whole graph or the folded one, annotated or not."""
        key = id(graph.block)
        if key not in self._partials:
            self._partials[key] = graph.block, find_partials(graph)
        return self._partials[key][1]

    def without_numbers(self) -> GraphViews:
        """The views of the same blocks without the numbers in constants, not yet annotated."""
        views, step = GraphViews(without_numbers(self.graph), self._flops), self.folded
        if step is not None:
            step = dataclasses.replace(step, graph=without_numbers(step.graph))
        views.__dict__["folded"] = step
        views._partials = dict(self._partials)
        return views

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_partials": list(self._partials.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _partials={id(block): (block, found) for block, found in state["_partials"]})

    @lazy
    def folded(self) -> FoldedStep | None:
        """The step with its repeated layers taken out; None where there are none to take out, or where sums could stay
        partial in one of both graphs only.
        """
        step = fold_step(self.graph, self._flops)
        if step is None or not same_partials(self.partials, self.partials_of(step.graph), step.op_of, step.value_of):
            return None
        return step

    @lazy
    def annotated_fold(self) -> FoldedStep | None:
        """`folded` with the semantics of its values."""
        step = self.folded
        return dataclasses.replace(step, graph=annotate_semantics(step.graph)) if step is not None else None

    @lazy
    def annotated(self) -> OpGraph:
        """The graph with the semantics of its values: those of dropped layers mean what their counterparts do."""
        step = self.annotated_fold
        if step is None:
            return annotate_semantics(self.graph)
        known = step.graph.values
        values = list(self.graph.values)
        for v, like in step.value_of.items():
            meant = known[like]
            values[v] = replaced(values[v], dimensions=meant.dimensions, sides=meant.sides, purpose=meant.purpose)
        return dataclasses.replace(self.graph, values=tuple(values))
