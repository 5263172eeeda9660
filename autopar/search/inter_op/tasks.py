"""From the lowered graphs of all stages to tasks: the instructions of each section, and the buffers between tasks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence

from autopar.ir.graph import HOST, UNREDUCED, OpGraph, OpKind, Section, read_by
from autopar.ir.layout import Layout, LogicalMesh, local_bytes
from autopar.ir.rewrite import makers
from autopar.lowering.instructions import (
    Accumulate,
    HostCopy,
    Instruction,
    Key,
    Leave,
    LoweredBlock,
    Move,
    Place,
    Split,
    Stack,
    section_of,
)
from autopar.passes.stage_graph import StageGraph
from autopar.runtime.program import Buffer, Pipeline, Task, TaskKind, Transfer

# The levels of a stage's sections before and after the loop on which its values are made and read.


class Levels:
    """The levels of the values of one stage."""

    def __init__(self, stage: StageGraph) -> None:
        self.stage = stage
        self.made_by = makers(stage.graph.block.ops)

    @functools.cached_property
    def first_read(self) -> dict[tuple[int, Section], int]:
        """The first level of each section on which a value is read."""
        first: dict[tuple[int, Section], int] = {}
        for op in self.stage.graph.block.ops:
            level = self.stage.level_of[op.id]
            for v in read_by(op):
                first[v, op.section] = min(level, first.get((v, op.section), level))
        return first

    def of_copy(self, copy: HostCopy) -> int:
        """The level that makes the value of a copy to the host, or the first one that reads that of a copy from it."""
        if copy.section.repeats:
            return 0
        if copy.to_host:
            return self.first(copy.value, copy.section)
        return self.first_read.get((copy.value, copy.section), 0)

    def first(self, value: int, section: Section) -> int:
        """The first level of a section on which a value exists."""
        if value in self.stage.arrival:
            sent, level = self.stage.arrival[value]
            return level if sent is section else 0
        producer = self.made_by.get(value)
        return self.stage.level_of[producer.id] if producer is not None and producer.section is section else 0


_KINDS = {
    Section.WHOLE: TaskKind.FORWARD,
    Section.BEFORE: TaskKind.BEFORE,
    Section.FORWARD: TaskKind.FORWARD,
    Section.BACKWARD: TaskKind.BACKWARD,
    Section.WEIGHT: TaskKind.WEIGHT,
    Section.AFTER: TaskKind.AFTER,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStage:
    """One stage with its instructions. `mesh_index` is the group of devices that runs it."""

    stage: StageGraph
    lowered: LoweredBlock
    mesh: LogicalMesh
    mesh_index: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """Instructions that run as one program on a stage's mesh, and the places that they read and fill.

    `zeros` are accumulators that the task initialises.
    """

    stage: int
    kind: TaskKind
    level: int
    instructions: tuple[Instruction, ...]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    zeros: tuple[Key, ...] = ()

    @property
    def only_exchanges(self) -> bool:
        """Whether its collectives, once a step, have nothing to hide behind: neither passes nor copies of state."""
        return not self.kind.repeats and not any(isinstance(i, HostCopy) for i in self.instructions)

    @property
    def name(self) -> str:
        once = f" {self.level}" if not self.kind.repeats else ""
        return f"{self.kind.value}{once} of stage {self.stage}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedProgram:
    """All tasks, buffers and transfers of a step. `tasks[i]` has the instructions of `pipeline.tasks[i]`.

    `key_of` and `stage_of`: the value in its place, and the stage, of each buffer. `arguments` and `results`: the
    positions in the step's arguments (constants first) and results of the pipeline's inputs and outputs.
    """

    pipeline: Pipeline
    tasks: tuple[StageTask, ...]
    key_of: tuple[Key, ...]
    stage_of: tuple[int, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]


def stage_tasks(number: int, stage: LoweredStage) -> list[StageTask]:
    """The tasks of one stage, in the order in which a micro-batch passes them."""
    groups = _instruction_groups(stage)
    accumulators = tuple(
        i.accumulator for group in groups.values() for i in group if isinstance(i, Accumulate) and i.read is not None
    )
    if accumulators and _FIRST not in groups:
        groups = {_FIRST: [], **groups}
    candidates = [
        _task(number, group, instructions, accumulators if group == _FIRST else ())
        for group, instructions in groups.items()
    ]
    needed = _needed_keys(stage.lowered, candidates)
    tasks = []
    for task in candidates:
        updated = {i.accumulator for i in task.instructions if isinstance(i, Accumulate)}
        outputs = tuple(key for key in task.outputs if key in needed or key in updated or key in task.zeros)
        if outputs or (task.kind, task.level) == _FIRST:
            tasks.append(dataclasses.replace(task, outputs=outputs))
    return tasks


# The kind and the level of a task.
_Group = tuple[TaskKind, int]
_FIRST: _Group = (TaskKind.BEFORE, 0)  # the task that allocates the accumulators


def _instruction_groups(stage: LoweredStage) -> dict[_Group, list[Instruction]]:
    """The instructions of each task. A stage without transfers runs its forward and backward sections as one task."""
    groups: dict[_Group, list[Instruction]] = {}
    levels = Levels(stage.stage)
    is_alone = not stage.stage.sends and not stage.stage.received
    by_section: dict[Section, list[Instruction]] = {section: [] for section in Section}
    for instruction in stage.lowered.instructions:
        by_section[section_of(instruction)].append(instruction)
    for section, instructions in by_section.items():
        kind = TaskKind.FORWARD if is_alone and section.repeats else _KINDS[section]
        pending: list[Move] = []  # moves, which go with the operation behind them
        for instruction in instructions:
            if isinstance(instruction, HostCopy):
                # A copy takes along the moves of its value. It runs on the level that makes the value; a copy from the
                # host runs on the first level that reads the value.
                moves = [move for move in pending if move.value == instruction.value]
                pending = [move for move in pending if move not in moves]
                level = levels.of_copy(instruction)
                groups.setdefault((kind, level), []).extend([*moves, instruction])
            elif isinstance(instruction, Move):
                pending.append(instruction)
            else:
                level = 0 if section.repeats else stage.stage.level_of[instruction.op.id]
                groups.setdefault((kind, level), []).extend([*pending, instruction])
                pending = []
        for move in pending:  # of the step's results, or before the loop for all micro-batches
            groups.setdefault((kind, levels.first(move.value, section)), []).append(move)
    return groups


def _task(number: int, group: _Group, instructions: Sequence[Instruction], zeros: tuple[Key, ...]) -> StageTask:
    """A task whose outputs are all places that it fills."""
    kind, level = group
    produced: dict[Key, None] = dict.fromkeys(zeros)
    inputs: dict[Key, None] = {}
    for instruction in instructions:
        inputs.update(dict.fromkeys(key for key in instruction.keys_read if key not in produced))
        produced.update(dict.fromkeys(instruction.keys_made))
    return StageTask(
        stage=number,
        kind=kind,
        level=level,
        instructions=tuple(instructions),
        inputs=tuple(inputs),
        outputs=tuple(produced),
        zeros=zeros,
    )


def _needed_keys(lowered: LoweredBlock, tasks: Sequence[StageTask]) -> set[Key]:
    """The places that some task, another stage or the caller reads."""
    needed = {key for task in tasks for key in task.inputs}
    needed |= {key for task in tasks for i in task.instructions if isinstance(i, Leave) for key in i.keys_read}
    return needed | {
        (atom, place)
        for atom, place in zip(lowered.block.outputs, lowered.outputs, strict=True)
        if isinstance(atom, int) and place is not None
    }


def assemble_pipeline(stages: Sequence[LoweredStage]) -> StagedProgram:
    """Tasks of all stages, their buffers, and the transfers between them."""
    return _Linker(stages).run()


class _Linker:
    def __init__(self, stages: Sequence[LoweredStage]) -> None:
        self.stages = stages
        self.buffers: list[Buffer] = []
        self.keys: list[Key] = []
        self.stage_of: list[int] = []
        self.number: dict[tuple[int, Key], int] = {}
        self.made_in_loop: set[tuple[int, Key]] = set()

    def run(self) -> StagedProgram:
        repeating = [self.repeating(s) for s in self.stages]
        tasks = [t for number, stage in enumerate(self.stages) for t in stage_tasks(number, stage)]
        # What a micro-batch copies of a value that all share is its own.
        self.made_in_loop = {
            (t.stage, key) for t in tasks if t.kind.repeats for key in t.outputs if key not in t.inputs
        }
        inputs: list[int] = []
        kept: list[int] = []
        arguments: list[int] = []
        for number, stage in enumerate(self.stages):
            for i, (position, v) in enumerate(zip(stage.stage.arguments, stage.lowered.block.inputs, strict=False)):
                inputs.append(self.buffer(number, (v, self.entry(stage, v)), repeating))
                arguments.append(position)
                if i not in stage.stage.graph.donated:
                    kept.append(inputs[-1])
        shared = self.join_neighbours(repeating)
        for task in tasks:
            for key in (*task.inputs, *task.outputs):
                self.buffer(task.stage, key, repeating)
        transfers = self.transfers(repeating)
        results, outputs = self.results(repeating)
        linked = self.tasks(tasks, {*shared, *(t.source for t in transfers)}, outputs)
        return StagedProgram(
            pipeline=Pipeline(
                buffers=tuple(self.buffers),
                tasks=tuple(linked),
                transfers=tuple(transfers),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                kept=tuple(kept),
            ),
            tasks=tuple(tasks),
            key_of=tuple(self.keys),
            stage_of=tuple(self.stage_of),
            arguments=tuple(arguments),
            results=tuple(results),
        )

    def repeating(self, stage: LoweredStage) -> frozenset[int]:
        """The values that exist once for each micro-batch."""
        graph = stage.stage.graph
        values = {v for i, v in enumerate(graph.block.inputs) if i in graph.repeating}
        for op in graph.block.ops:
            if op.kind is OpKind.SPLIT or (op.section.repeats and op.kind is not OpKind.ACCUMULATE):
                values.update(op.outputs)
        return frozenset(values)

    def entry(self, stage: LoweredStage, value: int) -> Place:
        at = stage.lowered.block.inputs.index(value)
        return stage.lowered.inputs[at], HOST if value in stage.lowered.in_host else UNREDUCED

    def buffer(self, stage: int, key: Key, repeating: Sequence[frozenset[int]]) -> int:
        if (stage, key) not in self.number:
            value, (layout, state) = key
            lowered = self.stages[stage]
            v = lowered.stage.graph.values[value]
            self.number[stage, key] = len(self.buffers)
            self.keys.append(key)
            self.stage_of.append(stage)
            self.buffers.append(
                Buffer(
                    name=f"{v.name or f'{v.dtype}{list(v.shape)} #{value}'} {layout.text(lowered.mesh)} {state}",
                    mesh=lowered.mesh_index,
                    nbytes=0 if state == HOST else local_bytes(v.shape, v.itemsize, layout, lowered.mesh),
                    repeats=value in repeating[stage] or (stage, key) in self.made_in_loop,
                )
            )
        return self.number[stage, key]

    def join_neighbours(self, repeating: Sequence[frozenset[int]]) -> set[int]:
        """The buffers between stages on the same devices, of which both stages use the same one."""
        shared = set()
        for source, leaves, target, arrives in self.crossings():
            if self.stages[source].mesh_index == self.stages[target].mesh_index:
                assert layout_of(leaves) == layout_of(arrives), "the same devices hold it alike on both sides"
                self.number[target, arrives] = self.buffer(source, leaves, repeating)
                shared.add(self.number[target, arrives])
        return shared

    def crossings(self) -> Iterator[tuple[int, Key, int, Key]]:
        """(stage, place on it, target stage, place on that) of every value that is sent from stage to stage."""
        for number, stage in enumerate(self.stages):
            for instruction in stage.lowered.instructions:
                if not isinstance(instruction, Leave):
                    continue
                (value,) = instruction.op.inputs
                assert isinstance(value, int), "values are sent, not literals"
                assert instruction.read is not None, "values are sent, not literals"
                target = stage.stage.sends[instruction.op.id]
                yield number, (value, instruction.read), target, (value, self.entry(self.stages[target], value))

    def transfers(self, repeating: Sequence[frozenset[int]]) -> list[Transfer]:
        transfers = []
        for source, leaves, target, arrives in self.crossings():
            if self.stages[source].mesh_index != self.stages[target].mesh_index:
                buffers = self.buffer(source, leaves, repeating), self.buffer(target, arrives, repeating)
                # The side with fewer devices has the busier links.
                nbytes = max(self.buffers[b].nbytes for b in buffers)
                transfers.append(Transfer(source=buffers[0], target=buffers[1], nbytes=nbytes))
        return transfers

    def results(self, repeating: Sequence[frozenset[int]]) -> tuple[list[int], list[int]]:
        """(positions in the step's results, buffers). Literal results have no buffer."""
        positions, buffers = [], []
        for number, stage in enumerate(self.stages):
            block = stage.lowered
            for position, atom, place in zip(stage.stage.results, block.block.outputs, block.outputs, strict=True):
                if isinstance(atom, int) and place is not None:
                    positions.append(position)
                    buffers.append(self.buffer(number, (atom, place), repeating))
        return positions, buffers

    def tasks(self, tasks: Sequence[StageTask], sent: Collection[int], outputs: Sequence[int]) -> list[Task]:
        """The tasks with buffers in place of places; `sent` are buffers that another stage reads or copies."""
        last_reader = {
            self.number[t.stage, key]: i for i, t in enumerate(tasks) for key in t.inputs if not t.kind.repeats
        }
        in_the_loop = {self.number[t.stage, key] for t in tasks if t.kind.repeats for key in t.inputs}
        replaced = [self.replacements(stage, number) for number, stage in enumerate(self.stages)]
        linked = []
        for i, task in enumerate(tasks):
            inputs = [self.number[task.stage, key] for key in task.inputs]
            outputs_of_task = [self.number[task.stage, key] for key in task.outputs]
            donated = []
            for position, b in enumerate(inputs):
                accumulator = b in outputs_of_task
                # What was sent is never donated: its receiver may still be reading it.
                state = replaced[task.stage].get(b) in outputs_of_task and last_reader.get(b) == i and b not in sent
                # What the micro-batches read is there until the last of them has: a count that goes up before them.
                state = state and (task.kind is TaskKind.AFTER or b not in in_the_loop)
                if accumulator or (state and b not in outputs):
                    donated.append(position)
            linked.append(
                Task(
                    name=task.name,
                    stage=task.stage,
                    mesh=self.stages[task.stage].mesh_index,
                    kind=task.kind,
                    inputs=tuple(inputs),
                    outputs=tuple(outputs_of_task),
                    donated=tuple(donated),
                    index=task.level,
                )
            )
        return linked

    def replacements(self, stage: LoweredStage, number: int) -> dict[int, int]:
        """Buffer of an argument -> buffer of the result that replaces it."""
        block, replacement_of = stage.lowered, {}
        for argument, result in stage.stage.graph.tied:
            atom, place = block.block.outputs[result], block.outputs[result]
            if isinstance(atom, int) and place is not None:
                v = block.block.inputs[argument]
                replacement_of[self.number[number, (v, self.entry(stage, v))]] = self.number[number, (atom, place)]
        return replacement_of


def groups_of_examples(stages: Sequence[LoweredStage]) -> int:
    """The number of runs of neighbouring examples into which the batch is split, of which each micro-batch takes a
    share.

    So each device holds its part of every micro-batch in its part of the batch, unless this would separate neighbouring
    examples that the step computes on together. The number is the same for all stages.
    """
    groups = 1
    for stage in stages:
        for instruction in stage.lowered.instructions:
            if isinstance(instruction, (Split, Stack)):
                axes = instruction.result.dims[instruction.op.dim]
                n = stage.mesh.size(axes)
                groups = math.lcm(groups, n)
    return math.gcd(groups, *(stage.stage.graph.runs_of_examples for stage in stages))


def shape_of(graph: OpGraph, key: Key, mesh: LogicalMesh) -> tuple[int, ...]:
    """The shape of the array that holds a value in a place; a partial array has its summands in front."""
    value, (layout, _) = key
    shape = graph.values[value].shape
    return (mesh.size(layout.partial), *shape) if layout.partial else shape


def layout_of(key: Key) -> Layout:
    return key[1][0]
