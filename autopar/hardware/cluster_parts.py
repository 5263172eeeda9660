"""The parts of a cluster with devices of several kinds: their devices, and the memory of each."""

from __future__ import annotations

import itertools

from autopar.errors import InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import DeviceKind

WHOLE = -1  # instead of the number of a part: all devices of the cluster


def first_devices(cluster: Cluster) -> dict[int, int]:
    """The first device of each part of a cluster, and of the whole."""
    sizes = itertools.accumulate((part.num_devices for part in cluster.parts), initial=0)
    return {WHOLE: 0} | {number: first for number, (first, _) in enumerate(zip(sizes, cluster.parts, strict=False))}


def part_number(cluster: Cluster, first_device: int, num_devices: int) -> int:
    """The number of the part of a cluster that has these neighbouring devices; WHOLE: all of them, or one kind only.

    Raises: InvalidArgumentError for devices of several parts that are not all of the cluster.
    """
    if not cluster.parts or num_devices == cluster.num_devices:
        return WHOLE
    first_of = first_devices(cluster)
    for number, part in enumerate(cluster.parts):
        if 0 <= first_device - first_of[number] <= part.num_devices - num_devices:
            return number
    sizes = " + ".join(f"{part.num_devices} {part.device.name}" for part in cluster.parts)
    raise InvalidArgumentError(
        where=f"a stage on cluster {cluster.name}",
        expected=f"devices of one part ({sizes}), or all of the cluster",
        got=f"devices {first_device} to {first_device + num_devices - 1}",
        hint="choose stages whose devices are of one kind",
    )


def part_at(cluster: Cluster, first_device: int, num_devices: int) -> Cluster:
    """The part of a cluster that has these devices; the cluster where all of it, or one kind only, has them."""
    number = part_number(cluster, first_device, num_devices)
    return cluster if number == WHOLE else cluster.parts[number]


def peak_flops_per_s(cluster: Cluster, device: DeviceKind, num_devices: int, dtype: str) -> float:
    """The peak rate of devices together: of all of a cluster the sum over its parts, else that of so many of a kind."""
    if cluster.parts and num_devices == cluster.num_devices:
        return sum(part.num_devices * part.device.peak_flops_per_s(dtype) for part in cluster.parts)
    return num_devices * device.peak_flops_per_s(dtype)


def memory_share(cluster: Cluster, first_device: int, num_devices: int) -> float:
    """The memory of each of these devices, as a multiple of the smallest in the cluster."""
    return part_at(cluster, first_device, num_devices).device.memory_bytes / cluster.device.memory_bytes


def memory_shares(cluster: Cluster) -> tuple[float, ...]:
    """Of each part of a cluster, the memory of a device as a multiple of the smallest."""
    return tuple(part.device.memory_bytes / cluster.device.memory_bytes for part in cluster.parts)
