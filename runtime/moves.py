"""Arrays from any sharding to any other, between meshes and processes, in pieces and in rounds of bounded bytes.

(1) A sharding gives each device a box of the array. The box that a device wants is cut by the boxes that others hold,
    and then to pieces of at most the bytes of a round. Each piece is sent by one of its holders: the device itself,
    else one of its process, else the one that has sent least.
(2) Devices of one process that want the same box get it once: the first receives a piece, the others copy it from
    there.
(3) In a round a device sends, and receives, at most so many bytes. The next round is sent before the last one is waited
    for. A piece is written into the receiver's part of the result as soon as it is there, and all processes meet
    before a sender goes on: so a device holds, beside its parts of both arrays, the pieces of two rounds.

A put between processes (`runtime.transfers`) is issued by every process, in one order, also where it has no part in it.
The result shares no memory with the source: each may be donated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.common import jax_compat
from autopar.ir.jax_sharding import DEVICE_MEMORY
from autopar.runtime.agreement import meet
from autopar.runtime.transfers import absent, row

# Of each dimension the first index and the one after the last.
Box = tuple[tuple[int, int], ...]

ROUNDS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Where an array lies and where it is wanted: (number of a device, its box). `itemsize` in bytes."""

    held: tuple[tuple[int, Box], ...]
    wanted: tuple[tuple[int, Box], ...]
    itemsize: int


class Send(NamedTuple):
    """A piece of an array to devices of one process: the first receives it, the others copy it from there."""

    array: int
    box: Box
    sender: int
    receivers: tuple[int, ...]


class NotHeldError(Exception):
    """No device holds a box of an array that another one wants."""

    def __init__(self, array: int, box: Box) -> None:
        super().__init__(f"array {array}: nobody holds {box}")
        self.array, self.box = array, box


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of an index as shardings give it."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def num_elements(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def sends_in_rounds(
    arrays: Sequence[Ends], process_of: Sequence[int], round_bytes: int
) -> tuple[tuple[Send, ...], ...]:
    """The sends of each round; `process_of` by the numbers of devices. A shard that stays whole has rounds of its own.

    Raises: NotHeldError.
    """
    rounds: list[list[Send]] = []
    sent_bytes = [0] * len(process_of)
    filled: dict[tuple[str, int], tuple[int, int]] = {}  # by direction and device: its last round, bytes in it
    for number, ends in enumerate(arrays):
        most = max(round_bytes // max(ends.itemsize, 1), 1)
        for process, receivers, box, holders, is_whole in _parts(number, ends, process_of):
            for turn, piece in enumerate([box] if is_whole else _cut(box, most)):
                nbytes = min(num_elements(piece) * ends.itemsize, round_bytes)
                sender = min(holders, key=lambda d: (d not in receivers, process_of[d] != process, sent_bytes[d], d))
                sent_bytes[sender] += nbytes
                at = receivers.index(sender) if sender in receivers else turn % len(receivers)
                in_turn = receivers[at:] + receivers[:at]
                places = [("sends", sender), *(("receives", d) for d in in_turn)]
                last = max(filled.get(place, (0, 0))[0] for place in places)
                if any(filled.get(p, (0, 0)) > (last, round_bytes - nbytes) for p in places):
                    last += 1
                for place in places:
                    in_round, so_far = filled.get(place, (0, 0))
                    filled[place] = last, nbytes + (so_far if in_round == last else 0)
                rounds += [[] for _ in range(len(rounds), last + 1)]
                rounds[last].append(Send(number, piece, sender, in_turn))
    return tuple(map(tuple, rounds))


def _parts(
    number: int, ends: Ends, process_of: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...], Box, tuple[int, ...], bool]]:
    """(process, its devices that want a box, a part of the box, the devices that hold the part, whether the part is all
    that these devices hold and those want: then it needs no memory on its way).

    Raises: NotHeldError.
    """
    holders: dict[Box, list[int]] = {}
    for device, box in ends.held:
        holders.setdefault(box, []).append(device)
    wanting: dict[tuple[int, Box], list[int]] = {}
    for device, box in ends.wanted:
        wanting.setdefault((process_of[device], box), []).append(device)
    for (process, want), receivers in wanting.items():
        rest = [want] if num_elements(want) else []
        near = sorted(holders, key=lambda box: process not in {process_of[d] for d in holders[box]})
        for box in near:
            if not rest:
                break
            left: list[Box] = []
            for part in rest:
                both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, box, strict=True))
                if all(start < stop for start, stop in both):
                    yield process, tuple(receivers), both, tuple(holders[box]), want == both == box
                    left += _without(part, both)
                else:
                    left.append(part)
            rest = left
        if rest:
            raise NotHeldError(number, rest[0])


def _without(box: Box, inner: Box) -> Iterator[Box]:
    """Boxes that make up a box but for one in it."""
    for d, ((start, stop), (first, last)) in enumerate(zip(box, inner, strict=True)):
        for edge in ((start, first), (last, stop)):
            if edge[0] < edge[1]:
                yield (*inner[:d], edge, *box[d + 1 :])


def _cut(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements, cut along leading dimensions first."""
    if num_elements(box) <= most:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    below = num_elements(box[dim + 1 :])
    length = max(most // below, 1)
    length = math.ceil((stop - start) / math.ceil((stop - start) / length))  # equal pieces: one program cuts them
    for first in range(start, stop, length):
        yield from _cut((*box[:dim], (first, min(first + length, stop)), *box[dim + 1 :]), most)


def move_in_rounds(
    values: Sequence[Any],
    targets: Sequence[tuple[jax.ShapeDtypeStruct, Any]],
    rounds: Sequence[Sequence[Send]],
    devices: Sequence[Any],
    name: str,
) -> list[Any]:
    """The arrays in their target shardings; every process must call it with the same rounds.

    `values[i]` is an array, or a numpy array that this process has whole, and is not read where no device of this
    process sends of it. `targets` are (shape and type, sharding). Raises: ProcessLostError.
    """
    with jax_compat.no_mesh_set(), jax.transfer_guard("allow"):
        mover = _Mover(values, targets, devices)
        before: tuple[Sequence[Send], list[Any]] | None = None
        for sends in (*rounds, None):
            sent = None if sends is None else (sends, mover.sent(sends))
            if before is not None:
                mover.land(*before)
                if any(mover.crosses(send) for send in before[0]):
                    meet(name)
            before = sent
        return [mover.assembled(i) for i in range(len(values))]


class _Mover:
    """The part of this process in a move."""

    def __init__(self, values: Sequence[Any], targets: Sequence[tuple[Any, Any]], devices: Sequence[Any]) -> None:
        self._values, self._targets, self._devices = values, targets, devices
        self._number = {device: i for i, device in enumerate(devices)}
        self._process = jax.process_index()
        self._written: dict[tuple[int, int], Any] = {}
        self._wanted = [
            self._boxes(sharding.addressable_devices_indices_map(aval.shape), aval) for aval, sharding in targets
        ]
        self._shards: dict[int, dict[int, tuple[Box, Any]]] = {}

    def _boxes(self, indices: Mapping[Any, Any], aval: Any) -> dict[int, Box]:
        return {self._number[device]: box_of(index, aval.shape) for device, index in indices.items()}

    def crosses(self, send: Send) -> bool:
        """Whether a piece goes from process to process."""
        return bool(self._process_of(send.sender) != self._process_of(send.receivers[0]))

    def _process_of(self, device: int) -> int:
        return int(self._devices[device].process_index)

    def sent(self, sends: Sequence[Send]) -> list[Any]:
        """For each send, the piece as an array on its first receiver; None in other processes."""
        pieces: list[Any] = [None] * len(sends)
        links: dict[tuple[int, int], list[int]] = {}
        for i, send in enumerate(sends):
            if self.crosses(send):
                links.setdefault((send.sender, send.receivers[0]), []).append(i)
        # Within one call over several links JAX sends in an order that differs between processes.
        for (sender, receiver), numbers in sorted(links.items()):
            put_to = [self._piece_row(receiver, sends[i])[1] for i in numbers]
            arrived = jax.device_put([self._to_send(sends[i], sender) for i in numbers], put_to)
            if self._process_of(receiver) == self._process:
                for i, array in zip(numbers, arrived, strict=True):
                    pieces[i] = array.addressable_data(0)
        local = [
            i
            for i, send in enumerate(sends)
            if not self.crosses(send) and self._process_of(send.sender) == self._process
        ]
        cut = [self._cut(sends[i]) for i in local]
        put = jax.device_put(cut, [SingleDeviceSharding(self._devices[sends[i].receivers[0]]) for i in local])
        for i, array in zip(local, put, strict=True):
            pieces[i] = array
        return pieces

    def _piece_row(self, device: int, send: Send) -> tuple[tuple[int, ...], Any]:
        """(shape of a piece with the numbers that random keys are made of, its sharding on one device)."""
        _, more = self._raw(send.array)
        shape = (*(stop - start for start, stop in send.box), *more)
        return shape, row(np.array([self._devices[device]]), shape)

    def _raw(self, array: int) -> tuple[Any, tuple[int, ...]]:
        """(type, further dimensions) of what is sent: of random keys, of the numbers that they are made of."""
        dtype = self._targets[array][0].dtype
        return jax_compat.raw_key(dtype) if jax_compat.is_key_dtype(dtype) else (dtype, ())

    def _to_send(self, send: Send, sender: int) -> Any:
        shape, at = self._piece_row(sender, send)
        if self._process_of(sender) != self._process:
            return absent(shape, self._raw(send.array)[0], at)
        piece = jax.device_put(self._cut(send), SingleDeviceSharding(self._devices[sender]))
        return jax.make_array_from_single_device_arrays(shape, at, [piece])

    def _cut(self, send: Send) -> Any:
        """A piece on its sender, or of numpy: an array of its own, or a whole shard where it is copied when it is sent."""
        value = self._values[send.array]
        if not isinstance(value, jax.Array):
            piece = np.asarray(value)[tuple(slice(*ends) for ends in send.box)]
            return np.array(piece, self._targets[send.array][0].dtype)
        if send.array not in self._shards:
            self._shards[send.array] = {
                self._number[s.device]: (box_of(s.index, value.shape), s.data) for s in value.addressable_shards
            }
        held, shard = self._shards[send.array][send.sender]
        if jax_compat.is_key_dtype(value.dtype):
            shard = jax.random.key_data(shard)
        is_copied = send.sender != send.receivers[0] and value.sharding.memory_kind in (None, DEVICE_MEMORY)
        if send.box == held and is_copied:
            return shard
        return _sliced(shard, *_place(send.box, held, shard.ndim))

    def land(self, sends: Sequence[Send], pieces: Sequence[Any]) -> None:
        """Writes the pieces of a round into the results; returns when that is done."""
        jax.block_until_ready([p for p in pieces if p is not None])
        places = set()
        for send, piece in zip(sends, pieces, strict=True):
            if piece is None:
                continue
            others = [SingleDeviceSharding(self._devices[d]) for d in send.receivers[1:]]
            copies = jax.device_put([piece] * len(others), others)
            for device, copy in zip(send.receivers, (piece, *copies), strict=True):
                self._write(send, device, copy)
                places.add((send.array, device))
        jax.block_until_ready([self._written[place] for place in places])

    def _write(self, send: Send, device: int, piece: Any) -> None:
        want = self._wanted[send.array][device]
        place = send.array, device
        if send.box == want:
            self._written[place] = piece
        else:
            if place not in self._written:
                self._written[place] = self._empty(send.array, device)
            starts, _ = _place(send.box, want, piece.ndim)
            self._written[place] = _writer(self._written[place], piece, *starts)

    def _empty(self, array: int, device: int) -> Any:
        dtype, more = self._raw(array)
        shape = tuple(stop - start for start, stop in self._wanted[array][device])
        return _zeros((*shape, *more), dtype, self._devices[device])()

    def assembled(self, array: int) -> Any:
        """The result, of its parts on this process's devices."""
        aval, sharding = self._targets[array]
        shards = []
        for device in self._wanted[array]:
            shard = self._written.pop((array, device), None)
            shard = self._empty(array, device) if shard is None else shard
            if jax_compat.is_key_dtype(aval.dtype):
                shard = jax_compat.key_of(shard, aval.dtype)
            if sharding.memory_kind not in (None, DEVICE_MEMORY):
                at = SingleDeviceSharding(self._devices[device], memory_kind=sharding.memory_kind)
                shard = jax.device_put(shard, at)
            shards.append(shard)
        if not shards:
            return absent(aval.shape, aval.dtype, sharding)
        made = jax.make_array_from_single_device_arrays(tuple(aval.shape), sharding, shards)
        return jax_compat.with_weak_type(made, bool(aval.weak_type))


def _place(box: Box, inside: Box, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(first indices, sizes) of a box in an array that holds another one; further dimensions are whole."""
    starts = [start - first for (start, _), (first, _) in zip(box, inside, strict=True)]
    sizes = [stop - start for start, stop in box]
    return (*starts, *(0,) * (ndim - len(box))), tuple(sizes)


def _sliced(shard: Any, starts: Sequence[int], sizes: Sequence[int]) -> Any:
    """A part of an array, in the memory of its device, never the array itself."""
    return _slicer((*sizes, *shard.shape[len(sizes) :]))(shard, *starts)


@functools.lru_cache(maxsize=4096)
def _slicer(sizes: tuple[int, ...]) -> Any:
    def part(array: Any, *starts: Any) -> Any:
        return jax.device_put(jax.lax.dynamic_slice(array, starts, sizes), jax.memory.Space.Device)

    return jax.jit(part)


@functools.lru_cache(maxsize=4096)
def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))


@functools.partial(jax.jit, donate_argnums=0)
def _writer(whole: Any, piece: Any, *starts: Any) -> Any:
    return jax.lax.dynamic_update_slice(whole, piece, starts)
