"""Host offloading of activations: what is saved for the backward pass waits for it in the memory of the host.

A saved array goes to the host once the forward pass has made it, and comes back for the backward pass. The arrays come
in the order in which the backward pass reads them, as parts of about equal bytes:

(1) A part comes once the backward pass has got to the part before it, so that two are on the device at once: one that
    is read, and one on its way. Barriers say so to the compiler.
(2) Where the backward pass follows at once, which is in one program and on the last stage, the part that it reads first
    stays on the device: it would have to come back as soon as it had gone.

Source: Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient neural network design", MICRO
2016, arXiv:1602.08124 (offload in the forward pass, prefetch in the backward pass).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.ir.graph import OpGraph, Section
from autopar.ir.layout import Layout, local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.ir.value_state import HOST, RETURNED
from autopar.lowering.host_offload import BUCKETS
from autopar.lowering.instructions import (
    Accumulate,
    Compute,
    HostCopy,
    Instruction,
    Key,
    Leave,
    Loop,
    LoweredBlock,
    Move,
    Pass,
    Place,
    Split,
    Stack,
    section_of,
)


def with_saved_in_host(graph: OpGraph, lowered: LoweredBlock, saved: frozenset[int], mesh: LogicalMesh) -> LoweredBlock:
    """The same instructions with some saved values in the memory of the host between the passes."""
    instructions = lowered.instructions
    parts = _parts(graph, _offered(graph, lowered, saved), mesh)
    begins = [0, *(part[0].first_reader for part in parts)]  # of the part before each one
    follows_at_once = not any(isinstance(i, Leave) and section_of(i) is Section.FORWARD for i in instructions)
    first = 1 if follows_at_once else 0  # (2)
    after: dict[int | None, list[HostCopy]] = {}
    before: dict[int, list[HostCopy]] = {}
    returned = set()
    for previous, part in zip(begins[first:], parts[first:], strict=False):
        for array in part:
            reader = instructions[array.first_reader]
            # (1), but in the section of its reader: the sections may be programs of their own.
            at = max(previous, _first_of(instructions, section_of(reader)))
            there, back = (array.layout, HOST), (array.layout, RETURNED)
            goes = HostCopy(
                value=array.value, source=array.place, target=there, module=array.module, section=Section.FORWARD
            )
            comes = HostCopy(
                value=array.value,
                source=there,
                target=back,
                module=_module(reader),
                section=section_of(reader),
                behind=_behind(instructions, at),
            )
            after.setdefault(array.maker, []).append(goes)
            before.setdefault(at, []).append(comes)
            returned.add((array.value, array.layout))
    out: list[Instruction] = list(after.get(None, ()))
    for position, instruction in enumerate(instructions):
        out += before.get(position, ())
        out.append(_reading_returned(instruction, returned) if section_of(instruction).is_backward else instruction)
        out += after.get(position, ())
    return dataclasses.replace(lowered, instructions=tuple(out))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """An array in the place in which the forward pass leaves it, and the positions of what makes it (None: another
    stage) and of what reads it first in the backward pass.
    """

    value: int
    place: Place
    maker: int | None
    module: str
    first_reader: int

    @property
    def layout(self) -> Layout:
        return self.place[0]


def _offered(graph: OpGraph, lowered: LoweredBlock, saved: frozenset[int]) -> list[_Saved]:
    """The arrays of these values that may go, in the order in which the backward pass reads them: all but sums that are
    not reduced, and what the body of a loop reads from outside of it.
    """
    instructions = lowered.instructions
    repeating = {lowered.block.inputs[i] for i in graph.repeating}
    entries = zip(lowered.block.inputs, lowered.entries(), strict=True)
    made: dict[Key, int | None] = {(v, place): None for v, place in entries if v in repeating & saved}
    inside: set[Key] = set()
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Loop):
            inside |= set(instruction.keys_read) - set(_operands(instruction))
        if section_of(instruction) is Section.FORWARD and not isinstance(instruction, (HostCopy, Split, Stack)):
            for key in instruction.keys_made:
                if key[0] in saved:
                    made.setdefault(key, position)
    found: dict[tuple[int, Layout], _Saved] = {}
    for position, instruction in enumerate(instructions):
        if not section_of(instruction).is_backward:
            continue
        for key in instruction.keys_read:
            value, place = key
            if key not in made or key in inside or place[0].partial or (value, place[0]) in found:
                continue
            maker = made[key]
            module = "" if maker is None else _module(instructions[maker])
            found[value, place[0]] = _Saved(value=value, place=place, maker=maker, module=module, first_reader=position)
    return list(found.values())


def _parts(graph: OpGraph, arrays: Sequence[_Saved], mesh: LogicalMesh) -> list[list[_Saved]]:
    """The arrays as parts of about equal bytes."""

    def nbytes(array: _Saved) -> int:
        value = graph.values[array.value]
        return local_bytes(value.shape, value.itemsize, array.layout, mesh)

    total, filled = sum(map(nbytes, arrays)), 0
    parts: list[list[_Saved]] = []
    for array in arrays:
        if not parts or filled * BUCKETS >= total:
            parts.append([])
            filled = 0
        parts[-1].append(array)
        filled += nbytes(array)
    return parts


def _first_of(instructions: Sequence[Instruction], section: Section) -> int:
    return next(i for i, instruction in enumerate(instructions) if section_of(instruction) is section)


def _behind(instructions: Sequence[Instruction], position: int) -> tuple[Key, ...]:
    """What the backward pass made last before a position, in the same section."""
    section = section_of(instructions[position])
    for instruction in reversed(instructions[:position]):
        if section_of(instruction) is section and isinstance(instruction, Compute):
            return next(iter([(key,) for key in instruction.keys_made]), ())
    return ()


def _operands(instruction: Instruction) -> Iterable[Key]:
    """What an instruction reads, but for what blocks inside of it read by themselves."""
    if isinstance(instruction, Loop):
        pairs = zip(instruction.op.inputs, instruction.reads, strict=True)
        return [(atom, place) for atom, place in pairs if isinstance(atom, int) and place is not None]
    return instruction.keys_read


def _reading_returned(instruction: Instruction, returned: set[tuple[int, Layout]]) -> Instruction:
    """An instruction of the backward pass that reads what has come back."""

    def place_of(atom: object, place: Place | None) -> Place | None:
        if isinstance(atom, int) and place is not None and (atom, place[0]) in returned:
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


def _module(instruction: Instruction) -> str:
    return instruction.module if isinstance(instruction, (Move, HostCopy)) else instruction.op.module
