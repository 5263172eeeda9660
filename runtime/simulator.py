"""Simulation of a program on a virtual clock, from the instructions that are executed.

A mesh runs its tasks one at a time in the order of the list, each as soon as its inputs are there. A Send holds up
neither mesh; each ordered pair of meshes is a link that carries one Send at a time. Memory is taken when a run or a
Send begins and comes back when the last one that uses it has ended, if the list has freed it; memory that a task takes
over comes back when the task begins, as its outputs are made there.

Buffers that are produced, read, sent and freed alike are merged before: the hundred arrays that a forward task keeps
for its backward task are one buffer of their total size. The order of runs and Sends, their times and the memory are
those of the pipeline itself.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Hashable, Iterable, Sequence

from autopar.common.trace_events import DEVICES, LINKS, Timeline, TraceEvent
from autopar.runtime.program import (
    Buffer,
    Free,
    Joined,
    Pipeline,
    Program,
    Run,
    Send,
    Task,
    Transfer,
    in_flight_changes,
    num_meshes,
    runs_of,
)


def merged(pipeline: Pipeline, transfer_s: Sequence[float]) -> tuple[Pipeline, tuple[float, ...]]:
    """(the smaller pipeline, seconds of each of its transfers). Tasks keep their numbers."""
    groups = groups_of(pipeline)
    buffers: list[Buffer | None] = [None] * (max(groups, default=-1) + 1)
    for b, g in zip(pipeline.buffers, groups, strict=True):
        before = buffers[g]
        nbytes = b.nbytes + (before.nbytes if before is not None else 0)
        name = before.name if before is not None else b.name
        buffers[g] = Buffer(name=name, mesh=b.mesh, nbytes=nbytes, repeats=b.repeats)
    tasks = []
    for task in pipeline.tasks:
        inputs = tuple(dict.fromkeys(groups[b] for b in task.inputs))
        donated = {groups[task.inputs[i]] for i in task.donated}
        tasks.append(
            Task(
                name=task.name,
                stage=task.stage,
                mesh=task.mesh,
                kind=task.kind,
                inputs=inputs,
                outputs=tuple(dict.fromkeys(groups[b] for b in task.outputs)),
                donated=tuple(i for i, g in enumerate(inputs) if g in donated),
                index=task.index,
            )
        )
    sent: dict[tuple[int, int], list[float]] = {}
    for transfer, seconds in zip(pipeline.transfers, transfer_s, strict=True):
        total = sent.setdefault((groups[transfer.source], groups[transfer.target]), [0.0, 0.0])
        total[0] += transfer.nbytes
        total[1] += seconds
    smaller = Pipeline(
        buffers=tuple(b for b in buffers if b is not None),
        tasks=tuple(tasks),
        transfers=tuple(Transfer(source=a, target=b, nbytes=int(n)) for (a, b), (n, _) in sent.items()),
        inputs=tuple(dict.fromkeys(groups[b] for b in pipeline.inputs)),
        outputs=tuple(dict.fromkeys(groups[b] for b in pipeline.outputs)),
        kept=tuple(dict.fromkeys(groups[b] for b in pipeline.kept)),
    )
    return smaller, tuple(seconds for _, seconds in sent.values())


def groups_of(pipeline: Pipeline) -> tuple[int, ...]:
    """For each buffer the one that it is part of in the smaller pipeline.

    Buffers are one that are made, read and donated by the same tasks, copied from one and copied to the same: parts of
    what one task hands to two meshes are not one with parts that it hands to one of these alone.
    """
    targets: list[list[int]] = [[] for _ in pipeline.buffers]
    source: list[int | None] = [None] * len(pipeline.buffers)
    for transfer in pipeline.transfers:
        targets[transfer.source].append(transfer.target)
        source[transfer.target] = transfer.source
    groups = _numbered(_uses(pipeline))
    while True:
        finer = _numbered(
            (
                group,
                groups[copied] if (copied := source[b]) is not None else None,
                tuple(sorted({groups[target] for target in targets[b]})),
            )
            for b, group in enumerate(groups)
        )
        if finer == groups:
            return groups
        groups = finer


def _numbered(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """Equal keys by the same number, in the order of their first appearance."""
    number: dict[Hashable, int] = {}
    return tuple(number.setdefault(key, len(number)) for key in keys)


def _uses(pipeline: Pipeline) -> list[Hashable]:
    """For each buffer where it lies and what tasks do with it."""
    makers: list[list[int]] = [[] for _ in pipeline.buffers]
    readers: list[list[int]] = [[] for _ in pipeline.buffers]
    donors: list[list[int]] = [[] for _ in pipeline.buffers]
    for number, task in enumerate(pipeline.tasks):
        for b in task.outputs:
            makers[b].append(number)
        for b in task.inputs:
            readers[b].append(number)
        for i in task.donated:
            donors[task.inputs[i]].append(number)
    outside = [set(pipeline.inputs), set(pipeline.outputs), set(pipeline.kept)]
    return [
        (b.mesh, b.repeats, tuple(makers[i]), tuple(readers[i]), tuple(donors[i]), *(i in those for those in outside))
        for i, b in enumerate(pipeline.buffers)
    ]


Steps = tuple[tuple[float, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """When everything happened, and what was held.

    Attributes:
        starts_s, ends_s: Of each instruction of the program; of a Free the moment at which the last memory is back.
        step_time_s: Until the last run and the last Send have ended.
        busy_s: For each mesh the time in which it ran tasks.
        peak_bytes: For each mesh on one of its devices: arguments, buffers and what tasks need while they run.
        at_peak: For each mesh (buffer, bytes) of what is there when `peak_bytes` are first reached; -1 - task stands
            for what that task needs beside its buffers.
        peak_in_flight: For each mesh pairs (stage, micro-batch), see `PipelineSchedule.in_flight`.
        bytes_over_time, in_flight_over_time: For each mesh (seconds, from then on).
    """

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    step_time_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    at_peak: tuple[tuple[tuple[int, int], ...], ...]
    peak_in_flight: tuple[int, ...]
    bytes_over_time: tuple[Steps, ...]
    in_flight_over_time: tuple[Steps, ...]

    @property
    def bubble_fraction(self) -> float:
        """Part of the step in which a mesh idles, mean over the meshes."""
        if not self.step_time_s:
            return 0.0
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_time_s)


def simulate(
    program: Program,
    task_s: Sequence[float],
    transfer_s: Sequence[float],
    task_bytes: Sequence[int] | None = None,
) -> Simulation:
    """When each instruction of a correct program runs, and the memory it takes.

    Args:
        task_s: Seconds of one run of each task of the pipeline, then of each `Joined` of the program.
        transfer_s: Seconds of each of its transfers, for one micro-batch; those of one Send follow each other.
        task_bytes: Bytes on one device that a run needs beside its inputs and outputs; 0 if left out.
    """
    pipeline = program.pipeline
    num_tasks = len(pipeline.tasks) + len(program.joined)
    assert len(task_s) == num_tasks, f"{len(task_s)} times for {num_tasks} tasks"
    assert len(transfer_s) == len(pipeline.transfers), (
        f"{len(transfer_s)} times for {len(pipeline.transfers)} transfers"
    )
    clock = _Clock(program, task_s, transfer_s, task_bytes or [0] * num_tasks)
    for at, step in enumerate(program.instructions):
        if isinstance(step, Run):
            clock.run(at, step)
        elif isinstance(step, Joined):
            clock.joined(at, step)
        elif isinstance(step, Send):
            clock.send(at, step)
        else:
            clock.free(at, step)
    return clock.simulation()


@dataclasses.dataclass(slots=True)
class _Array:
    """What a slot holds: there from `ready_s`, in use until `used_s`."""

    buffer: int
    nbytes: int
    mesh: int
    ready_s: float
    used_s: float
    kept: bool = False


class _Clock:
    """The state of the machine while the list is walked."""

    def __init__(
        self,
        program: Program,
        task_s: Sequence[float],
        transfer_s: Sequence[float],
        task_bytes: Sequence[int],
    ) -> None:
        self.program, self.task_s, self.transfer_s, self.task_bytes = program, task_s, transfer_s, task_bytes
        self.tasks, self.buffers = program.pipeline.tasks, program.pipeline.buffers
        self.num_meshes = num_meshes(program)
        self.mesh_s = [0.0] * self.num_meshes
        self.link_s: dict[tuple[int, int], float] = collections.defaultdict(float)
        self.starts_s = [0.0] * len(program.instructions)
        self.ends_s = [0.0] * len(program.instructions)
        # (when, 0: memory comes back, 1: it is taken, bytes, buffer or -1 - task)
        self.memory: list[list[tuple[float, int, int, int]]] = [[] for _ in range(self.num_meshes)]
        self.held: dict[int, _Array] = {}
        for b, slot in zip(program.pipeline.inputs, program.input_slots, strict=True):
            self.take(slot, b, 0.0, 0.0, kept=b in program.pipeline.kept)

    def take(self, slot: int, buffer: int, start_s: float, end_s: float, kept: bool = False) -> None:
        nbytes, mesh = self.buffers[buffer].nbytes, self.buffers[buffer].mesh
        self.held[slot] = _Array(buffer, nbytes, mesh, end_s, end_s, kept)
        self.memory[mesh].append((start_s, 1, nbytes, buffer))

    def give_back(self, slot: int, when_s: float) -> float:
        array = self.held.pop(slot)
        if not array.kept:
            self.memory[array.mesh].append((when_s, 0, array.nbytes, array.buffer))
        return when_s

    def run(self, at: int, step: Run) -> None:
        task = self.tasks[step.task]
        reads = dict.fromkeys(zip(self.expanded(task.inputs, step), step.inputs, strict=True))
        makes = zip(self.expanded(task.outputs, step), step.outputs, strict=True)
        self.occupy(at, step.task, task.mesh, reads, {task.inputs[i] for i in task.donated}, makes)

    def joined(self, at: int, step: Joined) -> None:
        reads = [(b, slot) for (b, _), slot in zip(step.reads, step.inputs, strict=True)]
        makes = [(b, slot) for (b, _), slot in zip(step.makes, step.outputs, strict=True)]
        donated = {step.reads[position][0] for position in step.donated}
        self.occupy(at, step.task, self.tasks[step.parts[0][0]].mesh, reads, donated, makes)

    def occupy(
        self,
        at: int,
        number: int,
        mesh: int,
        reads: Collection[tuple[int, int]],
        donated: Collection[int],
        makes: Iterable[tuple[int, int]],
    ) -> None:
        """A mesh runs a program, between (buffer, slot) that it reads and makes."""
        start = max([self.mesh_s[mesh], *(self.held[slot].ready_s for _, slot in reads)])
        end = start + self.task_s[number]
        self.starts_s[at], self.ends_s[at] = start, end
        self.mesh_s[mesh] = end
        for b, slot in reads:
            if b in donated:
                # A copy of it that is still under way holds it; the task then works on memory of its own.
                self.give_back(slot, max(start, self.held[slot].used_s))
            else:
                self.held[slot].used_s = max(self.held[slot].used_s, end)
        for b, slot in makes:
            self.take(slot, b, start, end)
        extra_bytes, holder = self.task_bytes[number], -1 - number
        self.memory[mesh] += [(start, 1, extra_bytes, holder), (end, 0, extra_bytes, holder)]

    def expanded(self, buffers: Sequence[int], step: Run) -> list[int]:
        """The buffer of each slot of a run."""
        repeats = self.tasks[step.task].kind.repeats
        times = [1 if repeats or not self.buffers[b].repeats else self.program.num_microbatches for b in buffers]
        return [b for b, n in zip(buffers, times, strict=True) for _ in range(n)]

    def send(self, at: int, step: Send) -> None:
        transfers = [self.program.pipeline.transfers[t] for t in step.transfers]
        link = (self.buffers[transfers[0].source].mesh, self.buffers[transfers[0].target].mesh)
        start = max([self.link_s[link], *(self.held[slot].ready_s for slot in step.sources)])
        end = start + sum(self.transfer_s[t] for t in step.transfers)
        self.starts_s[at], self.ends_s[at] = start, end
        self.link_s[link] = end
        for slot in step.sources:
            self.held[slot].used_s = max(self.held[slot].used_s, end)
        for transfer, slot in zip(transfers, step.targets, strict=True):
            self.take(slot, transfer.target, start, end)

    def free(self, at: int, step: Free) -> None:
        self.starts_s[at] = self.ends_s[at] = max(self.give_back(slot, self.held[slot].used_s) for slot in step.slots)

    def simulation(self) -> Simulation:
        program, meshes = self.program, range(self.num_meshes)
        busy, step_time_s = [0.0] * len(meshes), 0.0
        for at, step in enumerate(program.instructions):
            if isinstance(step, Free):
                continue
            step_time_s = max(step_time_s, self.ends_s[at])
            if isinstance(step, Run | Joined):
                ((number, _), *_) = runs_of(step)
                busy[self.tasks[number].mesh] += self.task_s[step.task]
        # At one moment, what comes back is there to be taken.
        memory = [
            _running((when, n if took else -n, took) for when, took, n, _ in self.memory[mesh]) for mesh in meshes
        ]
        in_flight = self.in_flight()
        return Simulation(
            starts_s=tuple(self.starts_s),
            ends_s=tuple(self.ends_s),
            step_time_s=step_time_s,
            busy_s=tuple(busy),
            peak_bytes=tuple(max((n for _, n in steps), default=0) for steps in memory),
            at_peak=tuple(self.held_at_peak(mesh, steps) for mesh, steps in enumerate(memory)),
            peak_in_flight=tuple(max((n for _, n in steps), default=0) for steps in in_flight),
            bytes_over_time=tuple(memory),
            in_flight_over_time=tuple(in_flight),
        )

    def held_at_peak(self, mesh: int, steps: Steps) -> tuple[tuple[int, int], ...]:
        peak_s = max(steps, key=lambda step: step[1], default=(0.0, 0))[0]
        bytes_of: dict[int, int] = collections.defaultdict(int)
        for when, took, nbytes, holder in self.memory[mesh]:
            if when <= peak_s:
                bytes_of[holder] += nbytes if took else -nbytes
        return tuple((holder, nbytes) for holder, nbytes in bytes_of.items() if nbytes)

    def in_flight(self) -> list[Steps]:
        changes: list[list[tuple[float, int, int]]] = [[] for _ in range(self.num_meshes)]
        for at, mesh, change in in_flight_changes(self.program):
            when = self.starts_s[at] if change > 0 else self.ends_s[at]
            changes[mesh].append((when, change, change > 0))
        return [_running(changes_of_mesh) for changes_of_mesh in changes]


def _running(changes: Iterable[tuple[float, int, int]]) -> Steps:
    """Sums of (when, change, rank within the same moment); of one moment the last sum only."""
    steps: list[tuple[float, int]] = []
    total = 0
    for when, change, _ in sorted(changes, key=lambda c: (c[0], c[2])):
        total += change
        if steps and steps[-1][0] == when:
            steps[-1] = (when, total)
        else:
            steps.append((when, total))
    return tuple(steps)


# The timeline of a simulated program.


def timeline_of(simulation: Simulation, program: Program) -> Timeline:
    """What each mesh and each link does and when: "F 3" is the forward pass of micro-batch 3."""
    pipeline = program.pipeline
    links: dict[tuple[int, int], int] = {}
    events: list[TraceEvent] = []
    for instruction, start_s, end_s in zip(program.instructions, simulation.starts_s, simulation.ends_s, strict=True):
        if isinstance(instruction, Run | Joined):
            runs = [(pipeline.tasks[number], i) for number, i in runs_of(instruction)]
            name = " + ".join(f"{task.kind.value} {i}" if task.kind.repeats else task.name for task, i in runs)
            task = next((task for task, _ in runs if task.kind.repeats), runs[0][0])
            events.append(TraceEvent(DEVICES, task.mesh, name, task.kind.value, start_s, end_s, task.stage))
        elif isinstance(instruction, Send):
            transfers = [pipeline.transfers[t] for t in instruction.transfers]
            source, target = (pipeline.buffers[b] for b in (transfers[0].source, transfers[0].target))
            row = links.setdefault((source.mesh, target.mesh), len(links))
            name = f"send {instruction.micro_batch}" if source.repeats else "send"
            sent = sum(t.nbytes for t in transfers)
            events.append(TraceEvent(LINKS, row, name, "send", start_s, end_s, 0, sent))
    return Timeline(
        rows=tuple(f"mesh {mesh}" for mesh in range(len(simulation.busy_s))),
        links=tuple(f"mesh {a} to mesh {b}" for a, b in links),
        events=tuple(events),
        tracks={"bytes": simulation.bytes_over_time, "in flight": simulation.in_flight_over_time},
    )
