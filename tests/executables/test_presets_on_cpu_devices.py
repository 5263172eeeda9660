"""Plans made for accelerators run as they are on as many virtual CPU devices, in every schedule."""

import jax
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.runtime.pipeline.standard_schedules import SCHEDULES
from tests.small_steps import assert_close, transformer

CLUSTERS = ("dgx-h100", "tpu-v5e:2x4")
CHUNKED = ("interleaved", "zb-v")


def run_and_compare(cluster: str, **options) -> autopar.Plan:
    """Runs a plan for a preset here, and holds its results against those of plain `jax.jit`."""
    case = transformer()
    state = jax.jit(case.create)(jax.random.key(0))
    expected = jax.jit(case.step)(state, case.batch)
    step = autopar.parallelize(
        case.step, cluster=autopar.Cluster.parse(cluster), cache_dir=None, show_progress=False, **options
    )
    assert_close(step(jax.tree.map(np.array, state), case.batch), expected)
    return step.plan(case.shapes, case.batch)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_free_search(cluster):
    plan = run_and_compare(cluster)
    assert plan.record.cluster.device.name != "CPU"


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"inference"}))
def test_pipelines(name):
    cluster = CLUSTERS[name in CHUNKED]
    chunks = {"chunks": 2} if name in CHUNKED else {}
    plan = recipes.combine(pp=2, dp=2, tp=2, num_microbatches=4, schedule=name, **chunks)
    made = run_and_compare(cluster, plan=plan)
    assert made.record.pipeline.schedule == name
