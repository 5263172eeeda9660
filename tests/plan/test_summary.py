"""A plan in short: the sentence, the parts of the step, what is alike as one row, and one screen of text."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.common.paths import parts_of
from autopar.plan import render, render_summary, summary
from autopar.plan.plan import decode, encode
from autopar.plan.schema import CandidateRecord
from tests.plan.records import module, pipeline, predicted, program, value
from tests.small_steps import shapes, slow_cluster, transformer


def test_the_sentence_of_a_program():
    assert summary.sentence(program()) == "One program on 8 devices: the matrices split over 8."
    two_axes = program(axis_sizes=(2, 4), axis_roles=(("data", "tensor"),))
    assert summary.sentence(two_axes) == (
        "One program on 8 devices: the batch split over 2, the matrices split over 4."
    )
    idle = program(axis_sizes=(2, 4), axis_roles=(("data", "y"),))
    assert summary.sentence(idle) == (
        "One program on 8 devices: the batch split over 2, groups of 4 devices do the same work."
    )
    assert summary.sentence(program(axis_sizes=(1,), axis_roles=(("x",),))) == "One program on one device."


def test_the_sentence_says_where_a_part_of_the_matrices_is_split_alone():
    kept = (
        value("state/embedding", split=True),
        value("state/up"),
        value("state/down"),
        value("state/head", split=True),
    )
    assert summary.sentence(program(arguments=kept)) == (
        "One program on 8 devices: a part of the matrices split over 8 (56% of the state a device)."
    )


def test_the_sentence_of_stages_names_those_that_differ():
    assert summary.sentence(pipeline()) == (
        "2 stages of 4 devices, 8 micro-batches in schedule 1f1b; inside each, the batch and the state split over 4."
    )
    roles = (("data",), ("data",), ("tensor",), ("data",))
    assert summary.sentence(pipeline(stages=4, axis_roles=roles)) == (
        "4 stages of 4 devices, 8 micro-batches in schedule 1f1b; in stages 0-1, 3, the batch split over 4; in stage "
        "2, the matrices split over 4."
    )
    roles = (("data",), ("tensor",), ("expert",), ("sequence",))
    assert summary.sentence(pipeline(stages=4, axis_roles=roles)).endswith("; 2 other ways in the rest.")
    assert summary.sentence(pipeline(stages=3, axis_roles=roles[:3])).endswith("; 1 other way in the rest.")


def test_the_sentence_on_the_screen_ends():
    """Where two unlike stages are too many for its lines, it describes one."""
    roles = (("data",), ("tensor",), ("expert",))
    named = dataclasses.replace(pipeline(stages=3, axis_roles=roles), step="a_step_with_a_name_" * 7)
    shown = str(autopar.Plan(named)).partition("\nStep ")[0]
    assert shown.replace("\n", " ").endswith("; in stage 0, the batch split over 4; 2 other ways in the rest.")


def test_notes_on_the_screen_are_whole_where_there_is_room():
    notes = ("BatchNorm_0 at a line of a file: " * 5, "another", "and a third")
    text = str(autopar.Plan(dataclasses.replace(program(), notes=notes))).replace("\n", " ")
    assert f"note: {notes[0].strip()} note: another and 1 more note: plan.table()" in text


def test_the_parts_of_a_step_add_up_to_it():
    parts = {share.name: share.seconds for share in summary.shares(program())}
    assert parts == {
        "arithmetic at the devices' peak rate": 2.0,
        "matrix products below the peak rate": 1.0,
        "operations bound by memory": 2.0,
        "exposed collectives": 3.0,
        "waiting": 2.0,
    }
    parts = {share.name: share.seconds for share in summary.shares(pipeline())}
    assert parts["bubble of the pipeline"] == 2.0
    assert sum(parts.values()) == 10.0


def test_arithmetic_at_the_peak_rate_is_that_of_each_type():
    record = program()
    record = dataclasses.replace(record, predicted=dataclasses.replace(record.predicted, peak_rate_time_s=1.5))
    parts = {share.name: share.seconds for share in summary.shares(record)}
    assert parts["arithmetic at the devices' peak rate"] == 1.5
    assert parts["matrix products below the peak rate"] == 1.5


def test_products_of_eight_bits_count_at_the_peak_rate_of_eight_bits():
    n = 4096

    def step(state, batch):
        narrow = batch["x"].astype(jnp.float8_e4m3fn)
        product = jax.lax.dot_general(narrow, narrow, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)
        return state, product @ batch["x"]

    batch = {"x": jax.ShapeDtypeStruct((n, n), jnp.bfloat16)}
    plan = autopar.plan(step, {}, batch, cluster="dgx-h100:1", cache_dir=None)
    flops, cast = 2 * n**3, n**2  # a cast counts as the first of the largest products
    assert plan.predicted.peak_rate_time_s == pytest.approx((flops + cast) / 1979e12 + flops / 989e12)


def test_layers_and_moments_are_one_row():
    groups = summary.state_groups(program(layers=3))
    assert [(g.name, g.count, g.device_bytes) for g in groups] == [
        ("batch['x']", 1, 4000),
        ("state/*/layer*/mlp/kernel", 6, 3000),
    ]


def test_a_row_is_named_after_its_parameters():
    moments = ("state['opt'][0].mu['dec'][0]['up']['w']", "state['opt'][0].mu['enc'][0]['up']['w']")
    dec, enc = "state['params']['dec'][0]['up']['w']", "state['params']['enc'][0]['up']['w']"
    named = [
        summary.state_groups(program(arguments=tuple(map(value, paths))))[0].name
        for paths in ((moments[0], dec), (*moments, dec, enc))
    ]
    assert named == ["state['params']['dec'][*]['up']['w']", "state/params/*/*/up/w"]


def test_the_screen_says_the_mesh_and_how_a_layout_is_read():
    names, roles = (("data", "model"),), (("data", "tensor"),)
    two_axes = str(autopar.Plan(program(axis_sizes=(2, 4), axis_names=names, axis_roles=roles)))
    assert (
        'Mesh data=2 x model=4. Layout P("data", None): dimension 0 split over axis data, dimension 1 not split.'
    ) in " ".join(two_axes.split())
    assert '\nLayout P("x", None): dimension 0 split' in str(autopar.Plan(pipeline()))
    assert "Mesh" not in str(autopar.Plan(program(axis_sizes=(1,), axis_roles=(("x",),))))


def test_the_screen_always_has_the_batch():
    state = tuple(value(f"state['{'abcdefghijkl'[i]}'][{'abcdefghijkl'[i]!r}]") for i in range(10))
    batch = dataclasses.replace(value("batch['x']", kind="batch"), shape=(5, 2), nbytes=40)
    text = str(autopar.Plan(program(arguments=(*state, batch))))
    assert "batch/x " in text
    assert "and 4 more groups of arguments, 16 kB" in text


def test_arrays_with_another_layout_have_a_row_of_their_own():
    record = program(arguments=(value("a['w']"), value("b['w']", split=True), value("c['w']")))
    assert [(g.name, g.count, g.layout) for g in summary.state_groups(record)] == [
        ("a['w']", 1, "P(None, None)"),
        ("c['w']", 1, "P(None, None)"),
        ("b['w']", 1, 'P(None, "x")'),
    ]


def test_a_device_holds_the_arguments_of_its_own_stage_only():
    groups = summary.state_groups(pipeline(layers=4, stages=2))
    assert [(g.count, g.device_bytes) for g in groups] == [(8, 4000), (1, 4000)]
    assert [g.count_text for g in groups] == ["4 of 8", "1"]
    assert "4 of 8  5x200 float32" in str(autopar.Plan(pipeline(layers=4, stages=2)))


def test_stages_that_are_alike_are_one_row():
    record = pipeline(layers=96, stages=12)
    (group,) = summary.stage_groups(record)
    assert (group.first, group.last, group.layers, group.mesh.num_devices, group.in_flight) == (0, 11, 8, 4, 12)
    roles = (*record.axis_roles[:-1], ("tensor",))
    assert [(g.first, g.last) for g in summary.stage_groups(dataclasses.replace(record, axis_roles=roles))] == [
        (0, 10),
        (11, 11),
    ]


def test_the_mesh_of_the_plan_has_its_time():
    trials = [
        CandidateRecord(source="", text="", axis_sizes=sizes, step_time_s=s, why=why, name=name)
        for sizes, s, why, name in (
            ((8,), 12.0, "slower", ""),
            ((2, 4), None, "not tried: slow", ""),
            ((8,), 10.0, "", "ZeRO-1"),
        )
    ]
    table = render.table(program(candidates=tuple(trials))).splitlines()
    assert [line for line in table if line.startswith("tried")] == [
        "tried on mesh 8: 10 s (ZeRO-1, the plan), 12 s",
        "tried on mesh 2x4: not tried: slow",
    ]


def test_a_plan_has_the_name_of_its_recipe():
    record = pipeline(recipe="combine(pp=2, dp=4)")
    assert "Planned under combine(pp=2, dp=4). Neither data" in str(autopar.Plan(record))
    assert "recipe: combine(pp=2, dp=4)" in render.table(record)
    assert decode(encode(record), "plan.json") == record


def assert_is_one_screen(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= render_summary.LINES
    assert max(map(len, lines)) <= render_summary.COLUMNS


@pytest.mark.parametrize("record", [program(), program(layers=96), pipeline(), pipeline(layers=96, stages=12)])
def test_a_plan_fits_a_screen(record):
    assert_is_one_screen(str(autopar.Plan(record)))


def test_the_longest_plan_fits_a_screen():
    """Every section has more than is shown, names are long, and no two stages are alike."""
    record = pipeline(layers=96, stages=12)
    assert record.pipeline is not None
    stages = tuple(
        dataclasses.replace(s, axis_sizes=(2, 2) if i % 2 else (4,)) for i, s in enumerate(record.pipeline.stages)
    )
    names = [f"{'outer' * 5}/{'abcdefghijkl'[i] * 60}" for i in range(12)]
    modules = tuple(module(name, compute_s=1.0, send_s=1.0 + i) for i, name in enumerate(names))
    crowded = dataclasses.replace(
        record,
        pipeline=dataclasses.replace(record.pipeline, stages=stages),
        axis_roles=tuple(("data",) * len(s.axis_sizes) for s in stages),
        arguments=tuple(value(f"state['{name}']") for name in names),
        modules=modules,
        predicted=predicted(modules, peak_bytes=record.predicted.peak_bytes, memory=record.predicted.memory),
        notes=("a note that is longer than a screen " * 90,) * 9,
    )
    text = str(autopar.Plan(crowded))
    assert_is_one_screen(text)
    assert "and 7 more groups of stages" in text
    assert "and 5 more groups of arguments" in text
    assert "and 7 more notes: plan.table()" in text
    assert text.count(" ... (whole: plan.table())") == 2


def test_a_searched_plan_says_what_it_chose_and_what_it_loses():
    case = transformer()
    step = autopar.parallelize(case.step, cluster=slow_cluster(4), cache_dir=None)
    plan = step.plan(case.shapes, shapes(case.batch))
    text = str(plan)
    assert_is_one_screen(text)
    assert "Plan of transformer_step on flat-4: One program on 4 devices: " in text
    assert "of the 14.4 GB available" in text
    assert "operations bound by memory" in text
    assert plan.predicted.product_time_s is not None
    assert 0 < plan.predicted.product_time_s < plan.predicted.compute_time_s
    parts = sum(share.seconds for share in summary.shares(plan.record))
    assert parts == pytest.approx(plan.predicted.step_time_s, rel=0.01)
    course = plan.predicted.memory[0].course
    assert course
    assert max(course) <= plan.predicted.peak_bytes[0]
    assert max(course) >= 0.99 * plan.predicted.peak_bytes[0]
    for group in summary.state_groups(plan.record):
        assert plan.explain(summary.path_of(group.name))


def test_names_of_the_screen_are_patterns():
    assert summary.path_of("state['params']['layer*']['kernel']") == "state/params/layer*/kernel"
    assert render_summary._shortened("state/params/params/layer*/self_attention/query/kernel", 43) == (
        "params/layer*/self_attention/query/kernel"
    )
    assert parts_of("a['b']") == ("a", "b")


def test_a_plan_as_values_is_json():
    made = json.loads(json.dumps(autopar.Plan(program()).to_dict()))
    assert made["summary"]["step_time_s"] == 10.0
    assert made["summary"]["sentence"] == "One program on 8 devices: the matrices split over 8."
    assert made["summary"]["arguments"][1]["count"] == 4
    assert made["plan"]["predicted"]["mfu"] == 0.2
    assert "decisions" not in made["plan"]


def test_a_notebook_shows_names_as_text():
    record = program(step="</pre><img onerror=alert(1)>")
    shown = autopar.Plan(record)._repr_html_()
    assert "<img" not in shown
    assert "&lt;img onerror=alert(1)&gt;" in shown


def test_new_fields_are_saved_and_loaded():
    record = pipeline()
    assert decode(encode(record), "plan.json") == record


@pytest.mark.parametrize(
    ("sizes", "roles", "held", "text"),
    [
        ((2, 32), ("data", "sharded data"), 0.0, "the batch split over 64, over 32 of them the state too"),
        (
            (2, 32), ("data", "sharded data"), 0.043,
            "the batch split over 64, over 32 of them the state in part (4.3% of it a device) too",
        ),
        ((8,), ("sharded data",), 1 / 8, "the batch and the state split over 8"),
        ((8,), ("sharded data",), 0.5, "the batch split over 8 and the state in part (50% of it a device)"),
        ((2, 4), ("data", "tensor"), 0.25, "the batch split over 2, the matrices split over 4"),
        (
            (2, 4), ("data", "tensor"), 0.56,
            "the batch split over 2, a part of the matrices split over 4 (56% of the state a device)",
        ),
        (
            (4, 2, 4), ("sharded data", "tensor", "sequence"), 0.9,
            "the batch split over 4 and the state in part (90% of it a device), the matrices split over 2, "
            "the sequences split over 4",
        ),
    ],
)  # fmt: skip
def test_what_axes_split(sizes, roles, held, text):
    assert summary.splits_text(sizes, roles, held) == text
