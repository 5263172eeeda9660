"""The parts of a pipelined step, their dataflow, and the totally ordered list of instructions that runs it.

The same list is executed (by every process, each doing what is local to it) and simulated. Nothing here knows jax: a
task is a name for a compiled function, a buffer a name for the array that a task makes.

In the dataflow an instance is a buffer of one micro-batch, (buffer, micro_batch), 0 where the buffer does not repeat; a
node is a run of a task, (task, micro_batch). An accumulator is a buffer that does not repeat and that repeating tasks
take over and make again: its updates are runs between its first state (an argument, or made by a BEFORE task) and its
last.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType

from autopar.common.enums import HashedById


class TaskKind(HashedById):
    """What a task does. FORWARD, BACKWARD and WEIGHT run once a micro-batch, the others once a step."""

    BEFORE = "before"
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    AFTER = "after"

    @property
    def repeats(self) -> bool:
        return self in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """An array that lies on one mesh. `repeats`: there is one for each micro-batch, else one for the step.

    `nbytes` on one device.
    """

    name: str
    mesh: int
    nbytes: int
    repeats: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function compiled for one mesh. `inputs` and `outputs` are numbers of buffers, in the function's order.

    A task that runs once and names a repeating buffer takes, or makes, all of its micro-batches: they stand one after
    the other in place of the buffer. `donated` are positions in `inputs` whose memory the task takes over: those
    buffers end with it. An accumulator is a buffer that does not repeat and that a repeating task both takes (donated)
    and makes: each run makes the next state of the same buffer. `index` orders the tasks of one kind on one stage.
    """

    name: str
    stage: int
    mesh: int
    kind: TaskKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()
    index: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copies a buffer to another mesh, once for each micro-batch where it repeats (source and target alike).

    `nbytes` over the busiest link.
    """

    source: int
    target: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Everything that runs in a step, without an order. `inputs` are the step's arguments, `outputs` its results.

    Arguments are buffers that no task makes; results are never freed. `kept` are arguments that the caller holds on to,
    so that freeing them gives nothing back.
    """

    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Runs a task. Slots hold arrays; `outputs` may be slots that `inputs` name (donated).

    `micro_batch` is 0 for a task that runs once.
    """

    task: int
    micro_batch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """Runs of one mesh, one behind the other, as one program: the compiler orders all that they do.

    `task` numbers it behind the pipeline's tasks, `parts` are its runs: (task, micro-batch). `reads` and `makes` are
    the buffers and their micro-batches in the slots `inputs` and `outputs`; what the runs hand to each other, and
    nobody else reads, has no slot. `donated` are positions in `inputs`.
    """

    task: int
    parts: tuple[tuple[int, int], ...]
    reads: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Copies arrays between two meshes, all in one call: `transfers[i]` from slot `sources[i]` to `targets[i]`.

    `micro_batch` is 0 where the buffers do not repeat.
    """

    transfers: tuple[int, ...]
    micro_batch: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Drops the arrays of slots. Slots may be used again afterwards."""

    slots: tuple[int, ...]


Instruction = Run | Joined | Send | Free


def work_of(joined: Joined, pipeline: Pipeline) -> Hashable:
    """Equal for chains that do the same in other micro-batches, which are numbered in the order of the runs."""
    order: dict[int, int] = {}
    for number, micro_batch in joined.parts:
        if pipeline.tasks[number].kind.repeats:
            order.setdefault(micro_batch, len(order))

    def numbered(instances: Sequence[tuple[int, int]]) -> Hashable:
        return tuple((b, order.get(i, -1 - i) if pipeline.buffers[b].repeats else 0) for b, i in instances)

    tasks = tuple(number for number, _ in joined.parts)
    return tasks, numbered(joined.reads), numbered(joined.makes), joined.donated


def runs_of(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """The runs of an instruction: (task, micro-batch)."""
    if isinstance(instruction, Run):
        return ((instruction.task, instruction.micro_batch),)
    return instruction.parts if isinstance(instruction, Joined) else ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The list. `input_slots` and `output_slots` go with the pipeline's inputs and outputs.

    A slot holds arrays of one mesh only, from the first instruction to the last.
    """

    pipeline: Pipeline
    num_microbatches: int
    instructions: tuple[Instruction, ...]
    num_slots: int
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]

    @property
    def joined(self) -> tuple[Joined, ...]:
        """Those of the list, by number."""
        return tuple(i for i in self.instructions if isinstance(i, Joined))


Instance = tuple[int, int]
Node = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """A pipeline seen from its buffers.

    Attributes:
        maker: The task that makes a buffer (an accumulator: its first state); arguments and copies have none.
        copy_of: The transfer that makes a buffer.
        copies: The transfers that copy a buffer.
        readers: Tasks that take a buffer, updates of accumulators left out.
        updaters: Tasks that update an accumulator.
        donor: The task that takes over a buffer's memory, updates of accumulators left out.
    """

    pipeline: Pipeline
    num_microbatches: int
    maker: Mapping[int, int]
    copy_of: Mapping[int, int]
    copies: Mapping[int, tuple[int, ...]]
    readers: Mapping[int, tuple[int, ...]]
    updaters: Mapping[int, tuple[int, ...]]
    donor: Mapping[int, int]

    def instances(self, buffer: int, task: Task, micro_batch: int) -> Iterator[Instance]:
        """What a run of a task means by a buffer: one instance, or all of them."""
        if not self.pipeline.buffers[buffer].repeats:
            yield buffer, 0
        elif task.kind.repeats:
            yield buffer, micro_batch
        else:
            for i in range(self.num_microbatches):
                yield buffer, i

    def runs(self, task: int) -> Iterator[Node]:
        """All runs of a task."""
        for i in range(self.num_microbatches if self.pipeline.tasks[task].kind.repeats else 1):
            yield task, i

    def source_of(self, buffer: int) -> tuple[int, tuple[int, ...]]:
        """The buffer that a chain of copies begins with, and the transfers from there to this buffer."""
        chain: list[int] = []
        while buffer in self.copy_of:
            chain.append(self.copy_of[buffer])
            buffer = self.pipeline.transfers[chain[-1]].source
        return buffer, tuple(reversed(chain))


def dataflow(pipeline: Pipeline, num_microbatches: int) -> Dataflow:
    """Reads a pipeline's buffers off its tasks and transfers, and checks that each is made once and where it lies.

    A pipeline that is not well formed is the compiler's bug: AssertionError.
    """
    buffers, tasks = pipeline.buffers, pipeline.tasks
    maker: dict[int, int] = {}
    copy_of: dict[int, int] = {}
    copies: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    updaters: dict[int, list[int]] = {}
    donor: dict[int, int] = {}
    for number, task in enumerate(tasks):
        donated = {task.inputs[i] for i in task.donated}
        for b in (*task.inputs, *task.outputs):
            assert buffers[b].mesh == task.mesh, f"task {task.name} on mesh {task.mesh} uses {_text(pipeline, b)}"
        updated = {b for b in donated if b in task.outputs and not buffers[b].repeats and task.kind.repeats}
        for b in dict.fromkeys(task.inputs):
            if b in updated:
                updaters.setdefault(b, []).append(number)
                continue
            readers.setdefault(b, []).append(number)
            if b in donated:
                assert b not in donor, f"both {tasks[donor[b]].name} and {task.name} take over {_text(pipeline, b)}"
                assert buffers[b].repeats or not task.kind.repeats, f"{task.name} takes {_text(pipeline, b)} over twice"
                donor[b] = number
        for b in task.outputs:
            if b not in updated:
                assert b not in maker, f"both {tasks[maker[b]].name} and {task.name} make {_text(pipeline, b)}"
                assert buffers[b].repeats or not task.kind.repeats, f"{task.name} makes {_text(pipeline, b)} again"
                maker[b] = number
    for number, transfer in enumerate(pipeline.transfers):
        source, target = buffers[transfer.source], buffers[transfer.target]
        assert source.repeats == target.repeats, f"{_transfer_text(pipeline, transfer)}: only one side repeats"
        assert source.mesh != target.mesh, f"{_transfer_text(pipeline, transfer)} stays on mesh {source.mesh}"
        assert transfer.target not in copy_of, f"two transfers make {_text(pipeline, transfer.target)}"
        copy_of[transfer.target] = number
        copies.setdefault(transfer.source, []).append(number)
    for b in range(len(buffers)):
        made = (b in maker) + (b in copy_of) + (b in pipeline.inputs)
        used = b in readers or b in updaters or b in copies or b in pipeline.outputs
        assert made == 1 or (not made and not used), f"{made} tasks, transfers or arguments make {_text(pipeline, b)}"
    for b in (*pipeline.inputs, *pipeline.outputs):
        assert not buffers[b].repeats, f"{_text(pipeline, b)} repeats and is an argument or a result"
    for b in pipeline.outputs:
        assert b not in donor, f"{tasks[donor[b]].name} takes over the result {_text(pipeline, b)}"
    for b in updaters:
        early = [tasks[t].name for t in readers.get(b, ()) if tasks[t].kind is not TaskKind.AFTER]
        assert not early, f"{early} read {_text(pipeline, b)} before all micro-batches are in it"
    return Dataflow(
        pipeline=pipeline,
        num_microbatches=num_microbatches,
        maker=MappingProxyType(maker),
        copy_of=MappingProxyType(copy_of),
        copies=_frozen(copies),
        readers=_frozen(readers),
        updaters=_frozen(updaters),
        donor=MappingProxyType(donor),
    )


def _frozen(lists: Mapping[int, Sequence[int]]) -> Mapping[int, tuple[int, ...]]:
    return MappingProxyType({key: tuple(value) for key, value in lists.items()})


def _text(pipeline: Pipeline, buffer: int) -> str:
    return f"buffer {buffer} ({pipeline.buffers[buffer].name}, mesh {pipeline.buffers[buffer].mesh})"


def _transfer_text(pipeline: Pipeline, transfer: Transfer) -> str:
    return f"transfer from {_text(pipeline, transfer.source)} to {_text(pipeline, transfer.target)}"


def release_kinds(program: Program) -> dict[int, TaskKind]:
    """For each stage that keeps something from its forward pass: the task after which it needs it no more."""
    kinds: dict[int, set[TaskKind]] = collections.defaultdict(set)
    for task in program.pipeline.tasks:
        kinds[task.stage].add(task.kind)
    order = (TaskKind.WEIGHT, TaskKind.BACKWARD)
    return {
        stage: next(kind for kind in order if kind in there)
        for stage, there in kinds.items()
        if TaskKind.FORWARD in there and not there.isdisjoint(order)
    }


def program_peak_in_flight(program: Program) -> tuple[int, ...]:
    """For each mesh the most pairs (stage, micro-batch) between forward pass and release, see
    `PipelineSchedule.in_flight`.
    """
    held: collections.Counter[int] = collections.Counter()
    peaks: collections.Counter[int] = collections.Counter()
    for _, mesh, change in in_flight_changes(program):
        held[mesh] += change
        peaks[mesh] = max(peaks[mesh], held[mesh])
    return tuple(peaks[mesh] for mesh in range(num_meshes(program)))


def in_flight_changes(program: Program) -> list[tuple[int, int, int]]:
    """What changes what is in flight, in order: (number of the instruction, mesh, +1 or -1). A stage may have several
    tasks of a kind: the first run of FORWARD takes, the last of the releasing kind gives back.
    """
    tasks = program.pipeline.tasks
    release = release_kinds(program)
    begun: dict[tuple[int, int], int] = {}
    ended: dict[tuple[int, int], int] = {}
    for at, step in enumerate(program.instructions):
        for number, micro_batch in runs_of(step):
            task = tasks[number]
            if task.stage not in release:
                continue
            if task.kind is TaskKind.FORWARD:
                begun.setdefault((task.stage, micro_batch), at)
            elif task.kind is release[task.stage]:
                ended[task.stage, micro_batch] = at
    mesh_of = {task.stage: task.mesh for task in tasks}
    changes = [
        (at, -change, mesh_of[stage]) for of, change in ((begun, 1), (ended, -1)) for (stage, _), at in of.items()
    ]
    return [(at, mesh, -change) for at, change, mesh in sorted(changes)]


def num_meshes(program: Program) -> int:
    pipeline = program.pipeline
    return 1 + max((*(b.mesh for b in pipeline.buffers), *(t.mesh for t in pipeline.tasks)), default=-1)
