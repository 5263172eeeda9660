"""Programs: literal lists, random pipelines, a verifier that sees every kind of damage, runs that are joined."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.runtime.emit import emit, joinable, order_of_runs, pairs
from autopar.runtime.program import Free, Joined, Run, Send, TaskKind, dataflow, runs_of, work_of
from autopar.runtime.schedule import V_SHAPED
from autopar.runtime.simulator import simulate, timeline_of
from autopar.runtime.standard_schedules import SCHEDULES, make_schedule
from autopar.runtime.verify import verify_program
from tests.runtime.pipelines import Builder, chain, random_pipeline

BEFORE, F, B, W, AFTER = TaskKind


def lines(program):
    """`F1 0: 8 1 -> 10 11`, `send 0: 6 -> 8`, `free 3 6`."""

    def slots(numbers):
        return "".join(f" {n}" for n in numbers)

    found = []
    for step in program.instructions:
        if isinstance(step, Run):
            name = program.pipeline.tasks[step.task].name
            found.append(f"{name} {step.micro_batch}:{slots(step.inputs)} ->{slots(step.outputs)}")
        elif isinstance(step, Send):
            found.append(f"send {step.micro_batch}:{slots(step.sources)} ->{slots(step.targets)}")
        else:
            found.append(f"free{slots(step.slots)}")
    return found


def emitted(name, p, m, v=1):
    schedule = make_schedule(name, p, m, v)
    program = emit(chain(schedule), schedule)
    verify_program(program, schedule)
    return program, schedule


def test_a_small_program():
    program, _ = emitted("1f1b", 2, 2)
    assert lines(program) == [
        "split 0: 2 -> 3 4",
        "free 2",
        "zeros0 0: -> 2",
        "zeros1 0: -> 5",
        "F0 0: 3 0 -> 6 7",
        "send 0: 6 -> 8",
        "free 3 6",
        "F0 1: 4 0 -> 3 6",
        "send 1: 3 -> 9",
        "free 4 3",
        "F1 0: 8 1 -> 10 11",
        "free 8",
        "B1 0: 11 5 -> 8 5",
        "send 0: 8 -> 3",
        "free 11 8",
        "B0 0: 7 3 2 -> 4 2",
        "free 7 3 4",
        "F1 1: 9 1 -> 8 11",
        "free 9",
        "B1 1: 11 5 -> 9 5",
        "send 1: 9 -> 3",
        "free 11 9",
        "B0 1: 6 3 2 -> 4 2",
        "free 6 3 4",
        "update0 0: 0 2 -> 0",
        "free 2",
        "update1 0: 1 5 -> 1",
        "free 5",
        "stack 0: 10 8 -> 5",
        "free 10 8",
    ]
    assert (program.num_slots, program.input_slots, program.output_slots) == (12, (0, 1, 2), (0, 1, 5))


def test_an_accumulator_is_sent_once_when_it_is_complete():
    """Tied weights: the gradient of both stages is added up where the weights are."""
    b = Builder()
    first = b.argument("first", 0)
    sums = b.buffer("sums", 1, repeats=False)
    y = b.buffer("y", 0)
    b.task("F0", 0, 0, F, [first], [y])
    b.task("zeros", 1, 1, BEFORE, [], [sums])
    b.task("F1", 1, 1, F, [b.on(y, 1), sums], [sums], donated=[sums])
    total = b.buffer("total", 0, repeats=False)
    b.task("add", 0, 0, AFTER, [b.on(sums, 0), first], [total], donated=[first])
    b.outputs.append(total)
    schedule = make_schedule("inference", 2, 3)
    program = emit(b.pipeline(), schedule)
    verify_program(program, schedule)
    assert lines(program) == [
        "zeros 0: -> 1",
        "F0 0: 0 -> 2",
        "send 0: 2 -> 3",
        "free 2",
        "F0 1: 0 -> 2",
        "send 1: 2 -> 4",
        "free 2",
        "F1 0: 3 1 -> 1",
        "free 3",
        "F0 2: 0 -> 2",
        "send 2: 2 -> 3",
        "free 2",
        "F1 1: 4 1 -> 1",
        "free 4",
        "F1 2: 3 1 -> 1",
        "send 0: 1 -> 2",
        "free 3 1",
        "add 0: 2 0 -> 0",
        "free 2",
    ]


def test_all_that_crosses_one_boundary_goes_in_one_send():
    b = Builder()
    x = b.argument("x", 0)
    made = [b.buffer(name, 0) for name in "abc"]
    b.task("F0", 0, 0, F, [x], made)
    copies = [b.on(made[0], 1), b.on(made[1], 1), b.on(made[2], 2)]
    out = b.buffer("out", 1)
    b.task("F1", 1, 1, F, copies[:2], [out], donated=copies[:1])
    last = b.buffer("last", 2)
    b.task("F2", 2, 2, F, [copies[2], b.on(out, 2)], [last])
    result = b.buffer("result", 2, repeats=False)
    b.task("stack", 2, 2, AFTER, [last], [result])
    b.outputs.append(result)
    schedule = make_schedule("inference", 3, 1)
    program = emit(b.pipeline(), schedule)
    verify_program(program, schedule)
    assert lines(program) == [
        "F0 0: 0 -> 1 2 3",
        "send 0: 1 2 -> 4 5",
        "send 0: 3 -> 6",
        "free 0 1 2 3",
        "F1 0: 4 5 -> 4",
        "send 0: 4 -> 7",
        "free 5 4",
        "F2 0: 6 7 -> 8",
        "free 6 7",
        "stack 0: 8 -> 6",
        "free 8",
    ]


def test_what_only_the_end_of_the_step_needs_is_sent_then():
    b = Builder()
    x, rate = b.argument("x", 0), b.argument("rate", 0)
    y = b.buffer("y", 0)
    b.task("F0", 0, 0, F, [x], [y])
    z = b.buffer("z", 1)
    b.task("F1", 1, 1, F, [b.on(y, 1)], [z])
    result = b.buffer("result", 1, repeats=False)
    b.task("stack", 1, 1, AFTER, [z, b.on(rate, 1)], [result])
    b.outputs.append(result)
    schedule = make_schedule("inference", 2, 2)
    program = emit(b.pipeline(), schedule)
    verify_program(program, schedule)
    kinds = [type(step).__name__ for step in program.instructions]
    assert kinds[-5:] == ["Free", "Send", "Free", "Run", "Free"]
    assert program.pipeline.transfers[program.instructions[-4].transfers[0]].source == rate


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 8), st.integers(1, 3), st.integers(0, 10**9)
)
def test_random_pipelines(name, p, m, v, seed):
    v = 2 if name in V_SHAPED else v if name in ("interleaved", "inference") else 1
    rng = random.Random(seed)
    schedule = make_schedule(name, p, m, v)
    pipeline = random_pipeline(schedule, rng)
    task_s = [rng.uniform(0.1, 2.0) for _ in pipeline.tasks]
    transfer_s = [rng.uniform(0.0, 0.5) for _ in pipeline.transfers]
    program = emit(pipeline, schedule)
    verify_program(program, schedule)
    simulation = simulate(program, task_s, transfer_s)
    # Everything waits for what it reads, whichever slot that is in.
    ready = dict.fromkeys(program.input_slots, 0.0)
    for at, step in enumerate(program.instructions):
        if isinstance(step, Free):
            continue
        sources, targets = (step.inputs, step.outputs) if isinstance(step, Run) else (step.sources, step.targets)
        assert simulation.starts_s[at] >= max((ready[slot] for slot in sources), default=0.0)
        ready |= dict.fromkeys(targets, simulation.ends_s[at])
    assert all(a <= b for a, b in zip(simulation.peak_in_flight, schedule.in_flight, strict=False))


def test_random_pipelines_have_everything():
    """That the examples above are worth something: each feature occurs in some of a few dozen."""
    seen = set()
    for seed in range(60):
        schedule = make_schedule("zb-h1" if seed % 2 else "1f1b", 4, 3)
        pipeline = random_pipeline(schedule, random.Random(seed))
        kinds = {(task.kind, task.stage) for task in pipeline.tasks}
        seen |= {"no B"} if (F, 0) in kinds and (B, 0) not in kinds else set()
        seen |= {"no W"} if schedule.splits_backward and any((W, s) not in kinds for s in range(4)) else set()
        seen |= {"two"} if any(task.index == 1 and task.kind is F for task in pipeline.tasks) else set()
        far = [(pipeline.buffers[t.source].mesh, pipeline.buffers[t.target].mesh) for t in pipeline.transfers]
        seen |= {"skip"} if any(b > a + 1 for a, b in far) else set()
        seen |= {"back"} if any(b < a - 1 for a, b in far) else set()
        read = {b for task in pipeline.tasks for b in task.inputs}
        seen |= (
            {"wasted"}
            if any(b.name.startswith("wasted") and i not in read for i, b in enumerate(pipeline.buffers))
            else set()
        )
    assert seen == {"no B", "no W", "two", "skip", "back", "wasted"}


def test_a_pipeline_for_another_schedule():
    split, merged = make_schedule("zb-h1", 2, 2), make_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match=r"the kinds \['F', 'B'\], got W on stage"):
        emit(chain(split), merged)
    with pytest.raises(ScheduleError, match="mesh 0, which holds stage 2, got mesh 2"):
        emit(chain(make_schedule("1f1b", 3, 2)), make_schedule("interleaved", 2, 2, 2))


def test_a_value_that_the_list_has_too_late():
    """A value of the second stage that the first wants in its forward pass can never be there."""
    b = Builder()
    x, y, z = b.argument("x", 0), b.buffer("y", 0), b.buffer("z", 1)
    b.task("F0", 0, 0, F, [x, b.on(z, 0)], [y])
    b.task("F1", 1, 1, F, [b.on(y, 1)], [z])
    with pytest.raises(
        ScheduleError, match="mesh 0 waits in F0 of micro-batch 0 for F1 of micro-batch 0; mesh 1 waits"
    ):
        emit(b.pipeline(), make_schedule("inference", 2, 2))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b.task("again", 0, 0, F, [b.inputs[0]], [1]), "both F0 and again make buffer 1"),
        (lambda b: b.task("far", 1, 1, F, [1], []), "task far on mesh 1 uses buffer 1"),
        (lambda b: b.task("twice", 0, 0, F, [0], [], donated=[0]), "twice takes buffer 0 .* over twice"),
        (lambda b: b.task("nothing", 0, 0, F, [b.buffer("n", 0)], []), "0 tasks, transfers or arguments make buffer 3"),
        (lambda b: b.outputs.append(1), "buffer 1 .* repeats and is an argument or a result"),
        (lambda b: b.task("early", 0, 0, F, [2], []), "'early'.* read buffer 2 .* before all micro-batches are in it"),
    ],
)
def test_a_pipeline_that_is_not_well_formed(damage, message):
    b = Builder()
    x, y, total = b.argument("x", 0), b.buffer("y", 0), b.argument("total", 0)
    b.task("F0", 0, 0, F, [x], [y])
    b.task("add", 0, 0, F, [y, total], [total], donated=[total], index=1)
    b.outputs.append(total)
    emit(b.pipeline(), make_schedule("inference", 1, 2))
    damage(b)
    with pytest.raises(AssertionError, match=message):
        emit(b.pipeline(), make_schedule("inference", 1, 2))


class TestVerifier:
    """Each promise broken by hand in a program that keeps them all."""

    @pytest.fixture(params=["1f1b", "zb-h1", "interleaved"])
    def made(self, request):
        return emitted(request.param, 2, 4, 2 if request.param == "interleaved" else 1)

    def find(self, program, condition):
        return next(at for at, step in enumerate(program.instructions) if condition(step))

    def check(self, made, instructions, message):
        program, schedule = made
        with pytest.raises(ScheduleError, match=message):
            verify_program(dataclasses.replace(program, instructions=tuple(instructions)), schedule)

    def test_a_dropped_run(self, made):
        program = made[0]
        for at, step in enumerate(program.instructions):
            if isinstance(step, Run):
                self.check(
                    made,
                    program.instructions[:at] + program.instructions[at + 1 :],
                    "runs of the program: .* 1 missing",
                )

    def test_a_dropped_send(self, made):
        program = made[0]
        at = self.find(program, lambda step: isinstance(step, Send))
        self.check(
            made, program.instructions[:at] + program.instructions[at + 1 :], "transfers of the program: .* 1 missing"
        )

    def test_a_run_twice(self, made):
        program = made[0]
        at = self.find(program, lambda step: isinstance(step, Run))
        self.check(made, [program.instructions[at], *program.instructions], "number 0 for micro-batch 0 2 times")

    def test_every_dropped_free(self, made):
        program = made[0]
        for at, step in enumerate(program.instructions):
            if isinstance(step, Free):
                left = program.instructions[:at] + program.instructions[at + 1 :]
                # A slot that is never used again is left over, any other is in the way of its next array.
                self.check(made, left, r"empty, for|nothing but the results")

    def test_a_leaked_slot(self, made):
        program = made[0]
        assert isinstance(program.instructions[-1], Free)
        self.check(made, program.instructions[:-1], "end of the program: expected nothing but the results, got y")

    def test_a_double_free(self, made):
        program = made[0]
        at = self.find(program, lambda step: isinstance(step, Free))
        self.check(
            made,
            [*program.instructions[: at + 1], program.instructions[at], *program.instructions[at + 1 :]],
            "to free, got nothing",
        )

    def test_an_early_free(self, made):
        program = made[0]
        instructions = list(program.instructions)
        first = self.find(program, lambda step: isinstance(step, Send))
        source = instructions[first].sources[0]
        free = next(at for at in range(first, len(instructions)) if isinstance(instructions[at], Free))
        assert source in instructions[free].slots
        instructions[free] = Free(tuple(slot for slot in instructions[free].slots if slot != source))
        self.check(
            made, [*instructions[:first], Free((source,)), *instructions[first:]], "Send: expected y0 .* got nothing"
        )

    def test_a_read_of_what_a_task_took_over(self, made):
        program = made[0]
        tasks = program.pipeline.tasks
        update = self.find(program, lambda step: isinstance(step, Run) and tasks[step.task].name == "update0")
        forward = self.find(program, lambda step: isinstance(step, Run) and tasks[step.task].name == "F0")
        assert program.instructions[update].inputs[0] in program.instructions[forward].inputs
        instructions = list(program.instructions)
        moved = instructions.pop(update)
        self.check(made, [*instructions[:forward], moved, *instructions[forward:]], "Run of update0: expected dw0")

    def test_neighbours_swapped(self, made):
        """Of all swaps of neighbours, exactly those pass that the verifier's promises leave open."""
        program, schedule = made
        tasks = program.pipeline.tasks
        refused = allowed = 0
        for at in range(len(program.instructions) - 1):
            first, second = program.instructions[at : at + 2]
            swapped = (*program.instructions[:at], second, first, *program.instructions[at + 2 :])
            touched = [
                {*s.inputs, *s.outputs}
                if isinstance(s, Run)
                else {*s.sources, *s.targets}
                if isinstance(s, Send)
                else {*s.slots}
                for s in (first, second)
            ]
            repeat = [isinstance(s, Run) and tasks[s.task].kind.repeats and tasks[s.task].mesh for s in (first, second)]
            same_list = all(mesh is not False for mesh in repeat) and repeat[0] == repeat[1]
            if same_list:
                self.check(made, swapped, "order on mesh|in slot|empty, for")
                refused += 1
            elif not touched[0] & touched[1]:
                verify_program(dataclasses.replace(program, instructions=swapped), schedule)
                allowed += 1
            elif isinstance(first, Send) or isinstance(second, Send):
                self.check(made, swapped, "in slot|to free|empty, for")
                refused += 1
        assert refused
        assert allowed

    def test_the_wrong_array(self, made):
        program = made[0]
        at = self.find(program, lambda step: isinstance(step, Run) and len(step.inputs) > 1)
        run = program.instructions[at]
        turned = dataclasses.replace(run, inputs=run.inputs[::-1])
        self.check(
            made, [*program.instructions[:at], turned, *program.instructions[at + 1 :]], "expected .* in slot .*, got"
        )

    def test_micro_batches_exchanged(self, made):
        program = made[0]
        change = {0: 1, 1: 0}
        instructions = [
            dataclasses.replace(step, micro_batch=change.get(step.micro_batch, step.micro_batch))
            if isinstance(step, Run) and program.pipeline.tasks[step.task].name == "F1"
            else step
            for step in program.instructions
        ]
        self.check(made, instructions, "y0@1 of micro-batch 1 in slot .*, got y0@1 of micro-batch 0")

    def test_an_accumulator_read_too_early(self):
        b = Builder()
        total, out = b.argument("total", 0), b.buffer("out", 0, repeats=False)
        b.task("add", 0, 0, F, [total], [total], donated=[total])
        b.task("read", 0, 0, AFTER, [total], [out])
        b.outputs += [total, out]
        schedule = make_schedule("inference", 1, 2)
        program = emit(b.pipeline(), schedule)
        verify_program(program, schedule)
        first, second, read = program.instructions
        with pytest.raises(
            ScheduleError, match="total of micro-batch 0 in slot 0, got total of micro-batch 0 after 1 upd"
        ):
            verify_program(dataclasses.replace(program, instructions=(first, read, second)), schedule)

    def test_results_in_other_slots(self, made):
        program, schedule = made
        with pytest.raises(ScheduleError, match="result new_w0: expected it in slot"):
            verify_program(dataclasses.replace(program, output_slots=program.output_slots[::-1]), schedule)

    def test_another_order_than_the_schedule_has(self):
        program = emitted("1f1b", 2, 4)[0]
        with pytest.raises(
            ScheduleError, match="order on mesh 0: expected F0 of micro-batch 2, as schedule gpipe has it"
        ):
            verify_program(program, make_schedule("gpipe", 2, 4))

    def test_more_in_flight_than_promised(self):
        program, schedule = emitted("gpipe", 2, 4)
        with pytest.raises(ScheduleError, match="mesh 1 of the program: expected at most 3 in flight, got 4"):
            verify_program(program, dataclasses.replace(schedule, in_flight=(4, 3)))

    def test_too_few_slots(self):
        program, schedule = emitted("gpipe", 2, 4)
        with pytest.raises(ScheduleError, match=f"numbers below {program.num_slots - 1}"):
            verify_program(dataclasses.replace(program, num_slots=program.num_slots - 1), schedule)

    def test_a_slot_for_two_meshes(self):
        """Slot 2 is free after mesh 0 has split the batch; its next array is taken to mesh 1's zeros."""
        program, schedule = emitted("1f1b", 2, 2)
        assert lines(program)[1:4] == ["free 2", "zeros0 0: -> 2", "zeros1 0: -> 5"]
        change = {2: 5, 5: 2}

        def moved(slots):
            return tuple(change.get(slot, slot) for slot in slots)

        instructions = [
            dataclasses.replace(step, inputs=moved(step.inputs), outputs=moved(step.outputs))
            if isinstance(step, Run)
            else dataclasses.replace(step, sources=moved(step.sources), targets=moved(step.targets))
            if isinstance(step, Send)
            else Free(moved(step.slots))
            for step in program.instructions[2:]
        ]
        damaged = dataclasses.replace(
            program,
            instructions=(*program.instructions[:2], *instructions),
            output_slots=moved(program.output_slots),
        )
        with pytest.raises(
            ScheduleError, match=r"slot 2 of the program: expected arrays of one mesh, got meshes \[0, 1\]"
        ):
            verify_program(damaged, schedule)


def test_tasks_of_a_stage_stand_beside_its_runs_where_that_holds_up_nobody():
    schedule = make_schedule("interleaved", 2, 4, 2)
    pipeline = chain(schedule)
    order, _ = order_of_runs(dataflow(pipeline, 4), schedule)
    first, second = (
        [pipeline.tasks[n].name + f" {i}" for n, i in order if pipeline.tasks[n].mesh == mesh] for mesh in (0, 1)
    )
    # Mesh 0 begins at once, and hands on nothing once the last backward pass of its second stage is done.
    assert first[:5] == ["split 0", "zeros0 0", "F0 0", "F0 1", "zeros2 0"]
    assert first[-5:] == ["B2 3", "update2 0", "B0 2", "B0 3", "update0 0"]
    # Mesh 1 waits for mesh 0 at its start, and mesh 0 for its last backward passes.
    assert second[:3] == ["zeros1 0", "zeros3 0", "F1 0"]
    assert second[-4:] == ["B1 3", "update1 0", "update3 0", "stack 0"]


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
    v = 2 if name in V_SHAPED else v if name in ("interleaved", "inference") else 1
    schedule = make_schedule(name, p, m, v)
    pipeline = random_pipeline(schedule, random.Random(seed))
    chains = joinable(pipeline, schedule)
    program = emit(pipeline, schedule, joined=chains)
    verify_program(program, schedule)
    assert [joined.parts for joined in program.joined] == list(chains)
    assert results(program) == results(emit(pipeline, schedule))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["1f1b", "eager-1f1b", "interleaved", "zb-2p", "zb-v", "dualpipev"]),
    st.integers(2, 4),
    st.integers(4, 9),
    st.integers(0, 10**9),
)
def test_neighbours_of_random_pipelines_make_the_same_as_one_program(name, p, m, seed):
    schedule = make_schedule(name, p, m, 2 if name in ("interleaved", *V_SHAPED) else 1)
    pipeline = random_pipeline(schedule, random.Random(seed))
    found = pairs(pipeline, schedule)
    program = emit(pipeline, schedule, joined=[*joinable(pipeline, schedule), *found])
    verify_program(program, schedule)
    left_apart = set(found) - {joined.parts for joined in program.joined}
    assert not left_apart or name != "dualpipev"
    assert {tuple(n for n, _ in runs) for runs in left_apart}.isdisjoint(
        tuple(n for n, _ in joined.parts) for joined in program.joined
    )
    assert results(program) == results(emit(pipeline, schedule))
    num_works = {work_of(joined, pipeline) for joined in program.joined}
    assert len(num_works) <= 2 * len({tuple(n for n, _ in joined.parts) for joined in program.joined})


def test_neighbours_of_dualpipev_are_those_of_its_picture():
    schedule = make_schedule("dualpipev", 2, 4, 2)
    pipeline = chain(schedule)
    names = [[f"{pipeline.tasks[n].name} {i}" for n, i in runs] for runs in pairs(pipeline, schedule)]
    assert names == [
        ["F0 3", "B3 1", "W3 1"],
        ["F3 2", "B0 0", "W0 0"],
        ["F3 3", "B0 1", "W0 1"],
        ["F1 2", "B2 0", "W2 0"],
        ["F2 2", "B1 0", "W1 0"],
        ["F1 3", "B2 1", "W2 1"],
        ["F2 3", "B1 1", "W1 1"],
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 20), (8, 20)])
@pytest.mark.parametrize("pair_s", [6.0, 9.0])
def test_the_bubble_of_dualpipev_in_pairs_is_at_most_the_published_one(p, m, pair_s):
    """(p-1)(P + B - 3W) of pairs that take P, B with the weight gradient in it: DeepSeek-V3, table 2, with a V."""
    schedule = make_schedule("dualpipev", p, m, 2)
    pipeline = chain(schedule)
    found = pairs(pipeline, schedule)
    program = emit(pipeline, schedule, joined=found)
    task_s = [3.0 if task.kind.repeats else 0.0 for task in pipeline.tasks] + [pair_s for _ in found]
    simulation = simulate(program, task_s, [0.0] * len(pipeline.transfers))
    bubbles_s = []
    for mesh in range(p):
        on = [
            at
            for at, x in enumerate(program.instructions)
            if any(pipeline.tasks[n].mesh == mesh for n, _ in runs_of(x))
        ]
        busy_s = [(simulation.starts_s[at], simulation.ends_s[at]) for at in on]
        bubbles_s.append(busy_s[-1][1] - busy_s[0][0] - sum(end_s - start_s for start_s, end_s in busy_s))
    published_s = (p - 1) * (pair_s + 6.0 - 9.0)
    assert max(bubbles_s) <= published_s
    assert pair_s == 6.0 or max(bubbles_s) == published_s


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
