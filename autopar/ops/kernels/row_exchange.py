"""Rows sent to the devices of their experts, and back: an all-to-all of rows that are sorted by their expert.

Each device has rows of its own tokens, and some of the experts, neighbouring ones. What a device sends to another is
known when it runs only, and none is dropped however the router chooses. So rows are sent in turns: in each as many from
one device to another as there is room for (`quota`), twice an equal share. Of a router that is near balance all are
sent in the first turn. `jax.lax.ragged_all_to_all` sends just them; where the platform has none (CPUs), each pair of
devices exchanges as many rows as there is room for, some of which are filling.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

# Platforms of JAX whose compilers have a ragged all-to-all.
_RAGGED = frozenset({"tpu", "gpu", "cuda", "rocm"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The mesh axes over which experts are split, among how many devices, the platform of JAX, and the other axes."""

    axes: tuple[str, ...]
    count: int
    platform: str
    others: tuple[str, ...] = ()

    @property
    def is_ragged(self) -> bool:
        return self.platform in _RAGGED


# How many rows each expert gets, of each of some layers; of no layers: equally many.
Load = tuple[tuple[float, ...], ...]


def busiest_share(load: Load, count: int) -> float:
    """The rows of the busiest of `count` devices that share the experts, as a multiple of an equal share.

    Neighbouring experts are on one device. Of several layers the mean: each waits for its own busiest device.
    """
    if not load or count == 1:
        return 1.0
    of_layers = []
    for experts in load:
        own = len(experts) // count
        busiest = max(math.fsum(experts[i : i + own]) for i in range(0, len(experts), own))
        of_layers.append(busiest * count / math.fsum(experts))
    return math.fsum(of_layers) / len(load)


# The scope, in the names of a program's operations, of what sends the rows that the first turn left.
LATER_TURNS = "later turns of experts"
# Rows from one device to another for which there is room in a turn, as a multiple of an equal share: what a router far
# from balance needs more takes more turns, and room that is not needed is moved, and takes memory, in each.
_ROOM = 2


def quota(num_rows: int, count: int, tile: int = 1) -> int:
    """For how many of a device's rows another one of `count` has room in a turn: in all, whole tiles."""
    step = tile // math.gcd(tile, count)
    return min(num_rows, -(-_ROOM * num_rows // (count * step)) * step)


def turns_of(load: float, count: int) -> int:
    """In how many turns rows are sent to a device that gets `load` times an equal share of `count` devices' rows."""
    return max(1, math.ceil(min(load, count) / room_of(count)))


def room_of(count: int) -> int:
    """The rows that a device has room for in a turn, of those of `count` devices, as a multiple of an equal share."""
    return min(_ROOM, count)


class RowExchange:
    """The exchange of the rows of one order in one turn. `experts`: of each sorted row its expert; `sizes`: how many
    rows each of all experts has here; `tile`: the rows for which there is room are a multiple of it.
    """

    def __init__(self, devices: Devices, experts: Any, sizes: Any, turn: Any = 0, tile: int = 1) -> None:
        self.devices, self.num_rows = devices, experts.shape[0]
        self.quota, self.me = quota(self.num_rows, devices.count, tile), lax.axis_index(devices.axes)
        count, own = devices.count, sizes.shape[0] // devices.count
        before = jnp.asarray(turn * self.quota, sizes.dtype)  # rows to each device that earlier turns sent

        def now(rows: Any) -> Any:
            return jnp.clip(rows - before, 0, self.quota)

        ends = jnp.cumsum(sizes.reshape(count, own), 1)
        by_device = jnp.diff(now(ends), axis=1, prepend=0)
        # From each device, and of each of this one's experts: the rows that come.
        self.coming = lax.all_to_all(by_device, devices.axes, 0, 0, tiled=True)
        self.received = jnp.sum(self.coming, 1)
        self.whole = lax.all_gather(ends[:, -1], devices.axes)  # rows of each device to each, in all turns
        self.all_sent = now(self.whole)
        self.all_starts = jnp.cumsum(self.whole, 1) - self.whole + jnp.minimum(before, self.whole)
        self.sent, self.starts = self.all_sent[self.me], self.all_starts[self.me]
        self.target = experts // own  # the device of each sorted row
        self.place = jnp.arange(self.num_rows, dtype=sizes.dtype) - self.starts[self.target]
        self.sizes = jnp.sum(self.coming, 0)
        self.own, self.of_places = own, self.expert_of_places()
        self.order = jnp.argsort(self.of_places, stable=True)

    @property
    def num_turns(self) -> Any:
        """In how many turns all rows are sent: equally many on all devices, whose collectives are in one program."""
        turns = -(-jnp.max(self.whole) // self.quota)
        return lax.pmax(turns, self.devices.others) if self.devices.others else turns

    def in_turn(self) -> Any:
        """Of each sorted row whether it is sent in this turn."""
        return (self.place >= 0) & (self.place < self.sent[self.target])

    @property
    def num_places(self) -> int:
        """The rows that there is room for."""
        return self.devices.count * self.quota

    def expert_of_places(self) -> Any:
        """Of each place in which rows arrive, which of this device's experts it is; one more where there is no row."""
        if self.devices.is_ragged:
            places = jnp.arange(self.num_places, dtype=self.received.dtype)
            ends = jnp.cumsum(self.received)
            source = jnp.sum(places[:, None] >= ends, 1)
            source = jnp.minimum(source, self.devices.count - 1)
            within = places - (ends - self.received)[source]
            return jnp.sum(within[:, None] >= jnp.cumsum(self.coming, 1)[source], 1)
        within = jnp.arange(self.quota, dtype=self.received.dtype)
        ends = jnp.cumsum(self.coming, 1)
        return jnp.sum(within[None, :, None] >= ends[:, None, :], -1).reshape(-1)

    def is_row(self) -> Any:
        """Of each place at the experts whether there is a row."""
        return jnp.arange(self.num_places) < jnp.sum(self.sizes)

    def expert_numbers(self) -> Any:
        """Of each place at the experts, in their order, which of all experts it is; the last one's of filling."""
        first = lax.axis_index(self.devices.axes) * self.own
        return jnp.minimum(jnp.sort(self.of_places), self.own - 1) + first

    def to_experts(self, rows: Any) -> Any:
        """Rows in sorted order, sorted by expert on the devices of the experts; filling comes after them."""
        if self.devices.is_ragged:
            places = self.zeros(self.num_places, rows)
            before = (jnp.cumsum(self.all_sent, 0) - self.all_sent)[self.me]
            arrived = self._sent(rows, places, self.starts, self.sent, before, self.received)
        else:
            index = jnp.minimum(self.starts[:, None] + jnp.arange(self.quota), self.num_rows - 1)
            arrived = lax.all_to_all(rows[index], self.devices.axes, 0, 0, tiled=True)
            arrived = arrived.reshape(self.num_places, *rows.shape[1:])
        return arrived.at[self.order].get(mode="promise_in_bounds", unique_indices=True)

    def to_tokens(self, rows: Any) -> Any:
        """Rows on the devices of their experts, back in sorted order on those of their tokens."""
        arrived = rows.at[jnp.argsort(self.order)].get(mode="promise_in_bounds", unique_indices=True)
        if self.devices.is_ragged:
            places = self.zeros(self.num_rows, rows)
            before = self.all_starts[:, self.me]
            starts = jnp.cumsum(self.received) - self.received
            return self._sent(arrived, places, starts, self.received, before, self.sent)
        parts = arrived.reshape(self.devices.count, self.quota, *rows.shape[1:])
        back = lax.all_to_all(parts, self.devices.axes, 0, 0, tiled=True)
        return back[self.target, jnp.clip(self.place, 0, self.quota - 1)]

    def zeros(self, num_rows: int, like: Any) -> Any:
        """So many rows of zeros, which the numbers of received rows come before: XLA for GPUs fills all arrays of a
        program that are filled by a constant in one kernel (jaxlib 0.10.2), and they would all be held from there on.
        """
        zero = jnp.minimum(self.received[0], 0)
        return jnp.broadcast_to(zero.astype(like.dtype), (num_rows, *like.shape[1:]))

    def _sent(self, rows: Any, places: Any, starts: Any, sizes: Any, targets: Any, received: Any) -> Any:
        numbers = (x.astype(jnp.int32) for x in (starts, sizes, targets, received))
        return lax.ragged_all_to_all(rows, places, *numbers, axis_name=self.devices.axes)


def sent_arrays(eqn: Any) -> Sequence[Any]:
    """The arrays whose elements a collective sends: of a ragged all-to-all the one without room for more."""
    if eqn.primitive.name == "ragged_all_to_all":
        return [min((eqn.invars[0].aval, eqn.outvars[0].aval), key=lambda a: a.size)]
    return [v.aval for v in eqn.outvars]
