"""`plan.explain`: what lies where, what binds, and other layouts, around each of which the step is planned anew."""

import dataclasses
import json

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import errors
from autopar.errors import InvalidArgumentError, MemoryLimitError
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import Layout, LogicalMesh
from autopar.plan.explanation import Piece, best_alternatives, explanation, other_layouts, pieces_of, pins_of
from tests.plan.records import module, pipeline, program, value
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step, slow_cluster

OPTIONS = dict(cluster=slow_cluster(), cache_dir=None)


def test_which_device_holds_what():
    mesh = LogicalMesh(axis_sizes=(2, 2))
    assert pieces_of((4, 6), Layout(((), (1,))), mesh, 8) == (
        Piece(indices="[:, 0:3]", devices=(8, 10)),
        Piece(indices="[:, 3:6]", devices=(9, 11)),
    )
    assert pieces_of((8,), Layout(((1, 0),)), mesh, 0) == (
        Piece(indices="[0:2]", devices=(0,)),
        Piece(indices="[2:4]", devices=(2,)),
        Piece(indices="[4:6]", devices=(1,)),
        Piece(indices="[6:8]", devices=(3,)),
    )
    assert pieces_of((), Layout(()), mesh, 0) == (Piece(indices="[]", devices=(0, 1, 2, 3)),)


def test_pieces_are_those_of_the_sharding():
    plan = autopar.parallelize(mlp_step, **OPTIONS | {"cluster": Cluster.local(8)}).plan(MLP_STATE, MLP_BATCH)
    for v in plan.record.arguments:
        held = plan.sharding(v.path).devices_indices_map(v.shape)
        (explained,) = explanation(plan.record, v.path).values[:1]
        for piece in explained.pieces:
            for device, slices in held.items():
                if device.id in piece.devices:
                    ends = [s.indices(n)[:2] for s, n in zip(slices, v.shape, strict=True)]
                    texts = [f"{a}:{b}" if (a, b) != (0, n) else ":" for (a, b), n in zip(ends, v.shape, strict=True)]
                    assert piece.indices == f"[{', '.join(texts)}]"


def test_the_picture_is_shown_for_few():
    record = program(layers=4)
    one = str(explanation(record, "state['params']['layer0']"))
    assert "  [:, 0:25] on device 0" in one
    assert "  [:, 175:200] on device 7" in one
    assert " on device" not in str(explanation(record, "state")).partition("\n")[2]


def test_modules_that_are_alike_are_told_once():
    lines = str(explanation(program(layers=4), "layer")).splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("layer*/mlp"))
    assert lines[at : at + 3] == [
        "layer*/mlp (4x), each: 3 operations, computes 1.5 s",
        '  matrix product forward: P(None, None) @ P(None, "x") -> P(None, "x")',
        "  sends: 2 all-reduce over x, 8 kB a device, 2 s, 1.5 s of it exposed",
    ]
    rows = (module("layer0/mlp", compute_s=1.0), module("layer1/mlp", compute_s=2.0))
    lines = str(explanation(program(modules=rows), "mlp")).splitlines()
    assert [line for line in lines if line.startswith("layer")] == [
        "layer0/mlp: 3 operations, computes 1 s",
        "layer1/mlp: 3 operations, computes 2 s",
    ]


def test_results_that_lie_as_their_state_are_not_told_again():
    own, moved = value("state['a']['w']", split=True), value("state['b']['w']", split=True)
    results = (
        dataclasses.replace(own, path="result[0]['a']['w']", kind="result"),
        value("result[0]['b']['w']", kind="result"),
        value("result[1]['w']", split=True, kind="result"),
    )
    record = program(arguments=(own, moved), results=results)
    told = [line.partition(":")[0] for line in str(explanation(record, "w")).splitlines() if ": float32" in line]
    assert told == ["state['a']['w']", "state['b']['w']", "result[0]['b']['w']", "result[1]['w']"]
    assert "result[0]['a']['w']" in str(explanation(record, "result[0]['a']['w']"))


def test_many_devices_are_told_in_ranges():
    replicated = dataclasses.replace(value("w"), layout=Layout(((1,), ())))
    lines = str(explanation(program(axis_sizes=(4, 2), arguments=(replicated,)), "w")).splitlines()
    assert lines[1] == "  [0:2, :] on devices 0, 2, 4, 6"
    rows = dataclasses.replace(value("w"), layout=Layout(((0,), ())))
    lines = str(explanation(program(axis_sizes=(2, 4), arguments=(rows,)), "w")).splitlines()
    assert lines[2] == "  [2:4, :] on devices 4-7"


def test_each_picture_follows_its_own_argument():
    lines = str(explanation(program(layers=2), "state['params']")).splitlines()
    assert [i for i, line in enumerate(lines) if line.startswith("state")] == [0, 9]
    assert lines[8] == "  [:, 175:200] on device 7"


def test_many_layers_that_lie_alike_are_one_line():
    many, few = (str(explanation(program(layers=n), "state")).splitlines() for n in (4, 3))
    assert many[0] == (
        "state['params']['layer*']['mlp']['kernel'] (4x): float32[5, 200] state, dimension 1 split over x (8 ways)"
    )
    assert few[0].startswith("state['params']['layer0']['mlp']['kernel']: float32[5, 200] state, dimension 1 split")


def test_what_binds_is_said():
    record = program()
    assert explanation(record, "layer0/mlp").binds == ()
    full = dataclasses.replace(record, memory_limit_bytes=10_100)
    assert explanation(full, "layer0/mlp").binds == ("memory: 10 kB of 10.1 kB are full at the peak",)
    tied = dataclasses.replace(record, results=(value("out", kind="result"),))
    assert explanation(tied, "state").binds == (
        "the state: the next step reads it as this step leaves it, in one layout",
    )
    wide = program(axis_sizes=(16,), cluster=Cluster.preset("dgx-h100", hosts=2))
    assert explanation(wide, "layer0/mlp").binds == ("the network: devices along x are on several hosts",)


def test_other_layouts_with_the_fewest_changes_first():
    mesh = LogicalMesh(axis_sizes=(5, 2))
    layouts = other_layouts(value("w", split=False), mesh)
    assert [layout.text(mesh) for layout in layouts] == [
        'P(None, "y")',
        'P("x", None)',
        'P(None, "x")',
        'P(None, ("x", "y"))',
        'P("x", "y")',
    ]


def test_a_layout_is_pinned_on_its_mesh():
    pins = pins_of("state['layer3']['w']", Layout(((), (1,))), LogicalMesh(axis_sizes=(2, 4)))
    assert pins.pins[0].pattern == "state/layer*/w"
    assert pins.pins[0].text == 'P(None, "y")'
    assert pins.axis_sizes == (("x", 2), ("y", 4))


def test_alternatives_by_time_and_what_does_not_fit_last():
    record = program(axis_sizes=(5,))
    times = {'P("x", None)': 30.0, "P(None, None)": None}

    def replan(request):
        step_s = times[request.pins.pins[0].text]
        if step_s is None:
            raise MemoryLimitError(where="w", limit_bytes=1, needed_bytes=2, largest=(), hint="h")
        return dataclasses.replace(record, predicted=dataclasses.replace(record.predicted, step_time_s=step_s))

    found = best_alternatives(record, value("w", split=True), replan, 3)
    assert [(a.layout, a.step_time_s, a.why) for a in found] == [
        ('P("x", None)', 30.0, "3 times as long: 20 s more waiting"),
        ("P(None, None)", None, "does not fit in 20 kB"),
    ]
    assert len(best_alternatives(record, value("w", split=True), replan, 1)) == 1


def test_alternatives_cost_what_the_pinned_plan_costs():
    step = autopar.parallelize(mlp_step, **OPTIONS)
    plan = step.plan(MLP_STATE, MLP_BATCH)
    found = plan.explanation("state['second']", alternatives=3)
    assert 1 <= len(found.alternatives) <= 3
    other = found.alternatives[0]
    pinned = autopar.constrain({"state/second": eval(other.layout, {"P": P})}, axis_sizes={"data": 8})
    own = autopar.parallelize(mlp_step, plan=pinned, **OPTIONS).plan(MLP_STATE, MLP_BATCH)
    assert other.step_time_s == own.predicted.step_time_s
    assert other.peak_bytes == own.predicted.peak_bytes[0]
    assert other.layout != found.values[0].layout
    hint = "why not another layout: plan.explain(\"state['second']\", alternatives=3) plans again for each"
    assert plan.explain("state['second']").endswith(hint)
    assert f"instead {other.lies}, {other.layout}: step " in plan.explain("state['second']", alternatives=3)
    assert json.loads(json.dumps(found.to_dict()))["alternatives"][0]["step_time_s"] == other.step_time_s


def test_a_layout_that_leaves_mesh_axes_out_is_an_alternative():
    plan = autopar.parallelize(mlp_step, **OPTIONS | {"plan": autopar.recipes.zero(3)}).plan(MLP_STATE, MLP_BATCH)
    found = plan.explanation("state['second']", alternatives=3)
    whole = next(other for other in found.alternatives if "data" not in other.layout)
    assert whole.step_time_s > 0


@pytest.mark.parametrize("number", [-1, 1.5, "a", True])
def test_a_number_of_alternatives_that_is_none_is_refused_before_anything_is_planned(number):
    plan = autopar.Plan(program(), replan=lambda request: pytest.fail("planned"))
    path = plan.record.arguments[0].path
    with pytest.raises(InvalidArgumentError, match="how many other layouts are shown, 0 or more"):
        plan.explain(path, alternatives=number)


def test_stages_have_no_alternatives_of_one_argument():
    plan = autopar.Plan(pipeline(), replan=lambda request: pytest.fail("planned"))
    with pytest.raises(errors.UnsupportedError, match="a plan in one program, got one of 2 stages"):
        plan.explain("state", alternatives=1)


def test_modules_have_no_alternatives():
    message = r"the name of an argument, .* such as 'state/params/layer0/mlp/kernel'.*\n?.*got that of modules"
    with pytest.raises(InvalidArgumentError, match=message):
        autopar.Plan(program()).explain("layer0/attention", alternatives=2)


def test_a_plan_of_a_file_has_no_alternatives():
    with pytest.raises(errors.UnsupportedError, match="a plan that knows its step"):
        autopar.Plan(program()).explain("state", alternatives=1)
