"""How long planning takes: at most as long as it may, and it says what was left untried."""

import math
import time

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.common.progress import LEAST_SOLVE_S, Deadline
from autopar.errors import InvalidArgumentError, MemoryLimitError
from autopar.search.inter_op.stage_problems import why_no_pipeline
from autopar.solver import NoStages
from tests.small_steps import chain_step, grouped, slow_cluster

STATE = [jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(4)]
BATCH = {k: jax.ShapeDtypeStruct((16, 64), jnp.float32) for k in "xy"}


def planned(**options):
    options = {"cluster": slow_cluster(8), "cache_dir": None, **options}
    return autopar.plan(chain_step, STATE, BATCH, **grouped(**options))


def test_a_deadline_is_shared_by_what_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    at = Deadline.after(8.0)
    assert (at.passed, at.solve_s(), at.solve_s(4)) == (False, 8.0, 2.0)
    now[0] = 109.0
    assert at.passed
    assert at.solve_s() == LEAST_SOLVE_S
    assert not Deadline.after(None).passed
    assert Deadline.after(None).solve_s(3) == math.inf


def test_without_time_the_first_plan_is_taken_and_it_says_what_was_left_untried():
    plan = planned(time_limit_s=0)
    first, *others = plan.record.tried
    assert first.axis_sizes == (8,)
    assert {t.why for t in others} == {"not tried: the 0 s of time_limit_s were over"}
    assert plan.mesh.axis_sizes == (8,)


def test_a_limit_that_is_not_reached_changes_nothing():
    limited, free = planned(time_limit_s=1_000), planned()
    assert limited.record.decisions == free.record.decisions
    assert [t.why for t in limited.record.tried] == [t.why for t in free.record.tried]


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"plan": autopar.recipes.pipeline(2)}], ids=str)
def test_what_is_asked_for_is_planned_without_time_too(options):
    assert planned(time_limit_s=0, **options).record.pipeline is not None


def test_a_step_whose_arguments_do_not_fit_is_refused_without_a_search_for_stages(monkeypatch):
    monkeypatch.setattr(
        autopar.search.planner, "pipeline_candidates", lambda *_: pytest.fail("stages are searched for")
    )
    with pytest.raises(MemoryLimitError, match="nor do stages fit: the arguments alone") as caught:
        planned(memory_limit_bytes=8_000)
    assert caught.value.needed_bytes > 8_000


def test_reasons_that_differ_in_their_numbers_alone_are_said_once():
    answers = [NoStages(reason=f"layer 0 alone is {n} bytes over") for n in ("1,504", "544", "736")]
    assert why_no_pipeline([*answers, NoStages(reason="other")]) == "layer 0 alone is 544 bytes over; other"


@pytest.mark.parametrize("limit", [-1, float("nan"), True, "5"])
def test_a_limit_that_is_none(limit):
    with pytest.raises(InvalidArgumentError, match="time_limit_s"):
        autopar.parallelize(chain_step, search=autopar.Search(time_limit_s=limit))
