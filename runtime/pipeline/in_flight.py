"""Micro-batches in flight: pairs (stage, micro-batch) from the forward pass to the last task of the stage."""

from __future__ import annotations

import collections

from autopar.runtime.pipeline.program import Program, TaskKind, runs_of


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
    for mesh, change in in_flight_changes(program).values():
        held[mesh] += change
        peaks[mesh] = max(peaks[mesh], held[mesh])
    return tuple(peaks[mesh] for mesh in range(num_meshes(program)))


def in_flight_changes(program: Program) -> dict[int, tuple[int, int]]:
    """For instructions that change what is in flight: (mesh, +1 or -1). A stage may have several tasks of a kind:
    the first run of FORWARD takes, the last of the releasing kind gives back.
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
    meshes = {at: tasks[runs_of(program.instructions[at])[0][0]].mesh for at in (*begun.values(), *ended.values())}
    gains = set(begun.values())
    return {at: (mesh, 1 if at in gains else -1) for at, mesh in sorted(meshes.items())}


def num_meshes(program: Program) -> int:
    pipeline = program.pipeline
    return 1 + max((*(b.mesh for b in pipeline.buffers), *(t.mesh for t in pipeline.tasks)), default=-1)
