"""Dispatch of programs to devices: one thread at a time, and on CPU devices a bounded number in flight.

Two threads that dispatch programs with collectives to the same devices may do so in another order on each of them:
every device then waits for the others. So the thread that runs a step holds a lock during dispatch, not during
computation.

XLA's CPU client accepts 32 programs at once for each device (`max_inflight_computations_per_device`). One more blocks a
thread of the pool that the 32 need to finish: with collectives among them they never finish, and after 40 s XLA ends
the process (seen with jaxlib 0.10.2 on 2, 8 and 16 devices with 33 in flight, never with 32). Accelerators have no such
limit, and dispatch to them never waits.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax

# In flight on a set of devices: those that were handed out last, and at most as many before them of which it is not
# known whether they have ended. Less than half of what XLA's CPU client takes: the devices may run the programs of
# another mesh too, those that cut and join what stages send, and what users compute between steps.
MOST_IN_FLIGHT = 7

# Of the whole process: all steps share its devices. A step may be called while another is handed out, by a callback.
turn = threading.RLock()


class InFlight:
    """The programs in flight on CPU devices that run the same ones. To be used in one's `turn`."""

    def __init__(self, most: int = MOST_IN_FLIGHT) -> None:
        self.most = most
        self._made: collections.deque[jax.Array] = collections.deque()
        self._unknown = 0

    def add(self, result: jax.Array) -> None:
        """Notes a result of a program that was just handed out, and waits for an older one where there are many.

        Until it is waited for, its memory is held.
        """
        self._made.append(result)
        if len(self._made) <= self.most:
            return
        oldest = self._made.popleft()
        if _waited_for(oldest):
            self._unknown = 0
        elif self._unknown < self.most:
            self._unknown += 1  # a later program took it over: when that one has ended, so has this one
        else:
            result.block_until_ready()
            self._made.clear()
            self._unknown = 0

    def drain(self) -> None:
        """Waits for all that is noted, and holds none of it any more."""
        for array in self._made:
            _waited_for(array)
        self._made.clear()
        self._unknown = 0


def _waited_for(array: jax.Array) -> bool:
    """Waits for an array; False where a later program took it over.

    On some devices only where the user holds a NumPy view of a part: that part stays, the others are donated, and the
    array says that it is not deleted.
    """
    if array.is_deleted():
        return False
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError:
        if any(shard.data.is_deleted() for shard in array.addressable_shards):
            return False
        raise
    return True


def smallest(avals: Sequence[Any], kept: Iterable[int] = ()) -> int | None:
    """The position of the smallest result, one of those that no later program takes over where there are any."""
    positions = list(kept) or range(len(avals))
    return min(positions, key=lambda i: math.prod(avals[i].shape), default=None)


_on_cpu: dict[tuple[int, ...], InFlight] = {}


def in_flight_on(devices: Sequence[jax.Device]) -> InFlight | None:
    """What counts the programs on some devices; None where as many as one likes may be in flight."""
    if devices[0].platform != "cpu":
        return None
    return _on_cpu.setdefault(tuple(sorted(d.id for d in devices)), InFlight())


def drain() -> None:
    """Waits for the programs in flight on CPU devices, so that no memory is held for them."""
    with turn:
        for in_flight in _on_cpu.values():
            in_flight.drain()
