"""From tasks and a schedule to the one list of instructions that every process executes.

(1) Runs stand in a total order in which each mesh keeps the order of its schedule (`order_of_runs`).
(2) A Send stands directly after what makes its sources, one for each pair of meshes (and micro-batch, where a run
    ends an accumulator too): an accumulator is sent after its last update, an argument at the start, or where AFTER
    tasks alone need it, in front of them.
(3) A Free stands as soon as nothing reads an array any more, at most one after each run. Results stay. Arguments go
    too: whether that gives memory back is up to whoever else holds them.
(4) A slot holds arrays of one mesh only, the lowest free one is taken; an accumulator keeps its slot.

One program can do the runs of the first micro-batch with what precedes the loop, of the last with what follows. What a
program sends between its devices, another program cannot compute beside: gradients that are exchanged behind the last
micro-batch, and parameters that are gathered ahead of the first one, hide behind nothing. As one program with that
micro-batch they hide behind its passes. So do sends within a forward pass behind the backward pass of another
micro-batch that stands next to it, and the other way round (`pairs`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from autopar.errors import ScheduleError
from autopar.runtime.program import (
    Dataflow,
    Free,
    Instance,
    Instruction,
    Joined,
    Node,
    Pipeline,
    Program,
    Run,
    Send,
    Task,
    TaskKind,
    dataflow,
)
from autopar.runtime.schedule import PipelineSchedule, Slot


def order_of_runs(
    flow: Dataflow, schedule: PipelineSchedule, together: Collection[tuple[Node, ...]] = ()
) -> tuple[tuple[Node, ...], Collection[tuple[Node, ...]]]:
    """(the order, those of `together` that hold in it): BEFORE tasks, then the schedule's lists merged by the time at
    which each run could start if all took equally long, then AFTER tasks.

    On a mesh with several stages those of one stage stand beside the runs of that stage, where this holds up nobody:
    a BEFORE task in front of the first of them, unless it can run while the mesh waits at its start, and an AFTER task
    behind the last of them, unless other meshes wait for what the mesh does then. `together`: runs that are neighbours
    on their mesh and begin when all that any of them needs is there, but for those by which meshes would wait for each
    other.

    Raises:
        ScheduleError: The schedule lacks a task of the pipeline, or makes meshes wait for each other in a circle.
    """
    tasks = flow.pipeline.tasks
    needs = _needs(flow)
    before, after = (_once(tasks, kind, needs) for kind in (TaskKind.BEFORE, TaskKind.AFTER))
    lists = [list(runs) for runs in runs_of_mesh(flow.pipeline, schedule)]
    lists, moved = _with_tasks_of_stages(tasks, lists, before, after, needs)
    before, after = [n for n in before if n not in moved], [n for n in after if n not in moved]
    neighbours = {
        tuple(runs[at : at + n]) for runs in lists for n in {len(x) for x in together} for at in range(len(runs))
    }
    begun_by = {runs[0]: runs for runs in together if runs in neighbours}
    merged = _merged(flow, schedule, lists, needs, frozenset(before), begun_by)
    return (*before, *merged, *after), begun_by.values()


def _with_tasks_of_stages(
    tasks: Sequence[Task],
    lists: list[list[Node]],
    before: Sequence[Node],
    after: Sequence[Node],
    needs: _Needs,
) -> tuple[list[list[Node]], frozenset[Node]]:
    """(the runs of each mesh with the tasks that stand beside those of their stage; these tasks)"""
    stages_of = [{tasks[n].stage for n, _ in runs} for runs in lists]
    if all(len(stages) < 2 for stages in stages_of):
        return lists, frozenset()
    needed_by: dict[Node, set[Node]] = {}
    for node, needed in needs.items():
        for need in needed:
            needed_by.setdefault(need, set()).add(node)
    moved: set[Node] = set()
    found = []
    for runs, stages in zip(lists, stages_of, strict=True):
        own = set(runs)
        waits = bool(runs) and any(x not in before and x not in own for x in needs[runs[0]])
        for node in () if len(stages) < 2 else before:
            if waits and not tasks[node[0]].index:
                continue  # it runs while the mesh waits; others wait for other meshes themselves
            at = next((i for i, (n, _) in enumerate(runs) if tasks[n].stage == tasks[node[0]].stage), 0)
            if tasks[node[0]].stage in stages and at and needed_by.get(node, set()) <= {*runs[at:], *after}:
                runs.insert(at, node)
                moved.add(node)
        for node in () if len(stages) < 2 else after:
            of_stage = [i for i, (n, _) in enumerate(runs) if tasks[n].stage == tasks[node[0]].stage]
            if not of_stage or tasks[node[0]].stage not in stages:
                continue
            behind = runs[of_stage[-1] + 1 :]
            held_up = {n for run in behind for n in needed_by.get(run, ())} - set(runs) - set(after)
            done = (own | set(before) | moved).difference(behind)
            if behind and not held_up and all(x in done for x in needs[node]):
                runs.insert(of_stage[-1] + 1, node)
                moved.add(node)
        found.append(runs)
    return found, frozenset(moved)


def runs_of_mesh(pipeline: Pipeline, schedule: PipelineSchedule) -> tuple[tuple[Node, ...], ...]:
    """For each mesh its repeating runs in the schedule's order; slots without a task fall out.

    Raises:
        ScheduleError: A task of the pipeline is in no list, or on another mesh than its stage.
    """
    of_slot: dict[tuple[TaskKind, int], list[int]] = {}
    for number, task in enumerate(pipeline.tasks):
        if task.kind.repeats:
            of_slot.setdefault((task.kind, task.stage), []).append(number)
    for numbers in of_slot.values():
        numbers.sort(key=lambda n: (pipeline.tasks[n].index, n))
    for (kind, stage), numbers in of_slot.items():
        name = pipeline.tasks[numbers[0]].name
        if stage >= schedule.num_stages or kind not in schedule.kinds:
            raise ScheduleError(
                where=f"task {name} on schedule {schedule.name}",
                expected=f"stages below {schedule.num_stages} and the kinds {[k.value for k in schedule.kinds]}",
                got=f"{kind.value} on stage {stage}",
                hint="make the pipeline for the schedule: it must split backward passes exactly where that does",
            )
        wrong = [n for n in numbers if pipeline.tasks[n].mesh != schedule.mesh_of_stage[stage]]
        if wrong:
            raise ScheduleError(
                where=f"task {pipeline.tasks[wrong[0]].name} on schedule {schedule.name}",
                expected=f"mesh {schedule.mesh_of_stage[stage]}, which holds stage {stage}",
                got=f"mesh {pipeline.tasks[wrong[0]].mesh}",
                hint="place stages on meshes as the schedule's mesh_of_stage says",
            )
    return tuple(
        tuple((n, slot.micro_batch) for slot in todo for n in of_slot.get((slot.kind, slot.stage), ()))
        for todo in schedule.lists
    )


# For each run those that must come first.
_Needs = Mapping[Node, tuple[Node, ...]]


def _needs(flow: Dataflow) -> _Needs:
    """For each run those that make what it takes, and, where it takes memory over, all other readers."""
    pipeline, m = flow.pipeline, flow.num_microbatches
    found: dict[Node, tuple[Node, ...]] = {}

    def makers(instance: Instance, first_state: bool) -> list[Node]:
        source, chain = flow.source_of(instance[0])
        if source in flow.updaters and not (first_state and not chain):
            return [node for t in flow.updaters[source] for node in flow.runs(t)]
        if source not in flow.maker:
            return []
        maker = flow.maker[source]
        return [(maker, instance[1] if pipeline.tasks[maker].kind.repeats else 0)]

    for number, task in enumerate(pipeline.tasks):
        for node in flow.runs(number):
            needed: list[Node] = []
            for b in dict.fromkeys(task.inputs):
                updates = number in flow.updaters.get(b, ())
                for instance in flow.instances(b, task, node[1]):
                    needed += makers(instance, first_state=updates)
                    if flow.donor.get(b) == number:
                        others = (t for t in flow.readers[b] if t != number)
                        once = pipeline.buffers[b].repeats
                        needed += [
                            run
                            for t in others
                            for run in flow.runs(t)
                            if not (once and pipeline.tasks[t].kind.repeats and run[1] != instance[1])
                        ]
            found[node] = tuple(dict.fromkeys(needed))
    assert all(i < m for _, i in found)
    return found


def _once(tasks: Sequence[Task], kind: TaskKind, needs: _Needs) -> list[Node]:
    """The tasks of a kind that runs once: those with the least index first among those that can run."""
    left = [(task.index, number) for number, task in enumerate(tasks) if task.kind is kind]
    waiting_for = {n: {need[0] for need in needs[n, 0] if tasks[need[0]].kind is kind} for _, n in left}
    if kind is TaskKind.BEFORE:
        late = [tasks[n].name for _, n in left for x in needs[n, 0] if tasks[x[0]].kind is not kind]
        assert not late, f"{late} run before the pipeline and need what it makes"
    order: list[Node] = []
    left.sort()
    while left:
        item = next((item for item in left if not waiting_for[item[1]]), None)
        assert item is not None, f"tasks wait for each other: {[tasks[n].name for _, n in left]}"
        left.remove(item)
        order.append((item[1], 0))
        for others in waiting_for.values():
            others.discard(item[1])
    return order


def _merged(
    flow: Dataflow,
    schedule: PipelineSchedule,
    lists: Sequence[Sequence[Node]],
    needs: _Needs,
    before: frozenset[Node],
    begun_by: dict[Node, tuple[Node, ...]],
) -> list[Node]:
    """`begun_by`: runs that begin together, by the first; those that hold up themselves are taken out."""
    position = [0] * len(lists)
    clock = [0] * len(lists)  # in runs, which are taken to be equally long
    ends = dict.fromkeys(before, 0)
    order: list[Node] = []
    ready: list[tuple[int, int]] = []  # a heap: when a mesh can start the next run of its list, where that is known
    waiting: dict[Node, list[int]] = {}  # else the meshes, by a run that they wait for

    def look_at(mesh: int) -> None:
        """Puts a mesh where it belongs after its last run, or after one that it waited for."""
        if position[mesh] == len(lists[mesh]):
            return
        start = clock[mesh]
        node = lists[mesh][position[mesh]]
        runs = begun_by.get(node, (node,))
        for need in (need for run in runs for need in needs[run] if need not in runs):
            if need not in ends:
                waiting.setdefault(need, []).append(mesh)
                return
            start = max(start, ends[need])
        heapq.heappush(ready, (start, mesh))

    for mesh in range(len(lists)):
        look_at(mesh)
    while True:
        if not ready:
            held_up = [
                mesh for mesh, at in enumerate(position) if lists[mesh][at : at + 1] and lists[mesh][at] in begun_by
            ]
            if not held_up:
                break
            _take_apart(begun_by, lists[held_up[0]][position[held_up[0]]])
            for meshes in waiting.values():
                meshes[:] = [mesh for mesh in meshes if mesh != held_up[0]]
            look_at(held_up[0])
            continue
        start, mesh = heapq.heappop(ready)
        node = lists[mesh][position[mesh]]
        runs = begun_by.get(node, (node,))
        clock[mesh] = start + len(runs)
        ends |= dict.fromkeys(runs, clock[mesh])
        position[mesh] += len(runs)
        order += runs
        for changed in (mesh, *(waiter for run in runs for waiter in waiting.pop(run, ()))):
            look_at(changed)
    stuck = {mesh: lists[mesh][position[mesh]] for mesh in range(len(lists)) if position[mesh] < len(lists[mesh])}
    if stuck:
        raise _deadlock(flow.pipeline, schedule, stuck, needs, ends)
    return order


def _take_apart(begun_by: dict[Node, tuple[Node, ...]], node: Node) -> None:
    """Takes out all runs of the tasks that begin together with a run: a plan names the tasks of a pair, and so all of
    its runs are one program, or none.
    """
    tasks = [number for number, _ in begun_by[node]]
    for first in [first for first, runs in begun_by.items() if [number for number, _ in runs] == tasks]:
        begun_by.pop(first)


def _deadlock(
    pipeline: Pipeline,
    schedule: PipelineSchedule,
    stuck: Mapping[int, Node],
    needs: _Needs,
    done: Collection[Node],
) -> ScheduleError:
    def text(node: Node) -> str:
        return f"{pipeline.tasks[node[0]].name} of micro-batch {node[1]}"

    waits = (
        f"mesh {mesh} waits in {text(node)} for {text(next(n for n in needs[node] if n not in done))}"
        for mesh, node in stuck.items()
    )
    return ScheduleError(
        where=f"schedule {schedule.name}",
        expected="that some mesh can go on",
        got=f"a deadlock: {'; '.join(waits)}",
        hint="values may flow forward through the stages in F, back in B, and from F or B to what the list has later",
    )


def joinable(pipeline: Pipeline, schedule: PipelineSchedule) -> tuple[tuple[Node, ...], ...]:
    """The chains of runs that may be one program each, at most two of a mesh, in the order of the program.

    Of a mesh its first run of a micro-batch with the BEFORE task in front of it, and its last one with the AFTER task
    behind it, both of the same stage; with a single run of a micro-batch all three. All that a later run of a chain
    reads is there when its first run begins.
    """
    flow = dataflow(pipeline, schedule.num_microbatches)
    order, _ = order_of_runs(flow, schedule)
    position = {node: at for at, node in enumerate(order)}
    of_mesh: dict[int, list[Node]] = {}
    for node in order:
        of_mesh.setdefault(pipeline.tasks[node[0]].mesh, []).append(node)
    found: list[tuple[Node, ...]] = []
    for nodes in of_mesh.values():
        repeating = [i for i, (task, _) in enumerate(nodes) if pipeline.tasks[task].kind.repeats]
        if not repeating:
            continue
        first, last = repeating[0], repeating[-1]
        begins = first > 0 and _follows(flow, position, nodes[first - 1 : first], nodes[first])
        ends = last + 1 < len(nodes) and _follows(flow, position, nodes[last : last + 1], nodes[last + 1])
        if (
            first == last
            and begins
            and ends
            and _follows(flow, position, nodes[first - 1 : first + 1], nodes[first + 1])
        ):
            found.append(tuple(nodes[first - 1 : first + 2]))
            continue
        if begins:
            found.append(tuple(nodes[first - 1 : first + 1]))
        if ends and not (begins and first == last):
            found.append(tuple(nodes[last : last + 2]))
    return tuple(sorted(found, key=lambda chain: position[chain[0]]))


def pairs(pipeline: Pipeline, schedule: PipelineSchedule) -> tuple[tuple[Node, ...], ...]:
    """The runs that may be one program each as neither waits for the other: a forward pass and, behind it on its mesh,
    the backward pass of another micro-batch, both parts of it where they are two. On a mesh with several stages it is
    of another stage.

    The first and the last run of a mesh stay for `joinable`.
    """
    found: list[tuple[Node, ...]] = []
    for nodes, todo in zip(runs_of_mesh(pipeline, schedule), schedule.lists, strict=True):
        of_slot: dict[Slot, list[Node]] = {}
        for number, micro_batch in nodes:
            task = pipeline.tasks[number]
            of_slot.setdefault(Slot(task.kind, task.stage, micro_batch), []).append((number, micro_batch))
        slots = [slot for slot in todo if slot in of_slot]
        several = len({slot.stage for slot in slots}) > 1
        for at in range(1, len(slots) - 2):
            forward, backward, *behind = slots[at : at + 3]
            if forward.kind is not TaskKind.FORWARD or backward.kind is TaskKind.FORWARD:
                continue
            if forward.micro_batch == backward.micro_batch or several == (forward.stage == backward.stage):
                continue
            goes_on = at + 3 < len(slots) and behind[0] == (TaskKind.WEIGHT, *backward[1:])
            runs = [forward, backward, *behind] if goes_on else [forward, backward]
            found.append(tuple(node for slot in runs for node in of_slot[slot]))
    return tuple(found)


def _follows(flow: Dataflow, position: dict[Node, int], chain: Sequence[Node], node: Node) -> bool:
    """Whether a run can be in one program with those in front of it on its mesh, all of one stage."""
    tasks = flow.pipeline.tasks
    task, begin = tasks[node[0]], position[chain[0]]
    if task.stage != tasks[chain[0][0]].stage:
        return False
    inside = set(chain)
    for b in dict.fromkeys(task.inputs):
        source, copies = flow.source_of(b)
        if copies and source in flow.pipeline.inputs and task.kind is TaskKind.AFTER:
            return False  # may be sent as late as the AFTER tasks begin
        if flow.donor.get(b) == node[0] and b in flow.copies:
            return False
        for _, i in flow.instances(b, task, node[1]):
            makers = [(flow.maker[source], i)] if source in flow.maker else []
            if makers and not tasks[makers[0][0]].kind.repeats:
                makers = [(makers[0][0], 0)]
            if source in flow.updaters and node[0] not in flow.updaters[source]:
                makers += [run for t in flow.updaters[source] for run in flow.runs(t)]
            if any(maker not in inside and position[maker] > begin for maker in makers):
                return False
    return True


def emit(
    pipeline: Pipeline,
    schedule: PipelineSchedule,
    joined: Sequence[tuple[Node, ...]] = (),
) -> Program:
    """The program of a pipeline on a schedule. What runs once, and what is sent once, has micro-batch 0.

    A pair (stage, kind) without a task is left out of the schedule.

    Args:
        joined: Chains of runs that are one program each, of those of `joinable` and `pairs`; pairs of tasks by which
            meshes would wait for each other are left apart.

    Raises:
        ScheduleError: The schedule lacks a task of the pipeline, or makes meshes wait for each other in a circle.
    """
    flow = dataflow(pipeline, schedule.num_microbatches)
    together = {runs for runs in joined if all(pipeline.tasks[number].kind.repeats for number, _ in runs)}
    order, held = order_of_runs(flow, schedule, together)
    left_apart = together.difference(held)
    writer = _Writer(flow, order, [runs for runs in joined if runs not in left_apart])
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
