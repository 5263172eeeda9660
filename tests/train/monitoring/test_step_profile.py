"""A step under the profiler beside its plan: which events are counted where, and a real step of each kind."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.plan.plan import Plan
from autopar.train.monitoring.step_profile import (
    RECORDED_PROGRAM_OPTIONS,
    DeviceEvent,
    ProgramOperation,
    events_of,
    module_of,
    operations_of,
    step_profile,
)
from benchmarks.zoo import CASES
from tests.small_steps import slow_cluster

MLP = CASES["mlp"](layers=2, width=32, batch=16)
TEXT = """
HloModule jit_F_of_stage_0, is_scheduled=true, num_partitions=2

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %wrapped_add.1 = f32[4]{0} fusion(%p), kind=kLoop, metadata={op_name="jit(F_of_stage_0)/while/body/jvp(M)/a/add"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %while.2 = f32[4]{0} while(%x), body=%body, metadata={op_name="jit(F_of_stage_0)/while"}
  ROOT %all-gather-start.3 = f32[8]{0} all-gather-start(%while.2), metadata={op_name="jit(F)/jvp(M)/b/shard_map/mul"}
}

HloModule jit_after

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %multiply.1 = f32[4]{0} multiply(%x, %x), metadata={op_name="jit(after)/mul"}
}
"""


def profiled(recipe):
    step = autopar.parallelize(MLP.step, plan=recipe, cluster=slow_cluster(4), cache_dir=None)
    state, batch = step.init(MLP.init, jax.random.key(0)), MLP.batch(0)
    expected = step.plain(state, batch)
    return step, step.profile(state, batch), expected


def test_operations_belong_to_kinds_and_modules():
    found = operations_of(TEXT)
    assert found["jit_F_of_stage_0", "wrapped_add.1"] == ProgramOperation(kind="compute", module="M/a")
    assert found["jit_F_of_stage_0", "all-gather-start.3"] == ProgramOperation(kind="all-gather", module="M/b")
    assert found["jit_after", "multiply.1"] == ProgramOperation(kind="compute", module="")
    assert ("jit_F_of_stage_0", "while.2") not in found  # its body's operations have events of their own
    assert module_of("") == ""
    assert module_of("jit(step)/while/body/eval_jaxpr/transpose(jvp(M))/a/dot_general") == "M/a"


def stats_on_gpu(operation, **stats):
    return {"hlo_op": operation, "hlo_module": "jit_step", **stats}


def test_kernels_of_a_gpu_are_operations_where_they_are_launched_one_by_one():
    """As recorded on an H200 with jax 0.11.2: a kernel in a CUDA graph bears the name of the graph."""
    kernels = [
        ("loop_broadcast_fusion_1", 98_111, stats_on_gpu("command_buffer_1", cuda_graph_id=5)),
        ("loop_broadcast_fusion_1", 97_631, stats_on_gpu("loop_broadcast_fusion.1", name="jit(step)/while")),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>", 11_657, stats_on_gpu("custom-call.3")),
    ]
    copies = [("MemcpyH2D", 3_808, {"memcpy_details": "kind_src:pinned kind_dst:device size:32768"})]

    def line(name, rows):
        events = [
            SimpleNamespace(name=n, start_ns=100_000 * i, duration_ns=d, stats=list(stats.items()))
            for i, (n, d, stats) in enumerate(rows)
        ]
        return SimpleNamespace(name=name, events=events)

    lines = [line("Stream #14(Compute)", kernels), line("Stream #15(MemcpyH2D)", copies)]
    events = events_of(SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=lines)]))
    assert [(e.device, e.program, e.operation) for e in events] == [
        (0, "jit_step", "command_buffer_1"),
        (0, "jit_step", "loop_broadcast_fusion.1"),
        (0, "jit_step", "custom-call.3"),
    ]
    assert events[1].end_s - events[1].start_s == pytest.approx(97.631e-6)


def test_where_a_backend_asks_for_it_programs_with_other_options_are_recorded(monkeypatch):
    compiled = []
    options_on = Plan.compiler_options_on
    monkeypatch.setattr(
        Plan, "compiler_options_on", lambda *a, **k: compiled.append(options_on(*a, **k)) or compiled[-1]
    )
    monkeypatch.setattr("autopar.step.RECORDED_PROGRAM_OPTIONS", {"cpu": RECORDED_PROGRAM_OPTIONS["gpu"]})
    step = autopar.parallelize(MLP.step, plan=recipes.zero(1), cluster=slow_cluster(4), cache_dir=None)
    state, _ = step(step.init(MLP.init, jax.random.key(0)), MLP.batch(0))
    expected = step.plain(state, MLP.batch(1))
    for _ in range(2):  # a second profile has its programs already
        profile = step.profile(jax.tree.map(jnp.copy, state), MLP.batch(1))
        np.testing.assert_allclose(profile.results[1]["loss"], expected[1]["loss"], rtol=1e-5)
        products = {m.module for m in step.latest_plan.record.modules if m.splits}
        assert products <= {row.module for row in profile.modules if row.measured_s > 0}
    state, metrics = step(state, MLP.batch(1))
    np.testing.assert_allclose(metrics["loss"], expected[1]["loss"], rtol=1e-5)
    assert compiled == [{}, {"xla_gpu_enable_command_buffer": ""}]


def test_lanes_and_modules_are_means_over_devices():
    plan = autopar.parallelize(MLP.step, plan=recipes.data_parallel(), cluster=slow_cluster(2), cache_dir=None).plan(
        jax.eval_shape(MLP.init, jax.random.key(0)), MLP.batch(0)
    )
    operations = {
        ("p", "dot"): ProgramOperation(kind="compute", module="M/a"),
        ("p", "sum"): ProgramOperation(kind="all-reduce", module="M/a"),
    }
    events = [
        DeviceEvent(device=0, program="p", run=1, operation="dot", start_s=1.0, end_s=4.0),
        DeviceEvent(device=0, program="p", run=1, operation="dot", start_s=2.0, end_s=3.0),  # on another thread
        DeviceEvent(device=0, program="p", run=1, operation="sum", start_s=3.0, end_s=6.0),
        DeviceEvent(device=1, program="p", run=1, operation="dot", start_s=1.0, end_s=2.0),
        DeviceEvent(device=1, program="p", run=1, operation="sum", start_s=5.0, end_s=6.0),
        DeviceEvent(device=1, program="other", run=9, operation="dot", start_s=0.0, end_s=9.0),
    ]
    made = step_profile(plan.record, operations, events, results=None)
    measured = {lane.name: lane.measured_s for lane in made.lanes}
    assert measured == {
        "step": 5.0,
        "computation": (3.0 + 1.0) / 2,
        "collectives": (3.0 + 1.0) / 2,
        "collectives that nothing hides": (2.0 + 1.0) / 2,
        "no work on a device": (0.0 + 3.0) / 2,
    }
    rows = {(row.module, row.kind): row.measured_s for row in made.modules if row.module == "M/a"}
    assert rows == {("M/a", "compute"): 2.0, ("M/a", "all-reduce"): 2.0}
    assert [row.module for row in made.modules[:2]] == ["M/a", "M/a"]  # seconds beside predicted microseconds


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe",
    [recipes.zero(3), recipes.combine(pp=2, num_microbatches=2)],
    ids=["one program", "stages"],
)
def test_a_real_step_beside_its_plan(recipe, tmp_path):
    step, profile, expected = profiled(recipe)
    np.testing.assert_allclose(profile.results[1]["loss"], expected[1]["loss"], rtol=1e-5)
    lanes = {lane.name: lane for lane in profile.lanes}
    plan = step.latest_plan
    assert lanes["step"].predicted_s == plan.predicted.step_time_s
    assert 0 < lanes["computation"].measured_s < lanes["step"].measured_s
    products = {m.module for m in plan.record.modules if m.splits}
    assert products <= {row.module for row in profile.modules if row.kind == "compute" and row.measured_s > 0}
    kinds = {row.kind for row in profile.modules if row.measured_s > 0}
    assert set(plan.predicted.by_kind()) <= kinds
    text = str(profile)
    assert "The largest differences" in text
    assert max(map(len, text.splitlines())) <= 100
    assert json.loads(json.dumps(profile.to_dict()))["step"] == plan.record.step
    profile.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == ["predicted devices", "predicted links", "measured devices", "measured links"]
    last_us = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] > 2)
    assert last_us == pytest.approx(lanes["step"].measured_s * 1e6)


def test_stages_and_micro_batches_are_named():
    _, profile, _ = profiled(recipes.combine(pp=2, num_microbatches=2))
    tasks = {e.category for e in profile.measured.events}
    assert {f"B of stage {s}, micro-batch {k}" for s in (0, 1) for k in (0, 1)} <= tasks
    assert not any("micro-batch 2" in task for task in tasks)
