"""Moves arrays between meshes whose devices belong to several processes.

`jax.device_put` carries shards from one process to another where every process issues every such put, in one order for
all, and both ends hold as many shards under equal shardings. So a transfer is cut into legs: a leg is one put, from
devices of one process to devices of one process. A process takes part in the legs between two processes even where it
holds neither end; legs within a process are its own affair. Never delete or donate what was sent: its receiver may
still be reading it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.runtime.transfers import End, pieces


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One put: shards of one process to as many devices of one process.

    Attributes:
        senders: Which of the shards that this process holds of the source are sent, by number; empty where others send.
        absent: What stands for the sent array in a process that holds nothing of it.
        shape: Of the shards one after the other, the name under which they travel.
        named: The sharding of that on the sending devices.
        put_to: And on the receiving ones.
        devices: The numbers of all of them.
    """

    senders: tuple[int, ...]
    absent: Any | None
    shape: tuple[int, ...]
    named: NamedSharding
    put_to: NamedSharding
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How one value crosses, as far as this process has to do with it: made once, used in every step.

    Attributes:
        shape: Of the whole value.
        dtype: Its type; random keys travel as the numbers they are made of.
        legs: Those that this process takes part in, in the order that all processes keep.
        target: The sharding of what arrives.
        joined: For each device of the target in this process (number of the leg, shard in it); None: there is none.
    """

    shape: tuple[int, ...]
    dtype: Any
    legs: tuple[Leg, ...]
    target: NamedSharding
    joined: tuple[tuple[int, int], ...] | None

    @property
    def concerns_this_process(self) -> bool:
        return bool(self.legs) or self.joined is not None


def crossing(shape: Sequence[int], dtype: Any, source: End, target: End) -> Crossing:
    """The way of a value whose layouts on both meshes cut it into the same grid of pieces.

    Where the source holds several copies of a piece, a device takes the one in its own process, or else the copies
    serve in turn.
    """
    source_devices, target_devices = list(source.mesh.devices.flat), list(target.mesh.devices.flat)
    holders: dict[int, list[int]] = {}
    for device, piece in enumerate(pieces(source.layout, source.logical)):
        holders.setdefault(piece, []).append(device)
    pairs = []
    turns: dict[int, int] = {}
    for device, piece in enumerate(pieces(target.layout, target.logical)):
        process = target_devices[device].process_index
        near = [h for h in holders[piece] if source_devices[h].process_index == process]
        turn = turns[piece] = turns.get(piece, -1) + 1
        candidates = near or holders[piece]
        pairs.append((candidates[turn % len(candidates)], device))
    return _crossing(shape, dtype, source_devices, target_devices, pairs, source.sharding, target.sharding)


def to_all_processes(shape: Sequence[int], dtype: Any, source: NamedSharding) -> Crossing:
    """From a mesh on which a value is replicated to one device of each process."""
    source_devices = list(source.mesh.devices.flat)
    first: dict[int, Any] = {}
    for device in (*source_devices, *jax.devices()):
        first.setdefault(device.process_index, device)
    target_devices = [first[process] for process in sorted(first)]
    mesh = Mesh(np.array(target_devices), ("process",), axis_types=(AxisType.Auto,))
    pairs = [(source_devices.index(d) if d in source_devices else 0, i) for i, d in enumerate(target_devices)]
    target = NamedSharding(mesh, PartitionSpec())
    return _crossing(shape, dtype, source_devices, target_devices, pairs, source, target)


def _crossing(
    shape: Sequence[int],
    dtype: Any,
    source_devices: Sequence[Any],
    target_devices: Sequence[Any],
    pairs: Sequence[tuple[int, int]],
    source: NamedSharding,
    target: NamedSharding,
) -> Crossing:
    """`pairs` are (device of the source, device of the target that gets its shard)."""
    here = jax.process_index()
    groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for sender, receiver in pairs:
        between = source_devices[sender].process_index, target_devices[receiver].process_index
        round_ = 0  # a device has one shard of an array: what it sends a second time is another put
        while any(s == sender for s, _ in groups.get((*between, round_), ())):
            round_ += 1
        groups.setdefault((*between, round_), []).append((sender, receiver))
    raw_dtype, trailing = jax_compat.raw_key(dtype) if jax_compat.is_key_dtype(dtype) else (dtype, ())
    shard_shape = (*source.shard_shape(tuple(shape)), *trailing)
    held = [i for i, d in enumerate(source_devices) if d.process_index == here]
    legs: list[Leg] = []
    arrives: dict[int, tuple[int, int]] = {}
    for (sends, receives, _), members in sorted(groups.items()):
        if sends == receives != here:
            continue
        if receives == here:
            arrives |= {receiver: (len(legs), n) for n, (_, receiver) in enumerate(members)}
        named = _row([source_devices[s] for s, _ in members], shard_shape)
        put_to = _row([target_devices[r] for _, r in members], shard_shape)
        stacked = (len(members) * shard_shape[0], *shard_shape[1:]) if shard_shape else ()
        mine = sends == here
        legs.append(
            Leg(
                senders=tuple(held.index(s) for s, _ in members) if mine else (),
                absent=None if mine else absent(stacked, raw_dtype, named),
                shape=stacked,
                named=named,
                put_to=put_to,
                devices=tuple(d.id for s in (named, put_to) for d in s.mesh.devices.flat),
            )
        )
    local = [i for i, d in enumerate(target_devices) if d.process_index == here]
    return Crossing(
        shape=tuple(shape),
        dtype=dtype,
        legs=tuple(legs),
        target=target,
        joined=tuple(arrives[i] for i in local) if local else None,
    )


def _row(devices: Sequence[Any], shard_shape: tuple[int, ...]) -> NamedSharding:
    """Shards one after the other along the first dimension; scalars are equal on all."""
    mesh = Mesh(np.array(devices), ("shard",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("shard") if shard_shape else PartitionSpec())


def cross(crossings: Sequence[Crossing], arrays: Sequence[Any]) -> list[Any]:
    """The arrays on their targets; None where this process has no device of the target.

    One call of jax for each pair of groups of devices: what one call puts between several, jax sends in an order that
    differs from process to process. `arrays[i]` is not looked at where this process has no device of its mesh.
    """
    calls: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, c in enumerate(crossings):
        for n, leg in enumerate(c.legs):
            calls.setdefault(leg.devices, []).append((i, n))
    arrived: dict[tuple[int, int], Any] = {}
    for places in calls.values():
        legs = [(crossings[i], crossings[i].legs[n], arrays[i]) for i, n in places]
        sources = [leg.absent if leg.absent is not None else _named(c, leg, array) for c, leg, array in legs]
        arrived |= zip(places, jax.device_put(sources, [leg.put_to for _, leg, _ in legs]), strict=True)
    out: list[Any] = []
    for i, c in enumerate(crossings):
        if c.joined is None:
            out.append(None)
            continue
        shards = [_shard(arrived[i, leg], n) for leg, n in c.joined]
        if jax_compat.is_key_dtype(c.dtype):
            shards = [jax_compat.key_of(shard, c.dtype) for shard in shards]
        out.append(jax.make_array_from_single_device_arrays(c.shape, c.target, shards))
    return out


def _named(c: Crossing, leg: Leg, array: Any) -> Any:
    shards = [_shard(array, i) for i in leg.senders]
    if jax_compat.is_key_dtype(c.dtype):
        shards = [jax.random.key_data(shard) for shard in shards]
    return jax.make_array_from_single_device_arrays(leg.shape, leg.named, shards)


def _shard(array: Any, number: int) -> Any:
    """What a device of this process holds. `addressable_data` gives of a replicated array the first one's only."""
    return array.addressable_shards[number].data if array.is_fully_replicated else array.addressable_data(number)


def absent(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> Any:
    """What stands in this process for an array of which it holds nothing."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def is_here(sharding: NamedSharding) -> bool:
    """Whether this process holds something of an array with this sharding."""
    here = jax.process_index()
    return any(d.process_index == here for d in sharding.mesh.devices.flat)
