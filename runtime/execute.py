"""Runs a program's list of instructions in this process: one thread walks it and hands work to the devices.

In a program of several processes each walks the same list and leaves out what it has no part in. Programs are
dispatched by one thread at a time, and on CPU devices a bounded number is in flight.

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from autopar.runtime.program import Free, Instruction, Joined, Program, Run
from autopar.runtime.transfers import Crossing, crosser

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


Action = Callable[[list[Any]], None]


class Executor:
    """A program with what its tasks and transfers stand for. Calling it runs one step.

    `executables[i]` runs task i on flat arrays, None where its devices are of other processes; behind those of all
    tasks stands one for each `Joined`. `routes[i]` is the way of transfer i. `in_flight[i]` counts the programs on the
    devices of task i, where they are limited.
    """

    def __init__(
        self,
        program: Program,
        executables: Sequence[Callable[..., Any] | None],
        routes: Sequence[Crossing],
        in_flight: Sequence[InFlight | None] = (),
    ) -> None:
        self.program = program
        actions = (action_of(i, executables, routes, in_flight) for i in program.instructions)
        self._actions = [action for action in actions if action is not None]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The results, in the order of the pipeline's outputs. Devices may still be computing them.

        None, as input and as result, is what lies on devices of other processes.
        """
        slots: list[Any] = [None] * self.program.num_slots
        for slot, array in zip(self.program.input_slots, inputs, strict=True):
            slots[slot] = array
        for action in self._actions:
            action(slots)
        return [slots[slot] for slot in self.program.output_slots]


def action_of(
    instruction: Instruction,
    executables: Sequence[Callable[..., Any] | None],
    routes: Sequence[Crossing],
    in_flight: Sequence[InFlight | None] = (),
) -> Action | None:
    """One instruction as a function on the slots, everything looked up that can be; None: nothing to do here."""
    if isinstance(instruction, Run | Joined):
        executable = executables[instruction.task]
        if executable is None:
            return None
        action = _run(executable, instruction.inputs, instruction.outputs)
        counts = in_flight[instruction.task] if in_flight else None
        return action if counts is None else _counted(action, instruction.outputs, counts)
    if isinstance(instruction, Free):
        return _free(instruction.slots)
    ways = [routes[t] for t in instruction.transfers]
    if any(way.concerns_this_process for way in ways):
        return _cross(ways, instruction.sources, instruction.targets)
    return None


def _run(executable: Callable[..., Any], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Action:
    def action(slots: list[Any]) -> None:
        for slot, array in zip(outputs, executable(*[slots[i] for i in inputs]), strict=True):
            slots[slot] = array

    return action


def _counted(action: Action, outputs: tuple[int, ...], in_flight: InFlight) -> Action:
    noted: list[int] = []  # the slot of the smallest result, found in the first run

    def counted(slots: list[Any]) -> None:
        action(slots)
        if not noted:
            position = smallest([slots[slot] for slot in outputs])
            noted.append(-1 if position is None else outputs[position])
        if noted[0] >= 0:
            in_flight.add(slots[noted[0]])

    return counted


def _cross(crossings: list[Crossing], sources: tuple[int, ...], targets: tuple[int, ...]) -> Action:
    cross = crosser(crossings)

    def action(slots: list[Any]) -> None:
        for slot, array in zip(targets, cross([slots[i] for i in sources]), strict=True):
            slots[slot] = array

    return action


def _free(freed: tuple[int, ...]) -> Action:
    def action(slots: list[Any]) -> None:
        for slot in freed:
            slots[slot] = None

    return action
