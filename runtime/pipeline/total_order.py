"""A total order of all runs of a step, in which each mesh keeps the order of its schedule."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from autopar.errors import ScheduleError
from autopar.runtime.pipeline.dataflow import Dataflow, Instance, Node
from autopar.runtime.pipeline.program import Pipeline, Task, TaskKind
from autopar.runtime.pipeline.schedule import PipelineSchedule


def order_of_runs(
    flow: Dataflow,
    schedule: PipelineSchedule,
    task_s: Sequence[float] | None = None,
    transfer_s: Sequence[float] | None = None,
) -> tuple[Node, ...]:
    """BEFORE tasks, then the schedule's lists merged by the time at which each run could start, then AFTER tasks.

    On a mesh with several stages those of one stage stand beside the runs of that stage, where this holds up nobody:
    a BEFORE task in front of the first of them, unless it can run while the mesh waits at its start, and an AFTER task
    behind the last of them, unless other meshes wait for what the mesh does then.

    Args:
        task_s: Seconds of each task; all 1 if left out.
        transfer_s: Seconds of each transfer, for one micro-batch; 0 if left out.

    Raises:
        ScheduleError: The schedule lacks a task of the pipeline, or makes meshes wait for each other in a circle.
    """
    tasks = flow.pipeline.tasks
    needs = _needs(flow)
    before, after = (_once(tasks, kind, needs) for kind in (TaskKind.BEFORE, TaskKind.AFTER))
    lists = [list(runs) for runs in runs_of_mesh(flow.pipeline, schedule)]
    lists, moved = _with_tasks_of_stages(tasks, lists, before, after, needs)
    before, after = [n for n in before if n not in moved], [n for n in after if n not in moved]
    merged = _merged(flow, schedule, lists, needs, frozenset(before), task_s, transfer_s)
    return (*before, *merged, *after)


def _with_tasks_of_stages(
    tasks: Sequence[Task],
    lists: list[list[Node]],
    before: Sequence[Node],
    after: Sequence[Node],
    needs: Mapping[Node, tuple[_Need, ...]],
) -> tuple[list[list[Node]], frozenset[Node]]:
    """(the runs of each mesh with the tasks that stand beside those of their stage; these tasks)"""
    stages_of = [{tasks[n].stage for n, _ in runs} for runs in lists]
    if all(len(stages) < 2 for stages in stages_of):
        return lists, frozenset()
    needed_by: dict[Node, set[Node]] = {}
    for node, needed in needs.items():
        for need in needed:
            needed_by.setdefault(need.node, set()).add(node)
    moved: set[Node] = set()
    found = []
    for runs, stages in zip(lists, stages_of, strict=True):
        own = set(runs)
        waits = bool(runs) and any(x.node not in before and x.node not in own for x in needs[runs[0]])
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
            if behind and not held_up and all(x.node in done for x in needs[node]):
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Need:
    """A run that must come first, and the transfers between it and the run that needs it."""

    node: Node
    transfers: tuple[int, ...] = ()


def _needs(flow: Dataflow) -> Mapping[Node, tuple[_Need, ...]]:
    """For each run those that make what it takes, and, where it takes memory over, all other readers."""
    pipeline, m = flow.pipeline, flow.num_microbatches
    found: dict[Node, tuple[_Need, ...]] = {}

    def makers(instance: Instance, first_state: bool) -> list[_Need]:
        source, chain = flow.source_of(instance[0])
        if source in flow.updaters and not (first_state and not chain):
            return [_Need(node, chain) for t in flow.updaters[source] for node in flow.runs(t)]
        if source not in flow.maker:
            return []
        maker = flow.maker[source]
        return [_Need((maker, instance[1] if pipeline.tasks[maker].kind.repeats else 0), chain)]

    for number, task in enumerate(pipeline.tasks):
        for node in flow.runs(number):
            needed: list[_Need] = []
            for b in dict.fromkeys(task.inputs):
                updates = number in flow.updaters.get(b, ())
                for instance in flow.instances(b, task, node[1]):
                    needed += makers(instance, first_state=updates)
                    if flow.donor.get(b) == number:
                        others = (t for t in flow.readers[b] if t != number)
                        once = pipeline.buffers[b].repeats
                        needed += [
                            _Need(run)
                            for t in others
                            for run in flow.runs(t)
                            if not (once and pipeline.tasks[t].kind.repeats and run[1] != instance[1])
                        ]
            found[node] = tuple(dict.fromkeys(needed))
    assert all(i < m for _, i in found)
    return found


def _once(tasks: Sequence[Task], kind: TaskKind, needs: Mapping[Node, tuple[_Need, ...]]) -> list[Node]:
    """The tasks of a kind that runs once: those with the least index first among those that can run."""
    left = [(task.index, number) for number, task in enumerate(tasks) if task.kind is kind]
    waiting_for = {n: {need.node[0] for need in needs[n, 0] if tasks[need.node[0]].kind is kind} for _, n in left}
    if kind is TaskKind.BEFORE:
        late = [tasks[n].name for _, n in left for x in needs[n, 0] if tasks[x.node[0]].kind is not kind]
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
    needs: Mapping[Node, tuple[_Need, ...]],
    before: frozenset[Node],
    task_s: Sequence[float] | None,
    transfer_s: Sequence[float] | None,
) -> list[Node]:
    position = [0] * len(lists)
    clock = [0.0] * len(lists)
    end_s = dict.fromkeys(before, 0.0)
    order: list[Node] = []
    ready: list[tuple[float, int]] = []  # a heap: when a mesh can start the next run of its list, where that is known
    waiting: dict[Node, list[int]] = {}  # else the meshes, by a run that they wait for

    def look_at(mesh: int) -> None:
        """Puts a mesh where it belongs after its last run, or after one that it waited for."""
        if position[mesh] == len(lists[mesh]):
            return
        start = clock[mesh]
        for need in needs[lists[mesh][position[mesh]]]:
            if need.node not in end_s:
                waiting.setdefault(need.node, []).append(mesh)
                return
            wait = sum(transfer_s[t] for t in need.transfers) if transfer_s is not None else 0.0
            start = max(start, end_s[need.node] + wait)
        heapq.heappush(ready, (start, mesh))

    for mesh in range(len(lists)):
        look_at(mesh)
    while ready:
        start, mesh = heapq.heappop(ready)
        node = lists[mesh][position[mesh]]
        clock[mesh] = end_s[node] = start + (task_s[node[0]] if task_s is not None else 1.0)
        position[mesh] += 1
        order.append(node)
        for changed in (mesh, *waiting.pop(node, ())):
            look_at(changed)
    stuck = {mesh: lists[mesh][position[mesh]] for mesh in range(len(lists)) if position[mesh] < len(lists[mesh])}
    if stuck:
        raise _deadlock(flow.pipeline, schedule, stuck, needs, end_s)
    return order


def _deadlock(
    pipeline: Pipeline,
    schedule: PipelineSchedule,
    stuck: Mapping[int, Node],
    needs: Mapping[Node, tuple[_Need, ...]],
    done: Mapping[Node, float],
) -> ScheduleError:
    def text(node: Node) -> str:
        return f"{pipeline.tasks[node[0]].name} of micro-batch {node[1]}"

    waits = (
        f"mesh {mesh} waits in {text(node)} for {text(next(n.node for n in needs[node] if n.node not in done))}"
        for mesh, node in stuck.items()
    )
    return ScheduleError(
        where=f"schedule {schedule.name}",
        expected="that some mesh can go on",
        got=f"a deadlock: {'; '.join(waits)}",
        hint="values may flow forward through the stages in F, back in B, and from F or B to what the list has later",
    )
