"""The memory of a plan as its page shows it: who holds the peak, and how the bytes of a device change over the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.plan import summary
from autopar.plan.device_limits import fullest
from autopar.plan.memory_use import MemoryHolder, MemoryKind
from autopar.plan.plan_timeline import timeline_of
from autopar.plan.schema import PlanRecord

CURVE_POINTS = 240


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """A group of devices: bytes by purpose at its peak, largest first, and the most bytes in each part of the step."""

    name: str
    peak_bytes: int
    at_peak: tuple[tuple[MemoryKind, int], ...]
    curve: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPanel:
    """`highest` is the number of the group with the highest peak, whose `holders` are named.

    The curves are over the seconds of the step where it has stages, else over the program in its order.
    """

    groups: tuple[GroupMemory, ...]
    highest: int
    holders: tuple[MemoryHolder, ...]
    is_over_seconds: bool


def memory_panel(record: PlanRecord) -> MemoryPanel:
    """The memory of each group of devices."""
    predicted = record.predicted
    tracks = timeline_of(record).tracks.get("bytes", ())
    step_s = predicted.step_time_s
    groups = []
    uses = zip(summary.group_names(record), predicted.peak_bytes, predicted.memory, strict=True)
    for number, (name, peak_bytes, use) in enumerate(uses):
        curve = in_parts(tracks[number], step_s, CURVE_POINTS) if number < len(tracks) else use.course
        kinds = tuple((kind, use.at_peak[kind]) for kind in MemoryKind if use.at_peak.get(kind))
        groups.append(GroupMemory(name=name, peak_bytes=peak_bytes, at_peak=kinds, curve=curve))
    highest = fullest(record).number
    return MemoryPanel(
        groups=tuple(groups),
        highest=highest,
        holders=predicted.memory[highest].largest,
        is_over_seconds=record.pipeline is not None,
    )


def in_parts(steps: Sequence[tuple[float, int]], end_s: float, parts: int) -> tuple[int, ...]:
    """The most of a quantity in each of equal parts of a time, from (second, value from then on)."""
    if not steps or end_s <= 0:
        return ()
    most = [0] * parts
    for number, (start_s, value) in enumerate(steps):
        stop_s = steps[number + 1][0] if number + 1 < len(steps) else end_s
        begin = min(int(start_s / end_s * parts), parts - 1)
        for part in range(begin, min(int(stop_s / end_s * parts), parts - 1) + 1):
            most[part] = max(most[part], value)
    return tuple(most)
