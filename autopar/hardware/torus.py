"""Links of mesh axes on a torus, whose devices are wired to their neighbours only (TPU slices)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.hardware.collective_cost import Fabric, Link


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
