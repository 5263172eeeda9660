"""Moves arrays from the devices of one mesh to those of another, shard by shard and without waiting.

`jax.device_put` is asynchronous only where each shard of the target is one whole shard of the source and both meshes
have as many devices. So the source's shards are first named anew, without copying: as an array on some of its devices,
in the order in which the target wants them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.layout import Layout
from autopar.mesh import LogicalMesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one value crosses: made once, used in every step.

    Attributes:
        shape: Of the whole value.
        direct: Where the shards go one to one in order: the only thing to do is a `device_put` to this sharding.
        puts: Else, for each `device_put`: the source's shards by their numbers, the sharding under which they are
            named on the source, and the one they are put to.
        target: The sharding that the arrived shards are joined under, in the order of its devices: `joined[i]` is
            (number of the put, shard in it).
    """

    shape: tuple[int, ...]
    direct: NamedSharding | None
    puts: tuple[tuple[tuple[int, ...], NamedSharding, NamedSharding], ...]
    target: NamedSharding
    joined: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a transfer: how the value lies there. `mesh` are the devices of the `logical` mesh."""

    layout: Layout
    logical: LogicalMesh
    mesh: Mesh
    sharding: NamedSharding


def route(shape: Sequence[int], source: End, target: End) -> Route:
    """The way of a value whose layouts on both meshes cut it into the same grid of pieces.

    Where the source holds several copies of a piece, the copies serve different devices of the target.
    """
    grid, other = _grid(source), _grid(target)
    assert grid == other, f"grids of pieces differ: {grid} and {other}"
    same_mesh = source.logical.axis_sizes == target.logical.axis_sizes
    if same_mesh and source.sharding.spec == target.sharding.spec:
        return Route(shape=tuple(shape), direct=target.sharding, puts=(), target=target.sharding, joined=())
    out, into = pieces(source.layout, source.logical), pieces(target.layout, target.logical)
    holders: dict[int, list[int]] = {}
    for device, piece in enumerate(out):
        holders.setdefault(piece, []).append(device)
    takers: dict[int, list[int]] = {}
    for device, piece in enumerate(into):
        takers.setdefault(piece, []).append(device)
    copies_out, copies_in = len(holders[0]), len(takers[0])
    source_devices, target_devices = source.mesh.devices.ravel(), target.mesh.devices.ravel()
    puts, joined = [], {}
    for first in range(0, copies_in, copies_out):
        copies = range(first, min(first + copies_out, copies_in))
        order = list(itertools.product(range(len(holders)), copies))
        senders = [holders[piece][c - first] for piece, c in order]
        receivers = [takers[piece][c] for piece, c in order]
        for n, device in enumerate(receivers):
            joined[device] = (len(puts), n)
        puts.append(
            (
                tuple(senders),
                _grid_sharding(source_devices[senders], grid, len(copies)),
                _grid_sharding(target_devices[receivers], grid, len(copies)),
            )
        )
    return Route(
        shape=tuple(shape),
        direct=None,
        puts=tuple(puts),
        target=target.sharding,
        joined=tuple(joined[i] for i in range(len(into))),
    )


def send(routes: Sequence[Route], arrays: Sequence[Any]) -> list[Any]:
    """The arrays on their targets, all put in one call."""
    if all(r.direct is not None for r in routes):
        return jax.device_put(list(arrays), [r.direct for r in routes])
    sources: list[Any] = []
    shardings: list[NamedSharding] = []
    for r, array in zip(routes, arrays, strict=True):
        if r.direct is not None:
            sources.append(array)
            shardings.append(r.direct)
            continue
        for senders, named, put_to in r.puts:
            shards = [array.addressable_data(i) for i in senders]
            sources.append(jax.make_array_from_single_device_arrays(r.shape, named, shards))
            shardings.append(put_to)
    arrived = iter(jax.device_put(sources, shardings))
    out = []
    for r in routes:
        if r.direct is not None:
            out.append(next(arrived))
            continue
        parts = [next(arrived) for _ in r.puts]
        shards = [parts[put].addressable_data(n) for put, n in r.joined]
        out.append(jax.make_array_from_single_device_arrays(r.shape, r.target, shards))
    return out


def pieces(layout: Layout, mesh: LogicalMesh) -> list[int]:
    """Which piece of the grid each device holds, devices and pieces in row-major order."""
    found = []
    for place in itertools.product(*map(range, mesh.axis_sizes)):
        piece = 0
        for axes in layout.dims:
            for a in axes:
                piece = piece * mesh.axis_sizes[a] + place[a]
        found.append(piece)
    return found


def _grid(end: End) -> tuple[int, ...]:
    return tuple(end.logical.size(axes) for axes in end.layout.dims)


def _grid_sharding(devices: np.ndarray, grid: tuple[int, ...], copies: int) -> NamedSharding:
    names = tuple(f"d{i}" for i in range(len(grid)))
    mesh = Mesh(devices.reshape((*grid, copies)), (*names, "copy"), axis_types=(AxisType.Auto,) * (len(grid) + 1))
    return NamedSharding(mesh, PartitionSpec(*names))
