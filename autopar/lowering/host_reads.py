"""What the passes that bring values back from the memory of the host read of an instruction, and change of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from autopar.ir.graph import HOST, RETURNED, Role
from autopar.ir.layout import Layout
from autopar.lowering.instructions import (
    Accumulate,
    Compute,
    HostCopy,
    Instruction,
    Key,
    Leave,
    Loop,
    Move,
    Pass,
    Place,
    Split,
    Stack,
)


def operands_of(instruction: Instruction) -> Iterable[Key]:
    """What an instruction reads, but for what blocks inside of it read by themselves."""
    if isinstance(instruction, Loop):
        pairs = zip(instruction.op.inputs, instruction.reads, strict=True)
        return [(atom, place) for atom, place in pairs if isinstance(atom, int) and place is not None]
    return instruction.keys_read


def reading_returned(instruction: Instruction, returned: Collection[tuple[int, Layout]]) -> Instruction:
    """An instruction that reads what has come back: of values in their layouts, the arrays from there. A stack whose
    slices a scan reads in the memory of the host stays there.
    """

    def place_of(atom: object, place: Place | None) -> Place | None:
        if isinstance(atom, int) and place is not None and place[1] != HOST and (atom, place[0]) in returned:
            return place[0], RETURNED
        return place

    if isinstance(instruction, Move):
        source = place_of(instruction.value, instruction.source)
        assert source is not None, "a move has a source"
        return dataclasses.replace(instruction, source=source)
    if isinstance(instruction, HostCopy):
        return instruction
    if isinstance(instruction, (Compute, Pass, Loop)):
        reads: Any = tuple(place_of(a, p) for a, p in zip(instruction.op.inputs, instruction.reads, strict=True))
        return dataclasses.replace(instruction, reads=reads)
    assert isinstance(instruction, (Accumulate, Split, Stack, Leave)), "there is no other instruction"
    (atom,) = instruction.op.inputs
    return dataclasses.replace(instruction, read=place_of(atom, instruction.read))


def module_of(instruction: Instruction) -> str:
    """The user's module."""
    return instruction.module if isinstance(instruction, (Move, HostCopy)) else instruction.op.place


def role_of(instruction: Instruction) -> Role:
    """The part of a training step that an instruction belongs to; copies of state belong to the update."""
    if isinstance(instruction, HostCopy):
        return Role.UPDATE
    return instruction.role if isinstance(instruction, Move) else instruction.op.role
