"""From tasks and a schedule to the one list of instructions that every process executes.

(1) Runs stand in the order of `total_order.order_of_runs`.
(2) A Send stands directly after what makes its sources, one for each pair of meshes (and micro-batch, where a run
    ends an accumulator too): an accumulator is sent after its
    last update, an argument at the start, or where AFTER tasks alone need it, in front of them.
(3) A Free stands as soon as nothing reads an array any more, at most one after each run. Results stay. Arguments go
    too: whether that gives memory back is up to whoever else holds them.
(4) A slot holds arrays of one mesh only, the lowest free one is taken; an accumulator keeps its slot.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Sequence

from autopar.runtime.pipeline.dataflow import Dataflow, Instance, Node, dataflow
from autopar.runtime.pipeline.program import Free, Instruction, Joined, Pipeline, Program, Run, Send, TaskKind
from autopar.runtime.pipeline.schedule import PipelineSchedule
from autopar.runtime.pipeline.total_order import order_of_runs


def emit(
    pipeline: Pipeline,
    schedule: PipelineSchedule,
    task_s: Sequence[float] | None = None,
    transfer_s: Sequence[float] | None = None,
    joined: Sequence[tuple[Node, ...]] = (),
) -> Program:
    """The program of a pipeline on a schedule. What runs once, and what is sent once, has micro-batch 0.

    A pair (stage, kind) without a task is left out of the schedule.

    Args:
        task_s: Seconds of each task, to merge the lists of the meshes by; all 1 if left out.
        transfer_s: Seconds of each transfer, for one micro-batch; 0 if left out.
        joined: Chains of runs that are one program each, of those of `joining.joinable`.

    Raises:
        ScheduleError: The schedule lacks a task of the pipeline, or makes meshes wait for each other in a circle.
    """
    flow = dataflow(pipeline, schedule.num_microbatches)
    order = order_of_runs(flow, schedule, task_s, transfer_s)
    writer = _Writer(flow, order, joined)
    return writer.program()


class _Writer:
    """Walks the runs once, with the slots of what is there and the number of reads that each array still has."""

    def __init__(self, flow: Dataflow, order: Sequence[Node], joined: Sequence[tuple[Node, ...]]) -> None:
        self.flow = flow
        self.chains = {chain[0]: chain for chain in joined}
        self.in_chains = {node for chain in joined for node in chain[1:]}
        self.num_joined = 0
        self.order = order
        self.tasks = flow.pipeline.tasks
        self.buffers = flow.pipeline.buffers
        self.slots: dict[Instance, int] = {}
        self.free: dict[int, list[int]] = {}
        self.fresh = itertools.count()
        self.num_slots = 0
        self.instructions: list[Instruction] = []
        self.reads = _num_reads(flow)
        self.completed = _completed(flow, order)

    def program(self) -> Program:
        pipeline = self.flow.pipeline
        inputs = tuple(self.take((b, 0)) for b in pipeline.inputs)
        late = {t for b in pipeline.inputs for t in self.flow.copies.get(b, ()) if self.is_late(t)}
        arguments = [(b, 0) for b in pipeline.inputs if b not in self.flow.updaters]
        dead = self.send(arguments, skip=late)
        self.drop([*dead, *((b, 0) for b in pipeline.inputs if not self.reads[b, 0])])
        phase_begun = False
        for node in self.order:
            if node in self.in_chains:
                continue
            if not phase_begun and self.tasks[node[0]].kind is TaskKind.AFTER:
                phase_begun = True
                self.drop(self.send(arguments, only=late))
            if node in self.chains:
                self.join(self.chains[node])
            else:
                self.run(node)
        assert {b for b, _ in self.slots} == set(pipeline.outputs), "something is left beside the results"
        return Program(
            pipeline=pipeline,
            num_microbatches=self.flow.num_microbatches,
            instructions=tuple(self.instructions),
            num_slots=self.num_slots,
            input_slots=inputs,
            output_slots=tuple(self.slots[b, 0] for b in pipeline.outputs),
        )

    def is_late(self, transfer: int) -> bool:
        """Whether a copy of an argument can wait until the micro-batches are through."""
        source, target = self.flow.pipeline.transfers[transfer].source, self.flow.pipeline.transfers[transfer].target
        donor = self.flow.donor.get(source)
        readers = [self.tasks[t].kind for t in self.flow.readers.get(target, ())]
        return (
            any(task.kind is TaskKind.AFTER for task in self.tasks)
            and all(kind is TaskKind.AFTER for kind in readers)
            and bool(readers)
            and target not in self.flow.updaters
            and target not in self.flow.copies
            and (donor is None or self.tasks[donor].kind is TaskKind.AFTER)
        )

    def take(self, instance: Instance) -> int:
        """A free slot for an array."""
        free = self.free.setdefault(self.buffers[instance[0]].mesh, [])
        if not free:
            heapq.heappush(free, next(self.fresh))
            self.num_slots += 1
        slot = heapq.heappop(free)
        assert instance not in self.slots, f"{instance} is there already"
        self.slots[instance] = slot
        return slot

    def release(self, instance: Instance) -> int:
        slot = self.slots.pop(instance)
        heapq.heappush(self.free[self.buffers[instance[0]].mesh], slot)
        return slot

    def drop(self, instances: Iterable[Instance]) -> None:
        slots = tuple(self.release(x) for x in dict.fromkeys(instances))
        if slots:
            self.instructions.append(Free(slots))

    def run(self, node: Node) -> None:
        number, micro_batch = node
        task = self.tasks[number]
        updated = {b for b in task.inputs if number in self.flow.updaters.get(b, ())}
        taken = {b for b in task.inputs if self.flow.donor.get(b) == number}
        read = [x for b in task.inputs for x in self.flow.instances(b, task, micro_batch)]
        inputs = tuple(self.slots[x] for x in read)
        dead = []
        for x in dict.fromkeys(read):
            self.reads[x] -= 1
            if x[0] in taken:
                assert not self.reads[x], f"{task.name} takes over {self.buffers[x[0]].name}, which is read later"
                self.release(x)
            elif not self.reads[x]:
                dead.append(x)
        made = [x for b in task.outputs for x in self.flow.instances(b, task, micro_batch)]
        outputs = tuple(self.slots[x] if x[0] in updated else self.take(x) for x in made)
        self.instructions.append(Run(number, micro_batch, inputs, outputs))
        final = [x for x in made if x[0] not in self.flow.updaters]
        final += [(b, 0) for b in self.completed.get(node, ())]
        dead += self.send(final)
        dead += [x for x in made if not self.reads[x]]
        self.drop(dead)

    def join(self, chain: tuple[Node, ...]) -> None:
        """Several runs as one instruction, after which all is as if they had run one after the other."""
        read: dict[Instance, None] = {}
        made: dict[Instance, None] = {}
        donated: set[Instance] = set()
        kept: set[Instance] = set()  # accumulators that came in: updated in place, then given back or read on
        for number, micro_batch in chain:
            task = self.tasks[number]
            reads = dict.fromkeys(x for b in task.inputs for x in self.flow.instances(b, task, micro_batch))
            for x in reads:
                self.reads[x] -= 1
                if x not in made:
                    read[x] = None
                if number in self.flow.updaters.get(x[0], ()) and x not in made:
                    kept.add(x)
                if self.flow.donor.get(x[0]) == number:
                    assert not self.reads[x], f"{task.name} takes over {self.buffers[x[0]].name}, which is read later"
                    donated.add(x)
            made |= dict.fromkeys(x for b in task.outputs for x in self.flow.instances(b, task, micro_batch))
        inputs = tuple(self.slots[x] for x in read)
        kept -= donated
        dead = [x for x in read if not self.reads[x] and x not in donated | kept]
        for x in donated & set(read):
            self.release(x)
        makes = [x for x in made if x in kept or (self.reads[x] and x not in donated)]
        outputs = tuple(self.slots[x] if x in kept else self.take(x) for x in makes)
        positions = tuple(i for i, x in enumerate(read) if x in donated or x in kept)
        number = len(self.tasks) + self.num_joined
        self.num_joined += 1
        self.instructions.append(Joined(number, chain, tuple(read), inputs, tuple(makes), outputs, positions))
        completed = {(b, 0) for node in chain for b in self.completed.get(node, ())}
        dead += self.send([x for x in makes if x[0] not in self.flow.updaters or x in completed])
        dead += [x for x in makes if not self.reads[x]]
        self.drop(dead)

    def send(
        self, final: Iterable[Instance], skip: Collection[int] = (), only: Collection[int] | None = None
    ) -> list[Instance]:
        """Copies what has just been finished to all meshes that want it, and on from there. Returns what then is
        dead.
        """
        dead: list[Instance] = []
        wave = list(final)
        while wave:
            batches: dict[tuple[int, int, int], list[tuple[int, Instance]]] = {}
            for buffer, micro_batch in wave:
                for t in self.flow.copies.get(buffer, ()):
                    if t in skip or (only is not None and t not in only):
                        continue
                    target = self.flow.pipeline.transfers[t].target
                    link = (self.buffers[buffer].mesh, self.buffers[target].mesh, micro_batch)
                    batches.setdefault(link, []).append((t, (buffer, micro_batch)))
            wave, only = [], None
            for (_, _, micro_batch), batch in batches.items():
                targets = [(self.flow.pipeline.transfers[t].target, micro_batch) for t, _ in batch]
                sources = tuple(self.slots[x] for _, x in batch)
                copied = tuple(self.take(x) for x in targets)
                self.instructions.append(Send(tuple(t for t, _ in batch), micro_batch, sources, copied))
                for _, x in batch:
                    self.reads[x] -= 1
                    if not self.reads[x]:
                        dead.append(x)
                dead += [x for x in targets if not self.reads[x]]
                wave += targets
        return dead


def _num_reads(flow: Dataflow) -> dict[Instance, int]:
    """How often each array is read by a run or a Send; results once more than that, by the caller.

    Updates of an accumulator count: it is there until the last.
    """
    pipeline, m = flow.pipeline, flow.num_microbatches
    reads = {(b, i): 0 for b, buffer in enumerate(pipeline.buffers) for i in range(m if buffer.repeats else 1)}
    for number, task in enumerate(pipeline.tasks):
        for _, i in flow.runs(number):
            for b in dict.fromkeys(task.inputs):
                for x in flow.instances(b, task, i):
                    reads[x] += 1
    for b, transfers in flow.copies.items():
        for i in range(m if pipeline.buffers[b].repeats else 1):
            reads[b, i] += len(transfers)
    for b in pipeline.outputs:
        reads[b, 0] += 1
    return reads


def _completed(flow: Dataflow, order: Sequence[Node]) -> dict[Node, list[int]]:
    """For each run the accumulators that it is the last to update."""
    position = {node: at for at, node in enumerate(order)}
    completed: dict[Node, list[int]] = {}
    for b, tasks in flow.updaters.items():
        last = max((node for t in tasks for node in flow.runs(t)), key=position.__getitem__)
        completed.setdefault(last, []).append(b)
    return completed
