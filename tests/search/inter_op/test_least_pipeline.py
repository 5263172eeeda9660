"""What pipelines take at least: their operations on all devices, and the tasks that a process hands out."""

import jax
import pytest

import autopar
from autopar.frontend.tracing import trace
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, Link
from autopar.ir.rules import RuleBook
from autopar.passes.split_scan import split_scans
from autopar.plan.options import PlanRequest
from autopar.search.inter_op import staged
from autopar.search.inter_op.build_stages import cut_layers
from autopar.search.inter_op.search import least_pipeline_s
from autopar.search.inter_op.staged import HAND_OUT_S, least_handed_out_s, process_devices
from benchmarks.decoder_grid.model import drawn
from tests.small_steps import chain_step, grouped


def chain(width, batch, layers=8):
    examples = jax.ShapeDtypeStruct((batch, width), "float32")
    return [jax.ShapeDtypeStruct((width, width), "float32")] * layers, {"x": examples, "y": examples}


def hosts(bytes_per_s, each=2, num_hosts=2):
    return Cluster(
        name="hosts",
        device=presets.H100,
        num_hosts=num_hosts,
        devices_per_host=each,
        inside_host=presets.NVLINK4,
        between_hosts=Link(latency_s=1e-5, bytes_per_s=bytes_per_s, source="made up"),
    )


def planned(cluster, arguments, **options):
    step = autopar.parallelize(chain_step, cluster=cluster, cache_dir=None, **grouped(**options))
    return step.plan(*arguments)


def least_s(arguments, m, cluster):
    traced = trace(chain_step, arguments, names=("params", "batch"), donate=(0,), batch=(1,))
    rules = RuleBook()
    return least_pipeline_s(cut_layers(split_scans(traced, 1, rules), m, rules), cluster, PlanRequest())


@pytest.mark.cases(2)
@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize("stages", [2, 4])
def test_no_pipeline_takes_less(monkeypatch, m, stages):
    monkeypatch.setattr(staged, "HAND_OUT_S", 0.0)
    arguments, cluster = chain(512, 1024), hosts(5e10)
    found_s = planned(
        cluster, arguments, plan=autopar.recipes.pipeline(stages, num_microbatches=m)
    ).predicted.step_time_s
    assert 0.2 * found_s < least_s(arguments, m, cluster) <= found_s


def test_stages_in_turn_leave_devices_idle(monkeypatch):
    """Two stages of two devices each take twice as long in one micro-batch as a program on all four."""
    monkeypatch.setattr(staged, "HAND_OUT_S", 0.0)
    arguments, cluster = chain(4096, 4096), hosts(1e15, each=4, num_hosts=1)
    program_s = planned(cluster, arguments, plan=autopar.recipes.data_parallel()).predicted.step_time_s
    assert 1.2 * program_s < least_s(arguments, 1, cluster)


@pytest.mark.slow
def test_a_pipeline_is_found_where_a_program_loses_a_quarter_of_its_time():
    """Twelve narrow layers on sixteen devices: matrices split sixteen ways are too small to keep any of them busy."""
    decoder, cluster = drawn(0, 0), Cluster.parse("tpu-v6e:4x4")
    state = jax.eval_shape(decoder.init, jax.random.key(0))
    options = {"cluster": cluster, "cache_dir": None}
    free, asked = (
        autopar.plan(decoder.step, state, decoder.batch_of(0), **grouped(**options, **request))
        for request in ({}, {"num_microbatches": 4})
    )
    assert free.predicted.step_time_s <= asked.predicted.step_time_s


def test_kernels_take_their_time_in_every_micro_batch(monkeypatch):
    monkeypatch.setattr(staged, "HAND_OUT_S", 0.0)
    arguments, cluster = chain(64, 256), hosts(5e10)
    assert least_s(arguments, 64, cluster) > 10 * least_s(arguments, 1, cluster)


@pytest.mark.parametrize(
    ("cluster", "processes", "pairs"), [(hosts(5e10), 2, 0), (hosts(5e10, each=1), 2, 0), (hosts(5e10, 4, 1), 1, 7)]
)
def test_a_step_takes_as_long_as_its_tasks_are_handed_out(cluster, processes, pairs):
    """Two stages, 8 micro-batches: each has a forward and a backward pass of every one, and two tasks a step; those of
    the first stage that stand next to each other may be one program.
    """
    recipe = autopar.recipes.pipeline(2, num_microbatches=8)
    plan = planned(cluster, chain(64, 256), plan=recipe)
    assert plan.predicted.step_time_s == pytest.approx((2 * (8 * 2 + 2) - pairs) / processes * HAND_OUT_S)
    least = least_handed_out_s(cluster, 2, 8)
    assert 0.4 * plan.predicted.step_time_s < least <= plan.predicted.step_time_s


def test_each_host_of_a_slice_has_its_process():
    assert process_devices(Cluster.parse("tpu-v6e:4x4")) == 4
    assert process_devices(Cluster.parse("dgx-h100x2")) == 8


def test_a_pipeline_is_found_for_a_step_of_a_few_milliseconds():
    cluster, arguments = hosts(4e10), chain(4096, 1536)
    free = planned(cluster, arguments)
    assert free.record.pipeline is not None
    assert free.predicted.step_time_s < 4e-3
    assert free.predicted.step_time_s <= planned(cluster, arguments, num_microbatches=2).predicted.step_time_s
