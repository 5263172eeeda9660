"""The options of layers on each of several meshes, and the meshes that no fast pipeline has."""

from __future__ import annotations

import dataclasses
import functools
import math

from autopar.cost.cost_model import CostModel
from autopar.cost.stream_work import Ran
from autopar.hardware.collective_cost import Link
from autopar.inter_op.layer_decisions import Decisions, LayerDecider
from autopar.inter_op.stage_costs import LayerPolicies, PricedOption, stage_options
from autopar.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.passes.fold_layers import FoldedGraph
from autopar.passes.layers import Layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The options of all layers on one mesh, in two parts: how long the fastest decisions take, and all decisions with
    their options.

    `room_bytes`, `in_flight`, `equal` and `time_limit_s` are those of `LayerDecider`. `known`: decisions that are known
    already from smaller micro-batches.
    """

    folded: FoldedGraph
    policies: LayerPolicies
    layers: Layers
    link: Link
    model: CostModel
    room_bytes: float
    in_flight: int
    equal: bool
    time_limit_s: float
    known: Decisions | None

    @property
    def ran(self) -> Ran | None:
        """How all layers run under the fastest decisions; None where there are none in time."""
        return self._timed.ran if self._timed is not None else None

    def priced(self) -> tuple[Decisions, tuple[PricedOption, ...]]:
        """All decisions, and their options."""
        decisions = self._decider.decisions() if self._decider is not None else self.known or ()
        options = stage_options(self.folded, self.policies, self.layers, self.model, self.link, decisions, self._timed)
        return decisions, options

    @functools.cached_property
    def _decider(self) -> LayerDecider | None:
        if self.known is not None:
            return None
        return LayerDecider(self.folded, self.model, self.room_bytes, self.in_flight, self.equal, self.time_limit_s)

    @functools.cached_property
    def _timed(self) -> TimedSharding | None:
        first, costs = self.known[0] if self.known else None, None
        if self._decider is not None:
            first, costs = self._decider.fastest, self._decider.intra_op.costs
        return timed_sharding(self.folded.graph, self.model, first.sharding, costs) if first is not None else None


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
