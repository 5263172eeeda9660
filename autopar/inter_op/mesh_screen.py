"""Which meshes no stage of a fast pipeline has, told by their fastest decisions: their tables are not made."""

from __future__ import annotations

import dataclasses
import math

from autopar.cost.stream_work import Ran

# Seconds of all layers on a mesh, over those on the fastest mesh of as many devices, from which it is left out: however
# little memory it takes, the fastest one is decided for little memory too.
MUCH_SLOWER = 2.0


@dataclasses.dataclass(slots=True, kw_only=True)
class MeshScreen:
    """What is known so far of stages on devices of a cluster.

    Attributes:
        num_devices: Of the cluster. What takes all of them is never left out: one stage has rules of its own.
        are_equal: Whether all stages lie on the same mesh.
        longest_s: The step time from which on pipelines are of no use; inf while none is known.
        least_device_s: Seconds of one device for all layers on the mesh that takes fewest.
        has_left_out: Whether any mesh was left out for `longest_s`.
    """

    num_devices: int
    are_equal: bool = False
    longest_s: float = math.inf
    least_device_s: float = math.inf
    has_left_out: bool = False

    def pays(self, num_devices: int, ran: Ran, fastest_s: float) -> bool:
        """Whether a stage of a pipeline that takes less than `longest_s` may be on a mesh, on which all layers run so
        under their fastest decisions; they take `fastest_s` on the fastest mesh of as many devices.

        While such a stage runs its layers, all other devices run theirs, as on this mesh or at best as on the one that
        takes fewest seconds of a device: together they must get through all layers. Whatever overlaps, no stream takes
        less than the sum of its work.
        """
        if num_devices == self.num_devices:
            return True
        if ran.end_s > MUCH_SLOWER * fastest_s:
            return False
        if math.isinf(self.longest_s) or not ran.busy_s:
            return True
        here_s = ran.busy_s * num_devices
        least_device_s = here_s if self.are_equal else min(self.least_device_s, fastest_s * num_devices)
        others = (self.num_devices - num_devices) / least_device_s
        pays = self.longest_s * (others + 1 / ran.busy_s) >= 1
        self.has_left_out |= not pays
        return pays

    def saw(self, num_devices: int, seconds: float) -> None:
        """All layers take so long on a mesh of so many devices."""
        self.least_device_s = min(self.least_device_s, seconds * num_devices)
