"""The options of layers on each of several meshes, and the meshes that no fast pipeline has."""

from __future__ import annotations

import dataclasses
import math
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


# Seconds of all layers on a mesh, over those on the fastest mesh of as many devices, from which it is left out: however
# little memory it takes, the fastest one is decided for little memory too. The same of the seconds of a device, over
# those on any mesh, once a pipeline is known.
MUCH_SLOWER = 2.0


@dataclasses.dataclass(slots=True, kw_only=True)
class MeshScreen:
    """What is known so far of stages on devices of a cluster.

    Attributes:
        num_devices: Of the cluster. What takes all of them is never left out: one stage has rules of its own.
        are_equal: Whether all stages lie on the same mesh.
        longest_s: The step time from which on pipelines are of no use; inf while none is known.
        least_device_s: Seconds of one device for all layers on the mesh that takes fewest.
        has_left_out: Whether any mesh was left out.
        has_left_out_for_pipeline: Whether one was because a pipeline is known.
    """

    num_devices: int
    are_equal: bool = False
    longest_s: float = math.inf
    least_device_s: float = math.inf
    has_left_out: bool = False
    has_left_out_for_pipeline: bool = False

    @property
    def knows_pipeline(self) -> bool:
        return self.longest_s < math.inf

    def pays(self, num_devices: int, ran: Ran, fastest_s: float) -> bool:
        """Whether a stage of a pipeline that takes less than `longest_s` may be on a mesh, on which all layers run so
        under their fastest decisions; they take `fastest_s` on the fastest mesh of as many devices.
        """
        if num_devices == self.num_devices:
            return True
        if ran.end_s > MUCH_SLOWER * fastest_s:
            self.has_left_out = True
            return False
        if not self.knows_pipeline:
            return True
        least_device_s = min(self.least_device_s, fastest_s * num_devices)
        pays = ran.end_s * num_devices <= MUCH_SLOWER * least_device_s and self.get_through(num_devices, ran, fastest_s)
        self.has_left_out |= not pays
        self.has_left_out_for_pipeline |= not pays
        return pays

    def get_through(self, num_devices: int, ran: Ran, fastest_s: float) -> bool:
        """Whether all devices get through all layers by `longest_s`, where one stage is on a mesh: while it runs its
        layers, all others run theirs, as on this mesh or at best as on the one that takes fewest seconds of a device.
        Whatever overlaps, no stream takes less than the sum of its work.
        """
        if not ran.busy_s:
            return True
        least_device_s = min(self.least_device_s, fastest_s * num_devices)
        others = (self.num_devices - num_devices) / (ran.busy_s * num_devices if self.are_equal else least_device_s)
        return self.longest_s * (others + 1 / ran.busy_s) >= 1

    def saw(self, num_devices: int, seconds: float) -> None:
        """All layers take so long on a mesh of so many devices."""
        self.least_device_s = min(self.least_device_s, seconds * num_devices)
