"""The link of a group of devices that lies over several hosts, each with its network cards.

A group with c devices in each of h hosts shares a host's cards with the other groups of that host, one device's share
for each of its devices. What goes round a ring (all-gather, reduce-scatter, all-reduce) crosses between hosts at the
edges only, so that all c shares carry what one device sends, at most at the rate inside. In an all-to-all every device
sends (n-c)/n of its data to other hosts, over its own share. Of a permute every device may send all of its data to
another host (reordered axes do so; of a ring only the edges do, each over its own card). Hosts are here what the inner
link joins.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind, Fabric, Link, SwitchDetail


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the groups of some mesh axes lie over hosts.

    Attributes:
        size: Devices of a group.
        hosts: The most hosts that a group touches.
        inside: The fewest devices of a group that lie in a host together.
    """

    size: int
    hosts: int
    inside: int


@functools.lru_cache(maxsize=1 << 12)
def spread(axis_sizes: tuple[int, ...], axes: tuple[int, ...], host_devices: int) -> Spread:
    """How the groups of `axes` lie, the mesh laid row-major over hosts of so many devices."""
    total, size = math.prod(axis_sizes), math.prod(axis_sizes[a] for a in axes)
    others = [a for a in range(len(axis_sizes)) if a not in axes]
    groups = np.arange(total).reshape(axis_sizes).transpose([*others, *sorted(axes)]).reshape(-1, size)
    hosts = -(-total // host_devices)
    cells = groups // host_devices + hosts * np.arange(len(groups))[:, None]
    counts = np.bincount(cells.ravel(), minlength=hosts * len(groups)).reshape(-1, hosts)
    return Spread(size=size, hosts=int(np.max((counts > 0).sum(axis=1))), inside=int(np.min(counts[counts > 0])))


def joint_axes(axis_sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The sets of two axes or more that a collective can go over at once."""
    axes = [a for a, n in enumerate(axis_sizes) if n > 1]
    return [over for count in range(2, len(axes) + 1) for over in itertools.combinations(axes, count)]


def link_over_hosts(lies: Spread, inside: Link, outside: Link, *, is_ring: bool) -> Link:
    """The link of groups on several hosts. Latencies count each of a ring's steps where it runs.

    `is_ring`: a permute hands on to the neighbour, and does not put axes in another order.
    """
    n, together = lies.size, lies.inside
    if together == 1:
        return outside
    if inside.fabric is Fabric.DIRECT:
        wires = together - 1
        inside = dataclasses.replace(inside, bytes_per_s=wires * inside.bytes_per_s, fabric=Fabric.SWITCHED)
    steps_outside = lies.hosts - 1
    latency_s = (steps_outside * outside.latency_s + (n - lies.hosts) * inside.latency_s) / (n - 1)
    return Link(
        latency_s=latency_s,
        bytes_per_s=min(inside.bytes_per_s, together * outside.bytes_per_s),
        overhead_s=max(inside.overhead_s, outside.overhead_s),
        fabric=outside.fabric,
        source=f"{together} devices a host on {lies.hosts} hosts; inside: {inside.source}; between: {outside.source}",
        detail=_tree(lies, inside, outside),
        kind_bytes_per_s=_kind_rates(lies, inside, outside, is_ring),
        is_asynchronous=inside.is_asynchronous and outside.is_asynchronous,
    )


def _kind_rates(lies: Spread, inside: Link, outside: Link, is_ring: bool) -> tuple[tuple[CollectiveKind, float], ...]:
    n, together = lies.size, lies.inside
    own = {
        # Of the (n-1)/n that `sent_bytes` counts, (n-c)/n leave the host.
        CollectiveKind.ALL_TO_ALL: (n - 1) / (n - together),
        CollectiveKind.COLLECTIVE_PERMUTE: float(min(outside.devices_per_card, together)) if is_ring else 1.0,
    }
    return tuple(
        (kind, min(inside.rate_of(kind), own[kind] * outside.rate_of(kind))) for kind in PLANNED_KINDS if kind in own
    )


def _tree(lies: Spread, inside: Link, outside: Link) -> SwitchDetail | None:
    """An all-reduce's tree: up and down inside each host, then between them (NCCL adds the latencies up so)."""
    if not (inside.fabric is outside.fabric is Fabric.SWITCHED):
        return None
    of_inside_s = (inside.detail and inside.detail.tree_latency_s) or inside.latency_s
    levels = math.log2(lies.size)
    outer = math.log2(lies.hosts)
    latency_s = ((levels - outer) * of_inside_s + outer * outside.latency_s) / levels
    return SwitchDetail(tree_latency_s=latency_s) if latency_s > 0 else None
