"""`autopar.verify`: a plan beside its compiled program, and its numbers beside plain jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.verification import Compared, leaf_difference
from tests.small_steps import (
    MLP_BATCH,
    MLP_STATE,
    mlp_batch,
    mlp_step,
    new_mlp_state,
    shapes,
    slow_cluster,
    transformer,
)


@pytest.fixture(scope="module")
def mlp() -> tuple[autopar.Plan, autopar.Verification]:
    step = autopar.parallelize(mlp_step, cluster=slow_cluster())
    return step.plan(MLP_STATE, MLP_BATCH), autopar.verify(step, new_mlp_state(), mlp_batch())


@pytest.fixture(scope="module")
def decoder() -> tuple[autopar.Plan, autopar.Verification]:
    case = transformer()
    step = autopar.parallelize(case.step, cluster=slow_cluster(4))
    state = case.create(jax.random.key(0))
    return step.plan(case.shapes, shapes(case.batch)), autopar.verify(step, state, case.batch)


@pytest.fixture(params=["mlp", "decoder"])
def verified(request) -> tuple[autopar.Plan, autopar.Verification]:
    return request.getfixturevalue(request.param)


@pytest.mark.cases(1)
def test_the_bytes_predicted_are_those_compiled(verified):
    plan, verification = verified
    assert verification.total.compiled > 0, "nothing was split, so that nothing was verified"
    assert verification.total.predicted == plan.predicted.sent_bytes
    assert verification.total.ratio == pytest.approx(1, abs=0.01)


def test_the_total_is_the_sum_of_the_kinds(verified):
    _, verification = verified
    *kinds, total = verification.collectives
    assert total is verification.total
    assert sum(k.compiled for k in kinds) == pytest.approx(total.compiled)
    assert sum(k.predicted for k in kinds) == pytest.approx(total.predicted)
    assert [k.name for k in kinds] == [c.name for c in verification.counts]


def test_the_peak_is_that_of_the_compiled_program(verified):
    plan, verification = verified
    assert verification.peak.predicted == plan.predicted.peak_bytes[0]
    assert verification.peak.ratio == pytest.approx(1, abs=0.15)


def test_the_numbers_are_those_of_plain_jit(verified):
    _, verification = verified
    assert verification.difference is not None
    assert verification.difference < 1e-5
    assert verification.worst_leaf.startswith("result")


def test_the_plan_has_the_comparison(verified):
    plan, found = verified
    rows = {row.name: (row.predicted, row.measured) for row in found.plan.record.measured}
    assert rows["peak, bytes of a device"] == (found.peak.predicted, found.peak.compiled)
    assert rows["total, bytes of a device"] == (found.total.predicted, found.total.compiled)
    assert len(rows) == len(found.collectives) + len(found.counts) + 1
    assert found.plan.predicted == plan.predicted


def test_the_table_shows_it_all(verified):
    plan, verification = verified
    text = " ".join(str(verification).split())  # long lines wrap
    assert f"verified on cpu x {plan.mesh.num_devices}" in text
    for row in verification.collectives:
        assert f"{row.name}, bytes" in text
        assert f"{row.compiled:,.0f}" in text
    for row in verification.counts:
        assert f"{row.name}, count" in text
    assert "peak memory, bytes" in text
    assert f"{verification.difference:.2e} of a leaf's largest value" in text
    assert verification.worst_leaf in text


def test_shapes_only_compare_no_numbers():
    step = autopar.parallelize(mlp_step, cluster=slow_cluster())
    before = {id(x) for x in jax.live_arrays()}
    verification = autopar.verify(step, MLP_STATE, MLP_BATCH)
    assert [x.shape for x in jax.live_arrays() if id(x) not in before] == []
    assert verification.difference is None
    assert verification.total.compiled > 0
    assert "numbers" not in str(verification)


def test_arguments_survive():
    step = autopar.parallelize(mlp_step, cluster=slow_cluster())
    state = step.init(lambda: new_mlp_state())
    autopar.verify(step, state, mlp_batch())
    assert not any(x.is_deleted() for x in state.values())
    assert float(step(state, mlp_batch())[1]["loss"]) > 0


def test_a_wrong_result_is_seen(monkeypatch):
    step = autopar.parallelize(mlp_step, cluster=slow_cluster())
    right = step.plain(new_mlp_state(), mlp_batch())
    wrong = jax.tree.map(lambda x: x * 1.001, right)
    monkeypatch.setattr(step, "plain", lambda *args: wrong)
    verification = autopar.verify(step, new_mlp_state(), mlp_batch())
    assert verification.difference == pytest.approx(1e-3, rel=0.01)
    assert verification.differs
    assert "rounding alone does not go as far" in str(verification)


def test_of_a_step_that_amplifies_rounding_it_is_said():
    """As the first step of Adam does: a gradient near zero is divided by its own size."""

    def step(state, batch):
        gradient = batch["x"].sum(0)
        return state - gradient / (jnp.abs(gradient) + 1e-8), {"total": jnp.sum(batch["x"] ** 2)}

    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    x[-1] = -x[:-1].sum(0)
    parallel = autopar.parallelize(step, plan=autopar.recipes.data_parallel(), cluster=slow_cluster(), cache_dir=None)
    verification = autopar.verify(parallel, jnp.zeros(64), {"x": x})
    assert verification.differs
    (leaf,) = verification.differing
    assert leaf.difference == verification.difference <= leaf.moved
    assert "rounding alone goes as far: where the arguments move by a unit in their last" in " ".join(
        str(verification).split()
    )


def test_what_is_no_step_is_refused():
    with pytest.raises(
        autopar.errors.InvalidArgumentError, match=r"autopar.verify: expected a step.*got function"
    ) as caught:
        autopar.verify(mlp_step, MLP_STATE, MLP_BATCH)
    assert "decorate the function" in caught.value.hint


def test_ratios():
    assert Compared(name="x", predicted=3, compiled=2).ratio == 1.5
    assert Compared(name="x", predicted=0, compiled=0).ratio == 1
    assert Compared(name="x", predicted=1, compiled=0).ratio == float("inf")


@pytest.mark.parametrize(
    ("expected", "got", "difference"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([0.0, 0.0], [0.0, 0.5], 0.5),
        ([1.0, float("nan")], [1.0, float("nan")], 0.0),
        ([1.0, float("nan")], [float("nan"), 1.0], float("inf")),
        ([1.0, float("inf")], [1.0, float("-inf")], float("inf")),
        ([True, False], [True, True], 1.0),
        ([200, 100], [100, 100], 0.5),
        ([4 + 3j, 0], [4 + 3j, 5j], 1.0),
    ],
)
def test_differences_of_leaves(expected, got, difference):
    assert leaf_difference(jnp.array(expected), jnp.array(got)) == pytest.approx(difference)


def test_difference_of_keys():
    one, other = jax.random.key(0), jax.random.key(1)
    assert leaf_difference(one, one) == 0
    assert leaf_difference(one, other) > 0
