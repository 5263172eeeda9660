"""Host offloading under a scan: what each trip saves goes to the host at once, and is stacked up in its memory.

A policy of `jax.checkpoint` that offloads sends a value to the host in the body of the forward scan. The scan stacks
the values of its trips there, and the scan of the backward pass takes each trip's from there: the body brings it to the
device before it is first read. So a device holds one trip's at a time. XLA's compilers for GPU and TPU write and read
one trip's slice of a stack in the memory of the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopar.ir.graph import Atom, OpKind, Section
from autopar.ir.value_state import HOST, RETURNED, UNREDUCED
from autopar.lowering.host_reads import module_of, operands_of, reading_returned
from autopar.lowering.instructions import HostCopy, Instruction, Key, Loop, LoweredBlock, Place, section_of


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
