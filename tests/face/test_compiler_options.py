"""XLA's options in plans: which a plan sets, what a user adds, how they are kept, applied and refused."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import recipes
from autopar.cost.compiler_options import assumed_options, exchange_options_of
from autopar.cost.stream_simulator import ALL_BYTES, overlap_of
from autopar.errors import InvalidArgumentError
from autopar.execute import aot
from autopar.execute.collectives import collectives
from autopar.hardware.kinds import Platform
from autopar.verification import compile_for_target
from benchmarks.zoo import CASES
from tests.small_steps import MLP_BATCH, MLP_STATE, grouped, mlp_batch, mlp_step, new_mlp_state

H100S = autopar.Cluster.preset("dgx-h100")
THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes"


def planned(cluster=None, **options):
    step = autopar.parallelize(mlp_step, cluster=cluster, cache_dir=None, **grouped(**options))
    return step.plan(MLP_STATE, MLP_BATCH)


@pytest.fixture
def compiled_with(monkeypatch):
    """The options that XLA got, program by program."""
    seen, compile_lowered = [], jax.stages.Lowered.compile

    def compile(lowered, compiler_options=None, **others):
        seen.append(compiler_options or {})
        return compile_lowered(lowered, compiler_options, **others)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    return seen


def test_a_plan_has_the_options_that_its_prediction_rests_on():
    combined = overlap_of(Platform.GPU).combined_bytes
    plan = planned(H100S)
    assert plan.compiler_options == {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": combined,
        THRESHOLD: combined,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": combined // max(plan.record.axis_sizes),
    }
    tpu = planned(autopar.Cluster.preset("tpu-v5e", topology="2x4")).compiler_options
    assert tpu == assumed_options(Platform.TPU)
    assert "xla_tpu_enable_latency_hiding_scheduler" in tpu
    assert planned().compiler_options == {}


def test_stages_have_them_too():
    plan = planned(H100S, plan=recipes.pipeline(2, num_microbatches=2))
    largest_axis = max(n for stage in plan.record.pipeline.stages for n in stage.axis_sizes)
    assert plan.compiler_options == assumed_options(Platform.GPU, largest_axis)
    assert plan.exchange_options == {
        "xla_gpu_all_gather_combine_threshold_bytes": ALL_BYTES,
        THRESHOLD: ALL_BYTES,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": ALL_BYTES,
    }
    assert "of programs that run once a step: xla_gpu_all_gather_combine_threshold_bytes=" in plan.table()
    asked = planned(H100S, plan=recipes.pipeline(2, num_microbatches=2), compiler_options={THRESHOLD: 1 << 20})
    assert THRESHOLD not in asked.exchange_options
    assert planned(H100S).exchange_options == {}


def test_a_printed_plan_has_them_in_one_line():
    line = "compiler options: xla_gpu_enable_latency_hiding_scheduler=True, "
    line += f"xla_gpu_all_gather_combine_threshold_bytes=31457280, {THRESHOLD}=31457280, "
    assert line in " ".join(planned(H100S).table().split())
    assert "compiler options" not in planned().table()


def test_options_of_a_user_are_added_or_come_in_place():
    wanted = {THRESHOLD: 1 << 20, "xla_gpu_enable_while_loop_double_buffering": True}
    plan = planned(H100S, compiler_options=wanted)
    assert plan.compiler_options == assumed_options(Platform.GPU, max(plan.record.axis_sizes)) | wanted
    assert f"the prediction assumes {THRESHOLD}=31457280, and not what compiler_options say" in plan.record.notes
    without = planned(H100S, compiler_options={THRESHOLD: None})
    assert THRESHOLD not in without.compiler_options
    added = planned(H100S, compiler_options={"xla_gpu_enable_while_loop_double_buffering": True})
    assert not any("compiler_options" in note for note in added.record.notes)


def test_another_plan_of_the_step_has_them():
    wanted = {"xla_gpu_enable_while_loop_double_buffering": True}
    plan = planned(H100S, compiler_options=wanted)
    assert plan.why_not(recipes.zero(3)).other.compiler_options.items() >= wanted.items()


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", [None, recipes.combine(pp=2, num_microbatches=2)], ids=["one program", "stages"])
def test_options_reach_the_compiler(recipe, compiled_with, tmp_path):
    options = {"xla_cpu_enable_fast_math": False}
    step = autopar.parallelize(mlp_step, plan=recipe, search=autopar.Search(compiler_options=options), cache_dir=None)
    plan = step.plan(MLP_STATE, MLP_BATCH)
    assert plan.exchange_options == {}  # thresholds are of GPUs
    compiled_with.clear()
    step(new_mlp_state(), mlp_batch())
    assert compiled_with.count(options) >= (1 if recipe is None else 4)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.compiler_options == options
    compiled_with.clear()
    autopar.parallelize(mlp_step, plan=loaded, cache_dir=None)(new_mlp_state(), mlp_batch())
    assert options in compiled_with


def test_devices_of_another_platform_get_none(compiled_with):
    plan = planned(autopar.Cluster.preset("tpu-v5e", topology="2x4"))
    autopar.parallelize(mlp_step, plan=plan, cache_dir=None)(new_mlp_state(), mlp_batch())
    assert not any("tpu" in name for options in compiled_with for name in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xla_gpu_enable_latency_hidding_scheduler": True}, "No such compile option"),
        ({THRESHOLD: "many"}, "not a valid int64"),
    ],
)
def test_what_xla_refuses_is_refused_when_planning(options, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        planned(H100S, compiler_options=options)
    assert next(iter(options)) in caught.value.where


@pytest.mark.parametrize("options", [["xla_a"], {"xla_a": [1]}, {1: True}, "xla_a=true"])
def test_what_are_no_options(options):
    with pytest.raises(InvalidArgumentError, match=r"compiler_options=\.\.\."):
        autopar.parallelize(mlp_step, search=autopar.Search(compiler_options=options))


def test_a_plan_keeps_its_own():
    with pytest.raises(InvalidArgumentError, match="a plan, and compiler_options"):
        autopar.parallelize(
            mlp_step, plan=planned(), search=autopar.Search(compiler_options={"xla_cpu_enable_fast_math": True})
        )


@pytest.mark.extra("gpu")
def test_gpu_compiler_combines_as_the_options_say():
    case = CASES["mlp"](batch=32)
    state, batch = jax.eval_shape(case.init, jax.random.key(0)), jax.eval_shape(lambda: case.batch(0))
    numbers = {}
    for threshold in (None, 0):
        options = {} if threshold is None else {THRESHOLD: threshold}
        step = autopar.parallelize(
            case.step,
            plan=recipes.data_parallel(),
            cluster=H100S,
            search=autopar.Search(compiler_options=options),
            cache_dir=None,
        )
        text = compile_for_target(step, "gpu:h100:8", state, batch).as_text()
        numbers[threshold] = sum(c.kind.value == "all-reduce" for c in collectives(text))
    assert numbers[0] > numbers[None]


@pytest.mark.extra("gpu")
def test_gpu_compiler_makes_one_of_what_is_exchanged_once_a_step():
    mesh = aot.target_mesh("gpu:h100:8", (8,), ("x",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P("x"), P()), check_vma=False)
    def exchange(gradients, weights):
        return (
            [jax.lax.psum_scatter(g, "x", tiled=True) for g in gradients],
            [jax.lax.all_gather(w, "x", tiled=True) for w in weights],
        )

    arrays = [jax.ShapeDtypeStruct((2048, 8192), jnp.float32)] * 5  # of 64 MiB each
    lowered = jax.jit(exchange).trace(arrays, arrays).lower(lowering_platforms=("cuda",))
    numbers = []
    for others in ({}, exchange_options_of((), Platform.GPU, 8)):
        text = lowered.compile(assumed_options(Platform.GPU, 8) | others).as_text()
        kinds = [c.kind.value for c in collectives(text)]
        numbers.append((kinds.count("reduce-scatter"), kinds.count("all-gather")))
    assert numbers == [(5, 5), (1, 1)]


@pytest.mark.extra("tpu")
def test_tpu_compiler_takes_the_options():
    step = autopar.parallelize(
        mlp_step, plan=recipes.zero(3), cluster=autopar.Cluster.preset("tpu-v5e", topology="2x2"), cache_dir=None,
    )  # fmt: skip
    compiled = compile_for_target(step, "tpu:v5e:2x2", MLP_STATE, MLP_BATCH)
    assert compiled.plan.compiler_options == assumed_options(Platform.TPU)
    assert "all-gather" in compiled.as_text()
    wrong = autopar.parallelize(
        mlp_step, plan=recipes.zero(3), cluster=autopar.Cluster.preset("tpu-v5e", topology="2x2"),
        search=autopar.Search(compiler_options={"xla_tpu_no_such_option": True}), cache_dir=None,
    )  # fmt: skip
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_tpu_no_such_option"):
        compile_for_target(wrong, "tpu:v5e:2x2", MLP_STATE, MLP_BATCH)
