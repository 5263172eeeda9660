"""Transfers from the devices of one mesh to those of another: each byte once, and asynchronous; in one process or
between several.

A put (`jax.device_put`) is asynchronous only where each shard of the target is one whole shard of the source and both
meshes have as many devices; otherwise it blocks and goes through the host. So a value crosses in rounds (`cross_mesh`):
in each, as many devices send one shard each as receive one. For a round, shards are assembled to an array of their own
without copies. Where a shard must be cut before, or joined from several afterwards, a small program does so on the mesh
that holds it.

Between processes `jax.device_put` transfers shards between processes if every process issues every such put in the same
order, and if both ends hold the same number of shards under equal shardings. Therefore a transfer is split into legs: a
leg is one put, from devices of one process to devices of one process. A process takes part in the legs between two
processes even where it holds neither end; legs within a process concern only that process. Never delete or donate a
sent array: its receiver may still be reading it.

A value that every process has whole (numpy arrays, numbers, arrays on one device of its own) is equal in all of them
and is never sent: each process takes the parts that its devices need.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar.common import jax_compat
from autopar.runtime.cross_mesh import End, Hop, Recut, cutter, hops_in_rounds, joiner, passage, shard_of


def row(devices: np.ndarray, shard_shape: Sequence[int]) -> NamedSharding:
    """Concatenated shards along the first dimension; scalars are equal on all."""
    mesh = Mesh(devices, ("shard",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("shard") if shard_shape else PartitionSpec())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One put: shards of one process to as many devices of one process.

    Attributes:
        senders: (part, number of the device among those of its mesh in this process) of each shard; none where another
            process sends.
        shape: The shape that the shards have one after the other.
        named: The sharding under which they are named so on the source.
        put_to: The sharding that they are put to.
        absent: The placeholder for the sent array in a process that holds no part of it.
        devices: Between processes the numbers of all devices that send or receive; none within one.
    """

    senders: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    named: NamedSharding
    put_to: NamedSharding
    absent: Any | None
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The transfer of one value, as far as it concerns this process: created once, used in every step.

    Attributes:
        shape: The shape of the whole value, or of each part of it that arrives.
        dtype: Its type; random keys are transferred as their raw numbers.
        target: The sharding of the result.
        is_direct: Whether the shards go one to one in order within this process: all there is to do is to put the value
            to the target.
        legs: The legs of this process, in the order that all processes keep.
        joined: For each part that arrives, for each device of the target in this process (number of the leg, shard in
            it); None: there is no such device.
        cut: The operation on the source before the transfer, None: nothing. `is_sent`: whether this process has a
            device of the source.
        join: The operation on the target after the transfer, None: nothing.
    """

    shape: tuple[int, ...]
    dtype: Any
    target: NamedSharding
    is_direct: bool = False
    legs: tuple[Leg, ...] = ()
    joined: tuple[tuple[tuple[int, int], ...], ...] | None = None
    is_sent: bool = True
    cut: Recut | None = None
    join: Recut | None = None

    @property
    def concerns_this_process(self) -> bool:
        return bool(self.is_direct or self.legs or self.joined is not None or (self.is_sent and self.cut is not None))


def crossing(shape: Sequence[int], dtype: Any, source: End, target: End) -> Crossing:
    """The transfer of a value between any two layouts of it.

    Where the source holds several copies of a piece, a device takes the copy in its own process, else the copies take
    turns.
    """
    source_devices, target_devices = list(source.mesh.devices.flat), list(target.mesh.devices.flat)

    def near(sender: int, receiver: int) -> bool:
        return source_devices[sender].process_index == target_devices[receiver].process_index

    way = passage(shape, source, target, near)
    is_local = {d.process_index for d in (*source_devices, *target_devices)} == {jax.process_index()}
    same_shards = source.logical == target.logical and source.layout == target.layout
    if is_local and same_shards and way.cut is None and way.joined is None:
        return Crossing(shape=tuple(shape), dtype=dtype, target=target.sharding, is_direct=True)
    crossed = _crossing(
        way.part_shape, way.fine_shape, dtype, source_devices, target_devices, way.rounds, way.part_sharding,
        way.num_parts,
    )  # fmt: skip
    return dataclasses.replace(crossed, cut=way.cut, join=way.joined)


def to_all_processes(shape: Sequence[int], dtype: Any, source: NamedSharding) -> Crossing:
    """From a mesh on which a value is replicated to one device of each process."""
    source_devices = list(source.mesh.devices.flat)
    first: dict[int, Any] = {}
    for device in (*source_devices, *jax.devices()):
        first.setdefault(device.process_index, device)
    target_devices = [first[process] for process in sorted(first)]
    mesh = Mesh(np.array(target_devices), ("process",), axis_types=(AxisType.Auto,))
    nearest = [source_devices.index(d) if d in source_devices else 0 for d in target_devices]
    rounds = hops_in_rounds([Hop(sender=s, sent=0, receiver=i, taken=0) for i, s in enumerate(nearest)])
    target = NamedSharding(mesh, PartitionSpec())
    return _crossing(shape, shape, dtype, source_devices, target_devices, rounds, target, 1)


def _crossing(
    shape: Sequence[int],
    fine_shape: Sequence[int],
    dtype: Any,
    source_devices: Sequence[Any],
    target_devices: Sequence[Any],
    rounds: Sequence[Sequence[Hop]],
    target: NamedSharding,
    num_parts: int,
) -> Crossing:
    """`shape` and `target` are those of the `num_parts` arrays that arrive, `fine_shape` that of each shard sent."""
    process = jax.process_index()
    groups: dict[tuple[int, int, int], list[Hop]] = {}
    for number, hops in enumerate(rounds):
        for hop in hops:
            between = source_devices[hop.sender].process_index, target_devices[hop.receiver].process_index
            groups.setdefault((*between, number), []).append(hop)
    raw_dtype, trailing = jax_compat.raw_key(dtype) if jax_compat.is_key_dtype(dtype) else (dtype, ())
    shard_shape = (*fine_shape, *trailing)
    local_sources = [i for i, d in enumerate(source_devices) if d.process_index == process]
    legs: list[Leg] = []
    arrives: dict[tuple[int, int], tuple[int, int]] = {}
    for (sends, receives, _), members in sorted(groups.items(), key=lambda group: group[0]):
        if sends == receives != process:
            continue
        if receives == process:
            arrives |= {(h.taken, h.receiver): (len(legs), n) for n, h in enumerate(members)}
        named = row(np.array([source_devices[h.sender] for h in members]), shard_shape)
        put_to = row(np.array([target_devices[h.receiver] for h in members]), shard_shape)
        stacked = (len(members) * shard_shape[0], *shard_shape[1:]) if shard_shape else ()
        is_sender = sends == process
        legs.append(
            Leg(
                senders=tuple((h.sent, local_sources.index(h.sender)) for h in members) if is_sender else (),
                absent=None if is_sender else absent(stacked, raw_dtype, named),
                shape=stacked,
                named=named,
                put_to=put_to,
                devices=tuple(d.id for s in (named, put_to) for d in s.mesh.devices.flat) if sends != receives else (),
            )
        )
    local = [i for i, d in enumerate(target_devices) if d.process_index == process]
    return Crossing(
        shape=tuple(shape),
        dtype=dtype,
        legs=tuple(legs),
        target=target,
        joined=tuple(tuple(arrives[k, i] for i in local) for k in range(num_parts)) if local else None,
        is_sent=bool(local_sources),
    )


def crosser(
    crossings: Sequence[Crossing], has_arrived: Callable[[list[Any]], None] | None = None
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function from arrays to the same arrays on their targets; None where this process has no device of the target.
    It returns at once.

    `has_arrived` is called with the transferred arrays before they are joined. `arrays[i]` is not read where this
    process has no device of its mesh.

    Within one process all is put in one call. Between processes there is one call for each pair of groups of devices:
    within one call over several groups, JAX sends in an order that differs between processes.
    """
    if all(c.is_direct for c in crossings) and has_arrived is None:
        return jax_compat.shard_putter([c.target for c in crossings])
    calls: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, c in enumerate(crossings):
        for n, leg in enumerate(c.legs or [None] * c.is_direct):
            calls.setdefault(leg.devices if leg is not None else (), []).append((i, n))

    def putter(devices: tuple[int, ...], places: Sequence[tuple[int, int]]) -> Callable[[Sequence[Any]], list[Any]]:
        targets = [crossings[i].target if crossings[i].is_direct else crossings[i].legs[n].put_to for i, n in places]
        return functools.partial(jax.device_put, device=targets) if devices else jax_compat.shard_putter(targets)

    puts = [(places, putter(devices, places)) for devices, places in calls.items()]
    cut_shards = cutter(tuple(c.cut if c.is_sent else None for c in crossings))
    join = joiner(tuple(c.join if c.joined is not None else None for c in crossings))

    def cross_all(arrays: Sequence[Any]) -> list[Any]:
        parts = cut_shards(arrays)
        arrived: dict[tuple[int, int], Any] = {}
        for places, put in puts:
            sources = [parts[i][0] if crossings[i].is_direct else _sent(crossings[i], n, parts[i]) for i, n in places]
            arrived |= zip(places, put(sources), strict=True)
        if has_arrived is not None:
            has_arrived(list(arrived.values()))
        return join([_parts_that_arrived(c, i, arrived) for i, c in enumerate(crossings)])

    return cross_all


def _sent(c: Crossing, number: int, parts: Sequence[Any]) -> Any:
    """The array that a leg puts; of random keys their numbers."""
    leg = c.legs[number]
    if leg.absent is not None:
        return leg.absent
    shards = [shard_of(parts[part], i) for part, i in leg.senders]
    if jax_compat.is_key_dtype(c.dtype):
        shards = [jax.random.key_data(shard) for shard in shards]
    return jax.make_array_from_single_device_arrays(leg.shape, leg.named, shards)


def _parts_that_arrived(c: Crossing, number: int, arrived: dict[tuple[int, int], Any]) -> list[Any]:
    """The arrays over the target's mesh, from the legs; None where this process has no device of it."""
    if c.is_direct:
        return [arrived[number, 0]]
    parts: list[Any] = []
    for places in c.joined or ():
        shards = [shard_of(arrived[number, leg], n) for leg, n in places]
        if jax_compat.is_key_dtype(c.dtype):
            shards = [jax_compat.key_of(shard, c.dtype) for shard in shards]
        parts.append(jax.make_array_from_single_device_arrays(c.shape, c.target, shards))
    return parts or [None]


def absent(shape: Sequence[int], dtype: Any, sharding: Sharding) -> Any:
    """The placeholder in this process for an array of which it holds no part."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def is_here(sharding: Sharding) -> bool:
    """Whether this process holds a part of an array with this sharding."""
    return bool(sharding.addressable_devices)


def aval_of(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, a random key or a number."""
    dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
    return jax.ShapeDtypeStruct(np.shape(value), jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


def is_whole(value: Any) -> bool:
    """Whether every process has a value of its own, the same in all."""
    return not isinstance(value, jax.Array) or isinstance(value.sharding, SingleDeviceSharding)


def from_whole(value: Any, aval: Any, sharding: NamedSharding) -> Any:
    """A global array of a value that every process has; nothing is sent."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if not is_here(sharding):
        return absent(aval.shape, aval.dtype, sharding)
    if not jax_compat.is_key_dtype(aval.dtype):
        value = np.asarray(value, aval.dtype)
    parts = sharding.addressable_devices_indices_map(tuple(aval.shape))
    shards = []
    for device, index in parts.items():
        at = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(jax.device_put(value[index] if aval.shape else value, at))
    return jax.make_array_from_single_device_arrays(tuple(aval.shape), sharding, shards)
