"""Host offloading of activations: what is saved for the backward pass waits for it in the memory of the host.

A saved array goes to the host once the forward pass has made it, and comes back for the backward pass. The arrays come
in the order in which the backward pass reads them, as parts of about equal bytes:

(1) A part comes once the backward pass has got to the part before it, so that two are on the device at once: one that
    is read, and one on its way. Barriers say so to the compiler.
(2) Where the backward pass follows at once, which is in one program and on the last stage, the part that it reads first
    stays on the device: it would have to come back as soon as it had gone. What a policy of `jax.checkpoint` offloads
    goes even then.

Where a step is not cut into sections, its passes are told apart by the roles of its operations. What scans stack up is
the matter of `autopar.lowering.stack_offload`.

Source: Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient neural network design", MICRO
2016, arXiv:1602.08124 (offload in the forward pass, prefetch in the backward pass).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.ir.graph import OpGraph, Role, Section
from autopar.ir.layout import Layout, local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.ir.value_state import HOST, RETURNED
from autopar.lowering.host_offload import BUCKETS
from autopar.lowering.host_reads import module_of, operands_of, reading_returned, role_of
from autopar.lowering.instructions import (
    Compute,
    HostCopy,
    Instruction,
    Key,
    Leave,
    Loop,
    LoweredBlock,
    Place,
    Split,
    Stack,
    section_of,
)


def with_saved_in_host(
    graph: OpGraph, lowered: LoweredBlock, saved: frozenset[int], mesh: LogicalMesh, by_policy: frozenset[int]
) -> LoweredBlock:
    """The same instructions with some saved values in the memory of the host between the passes. `by_policy` are those
    of them that a policy of `jax.checkpoint` offloads.
    """
    instructions = lowered.instructions
    parts = _parts(graph, _offered(graph, lowered, saved), mesh)
    begins = [0, *(part[0].first_reader for part in parts)]  # of the part before each one
    follows_at_once = not any(isinstance(i, Leave) and section_of(i) is Section.FORWARD for i in instructions)
    after: dict[int | None, list[HostCopy]] = {}
    before: dict[int, list[HostCopy]] = {}
    returned = set()
    for number, (previous, part) in enumerate(zip(begins, parts, strict=False)):
        stays = number == 0 and follows_at_once  # (2)
        goes = [array for array in part if not stays or array.value in by_policy]
        for array in goes:
            reader = instructions[array.first_reader]
            # (1), but in the section of its reader: the sections may be programs of their own.
            made = -1 if array.maker is None else array.maker
            at = max(previous, _first_of_pass(instructions, reader), made + 1)
            there, back = (array.layout, HOST), (array.layout, RETURNED)
            goes_there = HostCopy(
                value=array.value, source=array.place, target=there, module=array.module, section=array.section
            )
            comes = HostCopy(
                value=array.value,
                source=there,
                target=back,
                module=module_of(reader),
                section=section_of(reader),
                behind=_behind(instructions, at),
            )
            after.setdefault(array.maker, []).append(goes_there)
            before.setdefault(at, []).append(comes)
            returned.add((array.value, array.layout))
    out: list[Instruction] = list(after.get(None, ()))
    for position, instruction in enumerate(instructions):
        out += before.get(position, ())
        out.append(reading_returned(instruction, returned) if _is_backward(instruction) else instruction)
        out += after.get(position, ())
    return dataclasses.replace(lowered, instructions=tuple(out))


def _is_backward(instruction: Instruction) -> bool:
    section = section_of(instruction)
    return section.is_backward or (section is Section.WHOLE and role_of(instruction) is Role.BACKWARD)


def _is_forward(instruction: Instruction) -> bool:
    section = section_of(instruction)
    return section is Section.FORWARD or (section is Section.WHOLE and role_of(instruction) is Role.FORWARD)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """An array in the place in which the forward pass leaves it, and the positions of what makes it (None: another
    stage) and of what reads it first in the backward pass.
    """

    value: int
    place: Place
    maker: int | None
    module: str
    section: Section
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
            inside |= set(instruction.keys_read) - set(operands_of(instruction))
        if _is_forward(instruction) and not isinstance(instruction, (HostCopy, Split, Stack)):
            for key in instruction.keys_made:
                if key[0] in saved:
                    made.setdefault(key, position)
    found: dict[tuple[int, Layout], _Saved] = {}
    for position, instruction in enumerate(instructions):
        if not _is_backward(instruction):
            continue
        for key in instruction.keys_read:
            value, place = key
            if key not in made or key in inside or place[0].partial or (value, place[0]) in found:
                continue
            maker = made[key]
            found[value, place[0]] = _Saved(
                value=value,
                place=place,
                maker=maker,
                module="" if maker is None else module_of(instructions[maker]),
                section=Section.FORWARD if maker is None else section_of(instructions[maker]),
                first_reader=position,
            )
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


def _first_of_pass(instructions: Sequence[Instruction], reader: Instruction) -> int:
    """Where the section of a reader begins, or the backward pass of a step without sections."""
    section = section_of(reader)
    return next(i for i, other in enumerate(instructions) if section_of(other) is section and _is_backward(other))


def _behind(instructions: Sequence[Instruction], position: int) -> tuple[Key, ...]:
    """What was computed last before a position, in the same section."""
    section = section_of(instructions[position])
    for instruction in reversed(instructions[:position]):
        if section_of(instruction) is section and isinstance(instruction, Compute):
            return next(iter([(key,) for key in instruction.keys_made]), ())
    return ()
