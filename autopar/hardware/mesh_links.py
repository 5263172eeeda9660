"""The links of mesh axes: on a torus, whose devices are wired to their neighbours only (TPU slices), and over hosts.

Each host has its network cards. A group with c devices in each of h hosts shares a host's cards with the other groups
of that host, one device's share for each of its devices. What goes round a ring (all-gather, reduce-scatter,
all-reduce) crosses between hosts at the edges only, so that all c shares carry what one device sends, at most at the
rate inside. In an all-to-all every device sends (n-c)/n of its data to other hosts, over its own share. Of a permute
every device may send all of its data to another host (reordered axes do so; of a ring only the edges do, each over its
own card). Hosts are here what the inner link joins.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind, Fabric, Link, SwitchDetail


def group_link(
    shape: Sequence[int], axis_sizes: Sequence[int], axes: Sequence[int], wire: Link, inside_chip: Link | None = None
) -> Link:
    """The link of a collective over some axes of a logical mesh laid row-major over a torus of `shape`.

    `wire` is one wire, one way. A whole physical axis whose ends are joined gives a ring, with both ways at once: twice
    the wire's rate. A line, or a part of a ring, has one way towards its ends. A collective over several physical axes
    uses all of them at once. Where other axes of the mesh lie in between on the same physical axis, their groups share
    its wires. Source: scaling-book, tpus.md and sharding.md.

    With `inside_chip` the last axis of the shape is the devices of a chip, which it joins, and which share the chip's
    wires: a group with all of them has the wires to itself, other groups have a part.

    What is left of a mesh after the torus is full (several slices) is given the wire itself; `Cluster` knows better.
    """
    pieces = _decompose(tuple(shape), tuple(axis_sizes), 0 if inside_chip is None else 1)
    found = [piece for axis in axes for piece in pieces[axis]]
    if inside_chip is None:
        return _link(found, wire)
    on_chip = math.prod(piece.size for piece in found if piece.is_on_chip)
    between = [piece for piece in found if not piece.is_on_chip]
    if not between:
        return inside_chip
    shared_by = shape[-1] // on_chip
    link = _link(between, dataclasses.replace(wire, bytes_per_s=wire.bytes_per_s / shared_by))
    return (
        link if on_chip == 1 else dataclasses.replace(link, bytes_per_s=min(link.bytes_per_s, inside_chip.bytes_per_s))
    )


def part(shape: tuple[int, ...], num_devices: int, inside_chip: Link | None) -> tuple[int, ...]:
    """The shape of a part of a torus, whatever part it is: a line of its chips; none of what is no torus."""
    if not shape:
        return ()
    of_chip = 1 if inside_chip is None else math.gcd(shape[-1], num_devices)
    return (num_devices // of_chip, *((of_chip,) if inside_chip is not None else ()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """`size` devices of a physical axis of `whole`, `stride` apart."""

    size: int
    stride: int
    whole: int
    is_ring: bool
    is_on_chip: bool = False

    def bytes_per_s(self, wire: Link) -> float:
        ways = 2 if self.is_ring and self.size == self.whole else 1
        return wire.bytes_per_s * ways / self.stride


def _decompose(shape: tuple[int, ...], axis_sizes: tuple[int, ...], chip_axes: int) -> list[list[_Piece]]:
    """The parts of physical axes that each mesh axis is made of, filling the last axes of both first. The last
    `chip_axes` (none or one) of the shape are the devices of a chip.
    """
    chips = shape[: len(shape) - chip_axes]
    pieces: list[list[_Piece]] = [[] for _ in axis_sizes]
    dim, used = len(shape) - 1, 1
    for axis in reversed(range(len(axis_sizes))):
        left = axis_sizes[axis]
        while left > 1 and dim >= 0:
            free = shape[dim] // used
            size = math.gcd(left, free)
            if free == 1:
                dim, used = dim - 1, 1
                continue
            if size == 1:
                # 3 devices do not divide an axis of 4: the groups wind through the torus, and at worst all of them
                # cross the same wire.
                pieces[axis].append(_Piece(size=left, stride=shape[dim], whole=shape[dim], is_ring=False))
                return pieces
            on_chip = dim >= len(chips)
            is_ring = not on_chip and _is_ring(chips, dim)
            pieces[axis].append(_Piece(size=size, stride=used, whole=shape[dim], is_ring=is_ring, is_on_chip=on_chip))
            used, left = used * size, left // size
    return pieces


def _is_ring(shape: tuple[int, ...], dim: int) -> bool:
    """Whether the ends of a physical axis are joined: on 3D slices made of whole cubes of 4 x 4 x 4 devices, and on an
    axis of 16 of the 2D ones (scaling-book, tpus.md).
    """
    if len(shape) == 3:
        return all(n % 4 == 0 for n in shape)
    return shape[dim] == 16


def _link(pieces: list[_Piece], wire: Link) -> Link:
    n = math.prod(piece.size for piece in pieces)
    if n == 1:
        return wire
    hops = sum(piece.size - 1 for piece in pieces)
    return Link(
        # The hops of all physical axes, spread over the n-1 steps that `autopar.hardware.collective_cost.steps` counts.
        latency_s=wire.latency_s * hops / (n - 1),
        bytes_per_s=sum(piece.bytes_per_s(wire) for piece in pieces),
        overhead_s=wire.overhead_s,
        fabric=Fabric.TORUS,
        rings=len(pieces),
        source=wire.source,
        is_asynchronous=wire.is_asynchronous,
    )


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
