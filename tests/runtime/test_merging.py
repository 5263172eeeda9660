"""Pipelines in which equal buffers are one: the same runs at the same times, with the same memory."""

import pytest

from autopar.runtime.emit import emit
from autopar.runtime.program import Run, TaskKind
from autopar.runtime.simulator import merged, simulate
from autopar.runtime.standard_schedules import SCHEDULES, make_schedule
from tests.runtime.pipelines import Builder, chain


def wide(pipeline, times):
    """The pipeline with every buffer made `times` over."""
    from dataclasses import replace

    def spread(numbers):
        return tuple(n * times + i for n in numbers for i in range(times))

    return replace(
        pipeline,
        buffers=tuple(b for b in pipeline.buffers for _ in range(times)),
        tasks=tuple(
            replace(
                t,
                inputs=spread(t.inputs),
                outputs=spread(t.outputs),
                donated=tuple(i * times + k for i in t.donated for k in range(times)),
            )
            for t in pipeline.tasks
        ),
        transfers=tuple(
            replace(t, source=t.source * times + i, target=t.target * times + i)
            for t in pipeline.transfers
            for i in range(times)
        ),
        inputs=spread(pipeline.inputs),
        outputs=spread(pipeline.outputs),
    )


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ("interleaved", "zb-v", "inference-v")])
def test_runs_times_and_memory_are_those_of_the_pipeline(name):
    schedule = make_schedule(name, 3, 6)
    pipeline = wide(chain(schedule), 4)
    task_s = [1.0 + 0.1 * i for i in range(len(pipeline.tasks))]
    transfer_s = [0.01] * len(pipeline.transfers)
    smaller, sent_s = merged(pipeline, transfer_s)
    assert len(smaller.buffers) <= len(pipeline.buffers) // 4
    assert sum(b.nbytes for b in smaller.buffers) == sum(b.nbytes for b in pipeline.buffers)
    assert sum(sent_s) == pytest.approx(sum(transfer_s))
    a, b = emit(pipeline, schedule), emit(smaller, schedule)
    runs = [[(i.task, i.micro_batch) for i in p.instructions if isinstance(i, Run)] for p in (a, b)]
    assert runs[0] == runs[1]
    one, other = simulate(a, task_s, transfer_s), simulate(b, task_s, sent_s)
    assert other.step_time_s == pytest.approx(one.step_time_s)
    assert other.peak_bytes == one.peak_bytes
    assert other.peak_in_flight == one.peak_in_flight


def test_what_goes_to_two_meshes_is_not_one_with_what_goes_to_one_of_them():
    b = Builder()
    x = b.argument("x", 0, 1)
    both, one = b.buffer("both", 0), b.buffer("one", 0)
    b.task("F0", 0, 0, TaskKind.FORWARD, [x], [both, one])
    y = b.buffer("y", 1)
    b.task("F1", 1, 1, TaskKind.FORWARD, [b.on(both, 1)], [y])
    z = b.buffer("z", 2)
    b.task("F2", 2, 2, TaskKind.FORWARD, [b.on(both, 2), b.on(one, 2), b.on(y, 2)], [z])
    result = b.buffer("result", 2, repeats=False)
    b.task("stack", 2, 2, TaskKind.AFTER, [z], [result])
    b.outputs.append(result)
    pipeline = b.pipeline()
    smaller, _ = merged(pipeline, [1.0] * len(pipeline.transfers))
    assert len(smaller.transfers) == len(pipeline.transfers) == 4
    assert len({t.target for t in smaller.transfers}) == 4
    emit(smaller, make_schedule("inference", 3, 2))
