"""Transfers from the devices of one mesh to those of another: each byte once, and asynchronous.

A put (`jax.device_put`) is asynchronous only where each shard of the target is one whole shard of the source and both
meshes have as many devices; otherwise it blocks and goes through the host. So a value crosses in rounds (`cross_mesh`):
in each, as many devices send one shard each as receive one. For a round, shards are assembled to an array of their own
without copies. Where a shard must be cut before, or joined from several afterwards, a small program does so on the mesh
that holds it (`cut_shards`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.common import jax_compat
from autopar.runtime.execution.cut_shards import End, Passage, cutter, joiner, passage, shard_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One `device_put`: shards by (part, number of the device in its mesh), the shape they have one after the other,
    the sharding under which they are named so on the source, and the one they are put to.
    """

    senders: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    named: NamedSharding
    put_to: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one value crosses: made once, used in every step.

    Attributes:
        direct: Where the shards go one to one in order: the only thing to do is a `device_put` to this sharding.
        passage: How it crosses else.
        rounds: What is put.
        arrived: For each part of the target, for each device: (round, shard in it).
    """

    direct: NamedSharding | None = None
    passage: Passage | None = None
    rounds: tuple[Round, ...] = ()
    arrived: tuple[tuple[tuple[int, int], ...], ...] = ()


def route(shape: Sequence[int], source: End, target: End) -> Route:
    """The way of a value between any two layouts of it."""
    way = passage(shape, source, target)
    as_is = way.cut is None and way.joined is None
    if as_is and source.logical == target.logical and source.sharding.spec == target.sharding.spec:
        return Route(direct=target.sharding)
    source_devices, target_devices = source.mesh.devices.ravel(), target.mesh.devices.ravel()
    fine = way.fine_shape
    place = {(h.taken, h.receiver): (r, i) for r, hops in enumerate(way.rounds) for i, h in enumerate(hops)}
    return Route(
        passage=way,
        rounds=tuple(
            Round(
                senders=tuple((h.sent, h.sender) for h in hops),
                shape=(fine[0] * len(hops), *fine[1:]) if fine else (),
                named=row(source_devices[[h.sender for h in hops]], fine),
                put_to=row(target_devices[[h.receiver for h in hops]], fine),
            )
            for hops in way.rounds
        ),
        arrived=tuple(
            tuple(place[part, device] for device in range(len(target_devices))) for part in range(way.num_parts)
        ),
    )


def sender(routes: Sequence[Route]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that sends arrays on their routes, all in one put. It returns at once."""
    if all(r.direct is not None for r in routes):
        return jax_compat.shard_putter([r.direct for r in routes])
    cut_shards = cutter(tuple(r.passage.cut if r.passage else None for r in routes))
    join = joiner(tuple(r.passage.joined if r.passage else None for r in routes))
    put_shards = jax_compat.shard_putter(
        [s for r in routes for s in ([x.put_to for x in r.rounds] if r.passage else [r.direct])]
    )

    def send_all(arrays: Sequence[Any]) -> list[Any]:
        named: list[Any] = []
        for r, parts in zip(routes, cut_shards(arrays), strict=True):
            named += _named(r, parts) if r.passage else parts
        arrived = iter(put_shards(named))
        return join([_parts(r, r.passage, arrived) if r.passage else [next(arrived)] for r in routes])

    return send_all


def _named(r: Route, parts: Sequence[Any]) -> list[Any]:
    """The array that each round sends."""
    arrays = []
    for x in r.rounds:
        shards = [shard_of(parts[part], device) for part, device in x.senders]
        arrays.append(jax.make_array_from_single_device_arrays(x.shape, x.named, shards))
    return arrays


def _parts(r: Route, way: Passage, arrived: Iterator[Any]) -> list[Any]:
    """The arrays over the target's mesh, from the rounds."""
    rounds = [next(arrived) for _ in r.rounds]
    parts = []
    for places in r.arrived:
        shards = [shard_of(rounds[number], i) for number, i in places]
        parts.append(jax.make_array_from_single_device_arrays(way.part_shape, way.part_sharding, shards))
    return parts


def row(devices: np.ndarray, shard_shape: Sequence[int]) -> NamedSharding:
    """Concatenated shards along the first dimension; scalars are equal on all."""
    mesh = Mesh(devices, ("shard",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("shard") if shard_shape else PartitionSpec())
