"""`autopar.tune`: the plans near the best one, and which of them the clock likes."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import tuning
from autopar.common.progress import Progress
from autopar.errors import DonatedStateError, InvalidArgumentError, NotEnoughDevicesError, UnsupportedError
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, Link
from autopar.search import comparison
from autopar.search.planner import make_plan, make_plans
from autopar.tuning import LEAST_ROUNDS, MOST_ROUNDS, alternate, tuned_by
from tests.small_steps import (
    MLP_BATCH,
    MLP_STATE,
    assert_close,
    chain_step,
    grouped,
    mlp_batch,
    mlp_loss,
    mlp_step,
    new_mlp_state,
    slow_cluster,
)

WITHIN = 2.5  # far enough for ZeRO and data parallelism of the small model
SEARCHED = "search: mesh model=8, FSDP along the largest dimensions"  # the search comes to that recipe
ZERO = {"zero(1)": autopar.recipes.zero(1), "zero(2)": autopar.recipes.zero(2)}


def mlp(**options):
    return autopar.parallelize(mlp_step, cluster=slow_cluster(), cache_dir=None, **grouped(**options))


def piped(**options):
    """A chain of products on devices that share their processors, in micro-batches, and its arguments."""
    step = autopar.parallelize(
        chain_step,
        cluster=Cluster.local(4, measured=False),
        cache_dir=None,
        **grouped(num_microbatches=4, **options),
    )
    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(size=(64, 64)) / 8, jnp.float32) for _ in range(4)]
    batch = {name: random.normal(size=(512, 64)).astype(np.float32) for name in ("x", "y")}
    return step, (params, batch)


def near(step, args, within):
    """(what `make_plans` gives, what `make_plan` gives)"""
    traced, trees = step._traced(args)
    cluster, options = step._sources.request(traced)
    given = traced, trees, cluster, options, step._sources.rules(), Progress("", show=False)
    return make_plans(*given, keep_tolerance=within), make_plan(*given)


def times_s(plans):
    return [plan.predicted.step_time_s for plan in plans]


def decided(plan):
    """All that a plan decides."""
    made = plan.record.pipeline
    stages = [(s.first_layer, s.first_device, s.axis_sizes, s.decisions) for s in made.stages] if made else []
    return plan.record.axis_sizes, plan.record.decisions, made and (made.schedule, made.num_microbatches), stages


# Plans near the best


def test_near_plans_are_those_that_fit_and_take_little_longer():
    def candidate(step_time_s, peak_bytes):
        return SimpleNamespace(step_time_s=step_time_s, peak_bytes=peak_bytes)

    best, twin, slow, slower, large = (
        candidate(2.0, 10), candidate(2.0, 10), candidate(2.5, 9), candidate(2.6, 1), candidate(2.1, 11)
    )  # fmt: skip
    every = [slower, slow, large, best, twin]
    assert comparison.near(best, every, 10, 1.25) == [twin, slow]
    assert comparison.near(best, every, 11, 1.25) == [twin, large, slow]
    assert comparison.near(best, every, 10, 1.0) == []


def test_the_first_plan_is_the_search_s_own():
    plans, best = near(mlp(), (new_mlp_state(), mlp_batch()), 1.2)
    assert decided(plans[0]) == decided(best)
    assert {plan.record.axis_sizes for plan in plans} == {(8,), (2, 4)}
    assert times_s(plans) == sorted(times_s(plans))
    assert times_s(plans)[-1] <= 1.2 * best.predicted.step_time_s
    assert len({str(decided(plan)) for plan in plans}) == len(plans)


def test_of_each_number_of_stages_the_best_is_worked_out():
    step, args = piped()
    plans, best = near(step, args, 4.0)
    assert decided(plans[0]) == decided(best)
    assert {len(plan.record.pipeline.stages) for plan in plans} == {1, 2}
    assert all(not plan.record.own[0].why for plan in plans)  # of which each has a row
    assert times_s(plans)[1:] == sorted(times_s(plans)[1:])
    assert max(times_s(plans)) <= 4 * best.predicted.step_time_s
    limit_bytes = best.record.memory_limit_bytes
    assert all(max(plan.predicted.peak_bytes) <= limit_bytes for plan in plans)
    assert {len(plan.record.pipeline.stages) for plan in near(step, args, 1.01)[0]} == {1}


def test_pipelines_are_looked_at_though_they_may_not_pay():
    step = autopar.parallelize(chain_step, cluster=Cluster.local(4, measured=False), cache_dir=None)
    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    examples = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    plans, best = near(step, (params, {"x": examples, "y": examples}), 1.25)
    assert best.record.pipeline is None
    assert best.record.notes == ()  # no pipeline was weighed for it
    assert decided(plans[0]) == decided(best)
    assert 2 in [plan.record.pipeline and len(plan.record.pipeline.stages) for plan in plans]


@pytest.mark.slow
def test_a_program_may_be_near_a_pipeline():
    """Two hosts with a slow link between them: two stages are the fastest, under several schedules, then four in a V,
    then one program, then micro-batches.
    """
    hosts = Cluster(
        name="two hosts",
        device=presets.H100,
        num_hosts=2,
        devices_per_host=2,
        inside_host=presets.NVLINK4,
        between_hosts=Link(latency_s=1e-5, bytes_per_s=5e9, source="made up: 40 Gb/s"),
    )
    params = [jax.ShapeDtypeStruct((16_384, 16_384), jnp.float32)] * 8
    examples = jax.ShapeDtypeStruct((32_768, 16_384), jnp.float32)
    step = autopar.parallelize(chain_step, cluster=hosts, cache_dir=None)
    plans, best = near(step, (params, {"x": examples, "y": examples}), 2.0)
    made = [plan.record.pipeline for plan in plans]
    numbers = [pipeline and len(pipeline.stages) for pipeline in made]
    assert list(dict.fromkeys(numbers)) == [2, 4, None, 1]
    assert decided(plans[0]) == decided(best)
    assert times_s(plans) == sorted(times_s(plans))
    assert times_s(plans)[-1] <= 2 * best.predicted.step_time_s


# By the clock


@pytest.fixture(scope="module")
def tuned():
    step, args = mlp(), (new_mlp_state(), mlp_batch())
    return autopar.tune(step, *args, within=WITHIN, seconds=0.1), args


def test_rows_come_as_measured_then_as_predicted(tuned):
    found, _ = tuned
    timed = [row for row in found.rows if row.measured_s is not None]
    rest = [row for row in found.rows if row.measured_s is None]
    assert found.rows == (*timed, *rest)
    assert len(timed) > 2
    assert [row.measured_s for row in timed] == sorted(row.measured_s for row in timed)
    assert [row.predicted_s for row in rest] == sorted(row.predicted_s for row in rest)
    assert all((row.why == "") == (row.measured_s is not None) for row in found.rows)
    assert all(row.predicted_s == row.plan.predicted.step_time_s for row in found.rows)
    names = {row.name for row in found.rows}
    assert names >= {
        SEARCHED,
        "runner-up: mesh model=2 x model2=4",
        "data_parallel()",
        "zero(1)",
        "zero(2)",
        "zero(3)",
    }


def test_the_table_shows_it_all(tuned):
    found, _ = tuned
    text = str(found)
    assert "timed on cpu x 8" in text
    assert "1.000" in text
    for row in found.rows:
        assert all(word in text for word in row.name.split()), "long names are wrapped"


def test_a_tuned_step_gives_the_numbers_of_plain_jit(tuned):
    found, (state, batch) = tuned
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    assert_close(state, new_mlp_state(), 0)  # nothing was written there
    assert found.plan is found.rows[0].plan
    step = autopar.parallelize(mlp_step, plan=found.plan, cache_dir=None)
    expected = jax.jit(mlp_step)(new_mlp_state(), batch)
    assert_close(step(new_mlp_state(), batch), expected)


def test_plans_that_come_to_the_same_program_are_timed_once():
    found = autopar.tune(
        mlp(), new_mlp_state(), mlp_batch(), beside=ZERO | {"again": ZERO["zero(1)"]}, within=WITHIN, seconds=0.0
    )
    row = {row.name: row for row in found.rows}
    assert row["zero(1)"].measured_s is not None
    assert row["again"].why == "the same program as zero(1)"
    assert row["again"].measured_s is None


def test_a_pipeline_takes_its_turns():
    step, (params, batch) = piped()
    found = autopar.tune(step, params, batch, beside={}, within=4.0, seconds=0.1)
    # The fastest of each number of stages: rows come fastest first.
    stages = {len(row.plan.record.pipeline.stages): row for row in reversed(found.rows)}
    assert stages.keys() == {1, 2}
    assert all(row.measured_s > 0 for row in stages.values())
    assert not any(x.is_deleted() for x in params)
    expected = jax.jit(chain_step)(params, batch)
    again = autopar.parallelize(chain_step, plan=stages[2].plan, cache_dir=None)
    assert_close(again([x.copy() for x in params], batch), expected)


@pytest.mark.parametrize(
    "put", [lambda state, step: state, lambda state, step: step.init(lambda: state), jax.device_get]
)
def test_arguments_survive_wherever_they_lie(put):
    step = mlp()
    state = new_mlp_state()
    given = put(state, step) if put is not jax.device_get else put(state)
    autopar.tune(step, given, mlp_batch(), beside={}, within=1.0, seconds=0.0)
    assert_close(jax.device_get(given), jax.device_get(new_mlp_state()), 0)


def test_steps_that_keep_their_arguments_and_take_static_ones_are_tuned():
    def step(scale, batch, state, times):
        assert times == 3
        return {"loss": mlp_loss(state, batch) * scale * times}

    parallel = autopar.parallelize(step, donate_argnums=(), static_argnums=3, cluster=slow_cluster(), cache_dir=None)
    found = autopar.tune(parallel, 2.0, mlp_batch(), new_mlp_state(), 3, beside={}, within=1.0, seconds=0.0)
    assert found.fastest.measured_s > 0


def test_one_state_at_a_time_lies_on_the_devices():
    step, args = mlp(), (new_mlp_state(), mlp_batch())
    before = {id(x) for x in jax.live_arrays()}

    def clock(turns, seconds):
        found = []
        for turn in turns:
            found.append(turn())
            assert not [x.shape for x in jax.live_arrays() if id(x) not in before]
        return found

    found = tuned_by(clock, step, args, {}, 1.2, 8, 0.0)
    assert [row.measured_s is not None for row in found.rows] == [True, True]
    assert all(row.quartiles_s[0] <= row.measured_s <= row.quartiles_s[1] for row in found.rows)


def test_what_failed_leaves_nothing_on_the_devices(monkeypatch):
    step, args = mlp(), (new_mlp_state(), mlp_batch())
    before = {id(x) for x in jax.live_arrays()}
    put_copies, calls = tuning.put_copies, []

    def failing(leaves, compiled):
        made = put_copies(leaves, compiled)
        calls.append(compiled)
        if len(calls) == 1:
            try:
                raise ValueError("what the device said")
            except ValueError as error:
                raise jax.errors.JaxRuntimeError(f"out of memory beside {len(made)} arrays") from error
        return made

    def clock(turns, seconds):
        took = alternate(turns, seconds)
        assert not [x.shape for x in jax.live_arrays() if id(x) not in before]
        return took

    monkeypatch.setattr(tuning, "put_copies", failing)
    found = tuned_by(clock, step, args, {}, 1.2, 8, 0.0)
    assert found.rows[1].why == "out of memory beside 5 arrays"


# By a clock of our own


def by(seconds, beside=ZERO, most=8, within=WITHIN):
    """Tuned with what a made-up clock says each plan takes, those predicted to be the fastest first."""

    def clock(turns, budget_s):
        assert budget_s == 7.0
        assert len(turns) == len(seconds)
        return [s if isinstance(s, Exception) else (9.0, s, s) for s in seconds]

    return tuned_by(clock, mlp(), (new_mlp_state(), mlp_batch()), beside, within, most, 7.0)


def test_the_clock_s_choice_is_taken_though_another_was_predicted():
    found = by([3.0, 1.0], beside={}, within=1.2)
    assert [(row.name, row.measured_s) for row in found.rows] == [
        ("runner-up: mesh model=2 x model2=4", 1.0),
        (SEARCHED, 3.0),
    ]
    assert found.rows[0].predicted_s > found.rows[1].predicted_s
    assert found.plan.record.axis_sizes == (2, 4)
    note = "timed on the devices beside 1 other plan: 1 s; the one predicted to be the fastest took 3 s"
    assert found.plan.record.notes[-1] == note
    assert f"note: {note}" in found.plan.table()
    measured = {row.name: (row.predicted, row.measured) for row in found.plan.record.measured}
    assert measured == {f"step time of {row.name}": (row.predicted_s, row.measured_s) for row in found.rows}
    assert found.rows[1].plan.record.notes == ()


def test_a_choice_that_was_predicted_says_so():
    found = by([1.0, 3.0], beside={}, within=1.2)
    assert found.plan.record.axis_sizes == (8,)
    assert found.plan.record.notes[-1].endswith(": 1 s; it was predicted to be the fastest, too")


def test_a_plan_that_fails_is_listed_and_not_chosen():
    failed = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore of it")
    found = by([failed, 2.0], beside={}, within=1.2)
    assert found.plan.record.axis_sizes == (2, 4)
    assert found.rows[1].why == "RESOURCE_EXHAUSTED: out of memory"
    assert found.rows[1].measured_s is None


def test_where_all_fail_the_first_error_is_raised():
    errors = [jax.errors.JaxRuntimeError(text) for text in ("first", "second")]
    with pytest.raises(jax.errors.JaxRuntimeError, match="first"):
        by(errors, beside={}, within=1.2)


def test_a_plan_that_is_not_compiled_is_listed(monkeypatch):
    build = tuning.build

    def refusing(traced, plan, rules, progress):
        if plan.record.axis_sizes == (8,):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much")
        return build(traced, plan, rules, progress)

    monkeypatch.setattr(tuning, "build", refusing)
    found = by([2.0], beside={}, within=1.2)
    assert [(row.name, row.why) for row in found.rows] == [
        ("runner-up: mesh model=2 x model2=4", ""),
        (SEARCHED, "RESOURCE_EXHAUSTED: too much"),
    ]


def test_refused_recipes_are_listed_with_the_reason():
    beside = {"three stages": autopar.recipes.pipeline(3), "five": autopar.recipes.tensor_parallel(size=5)}
    found = by([1.0, 2.0], beside=beside, within=1.2)
    refused = {row.name: row for row in found.rows if row.plan is None}
    assert refused.keys() == beside.keys()
    assert refused["three stages"].why == "pipeline: 3 stages"
    assert refused["five"].why
    assert all(row.predicted_s is None and row.measured_s is None for row in refused.values())
    assert found.rows[2:] == tuple(refused.values())


def test_what_is_predicted_to_take_too_long_is_listed_untimed(monkeypatch):
    monkeypatch.setattr(tuning, "BESIDE", tuple(ZERO.items()))
    found = by([1.0, 2.0], beside=None, within=1.2)
    beyond = {row.name: row for row in found.rows if row.measured_s is None}
    assert beyond.keys() == {"zero(1)", "zero(2)"}
    assert all(row.why == "predicted to take more than 1.2 times the best" for row in beyond.values())
    assert all(row.predicted_s > 1.2 * found.rows[0].predicted_s for row in beyond.values())


def test_no_more_are_timed_than_are_asked_for():
    found = by([1.0], beside={}, most=1, within=1.2)
    assert found.rows[1].name == "runner-up: mesh model=2 x model2=4"
    assert found.rows[1].why == "not among the 1 predicted to be the fastest"


def test_recipes_that_are_named_are_timed_however_slow_they_are_predicted():
    found = by([1.0, 2.0], beside=[ZERO["zero(1)"]], most=1, within=1.0)
    assert [row.name for row in found.rows if row.measured_s] == [
        SEARCHED,
        "zero(1)",
    ]
    assert found.rows[1].plan.record.recipe == "zero(1)"


# Turns


class Turns:
    """Plans that take so many seconds for each of two steps, on a clock of their own."""

    def __init__(self, *seconds):
        self.seconds, self.now_s, self.order = seconds, 0.0, []

    def turns(self):
        return [lambda i=i, s=s: self.turn(i, s) for i, s in enumerate(self.seconds)]

    def turn(self, i, seconds):
        self.order.append(i)
        if isinstance(seconds, Exception):
            raise seconds
        self.now_s += 2 * seconds
        return [seconds + len(self.order), seconds]


def test_turns_go_round_and_back_and_the_first_of_each_does_not_count():
    made = Turns(1.0, 2.0, 3.0)
    took = alternate(made.turns(), 0.0, lambda: made.now_s)
    assert made.order == [2, 1, 0, 0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [len(steps) for steps in took] == [2 * LEAST_ROUNDS] * 3
    assert min(took[0]) == 1.0
    assert max(took[0]) == 1.0 + 10


def test_turns_stop_before_the_time_is_over():
    made = Turns(1.0)
    alternate(made.turns(), 13.0, lambda: made.now_s)
    assert len(made.order) == 6  # of two seconds each, the one that does not count among them
    made = Turns(1e-6)
    alternate(made.turns(), 13.0, lambda: made.now_s)
    assert len(made.order) == 1 + MOST_ROUNDS


def test_what_failed_has_no_more_turns():
    error = jax.errors.JaxRuntimeError("out of memory")
    made = Turns(1.0, error)
    took = alternate(made.turns(), 0.0, lambda: made.now_s)
    assert made.order.count(1) == 1
    assert took[1] is error
    assert error.__traceback__ is None
    made = Turns(error)
    assert alternate(made.turns(), 60.0, lambda: made.now_s) == [error]
    assert made.order == [0]


def test_mistakes_of_ours_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        alternate(Turns(ZeroDivisionError()).turns(), 0.0)


# What cannot be


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: mlp_step, "expected a step made by autopar.parallelize, got function"),
        (
            lambda: mlp(plan=autopar.recipes.zero(1)),
            "expected a step whose plan is searched for, got one with a recipe",
        ),
        (lambda: mlp(plan=mlp().plan(MLP_STATE, MLP_BATCH)), "got one with a plan"),
        (lambda: mlp(plan=mlp()), "got one with a step to follow"),
    ],
)
def test_what_does_not_search_is_refused(made, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        autopar.tune(made(), new_mlp_state(), mlp_batch())


def test_shapes_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"mlp_step, state\['bias'\]: expected an array.*got a shape"):
        autopar.tune(mlp(), MLP_STATE, mlp_batch())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"within": 0.9}, "within=.*expected 1 or more, got 0.9"),
        ({"most": 0}, "most=.*expected 1 or more, a whole number, got 0"),
        ({"most": 2.5}, "most=.*expected 1 or more, a whole number, got 2.5"),
        ({"seconds": -1.0}, "seconds=.*expected 0 or more, got -1.0"),
        ({"beside": [1]}, "expected recipes by name"),
        ({"beside": "fsdp"}, "expected recipes by name"),
        ({"beside": {"zero": "zero"}}, "recipe 'zero': expected a call of"),
    ],
)
def test_wrong_wishes_are_refused(options, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        autopar.tune(mlp(), new_mlp_state(), mlp_batch(), **options)


def test_a_state_that_was_taken_over_is_named():
    state = new_mlp_state()
    state["bias"].delete()
    with pytest.raises(DonatedStateError, match=r"state\['bias'\]"):
        autopar.tune(mlp(), state, mlp_batch())


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UnsupportedError, match="expected a program of one process, got 2 processes"):
        autopar.tune(mlp(), new_mlp_state(), mlp_batch())


def test_devices_that_are_not_here_are_an_error():
    step = autopar.parallelize(mlp_step, cluster=slow_cluster(16), cache_dir=None)
    with pytest.raises(NotEnoughDevicesError, match="expected 16 devices"):
        autopar.tune(step, new_mlp_state(), mlp_batch(), beside={}, within=1.0)


def test_recipes_that_do_not_fit_are_listed_and_not_timed():
    recipe = autopar.recipes.combine(pp=2, num_microbatches=2)
    search, stages = mlp(), mlp(plan=recipe)
    needed = [max(step.plan(new_mlp_state(), mlp_batch()).predicted.peak_bytes) for step in (search, stages)]
    assert needed[0] < needed[1], "else this shows nothing"
    step = mlp(memory_limit_bytes=needed[1] - 1)
    found = autopar.tune(step, new_mlp_state(), mlp_batch(), beside={"stages": recipe}, within=100.0, seconds=0.0)
    row = {row.name: row for row in found.rows}["stages"]
    assert row.measured_s is None
    assert row.plan is None
    assert row.why.startswith("mlp_step, stage 0 of 2: ")
    assert "1 B over" in row.why


def test_the_search_s_own_plan_is_timed_though_a_recipe_is_predicted_to_be_faster(monkeypatch):
    made = tuning.make_plan

    def faster(*args):
        plan = made(*args)
        predicted = dataclasses.replace(plan.predicted, step_time_s=1e-9)
        return dataclasses.replace(plan, record=dataclasses.replace(plan.record, predicted=predicted))

    monkeypatch.setattr(tuning, "make_plan", faster)
    monkeypatch.setattr(tuning, "BESIDE", [("zero(1)", ZERO["zero(1)"])])
    found = by([1.0], beside=None, most=1)
    assert [row.name for row in found.rows if row.measured_s] == [SEARCHED]
    assert {row.name: row.why for row in found.rows}["zero(1)"] == "not among the 1 predicted to be the fastest"
