"""Runs a program's list of instructions in this process: one thread walks it and hands work to the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.runtime.program import Free, Program, Run
from autopar.runtime.transfers import Route, send


class Executor:
    """A program with what its tasks and transfers stand for. Calling it runs one step.

    `executables[i]` runs task i on flat arrays; `routes[i]` is the way of transfer i.
    """

    def __init__(self, program: Program, executables: Sequence[Callable[..., Any]], routes: Sequence[Route]) -> None:
        self.program = program
        self._actions = [_action(i, executables, routes) for i in program.instructions]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The results, in the order of the pipeline's outputs. Devices may still be computing them."""
        slots: list[Any] = [None] * self.program.num_slots
        for slot, array in zip(self.program.input_slots, inputs, strict=True):
            slots[slot] = array
        for action in self._actions:
            action(slots)
        return [slots[slot] for slot in self.program.output_slots]


def _action(
    instruction: Any, executables: Sequence[Callable[..., Any]], routes: Sequence[Route]
) -> Callable[[list[Any]], None]:
    """One instruction as a function on the slots, everything looked up that can be."""
    if isinstance(instruction, Run):
        return _run(executables[instruction.task], instruction.inputs, instruction.outputs)
    if isinstance(instruction, Free):
        return _free(instruction.slots)
    return _send([routes[t] for t in instruction.transfers], instruction.sources, instruction.targets)


def _run(executable: Callable[..., Any], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Callable:
    def action(slots: list[Any]) -> None:
        made = executable(*[slots[i] for i in inputs])
        for slot, array in zip(outputs, made, strict=True):
            slots[slot] = array

    return action


def _send(routes: list[Route], sources: tuple[int, ...], targets: tuple[int, ...]) -> Callable:
    def action(slots: list[Any]) -> None:
        for slot, array in zip(targets, send(routes, [slots[i] for i in sources]), strict=True):
            slots[slot] = array

    return action


def _free(freed: tuple[int, ...]) -> Callable:
    def action(slots: list[Any]) -> None:
        for slot in freed:
            slots[slot] = None

    return action
