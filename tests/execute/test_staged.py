"""Steps that run in stages on eight virtual devices: the numbers of plain `jax.jit`, and what wrong input is told."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import BatchMismatchError, DonatedStateError, InvalidArgumentError
from autopar.execute import collectives
from autopar.hardware.collective_cost import CollectiveKind
from autopar.runtime.program import TaskKind
from autopar.runtime.verify import verify_program, verify_schedule
from autopar.search.inter_op import requested
from autopar.search.inter_op.pipeline_candidate import PipelineCandidate
from benchmarks.zoo import CASES
from benchmarks.zoo.comparison import worst_difference
from tests.beside_jit import check_in_stages, hosts_of_two
from tests.small_steps import assert_close, grouped, shapes, slow_cluster

OPTIONS = {"cluster": hosts_of_two(), "cache_dir": None}
SMALL = CASES["mlp"](layers=3, batch=16)
GPT = CASES["gpt"](layers=1, batch=8)
REDUCTIONS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


def recipe(stages=2, schedule="1f1b", m=4, **options):
    return autopar.recipes.pipeline(stages, schedule, num_microbatches=m, **options)


def staged(case=SMALL, plan=None, **options):
    return autopar.parallelize(case.step, plan=plan or recipe(), **grouped(**(OPTIONS | options)))


def new_state(case=SMALL):
    return jax.jit(case.init)(jax.random.key(0))


def plain(case=SMALL, steps=2):
    state, step = new_state(case), jax.jit(case.step)
    for seed in range(steps):
        state, metrics = step(state, case.batch(seed))
    return state, metrics


def assert_equal(case, got, steps=2):
    worst = worst_difference(case, plain(case, steps), got)
    assert worst.relative <= case.tolerance, f"{worst.path} differs by {worst.relative}"


@pytest.fixture(scope="module")
def small():
    """A step on two stages that has run."""
    step = staged()
    step(new_state(), SMALL.batch(0))
    return step


def halved_step(state, batch):
    """Layers that compute in half precision: a copy of each matrix is read by both passes."""

    def loss(state):
        x = batch["x"].astype(jnp.bfloat16)
        for w in state:
            x = jnp.tanh(x @ w.astype(jnp.bfloat16))
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


# Numbers


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stages", "schedule", "m"),
    [
        (4, "1f1b", 8),
        (2, "interleaved", 4),
        (2, "zb-v", 4),
        (2, "zb-2p", 8),
        pytest.param(2, "1f1b", 1, marks=pytest.mark.slow),
        pytest.param(2, "gpipe", 2, marks=pytest.mark.slow),
        pytest.param(2, "eager-1f1b", 4, marks=pytest.mark.slow),
        pytest.param(4, "zb-h2", 8, marks=pytest.mark.slow),
    ],
)
def test_an_mlp_in_stages(stages, schedule, m):
    check_in_stages(SMALL, stages, schedule, m)


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_gpt_in_two_stages(schedule):
    check_in_stages(GPT, 2, schedule, 4)


def test_an_evaluation_step_in_stages():
    check_in_stages(SMALL, 2, "inference", 4)


def test_gradient_accumulation_alone():
    step = autopar.parallelize(SMALL.step, search=autopar.Search(num_microbatches=4), **OPTIONS)
    state = new_state()
    for seed in range(2):
        state, metrics = step(state, SMALL.batch(seed))
    assert step.plan(state, SMALL.batch(0)).record.pipeline.num_microbatches == 4
    assert_equal(SMALL, (state, metrics))


@pytest.mark.slow
def test_a_skipped_update_and_state_on_other_stages():
    # A `lax.cond` over all parameters runs on one stage: gradients come to it, parameters go home.
    case = CASES["loss_scaling"](layers=7, batch=32)
    # At the scale that it starts with, gradients of the whole batch overflow in float16, those of a micro-batch do not.
    small = dataclasses.replace(case, init=lambda key: case.init(key) | {"scale": jnp.float32(2.0**12)})
    check_in_stages(small, 2, "1f1b", 4)


def test_groups_of_unequal_size():
    # The search puts the heavier layers on more devices: replicated values cross to a mesh of another size.
    step = autopar.parallelize(SMALL.step, search=autopar.Search(num_microbatches=4, schedule="zb-h1"), **OPTIONS)
    state, metrics = step(new_state(), SMALL.batch(0))
    assert_equal(SMALL, (state, metrics), steps=1)


# Steps of other forms


def chain_state(key):
    return {"w": [jax.random.normal(k, (16, 16)) / 4 for k in jax.random.split(key, 4)], "kept": jnp.arange(4.0)}


def chain_loss(weights, batch):
    x = batch["x"]
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2), x


def returns_what_it_is_given(state, batch):
    """A state leaf, a literal, a batch leaf, predictions and the same number twice are results."""
    (loss, x), grads = jax.value_and_grad(chain_loss, has_aux=True)(state["w"], batch)
    new = {**state, "w": [w - 0.1 * g for w, g in zip(state["w"], grads, strict=True)]}
    return new, {"loss": loss, "again": loss, "literal": 3.0, "y": batch["y"], "x": x, "kept": state["kept"]}


def state_that_changes_places(state, batch):
    (loss, _), grads = jax.value_and_grad(chain_loss, has_aux=True)(state["w"], batch)
    return {**state, "w": [w - 0.1 * g for w, g in zip(state["w"], grads, strict=True)][::-1]}, {"loss": loss}


def clipped_by_the_global_norm(state, batch):
    (loss, _), grads = jax.value_and_grad(chain_loss, has_aux=True)(state["w"], batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    scale = 0.1 * jnp.minimum(1.0, 0.01 / norm)
    new = {**state, "w": [w - scale * g for w, g in zip(state["w"], grads, strict=True)]}
    return new | {"kept": state["kept"] + loss}, {"loss": loss, "norm": norm}


@pytest.mark.parametrize(
    "step",
    [
        clipped_by_the_global_norm,
        pytest.param(returns_what_it_is_given, marks=pytest.mark.slow),
        pytest.param(state_that_changes_places, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("stages", "schedule", "m"),
    [
        (2, "zb-v", 2),
        pytest.param(2, "1f1b", 4, marks=pytest.mark.slow),
        pytest.param(4, "zb-h1", 4, marks=pytest.mark.slow),
    ],
)
def test_results_and_state_on_all_stages(step, stages, schedule, m):
    parallel, jitted = autopar.parallelize(step, plan=recipe(stages, schedule, m), **OPTIONS), jax.jit(step)
    random = np.random.default_rng(0)
    batch = {name: random.normal(size=(16, 16)).astype(np.float32) for name in "xy"}
    state = expected = jax.jit(chain_state)(jax.random.key(0))
    for _ in range(3):
        expected, metrics = jitted(expected, batch)
        state, got = parallel(state, batch)
    assert_close((state, got), (expected, metrics))


def test_state_that_is_not_given_away_can_be_used_again():
    parallel = autopar.parallelize(clipped_by_the_global_norm, plan=recipe(), donate_argnums=(), **OPTIONS)
    state = jax.jit(chain_state)(jax.random.key(0))
    batch = {"x": np.ones((16, 16), np.float32), "y": np.zeros((16, 16), np.float32)}
    expected = jax.jit(clipped_by_the_global_norm)(state, batch)
    for _ in range(2):
        assert_close(parallel(state, batch), expected)


# Around the step


def test_state_is_born_on_its_stages(small):
    state = small.init(SMALL.init, jax.random.key(0))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {4}
    assert len({tuple(sorted(d.id for d in leaf.sharding.device_set)) for leaf in jax.tree.leaves(state)}) == 2
    for seed in range(2):
        state, metrics = small(state, small.put_batch(SMALL.batch(seed)))
    assert_equal(SMALL, (state, metrics))


@pytest.mark.slow
def test_state_made_before_there_is_a_plan():
    step = staged()
    state = step.init(SMALL.init, jax.random.key(0))
    assert_equal(SMALL, step(state, SMALL.batch(0)), steps=1)


def test_a_saved_plan_runs_again(small, tmp_path):
    plan = small.plan(new_state(), SMALL.batch(0))
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.record == plan.record
    step = staged(plan=loaded)
    state = step.init(SMALL.init, jax.random.key(0))
    for seed in range(2):
        state, metrics = step(state, SMALL.batch(seed))
    assert_equal(SMALL, (state, metrics))


def test_plans_of_stages_are_kept_on_disk(tmp_path):
    state = jax.eval_shape(SMALL.init, jax.random.key(0))
    first = staged(cache_dir=tmp_path).plan(state, SMALL.batch(0))
    again = staged(cache_dir=tmp_path)
    assert again.plan(state, SMALL.batch(0)).record == first.record
    assert "make programs of the stages" not in again.last_progress.spent_s


def test_a_batch_of_another_size_is_planned_for():
    larger = CASES["mlp"](layers=3, batch=32)
    step = staged()
    state, _ = step(new_state(), SMALL.batch(0))
    got = step(state, larger.batch(1))
    expected = jax.jit(larger.step)(plain(SMALL, 1)[0], larger.batch(1))
    assert worst_difference(SMALL, expected, got).relative <= SMALL.tolerance


def test_state_that_a_step_took_over(small):
    state = small.init(SMALL.init, jax.random.key(0))
    small(state, SMALL.batch(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    with pytest.raises(DonatedStateError, match=r"state\.step"):
        small(state, SMALL.batch(0))


def test_a_batch_may_be_used_again(small):
    batch = small.put_batch(SMALL.batch(0))
    state = small.init(SMALL.init, jax.random.key(0))
    state, first = small(state, batch)
    _, second = small(state, batch)
    assert second["loss"] < first["loss"]


def test_the_programs_that_run_are_proved(small):
    compiled = small.compile(new_state(), SMALL.batch(0))
    verify_schedule(compiled.staged.schedule)
    verify_program(compiled.executor.program, compiled.staged.schedule)


# Wrong input


def words(*expected):
    return "(?s)" + ".*".join(re.escape(word) for word in expected)


@pytest.mark.parametrize(
    ("plan", "error", "expected"),
    [
        (recipe(8), InvalidArgumentError, ("4 layers", "8 stages")),
        (recipe(3), InvalidArgumentError, ("8 devices", "3 stages")),
        (recipe(16), InvalidArgumentError, ("8 devices", "16 stages")),
        (recipe(m=5), BatchMismatchError, ("5 equal micro-batches", "16 examples")),
        (recipe(m=32), BatchMismatchError, ("32 equal micro-batches", "16 examples")),
        (recipe(chunks=2), InvalidArgumentError, ("chunks of schedule 1f1b", "1 stage", "2")),
        (recipe(1, "zb-v", chunks=3), InvalidArgumentError, ("chunks of schedule zb-v", "2 stages", "3")),
        (recipe(schedule="inference"), InvalidArgumentError, ("schedule inference", "takes gradients", "1f1b")),
    ],
)  # fmt: skip
def test_pipelines_that_cannot_be(plan, error, expected):
    with pytest.raises(error, match=words(*expected)):
        staged(plan=plan).plan(jax.eval_shape(SMALL.init, jax.random.key(0)), SMALL.batch(0))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: autopar.recipes.pipeline(2, "1fb1"), ("schedule", "1f1b", "zb-v", "'1fb1'")),
        (lambda: autopar.recipes.pipeline(0), ("stages", "0")),
        (lambda: autopar.recipes.pipeline(2, num_microbatches=0), ("num_microbatches", "0")),
        (lambda: autopar.recipes.pipeline(2, "interleaved", chunks=0), ("chunks", "0")),
        (
            lambda: autopar.parallelize(SMALL.step, search=autopar.Search(schedule="zb-h3")),
            ("schedule", "zb-h2", "'zb-h3'"),
        ),
        (
            lambda: autopar.parallelize(SMALL.step, search=autopar.Search(num_microbatches=-1)),
            ("num_microbatches", "-1"),
        ),
    ],
)
def test_options_that_are_misspelt(make, expected):
    with pytest.raises(InvalidArgumentError, match=words(*expected)):
        make()


def test_a_schedule_that_the_search_does_not_know():
    step = autopar.parallelize(SMALL.step, search=autopar.Search(schedule="zb-v", num_microbatches=4), **OPTIONS)
    with pytest.raises(InvalidArgumentError, match=words("'zb-v'", "without a number of stages", "recipes.pipeline")):
        step.plan(jax.eval_shape(SMALL.init, jax.random.key(0)), SMALL.batch(0))


def test_a_second_batch_that_cannot_be_cut():
    step, odd = staged(), CASES["mlp"](layers=3, batch=18)  # a shorter one keeps the layouts
    state = jax.eval_shape(SMALL.init, jax.random.key(0))
    step.plan(state, SMALL.batch(0))
    with pytest.raises(BatchMismatchError, match=words("4 equal micro-batches", "18 examples")):
        step.plan(state, odd.batch(0))


# What is sent


def reductions(compiled):
    """(task kind, kind of collective) -> how many stand in the tasks' programs."""
    found = {}
    for task, executable in zip(compiled.staged.staged.tasks, compiled.executables, strict=True):
        for collective in collectives.collectives(executable.as_text()):
            key = task.kind, collective.kind
            found[key] = found.get(key, 0) + collective.count
    return found


def with_memory(cluster, bytes_per_s):
    device = dataclasses.replace(cluster.device, peak_memory_bytes_per_s=bytes_per_s)
    return dataclasses.replace(cluster, device=device)


DATA_PARALLEL = autopar.recipes.combine(pp=2, num_microbatches=4)
WIDE_BATCH = {"layers": 3, "width": 16, "features": 16, "classes": 8}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("case", "plan", "cluster", "tied"),
    [
        (CASES["mlp"](**WIDE_BATCH, batch=512), DATA_PARALLEL, slow_cluster(), 0),
        # The search's own choice where memory is not so slow that sums are kept in parts and reduced in the loop.
        (CASES["mlp"](**WIDE_BATCH, batch=4096), recipe(), with_memory(slow_cluster(), 9e9), 0),
        pytest.param(
            CASES["gpt"](layers=2, batch=256, length=8), DATA_PARALLEL, slow_cluster(), 1, marks=pytest.mark.slow
        ),
    ],
    ids=["mlp", "mlp searched", "gpt"],
)
def test_gradients_are_reduced_once_a_step(case, plan, cluster, tied):
    """Examples are split over the devices of a stage, parameters are on all of them.

    A parameter that two stages read has a gradient on each.
    """
    step = staged(case, plan, cluster=cluster)
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = shapes(case.batch(0))
    plan, compiled = step.plan(state, batch), step.compile(state, batch)
    layouts = [v.layout for v in plan.record.arguments if ".params" in v.path]
    assert sum(layout.is_replicated for layout in layouts) >= len(layouts) - 2, "all but embeddings are replicated"
    found = reductions(compiled)
    in_loop = {key: n for key, n in found.items() if key[0].repeats and key[1] in REDUCTIONS}
    assert not in_loop
    after = sum(n for (kind, collective), n in found.items() if kind is TaskKind.AFTER and collective in REDUCTIONS)
    assert 0 < after <= len(layouts) + 1, "each gradient at most once, and the loss"
    predicted = plan.predicted.by_kind()
    assert sum(predicted.get(kind.value, (0, 0))[0] for kind in REDUCTIONS) <= len(layouts) + 1 + tied


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (SMALL, "zb-v"),
        pytest.param(SMALL, "1f1b", marks=pytest.mark.slow),
        pytest.param(GPT, "zb-h1", marks=pytest.mark.slow),
    ],
)
def test_bytes_sent_are_those_predicted(case, schedule):
    step = staged(case, recipe(schedule=schedule))
    verification = autopar.verify(step, jax.eval_shape(case.init, jax.random.key(0)), shapes(case.batch(0)))
    assert verification.total.compiled > 0
    assert verification.total.ratio == pytest.approx(1, abs=0.01)
    assert verification.peak.ratio == pytest.approx(1, abs=0.15)
    assert verification.difference is None


def test_verify_compares_numbers_of_stages(small):
    verification = autopar.verify(small, new_state(), SMALL.batch(0))
    assert verification.difference is not None
    assert verification.difference <= SMALL.tolerance
    assert "verified on cpu x 8" in str(verification)


# Recomputation


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("mlp", "input"),
        pytest.param("mlp", "matmuls", marks=pytest.mark.slow),
        pytest.param("gpt", "matmuls", marks=pytest.mark.slow),
        pytest.param("gpt", "input", marks=pytest.mark.slow),
        pytest.param("dropout", "matmuls", marks=pytest.mark.slow),
        pytest.param("dropout", "input", marks=pytest.mark.slow),
    ],
)
def test_recomputation_by_layer_keeps_the_numbers(name, policy, monkeypatch):
    case, equal = CASES[name](layers=3, batch=16), requested.equal_choice

    def recomputing(*args):
        choice = equal(*args)[0]
        return [dataclasses.replace(choice, policies=(policy,) * len(choice.policies))]

    monkeypatch.setattr(requested, "equal_choice", recomputing)
    step = staged(case)
    state = new_state(case)
    for seed in range(2):
        state, metrics = step(state, case.batch(seed))
    made = step.plan(state, case.batch(0)).record.pipeline
    assert set(made.recomputed) == {policy}
    assert_equal(case, (state, metrics))


# Scans over layers


def scanned_step(state, batch):
    def layers(x, state):
        each = (lambda x, w: (jnp.tanh(x @ w), None)) if state.ndim == 3 else (lambda x, part: (layers(x, part), None))
        return jax.lax.scan(each, x, state)[0]

    def loss(state):
        return jnp.mean((layers(batch["x"], state) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return state - 0.1 * grads, value


@pytest.mark.cases(1)
@pytest.mark.parametrize("layers", [(3,), (2, 3)])
def test_gradients_of_scanned_layers_are_reduced_once_a_step(layers):
    state = jax.random.normal(jax.random.key(0), (*layers, 32, 32)) / 6
    batch = {"x": jax.random.normal(jax.random.key(1), (64, 32)), "y": jnp.zeros((64, 32))}
    expected = jax.jit(scanned_step)(state, batch)
    asked = autopar.recipes.combine(dp=4, num_microbatches=4)
    step = autopar.parallelize(scanned_step, plan=asked, **(OPTIONS | {"cluster": hosts_of_two(4)}))
    gradients_and_loss_bytes = 2 * 3 / 4 * (state.nbytes + 4)
    assert sum(use.sent_bytes for use in step.plan(state, batch).predicted.collectives) == gradients_and_loss_bytes
    found = autopar.verify(step, state, batch)
    assert all(row.predicted == row.compiled for row in found.collectives), found.collectives
    assert_close(step(state, batch), expected)


# Where memory is short


def halved_arguments(batch=8):
    state = [jax.random.normal(jax.random.key(i), (128, 128)) / 10 for i in range(6)]
    return state, {"x": jnp.ones((batch, 128)), "y": jnp.zeros((batch, 128))}


def test_copies_of_the_state_are_made_in_each_micro_batch_where_they_do_not_fit_otherwise():
    on = dataclasses.replace(autopar.Cluster.preset("p3.16xlarge"), devices_per_host=2)
    options = {"cluster": on, "cache_dir": None, "plan": recipe(2, m=4)}
    roomy = autopar.plan(halved_step, *halved_arguments(256), **grouped(**options))
    assert roomy.record.pipeline.keeps_copies
    less_bytes = 128 * 128 * 2  # of three copies that a device keeps, one
    limit_bytes = max(roomy.predicted.peak_bytes) - less_bytes
    tight = autopar.plan(halved_step, *halved_arguments(256), **grouped(**options, memory_limit_bytes=limit_bytes))
    assert not tight.record.pipeline.keeps_copies
    assert "copies of the state made in each anew" in tight.table()
    assert max(tight.predicted.peak_bytes) <= limit_bytes


@pytest.mark.cases(1)
@pytest.mark.parametrize("asked", [{"plan": recipe(2, m=4)}, {"num_microbatches": 4}])
def test_a_step_that_makes_copies_of_the_state_anew_is_that_of_plain_jit(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(PipelineCandidate, "fits", lambda found, _: not found.hoist_casts)
    arguments = halved_arguments()
    made = autopar.parallelize(halved_step, **grouped(**asked, **OPTIONS)).plan(*arguments)
    assert not made.record.pipeline.keeps_copies
    made.save(tmp_path / "plan.json")
    loaded = autopar.parallelize(halved_step, plan=autopar.Plan.load(tmp_path / "plan.json"), **OPTIONS)
    assert_close(loaded(*arguments), jax.jit(halved_step)(*arguments), 1e-2)
