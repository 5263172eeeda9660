"""Host offloading of state: when each part comes to the device for the update, and when it returns.

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, arXiv 2101.06840. There
the processors of the host compute the update too; here state is only kept in its memory, and the devices compute.

What belongs together, the moments of one parameter, is found by what the update computes: arrays that meet in an
operation (numbers, such as a norm over everything, join nothing). These groups come in the order in which their
gradients are there, and as `BUCKETS` parts of about equal bytes:

(1) A group's state comes once the last gradient that it is updated with is there, so that it takes no memory during the
    backward pass.
(2) A bucket's state comes once that of the bucket `AHEAD` before it has gone back, so that a few buckets are on the
    device at once, and the next one is on its way while one is updated.

Both are said to the compiler by barriers. Operations that read what is not there yet are put behind it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from scipy.cluster.hierarchy import DisjointSet

from autopar.ir.graph import OpGraph, Role, Section
from autopar.ir.layout import local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.ir.value_state import HOST, UNREDUCED
from autopar.lowering.host_reads import module_of, role_of
from autopar.lowering.instructions import HostCopy, Instruction, Key, LoweredBlock, Place, section_of

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
