"""The kind of the devices of each stage, and the memory limit of each group of devices."""

from __future__ import annotations

import dataclasses
import math

from autopar.hardware.cluster_parts import memory_share, part_at
from autopar.plan.schema import PlanRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fullest:
    """The group of devices that comes nearest to its memory limit. `number`: among those of `Predicted.peak_bytes`."""

    number: int
    peak_bytes: int
    limit_bytes: int | None


def fullest(record: PlanRecord, limit_bytes: int | None = None) -> Fullest:
    """The fullest group of devices under the plan's limit, or under another, both of the smallest device."""
    limit_bytes = record.memory_limit_bytes if limit_bytes is None else limit_bytes
    peaks = record.predicted.peak_bytes
    shares = [1.0] * len(peaks)
    if record.cluster.parts and record.pipeline is not None:
        sizes = {s.first_device: math.prod(s.axis_sizes) for s in record.pipeline.stages}
        shares = [memory_share(record.cluster, first, size) for first, size in sizes.items()]
    number = max(range(len(peaks)), key=lambda group: peaks[group] / shares[group])
    limit = None if limit_bytes is None else int(limit_bytes * shares[number])
    return Fullest(number=number, peak_bytes=peaks[number], limit_bytes=limit)


def stage_devices(record: PlanRecord) -> tuple[str, ...]:
    """The kind of the devices of each stage; empty on a cluster of one kind, and for one program."""
    if not record.cluster.parts or record.pipeline is None:
        return ()
    return tuple(
        part_at(record.cluster, s.first_device, math.prod(s.axis_sizes)).device.name for s in record.pipeline.stages
    )
