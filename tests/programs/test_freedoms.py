"""Freedoms of the search that are taken away: what is left is what it says."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.inter_op import evaluate, stage_problems
from benchmarks.freedoms import (
    FREEDOMS,
    WORKLOADS,
    Bench,
    alike,
    by_policy,
    by_price,
    kept_whole,
    nothing_hides,
    one_stage,
)
from tests.small_steps import gated_step


def option(policy="nothing", mesh="x=2", s_per_byte=1.0, in_flight=0, part=-1):
    return SimpleNamespace(
        policy=policy, mesh=mesh, part=part, terms=SimpleNamespace(s_per_byte=s_per_byte, in_flight=in_flight)
    )


def test_options_of_one_policy_or_of_none():
    options = [option("input"), option("nothing"), option("input"), option("matmuls")]
    assert by_policy(options) == [[1], [3], [], [0, 2]]
    assert kept_whole(options) == [[1]]


def test_options_of_one_price_are_those_of_the_same_rank_on_each_mesh():
    options = [
        option(s_per_byte=1.0), option(s_per_byte=5.0), option(mesh="x=4", s_per_byte=2.0), option(s_per_byte=5.0),
        option(s_per_byte=5.0, in_flight=4),
    ]  # fmt: skip
    assert by_price(options) == [[0, 2], [1, 2, 3], [2, 4]]


def test_where_nothing_hides_no_other_charges_are_tried():
    params = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 8192), (256, 8192), (8192, 256)))] * 4
    batch = {name: jax.ShapeDtypeStruct((4096, 256), jnp.float32) for name in "xy"}
    cluster = autopar.Cluster.preset("dgx-h100").submesh(1, 2)

    def tried():
        made = autopar.parallelize(
            gated_step, cluster=cluster, cache_dir=None, show_progress=False, num_microbatches=4, schedule="1f1b"
        )
        return [trial.text for trial in made.plan(params, batch).record.weighed]

    with nothing_hides():
        assert not any("hidden sends count" in text for text in tried())
    assert any("hidden sends count" in text for text in tried())


@pytest.mark.slow
def test_with_one_policy_for_all_stages_a_step_is_no_faster_and_recomputes_alike():
    params = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 8192), (256, 8192), (8192, 256)))] * 8
    batch = {name: jax.ShapeDtypeStruct((4096, 256), jnp.float32) for name in "xy"}

    def planned(**options):
        cluster = autopar.Cluster.preset("dgx-h100").submesh(1, 2)
        options = {"num_microbatches": 8, "schedule": "1f1b", **options}
        made = autopar.parallelize(gated_step, cluster=cluster, cache_dir=None, show_progress=False, **options)
        return made.plan(params, batch)

    before = stage_problems.best_stages, evaluate.best_stages, stage_problems.undominated
    limit_bytes = int(0.4 * max(planned().predicted.peak_bytes))
    free = planned(memory_limit_bytes=limit_bytes)
    assert len(set(free.record.pipeline.recomputed)) > 1
    with alike(by_policy):
        uniform = planned(memory_limit_bytes=limit_bytes)
    assert len(set(uniform.record.pipeline.recomputed)) == 1
    assert uniform.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9)
    with one_stage():
        assert len(planned().record.pipeline.stages) == 1
    assert (stage_problems.best_stages, evaluate.best_stages, stage_problems.undominated) == before


def test_every_workload_names_a_cluster_and_a_step():
    bench = Bench(WORKLOADS["two kinds"])
    assert len(bench.cluster.parts) == 2
    assert bench.smallest_microbatches() > 1
    assert len(FREEDOMS) == 6
