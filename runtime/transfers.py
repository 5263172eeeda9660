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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar.common import jax_compat
from autopar.runtime.cross_mesh import End, Hop, Passage, Recut, cutter, joiner, passage, shard_of


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
    if as_is and source.logical == target.logical and source.layout == target.layout:
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
            named += [_sent(x, parts) for x in r.rounds] if r.passage else parts
        arrived = iter(put_shards(named))
        return join([_parts_of_rounds(r, r.passage, arrived) if r.passage else [next(arrived)] for r in routes])

    return send_all


def _sent(x: Round, parts: Sequence[Any], *, as_numbers: bool = False) -> Any:
    """The array that one put sends; of random keys their numbers, where they are wanted so."""
    shards = [shard_of(parts[part], i) for part, i in x.senders]
    if as_numbers:
        shards = [jax.random.key_data(shard) for shard in shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.named, shards)


def _parts_of_rounds(r: Route, way: Passage, arrived: Iterator[Any]) -> list[Any]:
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leg(Round):
    """One put: shards of one process to as many devices of one process. Without senders where another process sends.

    Attributes:
        absent: The placeholder for the sent array in a process that holds no part of it.
        devices: The numbers of all devices that send or receive.
    """

    absent: Any | None
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The transfer of one value, as far as it concerns this process: created once, used in every step.

    Attributes:
        shape: The shape of the whole value.
        dtype: Its type; random keys are transferred as their raw numbers.
        legs: The legs of this process, in the order that all processes keep.
        target: The sharding of the result.
        joined: For each part that arrives, for each device of the target in this process (number of the leg, shard in
            it); None: there is no such device.
        cut: The operation on the source before the transfer, None: nothing. `is_sent`: whether this process has a
            device of the source.
        join: The operation on the target after the transfer, None: nothing.
    """

    shape: tuple[int, ...]
    dtype: Any
    legs: tuple[Leg, ...]
    target: NamedSharding
    joined: tuple[tuple[tuple[int, int], ...], ...] | None
    is_sent: bool
    cut: Recut | None = None
    join: Recut | None = None

    @property
    def concerns_this_process(self) -> bool:
        return bool(self.legs) or self.joined is not None or (self.is_sent and self.cut is not None)


def crossing(shape: Sequence[int], dtype: Any, source: End, target: End) -> Crossing:
    """The transfer of a value between any two layouts of it.

    Where the source holds several copies of a piece, a device takes the copy in its own process, else the copies take
    turns.
    """
    source_devices, target_devices = list(source.mesh.devices.flat), list(target.mesh.devices.flat)

    def near(sender: int, receiver: int) -> bool:
        return source_devices[sender].process_index == target_devices[receiver].process_index

    way = passage(shape, source, target, near)
    hops = sorted((h for hops in way.rounds for h in hops), key=lambda h: (h.receiver, h.taken))
    crossed = _crossing(
        way.part_shape, way.fine_shape, dtype, source_devices, target_devices, hops, way.part_sharding, way.num_parts
    )
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
    hops = [Hop(sender=s, sent=0, receiver=i, taken=0) for i, s in enumerate(nearest)]
    target = NamedSharding(mesh, PartitionSpec())
    return _crossing(shape, shape, dtype, source_devices, target_devices, hops, target, 1)


def _crossing(
    shape: Sequence[int],
    fine_shape: Sequence[int],
    dtype: Any,
    source_devices: Sequence[Any],
    target_devices: Sequence[Any],
    hops: Sequence[Hop],
    target: NamedSharding,
    num_parts: int,
) -> Crossing:
    """`shape` and `target` are those of the `num_parts` arrays that arrive, `fine_shape` that of each shard sent."""
    process = jax.process_index()
    groups: dict[tuple[int, int, int], list[Hop]] = {}
    for hop in hops:
        between = source_devices[hop.sender].process_index, target_devices[hop.receiver].process_index
        round_ = 0  # a device has one shard of an array: what it sends or takes a second time is another put
        while any(h.sender == hop.sender or h.receiver == hop.receiver for h in groups.get((*between, round_), ())):
            round_ += 1
        groups.setdefault((*between, round_), []).append(hop)
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
                devices=tuple(d.id for s in (named, put_to) for d in s.mesh.devices.flat),
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


def cross(crossings: Sequence[Crossing], arrays: Sequence[Any]) -> list[Any]:
    """`crosser` for once."""
    return crosser(crossings)(arrays)


def crosser(
    crossings: Sequence[Crossing], has_arrived: Callable[[list[Any]], None] | None = None
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function from arrays to the same arrays on their targets; None where this process has no device of the target.

    `has_arrived` is called with the transferred arrays before they are joined.

    There is one call of JAX for each pair of groups of devices: within one call over several groups, JAX sends in an
    order that differs between processes. `arrays[i]` is not read where this process has no device of its mesh.
    """
    calls: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, c in enumerate(crossings):
        for n, leg in enumerate(c.legs):
            calls.setdefault(leg.devices, []).append((i, n))
    cut_shards = cutter(tuple(c.cut if c.is_sent else None for c in crossings))
    join = joiner(tuple(c.join if c.joined is not None else None for c in crossings))

    def cross_all(arrays: Sequence[Any]) -> list[Any]:
        parts = cut_shards(arrays)
        arrived: dict[tuple[int, int], Any] = {}
        for places in calls.values():
            legs = [(crossings[i], crossings[i].legs[n], parts[i]) for i, n in places]
            sources = [
                _sent(leg, cut, as_numbers=jax_compat.is_key_dtype(c.dtype)) if leg.absent is None else leg.absent
                for c, leg, cut in legs
            ]
            arrived |= zip(places, jax.device_put(sources, [leg.put_to for _, leg, _ in legs]), strict=True)
        if has_arrived is not None:
            has_arrived(list(arrived.values()))
        return join([_parts_of_legs(c, i, arrived) for i, c in enumerate(crossings)])

    return cross_all


def _parts_of_legs(c: Crossing, number: int, arrived: dict[tuple[int, int], Any]) -> list[Any]:
    """The arrays over the target's mesh, from the legs; None where this process has no device of it."""
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
