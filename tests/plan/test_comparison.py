"""`plan.why_not`: another plan of the step beside the one that was taken."""

import dataclasses
import json
import pickle

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import errors, recipes
from autopar.plan import summary
from autopar.plan.comparison import Comparison
from autopar.plan.schema import MemoryKind
from tests.plan.records import MEMORY, module, pipeline, predicted, program, value
from tests.small_steps import grouped, shapes, slow_cluster, transformer

OPTIONS = dict(cache_dir=None)


def planned(**options) -> autopar.Plan:
    case = transformer()
    step = autopar.parallelize(case.step, **grouped(**({"cluster": slow_cluster(4)} | OPTIONS | options)))
    return step.plan(case.shapes, shapes(case.batch))


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return planned()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "instead",
    [
        recipes.data_parallel(),
        recipes.tensor_parallel(size=2),
        recipes.pipeline(2, num_microbatches=4),
        autopar.constrain({"blocks/*/up": P("x", None)}),
    ],
    ids=["data", "tensor", "pipeline", "pins"],
)
def test_the_numbers_are_those_of_the_recipes_own_plan(plan, instead):
    found = plan.why_not(instead)
    own = planned(plan=instead)
    assert found.other.predicted == own.predicted
    assert found.other.modules == own.record.modules
    assert found.slower_s == own.predicted.step_time_s - plan.predicted.step_time_s
    assert found.plan == plan.record


def test_a_plan_under_a_recipe_is_compared_with_others(plan):
    found = planned(plan=recipes.data_parallel()).why_not(recipes.tensor_parallel())
    assert found.other.predicted == planned(plan=recipes.tensor_parallel()).predicted


def test_modules_add_up_to_the_step():
    found = planned(plan=recipes.data_parallel()).why_not(recipes.pipeline(2, num_microbatches=4))
    for record, side in ((found.plan, "plan"), (found.other, "other")):
        made, rows = record.predicted, [getattr(row, side) for row in found.modules()]
        assert sum(row.compute_s for row in rows) == pytest.approx(made.compute_time_s)
        assert sum(row.send_s for row in rows) == pytest.approx(made.collective_time_s)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe",
    [recipes.zero(3), recipes.combine(pp=2, dp=4, zero=1, num_microbatches=4)],
    ids=["one program", "stages"],
)
def test_what_modules_compute_and_wait_for_is_the_step(recipe):
    """On devices whose collectives run beside computing, with micro-batches that are cut and summed."""
    made = planned(cluster="dgx-h100", plan=recipe)
    found = made.why_not(recipes.data_parallel())
    waited_s = sum(row.plan.exposed_s for row in found.modules())
    assert 0 < waited_s < sum(row.plan.send_s for row in found.modules())
    seconds = sum(row.plan.seconds for row in found.modules())
    predicted = made.predicted
    assert seconds + (predicted.bubble_fraction * predicted.step_time_s) == pytest.approx(predicted.step_time_s)
    (exposed,) = (s.seconds for s in summary.shares(made.record) if s.name == "exposed collectives")
    assert exposed == pytest.approx(waited_s)


def test_the_batch_is_the_same_in_arguments_and_memory():
    """The caller holds it until the step has ended: one program and stages count it."""
    for recipe in (recipes.data_parallel(), recipes.pipeline(2, num_microbatches=4)):
        made = planned(plan=recipe)
        held = [use.at_peak[MemoryKind.BATCH] for use in made.predicted.memory]
        rows = [group.device_bytes for group in summary.state_groups(made.record) if group.kind == "batch"]
        assert sum(rows) == sum(held) > 0
        compared = made.why_not(recipes.zero(1))
        (batch,) = (q.plan for q in compared.memory() if q.name == "batch")
        assert batch == held[summary.fullest(made.record).number]


def test_plans_are_named_after_their_recipe(plan):
    found = plan.why_not(recipes.tensor_parallel(size=2))
    assert found.other.recipe == "tensor_parallel(size=2)"
    assert str(found).startswith("Instead, under tensor_parallel(size=2): One program")
    assert plan.record.recipe == ""


def test_modules_rank_by_what_the_step_waits_for():
    """A collective that computing hides does not explain why a step is longer."""

    def rows(send_s, exposed_s, compute_s):
        hidden = module("layer0/attention", compute_s=1.0, send_s=send_s, exposed_s=0.0)
        return hidden, module("layer0/mlp", compute_s=compute_s, send_s=2.0, exposed_s=exposed_s)

    own, others = rows(1.0, 0.0, 1.5), rows(9.0, 1.0, 2.0)
    found = Comparison(plan=program(modules=own), other=program(modules=others))
    assert [(row.module, row.more_s) for row in found.modules()] == [("layer*/mlp", 1.5), ("layer*/attention", 0.0)]
    assert "┃ waiting ┃" in str(found)


def test_where_it_loses_is_said():
    slow = (module("layer0/mlp", compute_s=1.5, send_s=2.0), module("layer1/mlp", compute_s=2.5, send_s=6.0))
    other = program(modules=slow, predicted=predicted(slow, step_time_s=15.0))
    found = Comparison(plan=program(), other=other)
    assert found.verdict == (
        "It takes 15 s a step, 1.50 times the 10 s of the plan: slower by 5 s. The largest part of that is exposed "
        "collectives: 5 s more. Of the modules it loses the most in layer*/mlp: 6 s more, 1 s of it computing and 5 s "
        "waiting for sends."
    )
    assert [(row.module, row.more_s) for row in found.modules()] == [("layer*/mlp", 6.0), ("layer*/attention", -2.0)]
    assert "Instead: One program on 8 devices" in str(found)


def test_a_plan_that_takes_as_long_is_said_to():
    assert Comparison(plan=program(), other=program()).verdict == "It takes 10 s a step, as the plan does."


def test_a_loss_between_modules_is_the_bubble():
    other = pipeline()
    other = dataclasses.replace(
        other, predicted=dataclasses.replace(other.predicted, step_time_s=20.0, bubble_fraction=0.6)
    )
    found = Comparison(plan=program(), other=other)
    assert found.verdict.endswith(
        "The largest part of that is bubble of the pipeline: 12 s more. No module takes longer."
    )


def test_what_does_not_fit_says_by_how_much_and_with_what():
    saved = {MemoryKind.PARAMETER: 4000, MemoryKind.SAVED: 46_000}
    large = predicted((), peak_bytes=(50_000,), memory=(dataclasses.replace(MEMORY, at_peak=saved),))
    found = Comparison(plan=program(), other=program(predicted=large))
    assert found.excess_bytes == 30_000
    assert found.verdict == (
        "It does not fit: 50 kB of the 20 kB that a device has for it, 30 kB over; most of what it holds more is saved "
        "for backward (40 kB). Without the limit a step would take 10 s (10 s here)."
    )


def test_a_recipe_that_does_not_fit_is_planned_without_the_limit(plan):
    """Data parallelism holds the whole state on each device."""
    peak = planned(plan=recipes.data_parallel()).predicted.peak_bytes[0]
    limit = (plan.predicted.peak_bytes[0] + peak) // 2
    assert plan.predicted.peak_bytes[0] < limit < peak
    found = planned(memory_limit_bytes=limit).why_not(recipes.data_parallel())
    assert found.excess_bytes == peak - limit
    assert "It does not fit" in found.verdict


def test_as_values(plan):
    made = json.loads(json.dumps(plan.why_not(recipes.data_parallel()).to_dict()))
    assert made["slower_s"] == pytest.approx(made["quantities"][0]["other"] - made["quantities"][0]["plan"])
    assert {row["module"] for row in made["modules"]} >= {"layer*/mlp", "layer*/attention"}


def test_a_plan_of_a_file_is_bound_to_its_step_first(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    with pytest.raises(errors.UnsupportedError, match="a plan that knows its step"):
        loaded.why_not(recipes.data_parallel())
    bound = planned(plan=loaded)
    assert bound.why_not(recipes.data_parallel()).other.predicted == planned(plan=recipes.data_parallel()).predicted


def test_a_plan_is_copied_without_its_step(plan):
    copied = pickle.loads(pickle.dumps(plan))
    assert copied == plan
    assert copied.replan is None
    assert copied.state_shardings == plan.state_shardings


def test_what_is_no_recipe_is_refused(plan):
    with pytest.raises(errors.InvalidArgumentError, match="a recipe of autopar"):
        plan.why_not({"mlp": P()})


def test_what_is_as_fast_tells_its_memory_beside():
    small = program()
    large = dataclasses.replace(small, predicted=dataclasses.replace(small.predicted, peak_bytes=(12_000,)))
    assert Comparison(plan=small, other=small).in_short == "as fast, with as much memory"
    assert Comparison(plan=small, other=large).in_short == "as fast, with 2 kB more memory a device"
    assert Comparison(plan=large, other=small).in_short == "as fast, with 2 kB less memory a device"


def test_layers_that_differ_alike_are_one_row_of_a_difference():
    one, other = (
        program(arguments=tuple(value(f"state['layer{i}']['w']", split=split) for i in range(3)))
        for split in (False, True)
    )
    text = Comparison(plan=one, other=other).difference_text()
    assert "state['layer*']['w'] (3x)" in text
    assert text.count("layer") == 1


def test_layers_of_several_stages_are_one_row_with_the_stages():
    found = Comparison(plan=program(layers=4), other=pipeline(layers=4, stages=2))
    assert [(v.name, v.count, v.plan, v.other) for v in found.values()] == [
        ("state/*/layer*/mlp/kernel", 8, 'P(None, "x")', 'P(None, "x") on stages 0-1'),
        ("batch['x']", 1, "P(None, None)", "P(None, None) on stage 0"),
    ]
    first, *_ = found.values(one_by_one=True)
    assert (first.name, first.other) == ("state['params']['layer0']['mlp']['kernel']", 'P(None, "x") on stage 0')


def test_what_only_one_of_the_plans_has_is_absent_in_the_other():
    one, other = (program(arguments=(value(path),)) for path in ("a", "b"))
    assert [row[1:] for row in Comparison(plan=one, other=other).differences()] == [
        ("P(None, None)", "absent"),
        ("absent", "P(None, None)"),
    ]


def test_host_memory_is_a_quantity_where_one_of_the_plans_has_some():
    record = program()
    other = dataclasses.replace(record, predicted=dataclasses.replace(record.predicted, host_bytes=(4000,)))
    assert "host memory" not in str(Comparison(plan=record, other=record))
    found = Comparison(plan=record, other=other)
    assert ("host memory", "0 B", "4 kB") in found.differences()
    assert [(q.plan, q.other) for q in found.quantities() if q.name == "host memory"] == [(0, 4000)]


def slower(more_s: dict[str, tuple[float, float]], update_s: float = 0.0) -> str:
    """Where a plan loses whose modules compute and wait so much longer, all in updates of `update_s`."""
    rows = {"model/a": (1.0, 1.0), "model/b/up": (1.0, 1.0), "model/b/down": (1.0, 1.0)}
    records = []
    for added, updated_s in (({}, 0.0), (more_s, update_s)):
        modules = []
        for name, (compute_s, wait_s) in rows.items():
            more = added.get(name, (0.0, 0.0))
            row = module(name, compute_s=compute_s + more[0], send_s=wait_s + more[1], exposed_s=wait_s + more[1])
            modules.append(dataclasses.replace(row, update_time_s=updated_s))
        computes, waits = (sum(more[i] for more in added.values()) for i in (0, 1))
        made = predicted(tuple(modules), step_time_s=8.0 + computes + waits, compute_time_s=3.0 + computes)
        records.append(program(modules=tuple(modules), predicted=made))
    return Comparison(plan=records[0], other=records[1]).in_short


def test_a_loss_is_told_with_its_cause_and_the_innermost_module_that_has_most_of_it():
    waits = "more exposed collectives (all-reduce)"
    assert slower({"model/b/up": (0.0, 2.0)}) == f"25 % slower: 2 s {waits}, most in model/b/up"
    assert slower({"model/b/up": (0.0, 1.0), "model/b/down": (0.0, 1.1)}).endswith(f"{waits}, most in model/b/down")
    spread = {"model/b/up": (0.0, 0.7), "model/b/down": (0.0, 0.7), "model/a": (0.0, 0.4)}
    assert slower(spread).endswith(f"{waits}, most in model/b")
    everywhere = {"model/b/up": (0.0, 0.5), "model/b/down": (0.0, 0.5), "model/a": (0.0, 0.9)}
    assert slower(everywhere).endswith("most in model/b")
    thin = {"model/b/up": (0.5, 0.0), "model/b/down": (0.5, 0.0), "model/a": (0.9, 0.0)}
    assert "1.9 s more operations bound by memory" in slower(thin)
    assert "(the update of the parameters)" in slower(thin, update_s=0.4)
    assert "(the update" not in slower(thin, update_s=0.1)
