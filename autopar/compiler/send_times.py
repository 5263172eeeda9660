"""How long the collectives of a pipeline take, and for how much of that the step waits, by stage."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping, Sequence

from autopar.cost.stream_work import NO_TIME, Cause, SendTime
from autopar.inter_op.joined_tasks import timed_chain
from autopar.inter_op.staged import PlannedStage, StagedStep, timed_task
from autopar.plan.summary import folded

Sends = dict[Cause, SendTime]


def sends_of_stages(staged: StagedStep) -> tuple[Sends, ...]:
    """Of each stage: cause of collectives -> their seconds in a step, on each of its devices.

    Tasks are timed as their costs are: those that run alone by themselves, joined ones as the one program that they
    are. Stages that do the same, in modules of names that differ in numbers only, send alike and are timed once.
    """
    in_joined = collections.Counter(number for joined in staged.joined for number, _ in joined.parts)
    numbers = [[i for i, task in enumerate(staged.staged.tasks) if task.stage == s] for s in range(len(staged.stages))]
    known: dict[Hashable, tuple[Sequence[str], Sends]] = {}
    found = []
    for planned, tasks in zip(staged.stages, numbers, strict=True):
        modules = tuple(dict.fromkeys(op.place for op in planned.stage.graph.ops()))
        chains = [joined.parts for joined in staged.joined if joined.parts[0][0] in tasks]
        key = (
            planned.like,
            tuple(map(folded, modules)),
            tuple(_form(staged, number, in_joined) for number in tasks),
            tuple(tuple(tasks.index(number) for number, _ in chain) for chain in chains),
        )
        if key not in known:
            sends: Sends = {}
            for number in tasks:
                _add(sends, *_alone(staged, planned, number, in_joined))
            for chain in chains:
                _add(sends, timed_chain(staged, chain).sends(), 1.0)
            known[key] = modules, sends
        first_modules, sends = known[key]
        name = dict(zip(first_modules, modules, strict=True))
        found.append({(kind, axes, name.get(module, module)): s for (kind, axes, module), s in sends.items()})
    return tuple(found)


def _form(staged: StagedStep, number: int, in_joined: Mapping[int, int]) -> Hashable:
    """Equal for tasks of alike stages that are cut alike and run alone alike often."""
    task = staged.staged.tasks[number]
    sizes = len(task.instructions), len(task.inputs), len(task.outputs)
    return task.kind, task.level, sizes, in_joined.get(number, 0)


def _alone(staged: StagedStep, planned: PlannedStage, number: int, in_joined: Mapping[int, int]) -> tuple[Sends, float]:
    """The collectives of all runs of a task, and the part of these runs that are programs of their own."""
    task = staged.staged.tasks[number]
    runs = staged.graph.num_microbatches if task.kind.repeats else 1
    return timed_task(planned, task).sends(), 1 - in_joined.get(number, 0) / runs


def _add(sends: Sends, more: Sends, share: float) -> None:
    for cause, time in more.items():
        sends[cause] = sends.get(cause, NO_TIME) + time.times(share)
