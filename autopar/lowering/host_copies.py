"""Copies between the memories of devices and hosts, as the decisions of a plan ask for them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from scipy.cluster.hierarchy import DisjointSet

from autopar.ir.graph import HOST, RETURNED, UNREDUCED, Atom, OpGraph, OpKind, Role, Section
from autopar.ir.layout import Layout, LogicalMesh, local_bytes
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
from autopar.lowering.lower import ShardingPlan
from autopar.passes.saved_arrays import offloaded_by_policy


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
        return replace(instruction, source=source)
    if isinstance(instruction, HostCopy):
        return instruction
    if isinstance(instruction, (Compute, Pass, Loop)):
        reads: Any = tuple(place_of(a, p) for a, p in zip(instruction.op.inputs, instruction.reads, strict=True))
        return replace(instruction, reads=reads)
    assert isinstance(instruction, (Accumulate, Split, Stack, Leave)), "there is no other instruction"
    (atom,) = instruction.op.inputs
    return replace(instruction, read=place_of(atom, instruction.read))


def module_of(instruction: Instruction) -> str:
    """The user's module."""
    return instruction.module if isinstance(instruction, (Move, HostCopy)) else instruction.op.place


def role_of(instruction: Instruction) -> Role:
    """The part of a training step that an instruction belongs to; copies of state belong to the update."""
    if isinstance(instruction, HostCopy):
        return Role.UPDATE
    return instruction.role if isinstance(instruction, Move) else instruction.op.role


# Host offloading of state: when each part comes to the device for the update, and when it returns.
#
# Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, arXiv 2101.06840.
# There the processors of the host compute the update too; here state is only kept in its memory, and the devices
# compute.
#
# What belongs together, the moments of one parameter, is found by what the update computes: arrays that meet in an
# operation (numbers, such as a norm over everything, join nothing). These groups come in the order in which their
# gradients are there, and as `BUCKETS` parts of about equal bytes:
#
# (1) A group's state comes once the last gradient that it is updated with is there, so that it takes no memory during
# the backward pass. (2) A bucket's state comes once that of the bucket `AHEAD` before it has gone back, so that a few
# buckets are on the device at once, and the next one is on its way while one is updated.
#
# Both are said to the compiler by barriers. Operations that read what is not there yet are put behind it.

BUCKETS, AHEAD = 16, 2
_ORDER = {section: number for number, section in enumerate(Section)}


def with_state_in_host(
    graph: OpGraph, lowered: LoweredBlock, in_host: frozenset[int], mesh: LogicalMesh
) -> LoweredBlock:
    """The same step with some of its state, arguments of the graph, in the memory of the host before and after it."""
    return _Offloading(graph, lowered, in_host, mesh).run()


@dataclasses.dataclass(slots=True)
class _Group:
    """State that is updated together: what comes, what goes back, and the instruction that makes its last gradient."""

    comes: list[int]
    goes: list[Key] = dataclasses.field(default_factory=list)
    gradient: int = -1
    nbytes: int = 0
    bucket: int = 0


class _Offloading:
    """One block. Values in the host's memory are numbered: a set of them is the bits of a number."""

    def __init__(self, graph: OpGraph, lowered: LoweredBlock, in_host: frozenset[int], mesh: LogicalMesh) -> None:
        self.graph, self.lowered, self.mesh = graph, lowered, mesh
        self.layout = {v: at for v, at in zip(lowered.block.inputs, lowered.inputs, strict=True) if v in in_host}
        self.number = {v: i for i, v in enumerate(self.layout)}
        self.needs: dict[Key, int] = {}  # of what is in the host's memory, all that a place is computed of
        self.goes: dict[Key, HostCopy] = {}  # by the place on the device
        self.outputs = list(lowered.outputs)
        self.read_first: dict[int, Instruction] = {}

    def run(self) -> LoweredBlock:
        self.find_ends()
        groups = self.groups()
        comes = self.coming(groups)
        return dataclasses.replace(
            self.lowered,
            instructions=_Queue(self.lowered.instructions, comes, self.goes).run(),
            outputs=tuple(self.outputs),
            in_host=frozenset(self.layout),
        )

    def on_device(self, value: int) -> Key:
        return value, (self.layout[value], UNREDUCED)

    def in_host(self, value: int) -> Key:
        return value, (self.layout[value], HOST)

    def find_ends(self) -> None:
        """What goes back, and who reads what comes first."""
        block = self.lowered.block
        section = Section.AFTER if self.graph.is_cut else Section.WHOLE
        made_by = {key: i for i in self.lowered.instructions for key in i.keys_made}
        for argument, result in self.graph.tied:
            if block.inputs[argument] not in self.layout:
                continue
            atom, place = block.outputs[result], self.outputs[result]
            assert isinstance(atom, int), "what a step replaces by a literal is not kept in the host's memory"
            assert place is not None, "a value lies somewhere"
            target: Place = (place[0], HOST)
            self.outputs[result] = target
            if atom in self.layout and (atom, place) == self.on_device(atom):
                continue  # handed through: it has never left
            maker = made_by.get((atom, place))
            module = module_of(maker) if maker is not None else ""
            self.goes[atom, place] = HostCopy(value=atom, source=place, target=target, module=module, section=section)
        readers: list[Instruction] = [*self.lowered.instructions, *self.goes.values()]
        for instruction in readers:
            for value, place in instruction.keys_read:
                if value in self.layout and (value, place) == self.on_device(value):
                    self.read_first.setdefault(value, instruction)

    def groups(self) -> list[_Group]:
        """All state that comes, in the order in which it does."""
        joined = DisjointSet(range(len(self.number)))
        seen: set[int] = set()
        meets: dict[Key, int] = {self.on_device(v): 1 << i for v, i in self.number.items()}
        self.needs.update(meets)
        last_gradient: dict[Key, int] = {}
        for position, instruction in enumerate(self.lowered.instructions):
            reads, makes = instruction.keys_read, instruction.keys_made
            needs = _union(self.needs.get(key, 0) for key in reads)
            together = _union(meets.get(key, 0) for key in reads if self.graph.values[key[0]].size > 1)
            updates = role_of(instruction) is Role.UPDATE
            gradient = max((last_gradient.get(key, -1) for key in reads), default=-1) if updates else position
            if together not in seen:
                seen.add(together)
                numbers = _members(together)
                for number in numbers[1:]:
                    joined.merge(numbers[0], number)
            for key in makes:
                self.needs[key], meets[key], last_gradient[key] = needs, together, gradient
        found: dict[int, _Group] = {}
        for value in self.read_first:
            found.setdefault(joined[self.number[value]], _Group(comes=[])).comes.append(value)
        for key in self.goes:
            group = found.get(joined[_members(meets[key])[0]]) if meets.get(key) else None
            if group is not None:
                group.goes.append(key)
                group.gradient = max(group.gradient, last_gradient.get(key, -1))
        for group in found.values():
            group.nbytes = sum(self.nbytes(v) for v in group.comes)
        ordered = sorted(found.values(), key=lambda group: group.gradient)  # stable: else in the order of the readers
        _fill_buckets(ordered)
        return ordered

    def nbytes(self, value: int) -> int:
        v = self.graph.values[value]
        return local_bytes(v.shape, v.itemsize, self.layout[value], self.mesh)

    def coming(self, groups: Sequence[_Group]) -> dict[Key, HostCopy]:
        """How each value comes, by its place on the device."""
        from_bucket = [0] * (max((g.bucket for g in groups), default=0) + 2)  # what comes in it and in later ones
        gone: dict[int, list[Key]] = {}
        for group in groups:
            from_bucket[group.bucket] |= _union(1 << self.number[v] for v in group.comes)
            gone.setdefault(group.bucket, []).extend(group.goes)
        for bucket in reversed(range(len(from_bucket) - 1)):
            from_bucket[bucket] |= from_bucket[bucket + 1]
        found: dict[Key, HostCopy] = {}
        for group in groups:
            earlier = [
                (key[0], self.goes[key].target)
                for key in gone.get(group.bucket - AHEAD, ())
                if not self.needs.get(key, 0) & from_bucket[group.bucket]  # else each would wait for the other
            ]
            for value in group.comes:
                reader = self.read_first[value]
                found[self.on_device(value)] = HostCopy(
                    value=value,
                    source=self.in_host(value)[1],
                    target=self.on_device(value)[1],
                    module=module_of(reader),
                    section=section_of(reader),
                    behind=(*self.gradient_of(group, section_of(reader)), *earlier),
                )
        return found

    def gradient_of(self, group: _Group, section: Section) -> tuple[Key, ...]:
        if group.gradient < 0:
            return ()
        maker = self.lowered.instructions[group.gradient]
        key = next(iter(maker.keys_made), None)
        if key is None or self.needs.get(key) or _ORDER[section_of(maker)] > _ORDER[section]:
            return ()
        return (key,)


def _fill_buckets(groups: Sequence[_Group]) -> None:
    total, bucket, filled = sum(group.nbytes for group in groups), 0, 0
    for group in groups:
        if filled * BUCKETS >= total > 0:
            bucket, filled = bucket + 1, 0
        group.bucket = bucket
        filled += group.nbytes


class _Queue:
    """Instructions in their order, but for those that wait for something that comes later."""

    def __init__(
        self, instructions: Sequence[Instruction], comes: dict[Key, HostCopy], goes: dict[Key, HostCopy]
    ) -> None:
        self.instructions, self.comes, self.goes = instructions, dict(comes), dict(goes)
        made = {key for i in instructions for key in i.keys_made} | {(t.value, t.target) for t in goes.values()}
        # What somebody waits for that is not there yet.
        self.awaited = {key for copy in comes.values() for key in copy.behind if key in made}
        self.waiting: dict[Key, list[int]] = {}
        self.held: dict[int, tuple[Instruction, set[Key]]] = {}
        self.out: list[Instruction] = []

    def run(self) -> tuple[Instruction, ...]:
        for instruction in self.instructions:
            self.offer(instruction)
        for copy in list(self.goes.values()):  # of what nothing made: an argument that replaces another one
            self.offer(copy)
        assert not self.held, "state waits for itself"
        return tuple(self.out)

    def offer(self, instruction: Instruction) -> None:
        for key in instruction.keys_read:
            if key in self.comes:
                self.offer(self.comes.pop(key))
        behind = instruction.behind if isinstance(instruction, HostCopy) else ()
        missing = {key for key in (*instruction.keys_read, *behind) if key in self.awaited}
        missing.difference_update(instruction.keys_made)  # a sum over micro-batches is read by what adds to it
        if not missing:
            self.put(instruction)
            return
        number = len(self.out) + len(self.held)
        while number in self.held:
            number += 1
        self.held[number] = instruction, missing
        self.awaited.update(instruction.keys_made)
        for key in missing:
            self.waiting.setdefault(key, []).append(number)

    def put(self, instruction: Instruction) -> None:
        """Appends an instruction, then all that waited for what it makes."""
        ready = collections.deque([instruction])
        while ready:
            first = ready.popleft()
            self.out.append(first)
            for key in first.keys_made:
                self.awaited.discard(key)
                if key in self.goes:
                    ready.append(self.goes.pop(key))
                for number in self.waiting.pop(key, ()):
                    held, missing = self.held[number]
                    missing.discard(key)
                    if not missing:
                        del self.held[number]
                        ready.append(held)


def _union(sets: Iterable[int]) -> int:
    found = 0
    for bits in sets:
        found |= bits
    return found


def _members(bits: int) -> list[int]:
    """The numbers of the bits that are set, lowest first."""
    out = []
    while bits:
        out.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return out


# Host offloading of activations: what is saved for the backward pass waits for it in the memory of the host.
#
# A saved array goes to the host once the forward pass has made it, and comes back for the backward pass. The arrays
# come in the order in which the backward pass reads them, in parts that are full once they have the bytes of the
# largest array: the device holds as many in a long step as in a short one.
#
# (1) A part comes once the backward pass has got to the part `AHEAD` before it, so that few are on the device at once:
# one that is read, and some on their way. Barriers say so to the compiler. (2) Where the backward pass follows at once,
# which is in one program and on the last stage, the part that it reads first stays on the device: it would have to come
# back as soon as it had gone. What a policy of `jax.checkpoint` offloads goes even then.
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
    begins = [0] * AHEAD + [part[0].first_reader for part in parts]  # of the part before each one by so many
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
    """The arrays in parts."""

    def nbytes(array: _Saved) -> int:
        value = graph.values[array.value]
        return local_bytes(value.shape, value.itemsize, array.layout, mesh)

    largest, filled = max(map(nbytes, arrays), default=0), 0
    parts: list[list[_Saved]] = []
    for array in arrays:
        if not parts or filled >= largest:
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
        return replace(loop, reads=tuple(reads), blocks=(body,), in_host=in_host)

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
