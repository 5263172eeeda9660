"""The simulator: hand-made clocks, the times of the schedule's own placement, memory, the trace, and equal buffers as
one.
"""

import dataclasses
import itertools
import json

import pytest

from autopar.common.trace_events import chrome_trace, write_trace
from autopar.runtime.emit import emit
from autopar.runtime.program import Free, Run, Send, TaskKind
from autopar.runtime.schedule import V_SHAPED
from autopar.runtime.simulator import merged, simulate, timeline_of
from autopar.runtime.standard_schedules import SCHEDULES, Times, make_schedule, place
from tests.runtime.pipelines import Builder, chain

BEFORE, F, B, W, AFTER = TaskKind


def two_stages(nbytes=(10, 3, 5)):
    """x on mesh 0 -> y -> copy on mesh 1 -> z -> result."""
    b = Builder()
    x = b.argument("x", 0, nbytes[0])
    y = b.buffer("y", 0, nbytes=nbytes[1])
    b.task("F0", 0, 0, F, [x], [y])
    z = b.buffer("z", 1, nbytes=nbytes[2])
    b.task("F1", 1, 1, F, [b.on(y, 1)], [z])
    result = b.buffer("result", 1, nbytes=20, repeats=False)
    b.task("stack", 1, 1, AFTER, [z], [result])
    b.outputs.append(result)
    return b.pipeline()


def spans(program, simulation):
    found = {}
    for at, step in enumerate(program.instructions):
        if not isinstance(step, Free):
            name = program.pipeline.tasks[step.task].name if isinstance(step, Run) else "send"
            found[name, step.micro_batch] = (simulation.starts_s[at], simulation.ends_s[at])
    return found


def test_a_slow_link_carries_one_send_at_a_time_and_holds_up_no_mesh():
    schedule = make_schedule("inference", 2, 3)
    program = emit(two_stages(), schedule)
    simulation = simulate(program, task_s=[1.0, 1.0, 0.5], transfer_s=[2.0])
    assert spans(program, simulation) == {
        ("F0", 0): (0.0, 1.0),
        ("F0", 1): (1.0, 2.0),
        ("F0", 2): (2.0, 3.0),
        ("send", 0): (1.0, 3.0),
        ("send", 1): (3.0, 5.0),
        ("send", 2): (5.0, 7.0),
        ("F1", 0): (3.0, 4.0),
        ("F1", 1): (5.0, 6.0),
        ("F1", 2): (7.0, 8.0),
        ("stack", 0): (8.0, 8.5),
    }
    assert simulation.step_time_s == 8.5
    assert simulation.busy_s == (3.0, 3.5)
    assert simulation.bubble_fraction == pytest.approx(1 - 6.5 / 17.0)


def test_bytes_of_arguments_buffers_and_tasks():
    schedule = make_schedule("inference", 2, 3)
    program = emit(two_stages(), schedule)
    simulation = simulate(program, [1.0, 1.0, 0.5], [2.0], task_bytes=[100, 0, 1000])
    # Mesh 0: x, and the three y that are being made or wait for the link; x goes with the last F0.
    assert simulation.bytes_over_time[0] == ((0.0, 113), (1.0, 116), (2.0, 119), (3.0, 6), (5.0, 3), (7.0, 0))
    # Mesh 1: a copy while it comes and is read, z until they are stacked, then the result alone.
    assert simulation.bytes_over_time[1] == (
        (1.0, 3),
        (3.0, 11),
        (4.0, 8),
        (5.0, 16),
        (6.0, 13),
        (7.0, 18),
        (8.0, 1035),
        (8.5, 20),
    )
    assert simulation.peak_bytes == (119, 1035)


def test_an_argument_that_the_caller_holds_stays():
    program = emit(dataclasses.replace(two_stages(), kept=(0,)), make_schedule("inference", 2, 3))
    simulation = simulate(program, [1.0, 1.0, 0.5], [2.0])
    assert simulation.bytes_over_time[0][-1] == (7.0, 10)


def test_memory_that_a_task_takes_over_counts_once():
    b = Builder()
    old, new = b.argument("old", 0, 100), b.buffer("new", 0, nbytes=100, repeats=False)
    b.task("update", 0, 0, AFTER, [old], [new], donated=[old])
    b.outputs.append(new)
    schedule = make_schedule("inference", 1, 1)
    assert simulate(emit(b.pipeline(), schedule), [1.0], []).peak_bytes == (100,)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("transfer_s", [0.0, 0.25])
def test_programs_take_the_time_of_their_schedule(name, transfer_s):
    """What is emitted keeps the schedule's times: nothing waits for more than the chain of stages does."""
    times = Times(forward_s=3.0, backward_s=4.0, weight_s=2.0, transfer_s=transfer_s)
    schedule = make_schedule(name, 4, 8, 2 if name in ("interleaved", *V_SHAPED) else 1)
    pipeline = chain(schedule)
    merged = times.backward_s + (0.0 if schedule.splits_backward else times.weight_s)
    seconds = {F: times.forward_s, B: merged, W: times.weight_s, BEFORE: 0.0, AFTER: 0.0}
    program = emit(pipeline, schedule)
    simulation = simulate(
        program, [seconds[task.kind] for task in pipeline.tasks], [transfer_s] * len(pipeline.transfers)
    )
    placement = place(schedule, times)
    assert simulation.step_time_s == pytest.approx(placement.makespan_s)
    assert simulation.busy_s == pytest.approx(placement.busy_s)
    ran: dict[int, list[float]] = {}  # from the first to the last task of a micro-batch on each mesh
    for at, step in enumerate(program.instructions):
        if isinstance(step, Run) and pipeline.tasks[step.task].kind.repeats:
            ran.setdefault(pipeline.tasks[step.task].mesh, []).extend((simulation.starts_s[at], simulation.ends_s[at]))
    assert max(max(times_s) - min(times_s) for times_s in ran.values()) == pytest.approx(placement.span_s)
    assert simulation.peak_in_flight == schedule.in_flight


def test_the_trace_has_a_row_for_each_mesh_and_link(tmp_path):
    schedule = make_schedule("1f1b", 2, 3)
    pipeline = chain(schedule)
    program = emit(pipeline, schedule)
    simulation = simulate(program, [1.0] * len(pipeline.tasks), [0.5] * len(pipeline.transfers))
    timeline = timeline_of(simulation, program)
    write_trace(tmp_path / "step.json", timeline)
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace == json.loads(json.dumps(chrome_trace(timeline)))
    events = trace["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(rows.values()) == {"mesh 0", "mesh 1", "mesh 0 to mesh 1", "mesh 1 to mesh 0"}
    on = {row: [e for e in events if e["ph"] == "X" and rows[e["pid"], e["tid"]] == row] for row in rows.values()}
    assert [e["name"] for e in on["mesh 0"]] == ["split", "zeros0", "F 0", "F 1", "B 0", "F 2", "B 1", "B 2", "update0"]
    assert [e["name"] for e in on["mesh 1 to mesh 0"]] == ["send 0", "send 1", "send 2"]
    assert on["mesh 1 to mesh 0"][0]["dur"] == 500_000
    assert sum(len(each) for each in on.values()) == sum(isinstance(s, Run | Send) for s in program.instructions)
    for each in on.values():
        for first, second in itertools.pairwise(each):
            assert second["ts"] >= first["ts"] + first["dur"]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "in flight, mesh 0"]
    assert [e["args"]["in flight"] for e in counters][-1] == 0
    assert max(e["args"]["in flight"] for e in counters) == 2


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


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ("interleaved", *V_SHAPED)])
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
