"""The planner: requests restrict the search, and every way to run the step that lost says why."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, Link
from autopar.plan.plan import decode, encode
from autopar.search.comparison import why_lost
from benchmarks.everyday import STEPS
from benchmarks.zoo import CASES
from tests.small_steps import MLP_BATCH, MLP_STATE, chain_step, grouped, mlp_step, shapes, slow_cluster

ROUNDING = 1 + 1e-9


def two_hosts():
    """Two hosts with a slow link between them, where stages pay."""
    return Cluster(
        name="two hosts",
        device=presets.H100,
        num_hosts=2,
        devices_per_host=2,
        inside_host=presets.NVLINK4,
        between_hosts=Link(latency_s=1e-5, bytes_per_s=5e9, source="made up: 40 Gb/s"),
    )


def shared_cores():
    """Eight devices that share the cores of their host."""
    return Cluster.local(8, measured=False)


def chain(layers, width, batch):
    examples = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return chain_step, ([jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers, {"x": examples, "y": examples})


def zoo(name, **sizes):
    return shapes_of(CASES[name](**sizes))


def shapes_of(case):
    return case.step, (jax.eval_shape(case.init, jax.random.key(0)), shapes(case.batch(0)))


def planned(step, on, **options):
    function, args = step
    return autopar.parallelize(function, cluster=on, cache_dir=None, **grouped(**options)).plan(*args)


# Requests for what the search chose


def requests_for(plan):
    """What says the choices of a plan that the search found, one by one and together."""
    made = plan.record.pipeline
    if made is None:
        return [{"num_microbatches": 1}]
    number, schedule = {"num_microbatches": made.num_microbatches}, {"schedule": made.schedule}
    return [number, schedule, number | schedule]


def test_the_whole_batch_as_one_micro_batch_is_what_the_search_finds_without_a_request():
    step, on = zoo("mlp", layers=6, width=8192, batch=512), Cluster.preset("p3.16xlarge")
    free, asked = planned(step, on), planned(step, on, num_microbatches=1)
    assert asked.record.pipeline is None
    assert asked.predicted.step_time_s == free.predicted.step_time_s
    assert asked.record.decisions == free.record.decisions


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("step", "on", "options", "stages"),
    [
        pytest.param((mlp_step, (MLP_STATE, MLP_BATCH)), slow_cluster, {}, None, id="one program"),
        pytest.param(zoo("lstm"), lambda: Cluster.parse("tpu-v5e:2x4"), {}, None, id="scan over time"),
        pytest.param(chain(8, 16_384, 32_768), two_hosts, {}, 2, id="two stages"),
        pytest.param(chain(4, 512, 2048), shared_cores, {}, None, id="shared cores"),
        pytest.param(
            zoo("mlp", layers=2, width=512, batch=1024),
            lambda: Cluster.preset("dgx-h100").submesh(1, 4),
            {"memory_limit_bytes": 3_000_000},
            1,
            marks=pytest.mark.slow,
            id="one stage in micro-batches",
        ),
    ],
)
def test_a_request_for_what_the_search_chose_is_never_slower(step, on, options, stages):
    free = planned(step, on(), **options)
    made = free.record.pipeline
    assert stages is None or (made is not None and len(made.stages) == stages)
    for request in requests_for(free):
        asked = planned(step, on(), **options, **request)
        assert asked.predicted.step_time_s <= free.predicted.step_time_s * ROUNDING, request


@pytest.mark.parametrize("recipe", [autopar.recipes.zero(1), autopar.recipes.tensor_parallel()], ids=["zero", "tensor"])
def test_one_micro_batch_of_a_recipe_for_one_program_is_that_program(recipe):
    step, on = (mlp_step, (MLP_STATE, MLP_BATCH)), slow_cluster()
    alone, asked = planned(step, on, plan=recipe), planned(step, on, plan=recipe, num_microbatches=1)
    assert asked.record.decisions == alone.record.decisions
    assert asked.record.axis_names == alone.record.axis_names


def test_a_step_that_mixes_examples_runs_as_one_micro_batch():
    step, on = shapes_of(STEPS["clip"](16)), Cluster.preset("dgx-h100").submesh(1, 2)
    with pytest.raises(autopar.errors.MixedExamplesError):
        planned(step, on, num_microbatches=2)
    assert planned(step, on, num_microbatches=1).record.pipeline is None


# Why other ways lost


def test_every_mesh_and_baseline_that_lost_says_why():
    plan = planned((mlp_step, (MLP_STATE, MLP_BATCH)), slow_cluster())
    lost = {(r.source, r.text): r for r in plan.record.rejected}
    tried = [t for t in plan.record.tried if (t.axis_sizes, t.name) != (plan.record.axis_sizes, "")]
    assert tried
    for trial in tried:
        source = "baselines" if trial.name else "logical meshes"
        same = [r for (of, text), r in lost.items() if of == source and (not trial.name or trial.name in text)]
        assert trial.step_time_s is None or trial.step_time_s in [r.step_time_s for r in same]
    assert all(r.why for r in lost.values())
    pipelines = [r for r in plan.record.rejected if r.source == "pipelines"]
    assert pipelines
    assert all(r.why.startswith(("not searched", "slower", "not evaluated", "no pipeline")) for r in pipelines)


@pytest.mark.slow
def test_every_pipeline_that_was_weighed_and_one_program_say_why_they_lost():
    plan = planned(chain(8, 16_384, 32_768), two_hosts())
    texts = {(r.text, r.step_time_s) for r in plan.record.rejected}
    chosen_s = plan.predicted.step_time_s
    assert {(t.text, t.step_time_s) for t in plan.record.weighed if t.step_time_s != chosen_s} <= texts
    programs = [r for r in plan.record.rejected if r.source == "logical meshes" and r.step_time_s is not None]
    assert programs
    assert all(r.why.startswith(("slower by ", "over the memory limit by ")) for r in programs)


def test_reasons_are_in_numbers():
    assert why_lost(2e-3, 10, 1.5e-3, limit_bytes=10) == "slower by 500 us"
    assert why_lost(1e-3, 3_000_000, 1.5e-3, limit_bytes=1_000_000) == "over the memory limit by 2 MB"
    assert why_lost(1.49999e-3, 10, 1.5e-3, limit_bytes=10) == "as fast to 0.005%, on a mesh of more axes"


def test_the_plan_is_the_candidate_without_a_reason_and_all_are_saved():
    record = planned((mlp_step, (MLP_STATE, MLP_BATCH)), slow_cluster()).record
    (chosen,) = (c for c in record.candidates if not c.why)
    assert chosen in record.own
    assert len(record.rejected) == len(record.candidates) - 1 > 5
    assert decode(encode(record), "here") == record
