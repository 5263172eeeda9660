"""Runs a program's list of instructions in this process: one thread walks it and hands work to the devices.

In a program of several processes each walks the same list and leaves out what it has no part in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.runtime.execution.cross_process import Crossing, crosser
from autopar.runtime.execution.dispatch import InFlight, smallest
from autopar.runtime.execution.transfers import Route, sender
from autopar.runtime.pipeline.program import Free, Instruction, Joined, Program, Run

Way = Route | Crossing
Action = Callable[[list[Any]], None]


class Executor:
    """A program with what its tasks and transfers stand for. Calling it runs one step.

    `executables[i]` runs task i on flat arrays, None where its devices are of other processes; behind those of all
    tasks stands one for each `Joined`. `routes[i]` is the way of transfer i, a `Crossing` where devices of other
    processes are at an end. `in_flight[i]` counts the programs on
    the devices of task i, where they are limited.
    """

    def __init__(
        self,
        program: Program,
        executables: Sequence[Callable[..., Any] | None],
        routes: Sequence[Way],
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
    routes: Sequence[Way],
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
    within = [way for way in ways if isinstance(way, Route)]
    between = [way for way in ways if isinstance(way, Crossing)]
    assert not within or not between, "a Send joins one pair of meshes"
    if within:
        return _send(within, instruction.sources, instruction.targets)
    if any(way.concerns_this_process for way in between):
        return _cross(between, instruction.sources, instruction.targets)
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


def _send(routes: list[Route], sources: tuple[int, ...], targets: tuple[int, ...]) -> Action:
    send = sender(routes)

    def action(slots: list[Any]) -> None:
        for slot, array in zip(targets, send([slots[i] for i in sources]), strict=True):
            slots[slot] = array

    return action


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
