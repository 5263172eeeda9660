"""Zero-bubble schedules fitted to the predicted seconds and bytes of the tasks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.inter_op.tasks import StagedProgram
from autopar.runtime.pipeline.program import TaskKind
from autopar.runtime.pipeline.schedule import PipelineSchedule, StageCosts
from autopar.runtime.pipeline.standard_schedules import is_fitted, make_schedule


def fitted_schedule(
    schedule: PipelineSchedule, staged: StagedProgram, task_s: Sequence[float], transfer_s: Sequence[float]
) -> PipelineSchedule:
    """A schedule with the lists that end the step earliest for these tasks, if it has lists to choose from.

    The same tasks, seconds and bytes give the same lists, so that a plan is restored to the program it was made from.
    """
    costs = stage_costs(staged, schedule.num_stages, task_s, transfer_s)
    # A step whose tasks take no time at all has nothing to fit to.
    if not is_fitted(schedule.name) or not sum(costs.forward_s + costs.backward_s + costs.weight_s) > 0:
        return schedule
    return make_schedule(
        schedule.name, schedule.num_groups, schedule.num_microbatches, schedule.chunks, costs, whole_step=True
    )


def stage_costs(
    staged: StagedProgram, num_stages: int, task_s: Sequence[float], transfer_s: Sequence[float]
) -> StageCosts:
    """What the tasks of one micro-batch cost, by stage. Transfers between stages that are no neighbours wait for
    nobody: what they carry is there once the neighbour is done.
    """
    pipeline = staged.pipeline
    seconds = {kind: [0.0] * num_stages for kind in TaskKind}
    maker: dict[int, TaskKind] = {}
    readers: dict[int, set[TaskKind]] = {}
    for task, each_s in zip(pipeline.tasks, task_s, strict=True):
        seconds[task.kind][task.stage] += each_s
        maker |= dict.fromkeys(task.outputs, task.kind)
        for b in task.inputs:
            readers.setdefault(b, set()).add(task.kind)
    sends = {1: [0.0] * (num_stages - 1), -1: [0.0] * (num_stages - 1)}
    for transfer, each_s in zip(pipeline.transfers, transfer_s, strict=True):
        source, target = staged.stage_of[transfer.source], staged.stage_of[transfer.target]
        if pipeline.buffers[transfer.source].repeats and target - source in sends:
            sends[target - source][min(source, target)] += each_s
        maker[transfer.target] = maker.get(transfer.source, TaskKind.BEFORE)
    held, deferred = [0] * num_stages, [0] * num_stages
    for b, buffer in enumerate(pipeline.buffers):
        reads, stage = readers.get(b, set()), staged.stage_of[b]
        if not buffer.repeats:
            continue
        if maker.get(b) is TaskKind.FORWARD and reads & {TaskKind.BACKWARD, TaskKind.WEIGHT}:
            held[stage] += buffer.nbytes
        if TaskKind.WEIGHT in reads:
            deferred[stage] += buffer.nbytes
    return StageCosts(
        forward_s=tuple(seconds[TaskKind.FORWARD]),
        backward_s=tuple(seconds[TaskKind.BACKWARD]),
        weight_s=tuple(seconds[TaskKind.WEIGHT]),
        send_s=tuple(sends[1]),
        send_back_s=tuple(sends[-1]),
        deferred=tuple(d / h if h else 1.0 for d, h in zip(deferred, held, strict=True)),
    )
