"""From lowered stages to tasks, buffers and transfers: a step of two layers made by hand, all of it literal."""

import dataclasses

import pytest
from msgspec.structs import replace

from autopar.ir.graph import OpKind
from autopar.passes.stage_graph import split_stages
from autopar.runtime.emit import emit
from autopar.runtime.program import TaskKind
from autopar.runtime.simulator import simulate
from autopar.runtime.standard_schedules import make_schedule
from autopar.runtime.verify import verify_program
from autopar.search.inter_op.tasks import assemble_pipeline
from tests.hand_made import ON_B, lowered, two_layers, two_stages


def program(meshes=(0, 1), graph=None, rows_split=()):
    stages = [lowered(stage, mesh, rows_split) for stage, mesh in zip(two_stages(graph), meshes, strict=True)]
    return assemble_pipeline(stages)


def value_names(pipeline, buffers):
    return " ".join(pipeline.buffers[b].name.split()[0] for b in buffers)


def rows(pipeline):
    """(name, what it takes, what it makes, what it takes over) of each task."""
    return [
        (
            task.name,
            value_names(pipeline, task.inputs),
            value_names(pipeline, task.outputs),
            value_names(pipeline, [task.inputs[i] for i in task.donated]),
        )
        for task in pipeline.tasks
    ]


TASKS = [
    ("before 0 of stage 0", "batch", "G_a x", ""),
    ("F of stage 0", "w_a x", "h", ""),
    ("B of stage 0", "dh x G_a", "G_a", "G_a"),
    ("after 0 of stage 0", "G_a", "n_a", ""),
    ("after 2 of stage 0", "w_a G_a norm", "w_a'", "w_a"),
    ("before 0 of stage 1", "", "G_b", ""),
    ("F of stage 1", "w_b h", "y", ""),
    ("B of stage 1", "w_b y h G_b", "dh G_b", "G_b"),
    ("after 1 of stage 1", "n_a G_b w_b", "norm w_b'", "w_b"),
]


@pytest.mark.parametrize("meshes", [(0, 1), (0, 0)])
def test_tasks(meshes):
    made = program(meshes)
    assert rows(made.pipeline) == TASKS
    assert [task.mesh for task in made.pipeline.tasks] == [meshes[task.stage] for task in made.pipeline.tasks]
    assert [task.index for task in made.pipeline.tasks if task.kind is TaskKind.AFTER] == [0, 2, 1]


def test_transfers():
    pipeline = program().pipeline
    found = [
        (value_names(pipeline, [t.source]), pipeline.buffers[t.source].mesh, pipeline.buffers[t.target].mesh, t.nbytes)
        for t in pipeline.transfers
    ]
    assert found == [("h", 0, 1, 32), ("n_a", 0, 1, 4), ("dh", 1, 0, 32), ("norm", 1, 0, 4)]


def test_stages_on_the_same_devices_share_what_they_hand_on():
    apart, together = program((0, 1)).pipeline, program((0, 0)).pipeline
    assert together.transfers == ()
    assert len(together.buffers) == len(apart.buffers) - len(apart.transfers)
    (h,) = [b for b, buffer in enumerate(together.buffers) if buffer.name.startswith("h ")]
    assert [task.name for task in together.tasks if h in task.outputs] == ["F of stage 0"]
    assert [task.name for task in together.tasks if h in task.inputs] == ["F of stage 1", "B of stage 1"]


def test_buffers_of_micro_batches():
    pipeline = program().pipeline
    repeating = {b.name.split()[0] for b in pipeline.buffers if b.repeats}
    assert repeating == {"x", "h", "y", "dh"}
    assert {b.name.split()[0]: b.nbytes for b in pipeline.buffers}["batch"] == 8 * 4 * 4


def test_arguments_and_results_are_those_of_the_step():
    made = program()
    assert value_names(made.pipeline, made.pipeline.inputs) == "w_a batch w_b"
    assert made.arguments == (0, 2, 1)
    assert value_names(made.pipeline, made.pipeline.outputs) == "w_a' w_b' norm"
    assert made.results == (0, 1, 2)


def test_the_batch_that_the_caller_holds_is_there_beside_its_micro_batches():
    pipeline = program().pipeline
    assert value_names(pipeline, pipeline.kept) == "batch"  # the parameters are donated
    handed_over = dataclasses.replace(pipeline, kept=())
    kept_bytes, freed_bytes = (
        simulate(emit(of, make_schedule("gpipe", 2, 4)), [1.0] * 9, [0.0] * 4).peak_bytes
        for of in (pipeline, handed_over)
    )
    assert freed_bytes == (384, 416)  # stage 0 before the first micro-batch: w_a, the batch, four of x, G_a
    assert kept_bytes == (416, 416)  # in the loop: h beside all of these


def test_state_that_another_stage_reads_is_not_taken_over():
    graph = two_layers()
    (w_a,) = [v.id for v in graph.values if v.name == "w_a"]
    ops = tuple(replace(op, inputs=(*op.inputs, w_a)) if op.primitive == "layer_b" else op for op in graph.block.ops)
    tied = dataclasses.replace(graph, block=replace(graph.block, ops=ops))
    for meshes in ((0, 1), (0, 0)):
        taken = [row[3] for row in rows(program(meshes, tied).pipeline)]
        assert "w_b" in taken
        assert "w_a" not in taken


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_copy_of_a_parameter_for_all_readers_is_made_once_before_the_first_micro_batch(num_microbatches):
    graph = dataclasses.replace(two_layers(), num_microbatches=num_microbatches)
    pipeline = program(graph=graph, rows_split=("w_b",)).pipeline
    (gathered,) = [b for b, buffer in enumerate(pipeline.buffers) if buffer.name.startswith("w_b P(None, None)")]
    assert not pipeline.buffers[gathered].repeats
    assert [t.name for t in pipeline.tasks if gathered in t.outputs] == ["before 0 of stage 1"]
    schedule = make_schedule("1f1b", 2, num_microbatches)
    verify_program(emit(pipeline, schedule), schedule)


def test_a_result_that_arrives_late_is_laid_out_when_it_is_there():
    # w_a is updated on the second stage and goes home, where it lies in rows: no task waits for one that waits for it.
    graph = two_layers()
    (update,) = [op for op in graph.block.ops if graph.values[op.outputs[0]].name == "w_a'"]
    (square,) = [op for op in graph.block.ops if op.primitive == "square"]

    stage_of = {op.id: int(graph.values[op.outputs[0]].name in ON_B or op is update) for op in graph.block.ops}
    assert stage_of[square.id] == 0
    stages = split_stages(graph, stage_of, {0: 0, 1: 1}, 2)
    pipeline = assemble_pipeline(
        [lowered(stage, number, ("w_a",) if number == 0 else ()) for number, stage in enumerate(stages)]
    ).pipeline
    after = [(name, reads, makes) for name, reads, makes, _ in rows(pipeline) if name.startswith("after")]
    assert after == [
        ("after 0 of stage 0", "G_a", "n_a"),
        ("after 2 of stage 0", "w_a'", "w_a'"),
        ("after 1 of stage 1", "n_a G_b w_b w_a G_a", "norm w_b' w_a'"),
    ]
    schedule = make_schedule("1f1b", 2, 4)
    verify_program(emit(pipeline, schedule), schedule)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_programs_are_proved(name, num_microbatches):
    graph = dataclasses.replace(two_layers(), num_microbatches=num_microbatches)
    schedule = make_schedule(name, 2, num_microbatches)
    verify_program(emit(program(graph=graph).pipeline, schedule), schedule)


def test_a_stage_alone_runs_forward_and_backward_passes_as_one_task():
    graph = two_layers()

    (only,) = split_stages(graph, dict.fromkeys((op.id for op in graph.block.ops), 0), {0: 0, 1: 0}, 1)
    assert not [op for op in only.graph.block.ops if op.kind is OpKind.SEND]
    pipeline = assemble_pipeline([lowered(only, 0)]).pipeline
    assert rows(pipeline) == [
        ("before 0 of stage 0", "batch", "G_b G_a x", ""),
        ("F of stage 0", "w_a x w_b G_b G_a", "G_b G_a", "G_b G_a"),
        ("after 0 of stage 0", "G_a G_b w_b w_a", "norm w_b' w_a'", "w_b w_a"),
    ]
