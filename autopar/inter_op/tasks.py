"""From the lowered graphs of all stages to tasks: instructions cut by section, and the buffers between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from autopar.ir.graph import OpGraph, OpKind, Section, read_by
from autopar.ir.layout import Layout, local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.ir.value_state import HOST, UNREDUCED
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
from autopar.runtime.pipeline.program import Buffer, Pipeline, Task, TaskKind, Transfer

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
    """One stage with its decisions worked out. `mesh_index` is the group of devices that runs it."""

    stage: StageGraph
    lowered: LoweredBlock
    mesh: LogicalMesh
    mesh_index: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """Instructions that run as one program on a stage's mesh, and the places it reads and makes.

    `zeros` are accumulators that it makes from nothing.
    """

    stage: int
    kind: TaskKind
    level: int
    instructions: tuple[Instruction, ...]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    zeros: tuple[Key, ...] = ()

    @property
    def name(self) -> str:
        once = f" {self.level}" if not self.kind.repeats else ""
        return f"{self.kind.value}{once} of stage {self.stage}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedProgram:
    """Everything that runs in a step. `tasks[i]` is what `pipeline.tasks[i]` stands for.

    `key_of` and `stage_of` say of each buffer which value in which place on which stage it holds; `arguments` and
    `results` of each of the pipeline's inputs and outputs which of the step's it is (constants first).
    """

    pipeline: Pipeline
    tasks: tuple[StageTask, ...]
    key_of: tuple[Key, ...]
    stage_of: tuple[int, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]


def stage_tasks(number: int, stage: LoweredStage) -> list[StageTask]:
    """The tasks of one stage, in the order in which a micro-batch goes through them.

    A stage that sends nothing on between its forward and backward sections and is alone runs them as one task.
    """
    groups: dict[tuple[TaskKind, int], list[Instruction]] = {}
    alone = not stage.stage.sends and not stage.stage.received
    for section in Section:
        chosen = [i for i in stage.lowered.instructions if section_of(i) is section]
        kind = TaskKind.FORWARD if alone and section.repeats else _KINDS[section]
        waiting: list[Instruction] = []
        level = 0
        for instruction in chosen:
            if isinstance(instruction, HostCopy):
                # With what brings its value to where it is taken from, on the level on which that is made; a value
                # that comes from the host is there from the first level on which it is read.
                along = [i for i in waiting if isinstance(i, Move) and i.value == instruction.value]
                waiting = [i for i in waiting if i not in along]
                level = _level_of_copy(stage.stage, instruction)
                groups.setdefault((kind, level), []).extend([*along, instruction])
                continue
            waiting.append(instruction)
            if not isinstance(instruction, Move):
                level = 0 if section.repeats else stage.stage.level_of[instruction.op.id]
                groups.setdefault((kind, level), []).extend(waiting)
                waiting = []
        for instruction in waiting:  # of what the step gives out, or what is moved before the loop for all of it
            assert isinstance(instruction, Move), "all others have their level"
            level = _first_level(stage.stage, instruction.value, section)
            groups.setdefault((kind, level), []).append(instruction)
    zeros = tuple(
        i.accumulator for found in groups.values() for i in found if isinstance(i, Accumulate) and i.read is not None
    )
    if zeros and (TaskKind.BEFORE, 0) not in groups:
        groups = {(TaskKind.BEFORE, 0): [], **groups}
    parts: list[tuple[tuple[TaskKind, int], tuple[Instruction, ...], tuple[Key, ...], set[Key]]] = []
    for where, grouped in groups.items():
        made: set[Key] = set(zeros) if where == (TaskKind.BEFORE, 0) else set()
        reads: dict[Key, None] = {}
        for instruction in grouped:
            for key in instruction.keys_read:
                if key not in made:
                    reads[key] = None
            made.update(instruction.keys_made)
        parts.append((where, tuple(grouped), tuple(reads), made))
    wanted = {key for _, _, read, _ in parts for key in read}
    wanted |= {key for _, found, _, _ in parts for i in found if isinstance(i, Leave) for key in i.keys_read}
    block = stage.lowered
    wanted |= {
        (atom, place)
        for atom, place in zip(block.block.outputs, block.outputs, strict=True)
        if isinstance(atom, int) and place is not None
    }
    tasks = []
    for (kind, level), instructions, read, made in parts:
        updated = {i.accumulator for i in instructions if isinstance(i, Accumulate)}
        outputs = [key for key in _in_order(instructions, made) if key in wanted or key in updated]
        first = (kind, level) == (TaskKind.BEFORE, 0)
        if outputs or first:
            tasks.append(
                StageTask(
                    stage=number,
                    kind=kind,
                    level=level,
                    instructions=instructions,
                    inputs=read,
                    outputs=(*(zeros if first else ()), *(k for k in outputs if not (first and k in zeros))),
                    zeros=zeros if first else (),
                )
            )
    return tasks


def _level_of_copy(stage: StageGraph, copy: HostCopy) -> int:
    if copy.section.repeats:
        return 0
    if copy.to_host:
        return _first_level(stage, copy.value, copy.section)
    readers = (op for op in stage.graph.block.ops if copy.value in read_by(op) and op.section is copy.section)
    return min((stage.level_of[op.id] for op in readers), default=0)


def _first_level(stage: StageGraph, value: int, section: Section) -> int:
    """The first level of a section on which a value is there."""
    if value in stage.arrival:
        sent, level = stage.arrival[value]
        return level if sent is section else 0
    made = next((op for op in stage.graph.block.ops if value in op.outputs), None)
    return stage.level_of[made.id] if made is not None and made.section is section else 0


def _in_order(instructions: Iterable[Instruction], made: set[Key]) -> list[Key]:
    found = dict.fromkeys(key for i in instructions for key in i.keys_made)
    return [key for key in found if key in made]


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
        arguments: list[int] = []
        for number, stage in enumerate(self.stages):
            for position, v in zip(stage.stage.arguments, stage.lowered.block.inputs, strict=False):
                inputs.append(self.buffer(number, (v, self.entry(stage, v)), repeating))
                arguments.append(position)
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
            ),
            tasks=tuple(tasks),
            key_of=tuple(self.keys),
            stage_of=tuple(self.stage_of),
            arguments=tuple(arguments),
            results=tuple(results),
        )

    def repeating(self, stage: LoweredStage) -> frozenset[int]:
        """The values of which there is one for each micro-batch."""
        graph = stage.stage.graph
        found = {v for i, v in enumerate(graph.block.inputs) if i in graph.repeating}
        for op in graph.block.ops:
            if op.kind is OpKind.SPLIT or (op.section.repeats and op.kind is not OpKind.ACCUMULATE):
                found.update(op.outputs)
        return frozenset(found)

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
        """What a stage hands to another one on the same devices is one buffer, which both use: those buffers."""
        found = set()
        for source, left, target, arrives in self.crossings():
            if self.stages[source].mesh_index == self.stages[target].mesh_index:
                assert layout_of(left) == layout_of(arrives), "the same devices hold it alike on both sides"
                self.number[target, arrives] = self.buffer(source, left, repeating)
                found.add(self.number[target, arrives])
        return found

    def crossings(self) -> Iterator[tuple[int, Key, int, Key]]:
        """(stage, place there, stage that takes it, place there) of all that is handed from stage to stage."""
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
        found = []
        for source, left, target, arrives in self.crossings():
            if self.stages[source].mesh_index != self.stages[target].mesh_index:
                buffers = self.buffer(source, left, repeating), self.buffer(target, arrives, repeating)
                # The side with fewer devices has the busier links.
                nbytes = max(self.buffers[b].nbytes for b in buffers)
                found.append(Transfer(source=buffers[0], target=buffers[1], nbytes=nbytes))
        return found

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
        """The tasks with buffers for places; `sent` are buffers that another stage reads or gets a copy of."""
        last_reader = {
            self.number[t.stage, key]: i for i, t in enumerate(tasks) for key in t.inputs if not t.kind.repeats
        }
        in_the_loop = {self.number[t.stage, key] for t in tasks if t.kind.repeats for key in t.inputs}
        replaced = [self.replacements(stage, number) for number, stage in enumerate(self.stages)]
        linked = []
        for i, task in enumerate(tasks):
            inputs = [self.number[task.stage, key] for key in task.inputs]
            made = [self.number[task.stage, key] for key in task.outputs]
            donated = []
            for position, b in enumerate(inputs):
                accumulator = b in made
                # What was sent is never donated: its receiver may still be reading it.
                state = replaced[task.stage].get(b) in made and last_reader.get(b) == i and b not in sent
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
                    outputs=tuple(made),
                    donated=tuple(donated),
                    index=task.level,
                )
            )
        return linked

    def replacements(self, stage: LoweredStage, number: int) -> dict[int, int]:
        """Buffer of an argument -> buffer of the result that replaces it."""
        block, found = stage.lowered, {}
        for argument, result in stage.stage.graph.tied:
            atom, place = block.block.outputs[result], block.outputs[result]
            if isinstance(atom, int) and place is not None:
                v = block.block.inputs[argument]
                found[self.number[number, (v, self.entry(stage, v))]] = self.number[number, (atom, place)]
        return found


def groups_of_examples(stages: Sequence[LoweredStage]) -> int:
    """Into how many runs of neighbouring examples a batch is cut before each micro-batch takes its share of each.

    So every device finds its part of every micro-batch in its part of the batch, unless what is computed of
    neighbouring examples together would be cut. All stages must cut alike.
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
    """The shape of the array that holds a value in a place: a partial one has its summands in front."""
    value, (layout, _) = key
    shape = graph.values[value].shape
    return (mesh.size(layout.partial), *shape) if layout.partial else shape


def layout_of(key: Key) -> Layout:
    return key[1][0]
