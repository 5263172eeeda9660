"""A plan as a file and as text."""

import json

import pytest

import autopar
from autopar import errors
from autopar.common.text import text_of_s
from autopar.plan.schema import FORMAT_VERSION
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step, shapes, slow_cluster, transformer


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return autopar.parallelize(mlp_step, cluster=slow_cluster(), cache_dir=None).plan(MLP_STATE, MLP_BATCH)


@pytest.fixture(scope="module")
def replicated() -> autopar.Plan:
    return autopar.parallelize(mlp_step).plan(MLP_STATE, MLP_BATCH)


@pytest.fixture(scope="module")
def transformer_plan() -> autopar.Plan:
    case = transformer()
    return autopar.parallelize(case.step, cluster=slow_cluster(4)).plan(case.shapes, shapes(case.batch))


@pytest.fixture(params=["plan", "replicated", "transformer_plan"])
def any_plan(request) -> autopar.Plan:
    return request.getfixturevalue(request.param)


@pytest.mark.cases(2)
def test_what_is_saved_is_loaded(any_plan, tmp_path):
    any_plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.record == any_plan.record
    assert str(loaded) == str(any_plan)
    assert loaded.predicted == any_plan.predicted


def test_the_same_step_on_the_same_cluster_has_the_same_file(tmp_path):
    contents = set()
    for _ in range(2):
        step = autopar.parallelize(mlp_step, cluster=slow_cluster(), cache_dir=None)
        step.plan(MLP_STATE, MLP_BATCH).save(tmp_path / "plan.json")
        contents.add((tmp_path / "plan.json").read_bytes())
    assert len(contents) == 1


def test_the_file_is_versioned_json(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["format_version"] == FORMAT_VERSION
    assert content["plan"]["step"] == "mlp_step"
    assert content["plan"]["axis_sizes"] == list(plan.mesh.axis_sizes)


def test_the_text_has_mesh_arguments_collectives_memory_and_time(plan):
    text = plan.table()
    assert f"Plan of mlp_step on flat-8: 8 device(s), mesh {plan.mesh}" in text
    assert "predicted: compute" in text
    assert "a device of 14.4 GB" in text
    for path in ("state['first']", "state['second']", "batch['x']"):
        assert path in text
    for collective in plan.predicted.collectives:
        assert collective.kind in text
    assert f"tried on mesh 8: {text_of_s(plan.predicted.step_time_s)} (the plan)" in text
    assert "gap 0.00%" in text


def test_the_text_names_the_modules_of_a_model(transformer_plan):
    text = transformer_plan.table()
    assert "attention" in text
    assert "mlp" in text
    assert {row.module for row in transformer_plan.record.modules} >= {"layer0/attention", "layer1/mlp"}


def test_collectives_by_module_add_up_to_those_of_the_step(transformer_plan):
    rows = transformer_plan.record.modules
    assert sum(c.sent_bytes for row in rows for c in row.collectives) == pytest.approx(
        transformer_plan.predicted.sent_bytes
    )
    assert transformer_plan.predicted.sent_bytes > 0


def test_predictions_are_consistent(any_plan):
    made = any_plan.predicted
    assert made.step_time_s == pytest.approx(made.compute_time_s + made.collective_time_s - made.hidden_time_s)
    assert made.collective_time_s == pytest.approx(sum(c.time_s for c in made.collectives))
    assert 0 < made.mfu <= 1
    assert made.peak_bytes[0] > sum(
        v.nbytes // v.layout.shards(any_plan.mesh) for v in any_plan.record.arguments if v.kind == "state"
    )


def test_explain_an_argument(plan):
    text = plan.explain("state['first']")
    layout = next(v.layout for v in plan.record.arguments if v.path == "state['first']")
    assert "state['first']: float32[32, 64] state" in text
    assert not layout.is_replicated
    assert "state['second']" not in text


def test_explain_a_module(transformer_plan):
    row = next(r for r in transformer_plan.record.modules if r.module == "layer0/mlp")
    text = transformer_plan.explain("layer0/mlp")
    assert f"layer0/mlp: {row.operations} operations" in text
    assert "matrix product forward" in text
    assert "matrix product backward" in text
    for c in row.collectives:
        assert f"{c.kind} over" in text


@pytest.mark.parametrize("what", ["blocks", "params/blocks/0", "blocks/0/up", "params/blocks/*", "params/blocks/?/up"])
def test_explain_takes_any_part_of_a_path(what, transformer_plan):
    assert "params['blocks'][0]['up']: float32" in transformer_plan.explain(what)


def test_explain_takes_names_as_tables_have_them(transformer_plan):
    shown = transformer_plan.table()
    assert "layer*/mlp (2x)" in shown
    alike, alone = (
        [line for line in transformer_plan.explain(name).splitlines() if "operations" in line]
        for name in ("layer*/mlp (2x)", "layer0/mlp")
    )
    assert alike == [line.replace("layer0/mlp", "layer*/mlp (2x), each") for line in alone]
    assert "(no module)" not in shown, "what is in no module is named by the parameters that it reads"


def test_explain_what_is_not_there(plan):
    with pytest.raises(errors.InvalidArgumentError, match="nothing that is called 'decoder'; "):
        plan.explain("decoder")
    with pytest.raises(errors.InvalidArgumentError, match=r"near names: .*\['first'\]"):
        plan.explain("frist")


def test_diff_of_two_plans(plan, replicated):
    text = replicated.diff(plan)
    for what in ("step time", "peak of a device", "sent by a device", "state['first']"):
        assert what in text
    for kind in plan.predicted.by_kind():
        assert kind in text


def test_diff_of_a_plan_with_itself_says_that_nothing_differs(any_plan):
    assert any_plan.diff(any_plan) == "the plans are the same"


def test_diff_of_plans_for_two_steps(plan, transformer_plan):
    assert "absent" in plan.diff(transformer_plan)
