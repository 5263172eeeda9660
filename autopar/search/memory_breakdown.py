"""The predicted memory of a device by purpose, throughout the step and at its peak, and the largest arrays by name.

All numbers come from the instructions that will run. A holder of memory is a value in one of its places.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from autopar.common.paths import parts_of
from autopar.cost import peak_memory
from autopar.cost.memory_program import task_program
from autopar.ir.graph import HOST, UNREDUCED, OpGraph, OpKind, Role, Section, read_by
from autopar.ir.layout import LogicalMesh, local_bytes
from autopar.ir.resharding import StepKind
from autopar.lowering.instructions import HostCopy, Instruction, Key, LoweredBlock, Move, Pass, section_of
from autopar.plan.schema import MemoryHolder, MemoryKind, MemoryUse
from autopar.runtime.simulator import groups_of
from autopar.search.inter_op.build_stages import joined_memory
from autopar.search.inter_op.staged import StagedStep

LARGEST = 20  # how many holders a plan names
COURSE_PARTS = 120  # of a program, for each of which a plan has the most bytes
_NUMBER = re.compile(r"\d+")
_LOCAL = (StepKind.SLICE, StepKind.MASK)


def saved_for_backward(graph: OpGraph, instructions: Sequence[Instruction]) -> dict[Key, str]:
    """The forward values that the backward pass reads, with the module of the first operation that reads each.

    Arguments, and values made once for all micro-batches, are excluded: they are in memory anyway. Values that another
    stage sends are included. A value that passes a barrier is read behind it: `jax.checkpoint` puts a barrier around a
    layer, outside of its module.
    """
    forward_keys: set[Key] = set()
    module_of: dict[Key, str] = {}
    passed: dict[int, Key] = {}
    received = {v for i, v in enumerate(graph.block.inputs) if i in graph.repeating}
    for instruction in instructions:
        if isinstance(instruction, HostCopy):
            continue  # of what only the update reads
        role = instruction.role if isinstance(instruction, Move) else instruction.op.role
        if role is Role.BACKWARD:
            module = instruction.module if isinstance(instruction, Move) else instruction.op.place
            for key in instruction.keys_read:
                if key in forward_keys or key[0] in received:
                    module_of.setdefault(key, module)
                elif key[0] in passed:
                    module_of[passed.pop(key[0])] = module
            if isinstance(instruction, Pass):
                saved = zip(instruction.op.outputs, instruction.keys_read, strict=True)
                passed.update((out, key) for out, key in saved if key in module_of)
        elif section_of(instruction) is not Section.BEFORE:
            forward_keys.update(key for key in instruction.keys_made if key[1][1] != HOST)
    return module_of


def saved_bytes(graph: OpGraph, lowered: LoweredBlock, mesh: LogicalMesh) -> dict[str, int]:
    """Bytes on one device that wait for the backward pass of each module, for one micro-batch."""
    out: dict[str, int] = collections.defaultdict(int)
    for key, module in saved_for_backward(graph, lowered.instructions).items():
        out[module] += _local(graph, key, mesh)
    return dict(out)


def memory_of_program(
    graph: OpGraph,
    lowered: LoweredBlock,
    program: peak_memory.MemoryProgram,
    estimate: peak_memory.MemoryEstimate,
    stands_for: Mapping[int, Key],
    mesh: LogicalMesh,
) -> MemoryUse:
    """The memory of a step in one program; `stands_for` maps numbers of the program to values in their places."""
    kinds = _Kinds(graph, lowered.instructions)
    names = _Names(graph, mesh)
    arguments = [
        MemoryHolder(name=names.of(stands_for[a]), kind=kinds.of_argument(v), nbytes=program.nbytes[a])
        for a, v in zip(program.arguments, lowered.block.inputs, strict=True)
    ]
    taken_over = set(program.donated.values())
    results = [
        MemoryHolder(
            name=names.of(stands_for[r]) if r in stands_for else "a result that is an argument or a literal",
            kind=MemoryKind.OTHER,
            nbytes=program.nbytes[r],
        )
        for r in dict.fromkeys(program.results)
        if r not in taken_over
    ]
    temporary = _temporaries(program, estimate, stands_for, kinds, names)
    use = _use(arguments, [*arguments, *results, *temporary])
    return dataclasses.replace(use, course=course_in_parts(estimate.course))


def course_in_parts(course: Sequence[tuple[int, int]], parts: int = COURSE_PARTS) -> tuple[int, ...]:
    """The most bytes in each of at most so many equal parts of a program, of (position, bytes from there on).

    The last pair ends the program: what is alive from there on is none of it.
    """
    if len(course) < 2:
        return ()
    first, length = course[0][0], course[-1][0] - course[0][0]
    parts = min(parts, length)
    most = [0] * parts
    for (start, nbytes), (stop, _) in itertools.pairwise(course):
        begin, end = (start - first) * parts // length, -(-(stop - first) * parts // length)
        for part in range(begin, end):
            most[part] = max(most[part], nbytes)
    return tuple(most)


def memory_of_stages(staged: StagedStep, meshes: Sequence[LogicalMesh]) -> tuple[MemoryUse, ...]:
    """The memory of a pipeline, for each group of devices. `meshes`: of each stage, with the names of its axes."""
    buffers, key_of, stage_of = staged.staged.pipeline.buffers, staged.staged.key_of, staged.staged.stage_of
    members: dict[int, list[int]] = {}
    for b, group in enumerate(groups_of(staged.staged.pipeline)):
        members.setdefault(group, []).append(b)
    kinds = [_Kinds(p.stage.graph, p.lowered.lowered.instructions) for p in staged.stages]
    names = [_Names(p.stage.graph, mesh) for p, mesh in zip(staged.stages, meshes, strict=True)]

    def holder(b: int, nbytes: int, held: set[tuple[int, int]]) -> MemoryHolder:
        stage = stage_of[b]
        kind = kinds[stage].of(key_of[b])
        replaced = kinds[stage].replaced.get(key_of[b][0])
        if kind is MemoryKind.NEW_STATE and replaced is not None and (stage, replaced) not in held:
            kind = kinds[stage].of_argument(replaced)  # it has the memory of what it replaces
        times = nbytes // buffers[b].nbytes if buffers[b].nbytes else 1
        return MemoryHolder(name=names[stage].of(key_of[b]), kind=kind, nbytes=nbytes, count=times)

    out = []
    accumulators = {b for task in staged.staged.pipeline.tasks for b in set(task.outputs).intersection(task.inputs)}
    for at, parts in enumerate(staged.simulation.at_peak):
        lasting = {b for b in {*staged.staged.pipeline.inputs, *accumulators} if buffers[b].mesh == at}
        throughout = [holder(b, buffers[b].nbytes, {(stage_of[b], key_of[b][0])}) for b in sorted(lasting)]
        shares = [
            (b, n * buffers[b].nbytes // _total(members[g], buffers)) for g, n in parts if g >= 0 for b in members[g]
        ]
        held = {(stage_of[b], key_of[b][0]) for b, _ in shares}
        at_peak = [holder(b, n, held) for b, n in shares]
        for task in (-1 - holder_number for holder_number, _ in parts if holder_number < 0):
            at_peak += _of_task(staged, task, kinds, names)
        out.append(_use(throughout, at_peak))
    return tuple(out)


def _total(members: Iterable[int], buffers: Sequence) -> int:
    return max(1, sum(buffers[b].nbytes for b in members))


def _of_task(staged: StagedStep, number: int, kinds: Sequence[_Kinds], names: Sequence[_Names]) -> list[MemoryHolder]:
    """The holders of a task beside its inputs and outputs. Numbers beyond the tasks are those of joined tasks. `kinds`
    and `names` are those of each stage.
    """
    tasks = staged.staged.tasks
    if number >= len(tasks):
        programs = joined_memory(staged, staged.joined[number - len(tasks)].parts)
    else:
        task = tasks[number]
        graph, model = staged.stages[task.stage].stage.graph, staged.stages[task.stage].model
        programs = [(task.stage, *task_program(graph, task.instructions, task.inputs, task.outputs, model))]
    found: list[MemoryHolder] = []
    for stage, program, stands_for in programs:
        estimate = peak_memory.estimate(program, staged.stages[stage].model.compiler)
        found += _temporaries(program, estimate, stands_for, kinds[stage], names[stage])
    return found


def _temporaries(
    program: peak_memory.MemoryProgram,
    estimate: peak_memory.MemoryEstimate,
    stands_for: Mapping[int, Key],
    kinds: _Kinds,
    names: _Names,
) -> list[MemoryHolder]:
    """The holders at the peak beside arguments and results, largest first, up to the bytes of all temporaries: the
    others occupy the memory of results that are not made yet.
    """
    ends = {*program.arguments, *(set(program.results) - set(program.donated.values()))}
    remaining_bytes, holders = estimate.temporary_bytes, []
    for number, nbytes in estimate.at_peak:
        if number in ends or not remaining_bytes:
            continue
        nbytes = min(nbytes, remaining_bytes)
        remaining_bytes -= nbytes
        if number in stands_for:
            kind, name = kinds.of(stands_for[number]), names.of(stands_for[number])
        else:
            kind, name = MemoryKind.COLLECTIVE, "on its way from one layout to another"
        holders.append(MemoryHolder(name=name, kind=kind, nbytes=nbytes))
    return holders


def _use(throughout: Sequence[MemoryHolder], at_peak: Sequence[MemoryHolder]) -> MemoryUse:
    merged: dict[tuple[str, MemoryKind], MemoryHolder] = {}
    for h in at_peak:
        total = merged.get((h.name, h.kind), MemoryHolder(name=h.name, kind=h.kind, nbytes=0, count=0))
        merged[h.name, h.kind] = dataclasses.replace(h, nbytes=total.nbytes + h.nbytes, count=total.count + h.count)
    largest = sorted((h for h in merged.values() if h.nbytes), key=lambda h: -h.nbytes)[:LARGEST]
    return MemoryUse(throughout=_by_kind(throughout), at_peak=_by_kind(at_peak), largest=tuple(largest))


def _by_kind(holders: Iterable[MemoryHolder]) -> dict[MemoryKind, int]:
    sums: dict[MemoryKind, int] = collections.Counter()
    for h in holders:
        sums[h.kind] += h.nbytes
    return {kind: sums[kind] for kind in MemoryKind if sums[kind]}


class _Names:
    """Names of values in their places; values of repeated layers have one name."""

    def __init__(self, graph: OpGraph, mesh: LogicalMesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.makers = {v: f"{op.place}/{op.primitive}".lstrip("/") for op in graph.ops() for v in op.outputs}

    def of(self, key: Key) -> str:
        value = self.graph.values[key[0]]
        made = self.makers.get(value.id, "a value from another stage")
        name = "/".join(parts_of(value.name)) if value.name else made  # as the tables of arguments have it
        return f"{_NUMBER.sub('*', name)} {value.dtype}{list(value.shape)} {key[1][0].text(self.mesh)}"


class _Kinds:
    """The purpose of each value of a graph. `replaced[v]` is the argument whose memory a new state v takes."""

    def __init__(self, graph: OpGraph, instructions: Sequence[Instruction]) -> None:
        self.arguments: dict[int, MemoryKind] = {}
        self.values: dict[int, MemoryKind] = {}
        inputs, outputs, ops = graph.block.inputs, graph.block.outputs, graph.block.ops
        trained = {v for op in ops if op.role is not Role.UPDATE for v in read_by(op)}
        state = {*graph.donated, *(i for i, _ in graph.tied)}
        for i, v in enumerate(inputs):
            if i in graph.batch:
                self.arguments[v] = MemoryKind.BATCH
            elif i in state:
                self.arguments[v] = MemoryKind.PARAMETER if v in trained else MemoryKind.OPTIMIZER
            elif i not in graph.repeating:
                self.arguments[v] = MemoryKind.OTHER
        replacing = [(outputs[o], inputs[i]) for i, o in graph.tied]
        self.replaced = {new_state: old_state for new_state, old_state in replacing if isinstance(new_state, int)}
        updating = {v for op in ops if op.role is Role.UPDATE for v in read_by(op)}
        for op in ops:
            if op.kind is OpKind.ACCUMULATE and op.role is Role.BACKWARD:
                self.values |= dict.fromkeys((*read_by(op), *op.outputs), MemoryKind.GRADIENT)
            elif op.role is Role.BACKWARD:
                self.values |= dict.fromkeys(updating.intersection(op.outputs), MemoryKind.GRADIENT)
        self.values |= dict.fromkeys(self.replaced.keys() - self.values.keys(), MemoryKind.NEW_STATE)
        self.saved = saved_for_backward(graph, instructions).keys()
        self.moved = {
            (i.value, i.target)
            for i in instructions
            if isinstance(i, Move) and any(s.kind not in _LOCAL for s in i.steps)
        }

    def of_argument(self, value: int) -> MemoryKind:
        return self.arguments.get(value, MemoryKind.OTHER)

    def of(self, key: Key) -> MemoryKind:
        value, (_, state) = key
        if state == UNREDUCED and value in self.arguments:
            return self.arguments[value]
        if value in self.values:
            return self.values[value]
        if key in self.saved:
            return MemoryKind.SAVED
        return MemoryKind.COLLECTIVE if key in self.moved else MemoryKind.TEMPORARY


def _local(graph: OpGraph, key: Key, mesh: LogicalMesh) -> int:
    value = graph.values[key[0]]
    return local_bytes(value.shape, value.itemsize, key[1][0], mesh)
