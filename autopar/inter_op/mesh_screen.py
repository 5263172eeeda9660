"""Which meshes no stage of a fast pipeline has, told by their fastest decisions: their tables are not made."""

from __future__ import annotations

import dataclasses
import math

from autopar.cost.stream_work import Ran

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
        least_device_s: For each part of the cluster, seconds of one device for all layers on the mesh that takes
            fewest.
        has_left_out: Whether any mesh was left out.
        has_left_out_for_pipeline: Whether one was because a pipeline is known.
    """

    num_devices: int
    are_equal: bool = False
    longest_s: float = math.inf
    least_device_s: dict[int, float] = dataclasses.field(default_factory=dict)
    has_left_out: bool = False
    has_left_out_for_pipeline: bool = False

    @property
    def knows_pipeline(self) -> bool:
        return self.longest_s < math.inf

    def pays(self, part: int, num_devices: int, ran: Ran, fastest_s: float) -> bool:
        """Whether a stage of a pipeline that takes less than `longest_s` may be on a mesh in a part of the cluster, on
        which all layers run so under their fastest decisions; they take `fastest_s` on the fastest mesh of as many
        devices there.
        """
        if num_devices == self.num_devices:
            return True
        if ran.end_s > MUCH_SLOWER * fastest_s:
            self.has_left_out = True
            return False
        if not self.knows_pipeline:
            return True
        least_device_s = min(self.least_device_s.get(part, math.inf), fastest_s * num_devices)
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
        least_device_s = min(*self.least_device_s.values(), fastest_s * num_devices, math.inf)
        others = (self.num_devices - num_devices) / (ran.busy_s * num_devices if self.are_equal else least_device_s)
        return self.longest_s * (others + 1 / ran.busy_s) >= 1

    def saw(self, part: int, num_devices: int, seconds: float) -> None:
        """All layers take so long on a mesh of so many devices in a part of the cluster."""
        self.least_device_s[part] = min(self.least_device_s.get(part, math.inf), seconds * num_devices)
