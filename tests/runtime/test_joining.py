"""Runs that are one program: which may be, and that nothing changes but their number."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.runtime.emit import emit, joinable
from autopar.runtime.program import Free, Joined, Run, TaskKind, dataflow
from autopar.runtime.simulator import simulate, timeline_of
from autopar.runtime.standard_schedules import SCHEDULES, make_schedule
from autopar.runtime.verify import verify_program
from tests.runtime.pipelines import Builder, chain, random_pipeline

BEFORE, F, B, W, AFTER = TaskKind


def one_stage(m):
    """Gathered parameters, sums of gradients and an update, as one stage in micro-batches has them."""
    b = Builder()
    state = b.argument("state", 0)
    gathered = b.buffer("gathered", 0, repeats=False)
    sums = b.buffer("sums", 0, repeats=False)
    b.task("before", 0, 0, BEFORE, [state], [gathered, sums])
    loss = b.buffer("loss", 0)
    b.task("F", 0, 0, F, [gathered, sums], [sums, loss], donated=[sums])
    new, mean = b.buffer("new", 0, repeats=False), b.buffer("mean", 0, repeats=False)
    b.task("after", 0, 0, AFTER, [state, sums, loss], [new, mean], donated=[state])
    b.outputs += [new, mean]
    schedule = make_schedule("inference", 1, m)
    return b.pipeline(), schedule


def names(pipeline, chains):
    return [[f"{pipeline.tasks[task].name} {i}" for task, i in chain] for chain in chains]


def test_one_stage():
    pipeline, schedule = one_stage(3)
    chains = joinable(pipeline, schedule)
    assert names(pipeline, chains) == [["before 0", "F 0"], ["F 2", "after 0"]]
    program = emit(pipeline, schedule, joined=chains)
    verify_program(program, schedule)
    first, middle, last = program.instructions[:3]
    assert isinstance(middle, Run)
    # The sums begin inside of the first program; the last updates them in place, and takes the state over.
    assert (first.task, first.parts, first.donated) == (3, ((0, 0), (1, 0)), ())
    assert [pipeline.buffers[b].name for b, _ in first.makes] == ["gathered", "sums", "loss"]
    assert [pipeline.buffers[last.reads[i][0]].name for i in last.donated] == ["sums", "state"]
    assert [pipeline.buffers[b].name for b, _ in last.makes] == ["sums", "new", "mean"]


def test_a_single_micro_batch_is_one_program_with_all_that_is_around_it():
    pipeline, schedule = one_stage(1)
    assert names(pipeline, joinable(pipeline, schedule)) == [["before 0", "F 0", "after 0"]]


def test_times_and_memory_of_joined_runs():
    pipeline, schedule = one_stage(3)
    chains = joinable(pipeline, schedule)
    program = emit(pipeline, schedule, joined=chains)
    apart = simulate(emit(pipeline, schedule), [1.0, 10.0, 4.0], [], [5, 50, 7])
    joined = simulate(program, [1.0, 10.0, 4.0, 10.5, 11.0], [], [5, 50, 7, 51, 60])
    assert (apart.step_time_s, joined.step_time_s) == (35.0, 31.5)
    assert joined.peak_bytes[0] == apart.peak_bytes[0] + 10
    assert [e.name for e in timeline_of(joined, program).events] == ["before + F 0", "F 1", "F 2 + after"]


def test_an_update_that_waits_for_another_stage_stays_apart():
    """Stage 0 scales its gradients by what stage 1 makes of its own."""
    b = Builder()
    state = b.argument("state", 0)
    y, sums = b.buffer("y", 0), b.buffer("sums", 0, repeats=False)
    b.task("zeros", 0, 0, BEFORE, [], [sums])
    b.task("F0", 0, 0, F, [state, sums], [y, sums], donated=[sums])
    z = b.buffer("z", 1)
    b.task("F1", 1, 1, F, [b.on(y, 1)], [z])
    norm, new = b.buffer("norm", 1, repeats=False), b.buffer("new", 0, repeats=False)
    b.task("norm", 1, 1, AFTER, [z], [norm])
    b.task("update", 0, 0, AFTER, [sums, b.on(norm, 0)], [new])
    b.outputs += [new]
    schedule = make_schedule("inference", 2, 2)
    assert names(b.pipeline(), joinable(b.pipeline(), schedule)) == [["zeros 0", "F0 0"], ["F1 1", "norm 0"]]


def results(program):
    """What the results were computed from: a run is its name and its operands."""
    pipeline, flow = program.pipeline, dataflow(program.pipeline, program.num_microbatches)
    slots = {slot: pipeline.buffers[b].name for b, slot in zip(pipeline.inputs, program.input_slots, strict=True)}

    def run(task, operands):
        text = hash((pipeline.tasks[task].name, tuple(operands)))
        return [hash((text, i)) for i in range(10**4)]

    for step in program.instructions:
        if isinstance(step, Free):
            for slot in step.slots:
                del slots[slot]
        elif isinstance(step, Run):
            slots |= zip(step.outputs, run(step.task, [slots[i] for i in step.inputs]), strict=False)
        elif isinstance(step, Joined):
            held = dict(zip(step.reads, (slots[i] for i in step.inputs), strict=True))
            for task, micro_batch in step.parts:
                at = pipeline.tasks[task]
                reads, makes = (
                    [x for b in buffers for x in flow.instances(b, at, micro_batch)]
                    for buffers in (at.inputs, at.outputs)
                )
                held |= zip(makes, run(task, [held[x] for x in reads]), strict=False)
            slots |= zip(step.outputs, (held[x] for x in step.makes), strict=True)
        else:
            slots |= zip(step.targets, [slots[i] for i in step.sources], strict=True)
    return [slots[slot] for slot in program.output_slots]


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**9)
)
def test_random_pipelines_make_the_same_of_it(name, p, m, v, seed):
    v = 2 if name in ("zb-v", "inference-v") else v if name in ("interleaved", "inference") else 1
    schedule = make_schedule(name, p, m, v)
    pipeline = random_pipeline(schedule, random.Random(seed))
    chains = joinable(pipeline, schedule)
    program = emit(pipeline, schedule, joined=chains)
    verify_program(program, schedule)
    assert [joined.parts for joined in program.joined] == list(chains)
    assert results(program) == results(emit(pipeline, schedule))


def test_a_joined_run_that_reads_another_slot_is_seen():
    pipeline, schedule = one_stage(3)
    program = emit(pipeline, schedule, joined=joinable(pipeline, schedule))
    last = program.instructions[2]
    wrong = dataclasses.replace(last, inputs=(last.inputs[1], last.inputs[0], *last.inputs[2:]))
    damaged = dataclasses.replace(program, instructions=(*program.instructions[:2], wrong, *program.instructions[3:]))
    with pytest.raises(ScheduleError, match="instruction 2, Joined"):
        verify_program(damaged, schedule)


def test_a_stage_updates_while_the_stages_before_it_still_compute():
    """What follows the last micro-batch of a stage, its exchange of gradients too, waits for no other stage."""
    schedule = make_schedule("1f1b", 4, 8)
    program = emit(chain(schedule), schedule)
    tasks = program.pipeline.tasks
    task_s = [{F: 1.0, B: 2.0, AFTER: 3.0}.get(task.kind, 0.0) for task in tasks]
    simulation = simulate(program, task_s, [0.0] * len(program.pipeline.transfers))
    begins = {}
    for step, start_s in zip(program.instructions, simulation.starts_s, strict=True):
        if isinstance(step, Run):
            begins[tasks[step.task].name, step.micro_batch] = start_s
    assert [begins[f"update{stage}", 0] - begins[f"B{stage}", 7] for stage in range(4)] == [2.0] * 4
    # The last stage is through with its update when the first one begins its own last backward pass.
    assert begins["update3", 0] + 3.0 <= begins["B0", 7]
