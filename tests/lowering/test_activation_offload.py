"""What is saved for the backward pass, in the memory of the host: what goes there, when it comes back, its costs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.cost.peak_memory import allocated_bytes
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.execute import aot
from autopar.execute.compiled_pipeline import lower_task
from autopar.hardware import presets
from autopar.ir.graph import RETURNED, Section
from autopar.ir.layout import local_bytes
from autopar.ir.rules import RuleBook
from autopar.lowering.instructions import HostCopy
from autopar.runtime.program import TaskKind
from autopar.search.inter_op.tasks import groups_of_examples
from autopar.search.materialize import make_staged
from benchmarks.zoo import CASES
from tests.small_steps import slow_cluster, verified

GPT = CASES["gpt"](layers=4, width=64, length=32, batch=16)
STATE, BATCH = jax.eval_shape(GPT.init, jax.random.key(0)), jax.eval_shape(lambda: GPT.batch(0))


def step_under(recipe, case=GPT, cluster=None):
    cluster = cluster or slow_cluster()
    return autopar.parallelize(case.step, plan=recipe, cluster=cluster, cache_dir=None)


def staged_under(recipe, cluster=None):
    step = step_under(recipe, cluster=cluster)
    traced, plan = step._planned((STATE, BATCH))
    return make_staged(traced, plan, RuleBook()), plan


def copies_of(stage):
    return [i for i in stage.lowered.lowered.instructions if isinstance(i, HostCopy)]


# Numbers. `test_a_saved_plan_keeps_it` and `test_the_compiled_stages_need_less` compare them too.


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero": 3, "recompute": "matmuls"}, marks=pytest.mark.slow),
        pytest.param({"zero": 1, "recompute": "input", "num_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "recompute": "matmuls", "num_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "recompute": "input", "num_microbatches": 4, "schedule": "zb-h1"}, marks=pytest.mark.slow
        ),
        pytest.param({"zero": 2, "zero_size": 4, "recompute": "matmuls every 2"}, marks=pytest.mark.slow),
    ],
    ids=["zero 3", "micro-batches", "tensor", "stages", "weights apart", "hybrid"],
)
def test_it_computes_what_plain_jit_does(options):
    _, plan = verified(GPT, recipes.combine(**options, offload="activations"))
    assert sum(plan.predicted.host_bytes) > 0
    assert plan.predicted.host_copied_bytes > 0


@pytest.mark.slow
def test_with_the_optimisers_state():
    case = CASES["gpt_adamw"](layers=2, batch=16)
    _, plan = verified(case, recipes.zero(1, offload="optimizer and activations"))
    assert any(v.in_host for v in plan.record.arguments)
    assert plan.record.pipeline.stages[0].decisions.saved_in_host


@pytest.mark.slow
def test_a_saved_plan_keeps_it(tmp_path):
    _, plan = staged_under(recipes.combine(zero=1, recompute="input", offload="activations"))
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.record == plan.record
    verified(GPT, loaded)


def test_what_is_cut_may_offload():
    offloaded = recipes.cut(recipes.zero(3), recompute="input", offload="activations")
    assert offloaded == recipes.combine(zero=3, recompute="input", offload="activations")
    both = recipes.cut(recipes.zero(3, offload="optimizer"), offload="activations")
    assert both == recipes.zero(3, offload="optimizer and activations")


# What goes and comes


def test_layers_inputs_go_in_the_forward_pass_and_come_back_one_by_one():
    staged, _ = staged_under(recipes.combine(recompute="input", offload="activations"))
    copies = copies_of(staged.stages[0])
    goes, comes = [c for c in copies if c.to_host], [c for c in copies if not c.to_host]
    # What enters a layer is there for the recomputation of it; that of the last one, which comes first, stays.
    graph = staged.stages[0].stage.graph
    assert {graph.values[c.value].shape for c in goes} == {(16, 32, 64)}
    assert len(goes) == len(comes) >= 2
    assert {c.section for c in goes} == {Section.FORWARD}
    assert {c.section for c in comes} == {Section.BACKWARD}
    assert {c.target[1] for c in comes} == {RETURNED}
    assert [c.value for c in comes] == [c.value for c in reversed(goes)]
    instructions = staged.stages[0].lowered.lowered.instructions
    made = {key: i for i, instruction in enumerate(instructions) for key in instruction.keys_made}
    read = {}
    for i, instruction in enumerate(instructions):
        for key in instruction.keys_read:
            read.setdefault(key, i)
    at = [(instructions.index(c), read[c.value, c.target]) for c in comes]
    assert all(here < reader for here, reader in at)
    # Each but the first is behind a cotangent, and starts when the one before it is read.
    for (_, reader), (here, _), copy in zip(at, at[1:], comes[1:], strict=False):
        assert made[copy.behind[0]] < here <= reader


@pytest.mark.slow
def test_stages_that_wait_for_others_send_all_and_the_last_keeps_what_it_reads_first():
    recipe = recipes.combine(pp=2, num_microbatches=4, recompute="input", offload="activations")
    staged, plan = staged_under(recipe)
    goes = [[c for c in copies_of(stage) if c.to_host] for stage in staged.stages]
    saved = [len(stage.decisions.saved_in_host) for stage in plan.record.pipeline.stages]
    assert len(goes[0]) == saved[0]
    assert len(goes[1]) == saved[1] - 1
    graph, mesh = staged.stages[0].stage.graph, plan.stage_mesh(0)[0]
    one = sum(
        local_bytes(graph.values[c.value].shape, graph.values[c.value].itemsize, c.source[0], mesh) for c in goes[0]
    )
    # Two micro-batches are on their way between the passes of the first of two stages.
    assert plan.predicted.host_bytes[0] == 2 * one


# Costs


@pytest.mark.slow
def test_memory_falls_and_the_copies_are_timed():
    options = {"recompute": "matmuls", "num_microbatches": 2}
    device = dataclasses.replace(slow_cluster().device, host_link_bytes_per_s=1e9, launch_overhead_s=0.0)
    cluster = dataclasses.replace(slow_cluster(), device=device)
    _, on_device = staged_under(recipes.combine(**options), cluster)
    _, plan = staged_under(recipes.combine(**options, offload="activations"), cluster)
    saved = plan.predicted.host_bytes[0]
    # Both micro-batches copy all of it there and back, over a link of a gigabyte a second.
    assert plan.predicted.host_copied_bytes == 2 * 2 * saved
    assert plan.predicted.host_time_s == pytest.approx(4 * saved / 1e9)
    assert on_device.predicted.peak_bytes[0] - plan.predicted.peak_bytes[0] > 0.5 * saved


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "hides"), [("dgx-h100", True), ("tpu-v5e", True), ("CPU", False)])
def test_copies_hide_where_the_compiler_makes_them_asynchronous(platform, hides):
    cluster = {
        "dgx-h100": lambda: autopar.Cluster.preset("dgx-h100"),
        "tpu-v5e": lambda: autopar.Cluster.preset("tpu-v5e", topology="2x4"),
        "CPU": slow_cluster,
    }[platform]()
    # Programs for TPU offload between stages only.
    options = {"pp": 2, "num_microbatches": 4} if platform == "tpu-v5e" else {}
    _, plan = staged_under(recipes.combine(**options, recompute="input", offload="activations"), cluster)
    _, without = staged_under(recipes.combine(**options, recompute="input"), cluster)
    hidden_s = plan.predicted.hidden_time_s - without.predicted.hidden_time_s
    assert (hidden_s > 0) is hides
    assert plan.predicted.step_time_s <= without.predicted.step_time_s + plan.predicted.host_time_s + 1e-12


@pytest.mark.slow
def test_the_compiled_stages_need_less():
    options = {"pp": 2, "num_microbatches": 4, "recompute": "matmuls"}
    without, _ = verified(GPT, recipes.combine(**options))
    made, plan = verified(GPT, recipes.combine(**options, offload="activations"))
    saved = plan.predicted.host_bytes[0]
    assert without.peak.compiled - made.peak.compiled > 0.5 * saved
    assert made.peak.predicted == pytest.approx(made.peak.compiled, rel=0.15)


@pytest.mark.extra("tpu")
def test_a_stage_compiled_for_tpu_hands_on_what_it_saves_in_the_hosts_memory():
    cluster = autopar.Cluster.preset("tpu-v5e", topology="2x4")
    options = {"pp": 2, "num_microbatches": 4, "recompute": "matmuls"}
    stats = {}
    for offload in ("nothing", "activations"):
        staged, plan = staged_under(recipes.combine(**options, offload=offload), cluster)
        mesh = aot.target_mesh("tpu:v5e:2x2", plan.mesh.axis_sizes, plan.mesh.axis_names)
        stages = [planned.lowered for planned in staged.stages]
        groups = groups_of_examples(stages)
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
            number = next(i for i, t in enumerate(staged.staged.tasks) if t.kind is kind and t.stage == 0)
            compiled = lower_task(staged.staged, number, stages[0], mesh, groups, {}).compile()
            stats[offload, kind] = compiled.memory_analysis()
    saved = sum(plan.predicted.host_bytes[:1]) // 2  # of one of two micro-batches
    forward, backward = stats["activations", TaskKind.FORWARD], stats["activations", TaskKind.BACKWARD]
    # The compiler pads arrays to its tiles.
    assert forward.host_output_size_in_bytes >= saved
    assert backward.host_argument_size_in_bytes == forward.host_output_size_in_bytes
    assert stats["nothing", TaskKind.FORWARD].output_size_in_bytes - forward.output_size_in_bytes >= saved


@pytest.mark.extra("tpu")
def test_one_program_compiled_for_tpu_needs_no_less():
    """Why it is refused. If this fails, the compiler has learned to keep arrays in the host's memory."""
    made = {}
    for offload in ("nothing", "activations"):
        # Planned for other devices, for which it is not refused.
        staged, plan = staged_under(recipes.combine(recompute="input", offload=offload))
        mesh = aot.target_mesh("tpu:v5e:2x4", plan.mesh.axis_sizes, plan.mesh.axis_names)
        lowered = staged.stages[0].lowered
        number = next(i for i, t in enumerate(staged.staged.tasks) if t.kind is TaskKind.FORWARD)
        made[offload] = lower_task(staged.staged, number, lowered, mesh, groups_of_examples([lowered]), {}).compile()
    without, with_arrays = made["nothing"], made["activations"]
    # The arrays are in the host's memory at some time, and counted there, apart from those of the device.
    assert without.memory_analysis().host_temp_size_in_bytes == 0
    assert with_arrays.memory_analysis().host_temp_size_in_bytes > 0
    assert allocated_bytes(with_arrays) >= allocated_bytes(without)


# Errors


def test_what_can_be_offloaded_is_named():
    with pytest.raises(InvalidArgumentError, match="'activations' or 'optimizer and activations'"):
        recipes.combine(offload="parameters")
    with pytest.raises(InvalidArgumentError, match=r"recipes.cut\(offload=...\)"):
        recipes.cut(recipes.zero(1), offload="all")


def test_layers_in_a_loop_are_refused():
    case = CASES["gpt_scan"](layers=2, batch=16)
    step = step_under(recipes.zero(1, offload="activations"), case)
    with pytest.raises(UnsupportedError, match="layers in a loop") as caught:
        step.plan(jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))
    assert "write the layers out" in str(caught.value)


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"zero": 1, "recompute": "input", "num_microbatches": 2}], ids=["", "zero"])
def test_one_program_for_tpu_is_refused(options):
    cluster = autopar.Cluster.preset("tpu-v5e", topology="2x4")
    with pytest.raises(UnsupportedError, match="one stage: both passes in one program") as caught:
        staged_under(recipes.combine(**options, offload="activations"), cluster)
    assert "pp=2" in str(caught.value)


def test_a_step_without_a_backward_pass_is_refused():
    def evaluate(params, batch):
        return jnp.mean((batch["x"] @ params) ** 2)

    step = autopar.parallelize(
        evaluate, plan=recipes.zero(3, offload="activations"), donate_argnums=(), cluster=slow_cluster(),
        cache_dir=None,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="no backward pass"):
        step.plan(jax.ShapeDtypeStruct((8, 8), jnp.float32), {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)})


def test_a_cluster_must_know_its_link_to_the_host():
    device = dataclasses.replace(presets.H100, host_link_bytes_per_s=None)
    step = step_under(recipes.zero(1, offload="activations"), cluster=autopar.Cluster.flat(8, device=device))
    with pytest.raises(InvalidArgumentError, match="host_link_bytes_per_s"):
        step.plan(STATE, BATCH)
