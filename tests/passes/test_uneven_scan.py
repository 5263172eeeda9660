"""Stages that do not divide the layers of a scan: unequal ranges of trips, the state on fewer stages, the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.checkpoint import Checkpointer
from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.passes.split_scan import LeafSlice, ranges, split_scans
from tests.passes.test_split_scan import traced
from tests.sections import BOOK
from tests.small_steps import assert_close, slow_cluster

WIDTH, INNER, EXAMPLES = 8, 16, 16
ADAM = optax.adam(1e-2)


def layer(x, p):
    return x + jnp.tanh(x @ p["a"] + p["b"]) @ p["c"], None


def loss_of(params, batch):
    x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(state, batch):
    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, moments = ADAM.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def make_state(layers):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = {"a": (WIDTH, INNER), "c": (INNER, WIDTH)}
    stacks = {n: 0.3 * jax.random.normal(k, (layers, *s)) for k, (n, s) in zip(keys, sizes.items(), strict=False)}
    params = {
        "in": 0.3 * jax.random.normal(keys[2], (WIDTH, WIDTH)),
        "layers": stacks | {"b": jnp.zeros((layers, INNER))},
    }
    return params, ADAM.init(params)


def make_batch(seed=0, examples=EXAMPLES):
    random = np.random.default_rng(seed)
    return {n: random.normal(size=(examples, WIDTH)).astype(np.float32) for n in "xy"}


def step_on(stages, num_devices=None, **options):
    plan = recipes.combine(pp=stages, num_microbatches=2, **options) if stages else recipes.data_parallel()
    cluster = slow_cluster(num_devices or 2 * stages)
    return autopar.parallelize(train_step, plan=plan, cluster=cluster, cache_dir=None)


def trained(step, state, seeds):
    for seed in seeds:
        state, _ = step(state, make_batch(seed))
    return state


# The parts


def test_the_last_part_takes_the_rest():
    assert ranges(3, 2) == ((0, 2), (2, 3))
    assert ranges(7, 4) == ((0, 2), (2, 4), (4, 6), (6, 7))
    assert ranges(4, 2) == ((0, 2), (2, 4))
    # With 3 parts of at most 2 layers, the last would have none.
    assert ranges(4, 3) == ((0, 2), (2, 3), (3, 4))
    assert ranges(9, 6) == ((0, 2), (2, 4), (4, 6), (6, 7), (7, 8), (8, 9))


def test_the_state_lies_in_as_many_parts_as_divide_the_layers():
    whole = traced(train_step, make_state(6), make_batch())
    stacks = [i for i, aval in enumerate(whole.in_avals) if aval.shape[:1] == (6,)]
    step = split_scans(whole, 4, BOOK)
    assert step.scopes == ("layers[0:2]", "layers[2:4]", "layers[4:5]", "layers[5:6]")
    for i in stacks:
        pieces = [n for n, piece in enumerate(step.arguments) if piece.leaf == i]
        assert [step.arguments[n] for n in pieces] == [LeafSlice(i, part, 3) for part in range(3)]
        assert {step.traced.in_avals[n].shape for n in pieces} == {(2, *whole.in_avals[i].shape[1:])}
        assert [step.part_of_argument[n] for n in pieces] == [0, 1, 2]
    lengths = [e.params["length"] for e in jax_compat.equations_in(step.traced.jaxpr) if e.primitive.name == "scan"]
    assert lengths == [2, 2, 1, 1, 1, 1, 2, 2]  # forward, then backward


def test_layers_that_no_part_divides_lie_together():
    step = split_scans(traced(train_step, make_state(3), make_batch()), 2, BOOK)
    assert step.scopes == ("layers[0:2]", "layers[2:3]")
    assert {piece.parts for piece in (*step.arguments, *step.results)} == {1}


def test_a_part_without_layers_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"at most as many stages as its 3 layers(?s:.*)got 4"):
        step_on(4).plan(jax.eval_shape(lambda: make_state(3)), make_batch())


# Pipelines


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layers", "stages", "options"),
    [
        (3, 2, {}),
        (4, 3, {}),
        pytest.param(4, 3, {"zero": 1, "recompute": "input"}, marks=pytest.mark.slow),
        pytest.param(3, 2, {"zero": 2, "schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param(3, 2, {"zero": 3}, marks=pytest.mark.slow),
        pytest.param(3, 2, {"tp": 2, "recompute": "input"}, marks=pytest.mark.slow),
        pytest.param(5, 3, {}, marks=pytest.mark.slow),
        pytest.param(7, 4, {}, marks=pytest.mark.slow),
    ],
)
def test_it_computes_what_plain_jit_does(layers, stages, options):
    step = step_on(stages, **options)
    compared = autopar.verify(step, make_state(layers), make_batch())
    assert compared.difference < 1e-5
    assert len(compared.plan.record.pipeline.stages) == stages
    stacks = [v for v in compared.plan.record.arguments if v.kind == "state" and v.shape[:1] == (layers,)]
    assert len(stacks) == 9  # parameters and two moments
    parts = max(n for n in range(1, stages + 1) if layers % n == 0)
    assert {max(1, len(v.stages)) for v in stacks} == {parts}
    text = f"{parts} equal parts, on as many stages" if parts > 1 else "1 equal part, on one stage"
    assert any(f"{layers} layers of a scan lie in {text}" in note for note in compared.plan.record.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (4, 3)])
def test_a_run_is_saved_restored_and_goes_on_under_other_plans(tmp_path, layers, stages):
    expected = make_state(layers)
    for seed in range(4):
        expected, _ = jax.jit(train_step)(expected, make_batch(seed))
    step = step_on(stages)
    state = trained(step, step.init(lambda: make_state(layers)), range(2))
    stack = state[0]["layers"]["a"]
    assert stack.shape == (layers, WIDTH, INNER)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, state, plan=step)
        checkpoints.wait()
        assert_close(trained(step, state, (2, 3)), expected)
        for other in (step_on(stages), step_on(0, num_devices=4)):
            other.plan(jax.eval_shape(lambda: make_state(layers)), make_batch())
            restored = checkpoints.restore(like=jax.eval_shape(lambda: make_state(layers)), step=other)
            assert_close(trained(other, restored, (2, 3)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (4, 3)])
def test_a_saved_plan_and_a_short_batch_keep_the_stages(tmp_path, layers, stages):
    step = step_on(stages)
    plan = step.plan(make_state(layers), make_batch())
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    again = autopar.parallelize(train_step, plan=loaded, cluster=slow_cluster(2 * stages), cache_dir=None)
    state, expected = make_state(layers), make_state(layers)
    for examples in (EXAMPLES, EXAMPLES // 2):
        state, loss = again(state, make_batch(examples=examples))
        expected, expected_loss = jax.jit(train_step)(expected, make_batch(examples=examples))
        assert_close(loss, expected_loss)
    assert_close(state, expected)
