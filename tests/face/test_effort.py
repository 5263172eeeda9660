"""How far the search goes on, what is said of the rest, and searching again."""

import types

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import InvalidArgumentError
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, Link
from autopar.plan.context import PlanningContext
from autopar.plan.options import Effort, PlanRequest
from autopar.plan.rivals import BASELINES
from autopar.search.inter_op.pipeline_candidate import SOURCE as PIPELINES
from tests.small_steps import assert_close, chain_step, grouped, mlp_batch, mlp_step, new_mlp_state, slow_cluster

PARAMS = [jax.ShapeDtypeStruct((16_384, 16_384), jnp.float32)] * 8
EXAMPLES = jax.ShapeDtypeStruct((32_768, 16_384), jnp.float32)
CHAIN = PARAMS, {"x": EXAMPLES, "y": EXAMPLES}
# Two stages are the fastest where hosts have a slow link between them.
HOSTS = Cluster(
    name="two hosts",
    device=presets.H100,
    num_hosts=2,
    devices_per_host=2,
    inside_host=presets.NVLINK4,
    between_hosts=Link(latency_s=1e-5, bytes_per_s=5e9, source="made up: 40 Gb/s"),
)


def planned(cluster=HOSTS, step=chain_step, args=CHAIN, **options):
    return autopar.parallelize(step, cluster=cluster, cache_dir=None, **grouped(**options)).plan(*args)


def untried(plan, source):
    return [
        r.why for r in plan.record.rejected if r.source == source and ("not tried" in r.why or "not searched" in r.why)
    ]


def test_a_quick_search_takes_the_best_program_and_says_what_it_left():
    quick, default = planned(effort="quick"), planned()
    assert quick.record.pipeline is None
    assert default.record.pipeline is not None
    assert default.predicted.step_time_s < quick.predicted.step_time_s
    assert "effort='quick'" in untried(quick, PIPELINES)[0]
    assert not untried(quick, BASELINES)
    assert not untried(default, PIPELINES)


def test_a_quick_search_takes_pipelines_where_no_program_fits():
    examples = jax.ShapeDtypeStruct((131_072, 16_384), jnp.float32)  # whose saved activations exceed the memory
    quick = planned(effort="quick", args=(PARAMS, {"x": examples, "y": examples}), memory_limit_bytes="26GB")
    assert quick.record.pipeline is not None
    assert max(quick.predicted.peak_bytes) <= 26 * 10**9


def test_the_gap_is_what_no_plan_can_save():
    quick, default = planned(effort="quick"), planned()
    assert quick.record.least_step_time_s == default.record.least_step_time_s <= default.predicted.step_time_s
    assert 0 <= default.gap < quick.gap < 1
    assert default.gap == 1 - default.record.least_step_time_s / default.predicted.step_time_s


def test_where_nothing_can_be_gained_nothing_more_is_tried():
    """Large batches over links that cost nothing: data parallelism is as fast as any plan can be."""
    free = Cluster.flat(4, device=presets.H100, links=(Link(latency_s=1e-9, bytes_per_s=1e16, source="made up"),))
    examples = jax.ShapeDtypeStruct((2**20, 16_384), jnp.float32)  # beside which starting kernels takes no time
    options = {"args": (PARAMS, {"x": examples, "y": examples}), "memory_limit_bytes": "1PB"}
    default, thorough = planned(free, **options), planned(free, effort="thorough", **options)
    assert default.gap < 5e-5
    (meshes,) = [r for r in default.record.tried if r.axis_sizes == (2, 2)]
    assert "no plan can take less than" in meshes.why
    assert "no plan can take less than" in untried(default, PIPELINES)[0]
    assert not untried(thorough, PIPELINES)
    assert thorough.predicted.step_time_s <= default.predicted.step_time_s


@pytest.mark.parametrize(("num_devices", "worth"), [(1, 0.01), (8, 0.01), (64, 0.03), (1024, 0.03)])
def test_stages_are_searched_for_where_they_may_gain_more_than_that_is_worth(num_devices, worth):
    def may_gain(gap, effort=Effort.DEFAULT):
        found = types.SimpleNamespace(
            request=PlanRequest(effort=effort),
            cluster=types.SimpleNamespace(num_devices=num_devices),
            least_s=1 - gap,
        )
        return PlanningContext.stages_may_beat(found, 1.0)

    assert not may_gain(0.999 * worth)
    assert may_gain(1.001 * worth)
    assert may_gain(1e-6, Effort.THOROUGH)


def test_one_stage_under_zero_ends_the_search_where_the_bound_is_near():
    """Large batches whose values do not fit at once: gathering the state in two micro-batches is hidden."""
    examples = jax.ShapeDtypeStruct((2**20, 16_384), jnp.float32)
    args = PARAMS, {"x": examples, "y": examples}
    cluster = Cluster.flat(8, device=presets.H100, links=(presets.NVLINK4,))
    default = planned(cluster, args=args)
    assert default.record.pipeline is not None
    assert len(default.record.pipeline.stages) == 1
    assert default.gap < 0.01
    assert "no plan can take less than" in untried(default, PIPELINES)[0]
    assert "ZeRO-3" in str(default)


def test_a_step_planned_again_takes_the_faster_plan_and_moves_the_state():
    step = autopar.parallelize(mlp_step, cluster=slow_cluster(4), cache_dir=None, search=autopar.Search(effort="quick"))
    expected = state = new_mlp_state()
    state, _ = step(state, mlp_batch())
    expected, _ = mlp_step(expected, mlp_batch())
    before = step.plan(state, mlp_batch())
    found = step.replan(state, mlp_batch())
    assert found.predicted.step_time_s <= before.predicted.step_time_s
    assert step.plan(state, mlp_batch()).record == found.record
    assert_close(step(state, mlp_batch()), mlp_step(expected, mlp_batch()))


def test_a_faster_plan_comes_in_place_of_the_old_one():
    step = autopar.parallelize(chain_step, cluster=HOSTS, cache_dir=None, search=autopar.Search(effort="quick"))
    before = step.plan(*CHAIN)
    found = step.replan(*CHAIN, effort="default")
    assert before.record.pipeline is None
    assert found.record.pipeline is not None
    assert step.plan(*CHAIN).record == found.record
    assert step.replan(*CHAIN, effort="quick").record == found.record


def test_a_short_batch_follows_the_plan_of_the_longer_one():
    step = autopar.parallelize(mlp_step, cluster=slow_cluster(2), cache_dir=None, search=autopar.Search(effort="quick"))
    state, _ = step(new_mlp_state(), mlp_batch())
    short = jax.tree.map(lambda x: x[: x.shape[0] // 2], mlp_batch())
    state, _ = step(state, short)
    with pytest.raises(InvalidArgumentError, match="a shorter one"):
        step.replan(state, short)


def test_keys_that_share_a_plan_get_the_new_one():
    step = autopar.parallelize(chain_step, cluster=HOSTS, cache_dir=None, search=autopar.Search(effort="quick"))
    other = [jax.ShapeDtypeStruct(p.shape, p.dtype, weak_type=True) for p in PARAMS], CHAIN[1]
    assert step.plan(*CHAIN).record is step.plan(*other).record
    found = step.replan(*CHAIN, effort="default")
    assert found.record.pipeline is not None
    assert step.plan(*other).record is found.record


def test_a_word_that_is_no_effort_is_refused():
    with pytest.raises(InvalidArgumentError, match="'quick' or 'default' or 'thorough'"):
        planned(effort="hasty")
    step = autopar.parallelize(chain_step, plan=planned(effort="quick"), cluster=HOSTS)
    with pytest.raises(InvalidArgumentError, match="given a plan"):
        step.replan(*CHAIN)
