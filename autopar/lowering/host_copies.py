"""Copies between the memories of devices and hosts, as the decisions of a plan ask for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from autopar.ir.graph import Atom, OpGraph, OpKind, Role, Section
from autopar.ir.layout import Layout, local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.ir.value_state import HOST, RETURNED, UNREDUCED
from autopar.lowering.decisions import ShardingPlan
from autopar.lowering.host_offload import BUCKETS, with_state_in_host
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
from autopar.passes.saved_arrays import offloaded_by_policy

# Host offloading of activations: what is saved for the backward pass waits for it in the memory of the host.
#
# A saved array goes to the host once the forward pass has made it, and comes back for the backward pass. The arrays
# come in the order in which the backward pass reads them, as parts of about equal bytes:
#
# (1) A part comes once the backward pass has got to the part before it, so that two are on the device at once: one that
# is read, and one on its way. Barriers say so to the compiler. (2) Where the backward pass follows at once, which is in
# one program and on the last stage, the part that it reads first stays on the device: it would have to come back as
# soon as it had gone. What a policy of `jax.checkpoint` offloads goes even then.
#
# Where a step is not cut into sections, its passes are told apart by the roles of its operations. What scans stack up
# is told below.
#
# Source: Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient neural network design",
# MICRO 2016, arXiv:1602.08124 (offload in the forward pass, prefetch in the backward pass).


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


# Host offloading under a scan: what each trip saves goes to the host at once, and is stacked up in its memory.
#
# A policy of `jax.checkpoint` that offloads sends a value to the host in the body of the forward scan. The scan stacks
# the values of its trips there, and the scan of the backward pass takes each trip's from there: the body brings it to
# the device before it is first read. So a device holds one trip's at a time. XLA's compilers for GPU and TPU write and
# read one trip's slice of a stack in the memory of the host.


def with_stacks_in_host(lowered: LoweredBlock, saved: frozenset[int]) -> LoweredBlock:
    """The same instructions with the saved values that scans stack up in the memory of the host."""
    return _BlockRewriter(saved).run(lowered, num_carry=len(lowered.outputs))


class _BlockRewriter:
    """One block. `stacks` are places whose arrays lie in the memory of the host instead; `section` and `trips` are
    those of the loops around it (None: the top block, whose instructions have their own).
    """

    def __init__(
        self, saved: frozenset[int], stacks: Iterable[Key] = (), section: Section | None = None, trips: int = 1
    ) -> None:
        self.saved, self.stacks, self.section, self.trips = saved, set(stacks), section, trips
        self.returned: dict[Key, Place] = {}
        self.out: list[Instruction] = []

    def run(self, lowered: LoweredBlock, num_carry: int) -> LoweredBlock:
        """The block. Its results behind the first `num_carry` are in the memory of the host, where they are saved."""
        last: Instruction | None = None
        for instruction in lowered.instructions:
            last = instruction
            if isinstance(instruction, Loop) and instruction.op.kind is OpKind.SCAN:
                last = self.scan(instruction, self.section_at(instruction))
            self.bring_back(operands_of(last), last)
            self.out.append(reading_returned(last, {(value, place[0]) for value, place in self.returned}))
            self.stacks.update((v, (at, UNREDUCED)) for v, (at, state) in _stacked(last) if state == HOST)
        outputs = [
            self.output(atom, place, last, may_stay=position >= num_carry)
            for position, (atom, place) in enumerate(zip(lowered.block.outputs, lowered.outputs, strict=True))
        ]
        return dataclasses.replace(lowered, instructions=tuple(self.out), outputs=tuple(outputs))

    def section_at(self, instruction: Instruction) -> Section:
        return self.section if self.section is not None else section_of(instruction)

    def scan(self, loop: Loop, section: Section) -> Loop:
        """A scan with slices of what is there read from the host, and slices of what is saved written there."""
        (body,), first = loop.blocks, loop.op.num_consts + loop.op.num_carry
        reads, taken = list(loop.reads), set()
        for position in range(first, len(reads)):
            key = _key(loop.op.inputs[position], reads[position])
            if key in self.stacks:
                reads[position] = key[1][0], HOST
                taken.add(body.block.inputs[position])
        slices = [(v, (at, UNREDUCED)) for v, at in zip(body.block.inputs, body.inputs, strict=True) if v in taken]
        inside = _BlockRewriter(self.saved, slices, section, self.trips * loop.op.trips)
        body = inside.run(dataclasses.replace(body, in_host=frozenset(taken)), loop.op.num_carry)
        in_host = frozenset(i for i, place in enumerate(body.outputs) if place is not None and place[1] == HOST)
        return dataclasses.replace(loop, reads=tuple(reads), blocks=(body,), in_host=in_host)

    def bring_back(self, keys: Iterable[Key], reader: Instruction) -> None:
        """Copies to the device what a reader needs there and is not there yet."""
        for key in keys:
            if key not in self.stacks or key in self.returned:
                continue
            value, (layout, _) = key
            self.returned[key] = layout, RETURNED
            self.out.append(
                HostCopy(
                    value=value,
                    source=(layout, HOST),
                    target=(layout, RETURNED),
                    module=module_of(reader),
                    section=self.section_at(reader),
                    trips=self.trips,
                )
            )

    def output(self, atom: Atom, place: Place | None, last: Instruction | None, *, may_stay: bool) -> Place | None:
        key = _key(atom, place)
        if key is None or last is None:
            return place
        value, (layout, state) = key
        if key in self.stacks:
            if may_stay:
                return layout, HOST
            self.bring_back([key], last)
            return self.returned[key]
        if not may_stay or value not in self.saved or layout.partial or state == HOST:
            return place
        made = next((i for i, instruction in enumerate(self.out) if key in instruction.keys_made), None)
        if made is None:
            return place
        goes = HostCopy(
            value=value,
            source=key[1],
            target=(layout, HOST),
            module=module_of(self.out[made]),
            section=self.section_at(last),
            trips=self.trips,
        )
        if goes not in self.out:
            self.out.insert(made + 1, goes)
        return layout, HOST


def _stacked(instruction: Instruction) -> Iterable[Key]:
    return instruction.keys_made if isinstance(instruction, Loop) else ()


def _key(atom: Atom, place: Place | None) -> Key | None:
    return (atom, place) if isinstance(atom, int) and place is not None else None


def with_host_copies(graph: OpGraph, lowered: LoweredBlock, sharding: ShardingPlan) -> LoweredBlock:
    """The same step with some of its state in the memory of the host before and after it, and some of what it saves for
    the backward pass there in between.
    """
    if sharding.in_host:
        lowered = with_state_in_host(graph, lowered, sharding.in_host, sharding.mesh)
    if sharding.saved_in_host:
        lowered = with_stacks_in_host(lowered, sharding.saved_in_host)
        by_policy = offloaded_by_policy(graph)
        lowered = with_saved_in_host(graph, lowered, sharding.saved_in_host, sharding.mesh, by_policy)
    return lowered
