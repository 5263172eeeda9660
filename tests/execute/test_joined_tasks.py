"""Micro-batches that are one program with the update, or with what precedes the loop: equal to plain `jax.jit`, and
chosen where exchanged gradients hide.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.runtime.emit import joinable, pairs
from autopar.search.inter_op import build_stages
from tests.small_steps import assert_close, transformer


def step_of(fun, plan, cluster):
    cluster = autopar.Cluster.parse(cluster)
    return autopar.parallelize(fun, plan=plan, cluster=cluster, cache_dir=None)


@pytest.fixture
def all_that_can_be(monkeypatch):
    """Joined, that is, whatever it hides."""

    def join_all(staged, limit_bytes):
        pipeline, schedule = staged.simulated.pipeline, staged.schedule
        chains = [*joinable(pipeline, schedule), *pairs(pipeline, schedule)]
        return build_stages.with_joined(staged, [build_stages.joined_task(staged, chain) for chain in chains])

    monkeypatch.setattr(build_stages, "join_where_it_pays", join_all)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("recipe", "joined"),
    [
        (
            {"dp": 4, "tp": 2, "zero": 1, "num_microbatches": 2},
            (("before 0 of stage 0", "F of stage 0"), ("F of stage 0", "after 0 of stage 0")),
        ),
        (
            {"dp": 8, "num_microbatches": 1, "recompute": "input"},
            (("before 0 of stage 0", "F of stage 0", "after 0 of stage 0"),),
        ),
        (
            {"dp": 4, "pp": 2, "num_microbatches": 2, "schedule": "zb-2p"},
            (
                ("before 0 of stage 0", "F of stage 0"),
                ("F of stage 0", "W of stage 0"),
                ("W of stage 1", "after 0 of stage 1"),
                ("W of stage 0", "after 0 of stage 0"),
            ),
        ),
        (
            {"dp": 4, "pp": 2, "num_microbatches": 4, "schedule": "dualpipev", "chunks": 2},
            (
                ("F of stage 0", "B of stage 3", "W of stage 3"),
                ("F of stage 1", "B of stage 2", "W of stage 2"),
                ("F of stage 2", "B of stage 1", "W of stage 1"),
                ("F of stage 3", "W of stage 0"),
                ("before 0 of stage 0", "F of stage 0"),
                ("W of stage 1", "after 0 of stage 1"),
                ("W of stage 0", "after 1 of stage 0"),
            ),
        ),
        (
            {"dp": 4, "pp": 2, "num_microbatches": 4},
            (
                ("F of stage 0", "B of stage 0"),
                ("before 0 of stage 0", "F of stage 0"),
                ("B of stage 1", "after 0 of stage 1"),
                ("B of stage 0", "after 0 of stage 0"),
            ),
        ),
    ],
    ids=["one stage", "one micro-batch", "two stages", "dualpipev", "1f1b"],
)
def test_results_are_those_of_plain_jit(recipe, joined, all_that_can_be):
    case = transformer()
    state = jax.jit(case.create)(jax.random.key(0))
    step, plain = step_of(case.step, recipes.combine(**recipe), "dgx-h100"), jax.jit(case.step)
    assert set(step.plan(case.shapes, case.batch).record.pipeline.joined) == set(joined)
    got, expected = jax.tree.map(np.array, state), state
    for _ in range(2):
        got, *got_rest = step(got, case.batch)
        expected, *expected_rest = plain(expected, case.batch)
    assert_close((got, *got_rest), (expected, *expected_rest))
    text = step.compile(case.shapes, case.batch).as_text()
    for names in joined:
        assert "_and_".join(names).replace(" ", "_") in text


def test_a_plan_that_is_read_again_joins_the_same(tmp_path, all_that_can_be, monkeypatch):
    case = transformer()
    recipe = recipes.combine(dp=4, tp=2, num_microbatches=2)
    plan = step_of(case.step, recipe, "dgx-h100").plan(case.shapes, case.batch)
    plan.save(tmp_path / "plan.json")
    monkeypatch.undo()
    again = step_of(case.step, autopar.Plan.load(tmp_path / "plan.json"), "dgx-h100")
    assert "F_of_stage_0_and_after_0_of_stage_0" in again.compile(case.shapes, case.batch).as_text()


def wide_step(weights, batch):
    """Four products of 4096 x 4096, whose gradients are too large to be combined."""

    def loss(weights):
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


WIDE = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 4, jax.ShapeDtypeStruct((16384, 4096), jnp.float32)


def wide_plan(cluster):
    return step_of(wide_step, recipes.combine(dp=8, num_microbatches=4), cluster).plan(*WIDE)


def test_gradients_hide_behind_the_last_micro_batch_of_a_gpu(monkeypatch):
    plan = wide_plan("dgx-h100")
    assert plan.record.pipeline.joined == (("F of stage 0", "after 0 of stage 0"),)
    assert "; one program: F of stage 0 + after 0 of stage 0" in plan.table()
    monkeypatch.setattr(build_stages, "WORTHWHILE", 1.0)
    apart = wide_plan("dgx-h100")
    assert apart.record.pipeline.joined == ()
    joined_s, apart_s = plan.record.predicted, apart.record.predicted
    saved_s = apart_s.step_time_s - joined_s.step_time_s
    more_hidden_s = joined_s.hidden_time_s - apart_s.hidden_time_s
    # By itself the exchange is one collective, with one latency; beside computing it is four.
    more_latency_s = joined_s.collective_time_s - apart_s.collective_time_s
    assert more_latency_s > 0
    assert saved_s == pytest.approx(more_hidden_s - more_latency_s, rel=0.02)
    # Three of the four exchanges at most: the last gradient is there when nothing is left to compute.
    assert 0.4 < saved_s / apart_s.collective_time_s < 0.76
    assert joined_s.peak_bytes == apart_s.peak_bytes


@pytest.mark.parametrize("cluster", ["tpu-v5e:2x4", "local"])
def test_nothing_is_joined_where_reductions_hold_up_computing(cluster):
    assert wide_plan(cluster).record.pipeline.joined == ()
