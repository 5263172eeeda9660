"""The options of layers on each of several meshes: decided, timed and priced, one mesh independently of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from autopar.cost.cost_model import CostModel
from autopar.cost.stream_work import Ran
from autopar.hardware.collective_cost import Link
from autopar.inter_op.layer_decisions import Decisions, LayerDecider
from autopar.inter_op.stage_costs import LayerPolicies, PricedOption, stage_options
from autopar.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.ir.graph import OpGraph, Value, values_of, without_numbers
from autopar.passes.fold_layers import FoldedGraph
from autopar.passes.layers import Layers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayersOnMesh:
    """What the decisions of layers on one mesh depend on: as in `LayerDecider`; `known`, where they are known already
    from smaller micro-batches.
    """

    model: CostModel
    room_bytes: float
    in_flight: int
    equal: bool
    known: Decisions | None


def _of_read_values(graph: OpGraph) -> OpGraph:
    """The graph without the values of layers that were folded away, and without the numbers in its constants."""
    read, nobody = set(values_of(graph.block)), Value(id=-1, shape=(), dtype="float32", itemsize=0)
    values = tuple(v if v.id in read else nobody for v in graph.values)
    return dataclasses.replace(without_numbers(graph), values=values)


class MeshOptions:
    """The options of layers on meshes, for each by its number, in two parts: how long the fastest decisions take, and
    all decisions with their options.

    It holds no arrays, and all that it is made of can be pickled (`common.jax_pickle`).
    """

    def __init__(
        self,
        folded: FoldedGraph,
        policies: LayerPolicies,
        layers: Layers,
        link: Link,
        time_limit_s: float,
        meshes: Sequence[LayersOnMesh],
    ) -> None:
        self.folded = dataclasses.replace(folded, graph=_of_read_values(folded.graph), members={})
        self.policies, self.layers, self.link = policies, layers, link
        self.time_limit_s, self.meshes = time_limit_s, tuple(meshes)
        self._begun: dict[int, tuple[LayerDecider | None, TimedSharding | None]] = {}

    def fastest(self, number: int) -> Ran | None:
        """How all layers run on a mesh under the fastest decisions; None where there are none in time."""
        _, timed = self._at(number)
        return timed.ran if timed is not None else None

    def priced(self, number: int) -> tuple[Decisions, tuple[PricedOption, ...]]:
        """All decisions on a mesh, and their options."""
        on, (decider, timed) = self.meshes[number], self._at(number)
        decisions = decider.decisions() if decider is not None else on.known or ()
        options = stage_options(self.folded, self.policies, self.layers, on.model, self.link, decisions, timed)
        del self._begun[number]
        return decisions, options

    def forget(self, numbers: Iterable[int]) -> None:
        """Frees what is known of meshes that need no options."""
        for number in numbers:
            self._begun.pop(number, None)

    def _at(self, number: int) -> tuple[LayerDecider | None, TimedSharding | None]:
        if number not in self._begun:
            on = self.meshes[number]
            decider = first = costs = None
            if on.known is None:
                decider = LayerDecider(self.folded, on.model, on.room_bytes, on.in_flight, on.equal, self.time_limit_s)
                first, costs = decider.fastest, decider.intra_op.costs
            elif on.known:
                first = on.known[0]
            timed = timed_sharding(self.folded.graph, on.model, first.sharding, costs) if first is not None else None
            self._begun[number] = decider, timed
        return self._begun[number]
