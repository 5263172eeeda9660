"""Training steps under policies, parallelised: beside plain jit under the same policy."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import MixedExamplesError, NonFiniteError
from autopar.mixed_precision import stop_if_not_finite
from tests.in_processes import launch
from tests.small_steps import MLP_BATCH, mlp_batch, mlp_loss, mlp_state, new_mlp_state, slow_cluster
from tests.train.mixed_precision.small_training import batches, run, training

PROGRAM = str(Path(__file__).with_name("processes_with_overflow.py"))
PIPELINE = autopar.recipes.pipeline(2, "1f1b", num_microbatches=4)
ONE_MICROBATCH = autopar.recipes.pipeline(2, "1f1b", num_microbatches=1)
SEARCHED = None
# What one rounding to the type changes at most of a number of about 1, as the losses are.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}


def parallel(function, plan):
    cluster = slow_cluster() if plan is SEARCHED else None
    return autopar.parallelize(function, plan=plan, cluster=cluster, cache_dir=None)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("fp16", PIPELINE),
        ("fp16", SEARCHED),
        pytest.param("fp16", autopar.recipes.zero(3), marks=pytest.mark.slow),
    ],
    ids=["stages", "one program", "ZeRO-3"],
)
def test_a_step_that_overflows_is_left_out_on_all_devices_and_stages(name, plan):
    create, function = training(name)
    data = batches(6, overflows_at=3)
    step = parallel(function, plan)
    states, metrics = run(step, create, data)
    assert [bool(m["finite"]) for m in metrics] == [True, True, True, False, True, True]
    before, after = states[2], states[3]
    assert float(after.pop("loss_scale").value) == float(before.pop("loss_scale").value) / 2
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [int(s["steps"]) for s in states] == [1, 2, 3, 3, 4, 5]
    _, expected = run(jax.jit(function), create, data)
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(metrics, expected, strict=True)]
    print(f"{name}: losses differ by at most {np.nanmax(differences):.1e}")
    for got, wanted in zip(metrics, expected, strict=True):
        np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=0, atol=ROUNDING[name])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("bf16", PIPELINE),
        ("bf16", autopar.recipes.zero(3)),
        ("fp8", SEARCHED),
        ("fp8", ONE_MICROBATCH),
        pytest.param("fp8", autopar.recipes.zero(3), marks=pytest.mark.slow),
        pytest.param("bf16", SEARCHED, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_plain_jit_up_to_roundings(name, plan):
    create, function = training(name)
    data = batches(20)
    _, metrics = run(parallel(function, plan), create, data)
    _, expected = run(jax.jit(function), create, data)
    difference = max(abs(float(a["loss"]) - float(b["loss"])) for a, b in zip(metrics, expected, strict=True))
    print(f"{name}: losses differ by at most {difference:.1e}")
    assert difference <= ROUNDING[name]


@pytest.mark.slow
def test_a_step_that_overflows_is_left_out_in_all_processes(tmp_path):
    steps, overflows_at = 5, 2
    ended = launch(tmp_path, 2, 2, 280.0, program=PROGRAM, steps=steps, overflows_at=overflows_at)
    assert [code for code, _, _ in ended] == [0, 0], "\n".join(text[-3000:] for _, text, _ in ended)
    create, function = training("fp16")
    _, expected = run(jax.jit(function), create, batches(steps, overflows_at))
    for process in range(2):
        for rows in json.loads((tmp_path / f"found{process}.json").read_text()).values():
            assert [finite for finite, _, _ in rows] == [i != overflows_at for i in range(steps)]
            assert [is_same for _, is_same, _ in rows] == [i == overflows_at for i in range(steps)]
            losses = [loss for *_, loss in rows]
            np.testing.assert_allclose(losses, [m["loss"] for m in expected], rtol=0, atol=ROUNDING["fp16"])


@pytest.mark.parametrize(
    "plan", [pytest.param(SEARCHED, marks=pytest.mark.slow), PIPELINE], ids=["one program", "stages"]
)
def test_a_run_stops_with_the_step_and_the_module_that_is_not_finite(plan):
    create, function = training("fp16")

    def named(state, batch):
        with jax.named_scope("model"):
            return function(state, batch)

    step, state = parallel(named, plan), create(jax.random.key(0))
    for batch in batches(2):
        state, metrics = step(state, batch)
        stop_if_not_finite(metrics["finite"], 0, step, state, batch)
    bad = batches(3, overflows_at=2)[2]
    state, metrics = step(state, bad)
    with pytest.raises(NonFiniteError, match=r"step 2, model at .*small_training\.py") as raised:
        stop_if_not_finite(metrics["finite"], 2, step, state, bad)
    print(raised.value)
    assert int(state["steps"]) == 2  # the state is there: that before the step


def test_what_is_not_finite_is_named_where_no_result_shows_it():
    """A step that was skipped has finite results, and its loss may be finite too."""
    policy = autopar.precision("bf16")

    def function(state, batch):
        def loss_of(params):
            with jax.named_scope("norm"):
                return jnp.sqrt(jnp.sum((batch["x"] @ params["first"]) ** 2))

        loss, gradients = policy.value_and_grad(loss_of)(state)
        new, finite = policy.apply_if_finite(gradients, jax.tree.map(jnp.add, state, gradients), state)
        return new, {"loss": loss, "finite": finite}

    step, batch = parallel(function, SEARCHED), {"x": np.zeros((8, 16), np.float32)}
    state, metrics = step({"first": jnp.ones((16, 4))}, batch)
    assert metrics["loss"] == 0
    with pytest.raises(NonFiniteError, match=r"step 3, norm at .*test_steps\.py.*it shows in no result"):
        stop_if_not_finite(metrics["finite"], 3, step, state, batch)


def test_float8_products_are_not_split_into_micro_batches():
    create, function = training("fp8")
    with pytest.raises(MixedExamplesError, match="reduce_max mixes the examples"):
        parallel(function, PIPELINE).plan(jax.eval_shape(create, jax.random.key(0)), MLP_BATCH)


NARROW_SUMS = "params=float32,compute=bfloat16,output=float32,reductions=bfloat16"


@pytest.mark.parametrize(("name", "share"), [("bf16", 1), ("fp16", 1), (NARROW_SUMS, 0.5)])
def test_parameters_are_cast_before_they_are_gathered_and_gradients_summed_in_the_type_of_reductions(name, share):
    def gathered_and_reduced(policy):
        create, function = training(policy)
        step = autopar.parallelize(function, plan=autopar.recipes.zero(3), cluster="dgx-h100x1", cache_dir=None)
        plan = step.plan(jax.eval_shape(create, jax.random.key(0)), MLP_BATCH)
        kinds = ("all-gather",), ("all-reduce", "reduce-scatter")
        return [sum(c.sent_bytes for c in plan.predicted.collectives if c.kind in of) for of in kinds]

    (wide_gathers, wide_sums), (gathers, sums) = gathered_and_reduced("float32"), gathered_and_reduced(name)
    assert gathers == wide_gathers / 2 > 0
    assert sums == pytest.approx(share * wide_sums, rel=0.02)  # the loss, and whether all is finite, are always as long


def test_the_compiled_program_gathers_what_is_cast():
    step = parallel(training("fp16")[1], autopar.recipes.zero(3))  # bfloat16 goes in 32 bits between CPU devices
    found = autopar.verify(step, jax.eval_shape(training("fp16")[0], jax.random.key(0)), MLP_BATCH)
    gathers = next(row for row in found.collectives if row.name == "all-gather")
    assert gathers.predicted == gathers.compiled > 0


def test_gradients_are_added_up_over_micro_batches_in_the_type_of_reductions():
    num_microbatches, policy = 64, autopar.precision("bf16")

    def gradients(params, batch):
        return policy.value_and_grad(mlp_loss)(params, batch)

    def step(params, batch):
        loss, grads = gradients(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, grads), {"loss": loss}

    batch, params = mlp_batch(512, seed=1), mlp_state(jax.random.key(0))
    parts = [jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], batch) for i in range(num_microbatches)]
    of_parts = [jax.jit(gradients)(params, part)[1] for part in parts]
    exact = jax.grad(mlp_loss)(params, batch)

    def error(grads):
        return max(float(abs(g - e).max()) for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True))

    def summed(dtype):
        total = jax.tree.map(lambda g: g.astype(dtype) / num_microbatches, of_parts[0])
        for grads in of_parts[1:]:
            total = jax.tree.map(lambda t, g: t + g.astype(dtype) / num_microbatches, total, grads)
        return total

    in_micro_batches = parallel(step, autopar.recipes.pipeline(2, "1f1b", num_microbatches=num_microbatches))
    new, _ = in_micro_batches(new_mlp_state(), batch)
    got = error(jax.tree.map(lambda p, n: p - n, params, jax.device_get(new)))
    assert got < 1.5 * error(summed("float32")) < 0.5 * error(summed("bfloat16"))
