"""Plans made for accelerators run as they are on as many virtual CPU devices, in every schedule."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.runtime.standard_schedules import SCHEDULES
from tests.small_steps import assert_close, grouped, transformer

CLUSTERS = ("dgx-h100", "tpu-v5e:2x4")
CHUNKED = ("interleaved", "zb-v")


def run_and_compare(cluster: str, **options) -> autopar.Plan:
    """Runs a plan for a preset here, and holds its results against those of plain `jax.jit`."""
    case = transformer()
    state = jax.jit(case.create)(jax.random.key(0))
    expected = jax.jit(case.step)(state, case.batch)
    step = autopar.parallelize(case.step, cluster=autopar.Cluster.parse(cluster), cache_dir=None, **grouped(**options))
    assert_close(step(jax.tree.map(np.array, state), case.batch), expected)
    return step.plan(case.shapes, case.batch)


def test_zero_2_between_hosts_reduces_large_gradients_in_parts():
    # Eight hosts that are far apart: small values are all-reduced sooner than they are reduced in parts.
    hosts = autopar.Cluster.preset("dgx-a100-80g", hosts=8)
    far = dataclasses.replace(hosts.between_hosts, latency_s=5 * hosts.between_hosts.latency_s)
    cluster = dataclasses.replace(hosts, devices_per_host=1, between_hosts=far)
    case = transformer(layers=1, width=1024)
    step = autopar.parallelize(
        case.step,
        plan=recipes.combine(zero=2, num_microbatches=2),
        cluster=cluster,
        cache_dir=None,
    )
    verified = autopar.verify(step, case.shapes, case.batch)
    matrices = sum(4 * x.size for x in jax.tree.leaves(case.shapes))
    compiled = {c.name: c.compiled for c in verified.collectives}
    data, in_all = collections.Counter(), 0
    plan = step.plan(case.shapes, case.batch)
    for use in plan.record.predicted.collectives:
        data[use.kind] += use.sent_bytes if use.axes == plan.mesh.axis_names[:1] else 0
        in_all += use.sent_bytes if use.kind == "reduce-scatter" else 0
    # But for the embedding, which is small, each device sends seven eighths of each in each of two micro-batches.
    assert data["reduce-scatter"] == pytest.approx(2 * 7 / 8 * matrices, rel=0.05)
    assert compiled["reduce-scatter"] == pytest.approx(in_all)


@pytest.mark.cases(1)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_free_search(cluster):
    plan = run_and_compare(cluster)
    assert plan.record.cluster.device.name != "CPU"


QUICK = ("1f1b", "interleaved", "zb-h2")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in sorted(set(SCHEDULES) - {"inference", "inference-v"})
    ],
)
def test_pipelines(name):
    cluster = CLUSTERS[name in CHUNKED]
    chunks = {"chunks": 2} if name in CHUNKED else {}
    plan = recipes.combine(pp=2, dp=2, tp=2, num_microbatches=4, schedule=name, **chunks)
    made = run_and_compare(cluster, plan=plan)
    assert made.record.pipeline.schedule == name
