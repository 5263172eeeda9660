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
_ROUNDS_BACK = 8  # a piece is put into earlier rounds, so that planning takes no time that grows with their number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Where an array lies and where it is wanted: (number of a device, its box). `itemsize` in bytes."""

    held: tuple[tuple[int, Box], ...]
    wanted: tuple[tuple[int, Box], ...]
    itemsize: int


class Send(NamedTuple):
    """A piece of an array to devices of one process: the first receives it, the others copy it from there.

    `is_whole`: it is all that the sender holds and all that the receivers want.
    """

    array: int
    box: Box
    sender: int
    receivers: tuple[int, ...]
    is_whole: bool


class NotHeldError(Exception):
    """No device holds a box of an array that another one wants."""

    def __init__(self, array: int, box: Box) -> None:
        super().__init__(f"array {array}: nobody holds {box}")
        self.array, self.box = array, box


def boxes_of(
    indices: Mapping[Any, Any], shape: Sequence[int], number: Mapping[Any, int]
) -> tuple[tuple[int, Box], ...]:
    """(number of a device, its box), from the indices that a sharding gives to devices."""
    boxes = ((d, [part.indices(n) for part, n in zip(at, shape, strict=True)]) for d, at in indices.items())
    return tuple((number[d], tuple((start, stop) for start, stop, _ in box)) for d, box in boxes)


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
    filled: dict[tuple[str, int], list[int]] = {}  # by direction and device: the bytes of each round
    for number, ends in enumerate(arrays):
        most = max(round_bytes // max(ends.itemsize, 1), 1)
        for process, receivers, box, holders, is_whole in _parts(number, ends, process_of):
            for turn, piece in enumerate([box] if is_whole else _cut(box, most)):
                nbytes = min(num_elements(piece) * ends.itemsize, round_bytes)
                sender = min(holders, key=lambda d: (d not in receivers, process_of[d] != process, sent_bytes[d], d))
                sent_bytes[sender] += nbytes
                at = receivers.index(sender) if sender in receivers else turn % len(receivers)
                in_turn = receivers[at:] + receivers[:at]
                places = [
                    filled.setdefault(place, []) for place in (("sends", sender), *(("receives", d) for d in in_turn))
                ]
                chosen = _first_round_with_room(places, round_bytes - nbytes)
                for of_rounds in places:
                    of_rounds += [0] * (chosen + 1 - len(of_rounds))
                    of_rounds[chosen] += nbytes
                rounds += [[] for _ in range(len(rounds), chosen + 1)]
                rounds[chosen].append(Send(number, piece, sender, in_turn, is_whole))
    return tuple(map(tuple, rounds))


def _first_round_with_room(places: Sequence[Sequence[int]], most: int) -> int:
    """The first of the last few rounds that have at most so many bytes in all places."""
    last = max(map(len, places))
    return next(
        r for r in range(max(last - _ROUNDS_BACK, 0), last + 1) if all(sum(p[r : r + 1]) <= most for p in places)
    )


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
        self._process = jax.process_index()
        self._written: dict[tuple[int, int], Any] = {}
        self._number = number = {device: i for i, device in enumerate(devices)}
        self._wanted = [
            dict(boxes_of(sharding.addressable_devices_indices_map(aval.shape), aval.shape, number))
            for aval, sharding in targets
        ]
        self._missing = {
            (i, device): num_elements(box) for i, wanted in enumerate(self._wanted) for device, box in wanted.items()
        }
        self._shards: dict[int, dict[int, tuple[Box, Any]]] = {}

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
            put_to = [row(np.array([self._devices[receiver]]), self._type_sent(sends[i])[1]) for i in numbers]
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

    def _type_sent(self, send: Send) -> tuple[Any, tuple[int, ...]]:
        """(type, shape) of what is sent: of random keys the numbers that they are made of, of a part its bits."""
        dtype, more = _raw(self._targets[send.array][0].dtype)
        shape = (*(stop - start for start, stop in send.box), *more)
        return dtype if send.is_whole else _bits_of(dtype), shape

    def _to_send(self, send: Send, sender: int) -> Any:
        dtype, shape = self._type_sent(send)
        at = row(np.array([self._devices[sender]]), shape)
        if self._process_of(sender) != self._process:
            return absent(shape, dtype, at)
        piece = jax.device_put(self._cut(send), SingleDeviceSharding(self._devices[sender]))
        return jax.make_array_from_single_device_arrays(shape, at, [piece])

    def _cut(self, send: Send) -> Any:
        """A piece on its sender, or of numpy; an array of its own, or a whole shard that is copied when it is sent."""
        value = self._values[send.array]
        if not isinstance(value, jax.Array):
            piece = np.asarray(value)[tuple(slice(*ends) for ends in send.box)]
            return np.array(piece, self._targets[send.array][0].dtype).view(self._type_sent(send)[0])
        if send.array not in self._shards:
            shards = {s.device: s.data for s in value.addressable_shards}
            boxes = boxes_of(value.sharding.addressable_devices_indices_map(value.shape), value.shape, self._number)
            self._shards[send.array] = {n: (box, shards[self._devices[n]]) for n, box in boxes}
        held, shard = self._shards[send.array][send.sender]
        if jax_compat.is_key_dtype(value.dtype):
            shard = jax.random.key_data(shard)
        is_on_device = value.sharding.memory_kind in (None, DEVICE_MEMORY)
        if send.is_whole and send.sender != send.receivers[0] and is_on_device:
            return shard
        dtype, shape = self._type_sent(send)
        return _cutter(shape, dtype)(shard, *_first(send.box, held, shard.ndim))

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
        want, place = self._wanted[send.array][device], (send.array, device)
        if send.box == want:
            self._written[place] = piece
        else:
            if place not in self._written:
                shape = (*(stop - start for start, stop in want), *piece.shape[len(want) :])
                self._written[place] = _zeros(shape, piece.dtype, self._devices[device])()
            self._written[place] = _writer(self._written[place], piece, *_first(send.box, want, piece.ndim))
        self._missing[place] -= num_elements(send.box)
        if not self._missing[place] and self._is_in_host(send.array):  # at once: the device has no room for all
            self._written[place] = self._placed(send.array, device, self._written[place])

    def assembled(self, array: int) -> Any:
        """The result, of its parts on this process's devices."""
        aval, sharding = self._targets[array]
        dtype, more = _raw(aval.dtype)
        shards = []
        for device, box in self._wanted[array].items():
            shard = self._written.pop((array, device), None)
            if shard is None:  # without elements
                shape = (*(stop - start for start, stop in box), *more)
                shard = self._placed(array, device, _zeros(shape, dtype, self._devices[device])())
            elif not self._is_in_host(array):
                shard = self._placed(array, device, shard)
            shards.append(shard)
        if not shards:
            return absent(aval.shape, aval.dtype, sharding)
        made = jax.make_array_from_single_device_arrays(tuple(aval.shape), sharding, shards)
        return jax_compat.with_weak_type(made, bool(aval.weak_type))

    def _is_in_host(self, array: int) -> bool:
        return self._targets[array][1].memory_kind not in (None, DEVICE_MEMORY)

    def _placed(self, array: int, device: int, shard: Any) -> Any:
        """A part that is there as a whole, in its type and its memory."""
        aval, sharding = self._targets[array]
        dtype, _ = _raw(aval.dtype)
        if shard.dtype != dtype:
            shard = jax.block_until_ready(_as_dtype(dtype)(shard))  # one after the other: on CPUs it is a copy
        if jax_compat.is_key_dtype(aval.dtype):
            shard = jax_compat.key_of(shard, aval.dtype)
        if self._is_in_host(array):
            at = SingleDeviceSharding(self._devices[device], memory_kind=sharding.memory_kind)
            shard = jax.device_put(shard, at)
        return shard


def _first(box: Box, inside: Box, ndim: int) -> tuple[int, ...]:
    """The first indices of a box in an array that holds another one; further dimensions are whole."""
    return (*(start - first for (start, _), (first, _) in zip(box, inside, strict=True)), *(0,) * (ndim - len(box)))


def _raw(dtype: Any) -> tuple[Any, tuple[int, ...]]:
    """(type, further dimensions) of an array: random keys are the numbers that they are made of."""
    return jax_compat.raw_key(dtype) if jax_compat.is_key_dtype(dtype) else (dtype, ())


def _bits_of(dtype: Any) -> Any:
    """The type in which parts of an array are moved: compilers cut and join short floats as float32, where what is no
    number loses its bits, and XLA's CPU compiler then writes the whole array anew for each piece.
    """
    return _BITS.get(jnp.finfo(dtype).bits, dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


_BITS = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16)}  # by bits: floats of 4 bits have bytes in numpy, not in XLA


@functools.lru_cache(maxsize=4096)
def _cutter(sizes: tuple[int, ...], dtype: Any) -> Any:
    """A part of an array in the memory of its device, by its bits; never the array itself."""

    def part(array: Any, *starts: Any) -> Any:
        array = array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
        return jax.device_put(jax.lax.dynamic_slice(array, starts, sizes), jax.memory.Space.Device)

    return jax.jit(part)


@functools.partial(jax.jit, donate_argnums=0)
def _writer(whole: Any, piece: Any, *starts: Any) -> Any:
    return jax.lax.dynamic_update_slice(whole, piece, starts)


@functools.lru_cache(maxsize=64)
def _as_dtype(dtype: Any) -> Any:
    return jax.jit(lambda bits: jax.lax.bitcast_convert_type(bits, dtype), donate_argnums=0)


@functools.lru_cache(maxsize=4096)
def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))
