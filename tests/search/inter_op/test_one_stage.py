"""What is known of a step in one stage, and what is left out of a search for that."""

import contextlib
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MemoryLimitError
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.passes.split_scan import split_scans
from autopar.plan.options import WORTHWHILE, PlanRequest
from autopar.search.inter_op import search
from autopar.search.inter_op.build_stages import build, cut_layers
from autopar.search.inter_op.decide_stages import BuildLimits, StageChoice
from autopar.search.inter_op.one_stage import least_in_turn_s
from autopar.search.inter_op.stage_costs import PricedOption
from autopar.search.inter_op.stage_problems import PosedProblems
from autopar.search.inter_op.truncated_model import least_bytes
from autopar.search.intra_op.ilp import ObjectiveWeights
from autopar.solver import Schedule, StageOption, StageProblem, best_stages
from benchmarks.everyday import STEPS
from tests.small_steps import chain_step, grouped, slow_cluster

ON = slow_cluster(4)
ROW, GRID = LogicalMesh(axis_sizes=(4,)), LogicalMesh(axis_sizes=(2, 2))
LIMITS = BuildLimits(limit_bytes=10**12, time_limit_s=10.0)


def chain(layers=4, width=64, batch=4096):
    examples = jax.ShapeDtypeStruct((batch, width), "float32")
    return [jax.ShapeDtypeStruct((width, width), "float32")] * layers, {"x": examples, "y": examples}


@pytest.fixture(scope="module")
def step():
    rules = RuleBook()
    traced = trace(chain_step, chain(), names=("params", "batch"), donate=(0,), batch=(1,))
    return cut_layers(split_scans(traced, 1, rules), 1, rules)


def one_stage(step, policy, mesh=ROW):
    policies = (policy,) * len(step.layers)
    return StageChoice(schedule="1f1b", chunks=1, first_layers=(0,), group_meshes=(mesh,), policies=policies)


@pytest.mark.parametrize("policy", ["nothing", "input"])
def test_no_decisions_need_less_than_the_least_memory(step, policy):
    least = least_bytes(step, one_stage(step, policy), ON, 10.0)
    built = [build(step, one_stage(step, policy, mesh), ON, LIMITS).peak_bytes[0] for mesh in (ROW, GRID)]
    assert 0.5 * min(built) < least <= min(built)


def test_several_stages_run_their_forward_passes_one_after_another(step):
    staged = build(step, one_stage(step, "nothing"), ON, LIMITS)
    shared_s, of_two_s, of_one_s = (least_in_turn_s(staged, most) for most in (4, 2, 1))
    forward_s = of_two_s - shared_s
    assert shared_s / 4 < forward_s < shared_s / 2
    assert of_one_s == pytest.approx(shared_s + 3 * forward_s)
    assert shared_s <= staged.step_time_s


def wide_step(params, batch):
    """Layers that save much more than they read."""

    def loss(params):
        x = batch["x"]
        for w in params:
            x = x + jnp.tanh(x @ w["in"]) @ w["out"]
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def planned(**options):
    width, examples = 512, jax.ShapeDtypeStruct((131_072, 512), "float32")
    shapes = {"in": (width, 8 * width), "out": (8 * width, width)}
    params = [{name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}] * 4
    on = Cluster.preset("dgx-h100").submesh(1, 4)
    step = autopar.parallelize(wide_step, cluster=on, cache_dir=None, **grouped(**options))
    return step.plan(params, {"x": examples, "y": examples})


def test_in_one_micro_batch_one_stage_that_sends_little_is_enough(monkeypatch):
    whole = planned(num_microbatches=1)
    limit_bytes = int(0.8 * max(whole.predicted.peak_bytes))
    options = {"num_microbatches": 1, "memory_limit_bytes": limit_bytes}
    with monkeypatch.context() as patched:
        patched.setattr(search._Search, "several_may_pay", lambda *_: True)
        searched = planned(**options)
    monkeypatch.setattr(PosedProblems, "of", lambda *_, **__: pytest.fail("several stages were searched for"))
    found = planned(**options)
    assert len(found.record.pipeline.stages) == 1
    assert found.predicted.step_time_s <= searched.predicted.step_time_s * (1 + WORTHWHILE)


def option_of(seconds, nbytes):
    """One layer on all devices."""
    time_s, size, none = np.array([seconds]), np.array([nbytes]), np.array([0])
    table = StageOption(
        num_devices=4, forward_s=time_s, backward_s=time_s, once_s=0 * time_s, state_bytes=size, saved_bytes=none,
        working_bytes=none, send_s=0 * time_s,
    )  # fmt: skip
    terms = ObjectiveWeights(s_per_byte=0.0, exposed_fraction=1.0)
    return PricedOption(option=table, mesh=ROW, given_bytes=none, policies=(f"{nbytes} bytes",), terms=terms)


def test_where_one_stage_does_not_fit_as_built_the_tables_say_what_would():
    """Of a limit of 100 bytes; 150 bytes by the tables came to 120, so that 125 of theirs will fit."""
    options = (option_of(1.0, 150), option_of(2.0, 124))
    problem = StageProblem(
        options=tuple(o.option for o in options), num_devices=4, num_layers=1, num_microbatches=4,
        schedule=Schedule.ONE_F_ONE_B, limit_bytes=100, host_devices=4, fixed_num_stages=1,
    )  # fmt: skip
    context = SimpleNamespace(
        progress=SimpleNamespace(pass_=lambda _: contextlib.nullcontext()), cluster=ON, request=PlanRequest(),
        limit_bytes=100, keep_tolerance=1.0,
    )  # fmt: skip
    posed = SimpleNamespace(priced=lambda *_: options, on_schedule=lambda *_: [(problem, options)])
    built = SimpleNamespace(peak_bytes=120, fits=lambda limit_bytes: limit_bytes >= 120)
    builder = SimpleNamespace(
        best_of={}, short=lambda _: None, search=lambda posed, *_: best_stages([problem for problem, _ in posed]),
        one_stage_fits=lambda _: False, run=lambda *_: {},
    )  # fmt: skip
    look = search._Search(context=context, hoist_casts=True, screens=False)
    look.cuts, look.posed, look.builder = {4: SimpleNamespace()}, posed, builder
    assert look.one_stage(4, 200).policies == ("150 bytes",)
    builder.best_of[1, 4] = built, 150
    assert look.one_stage(4, 200).policies == ("124 bytes",)


# One device, too little memory


def blocks_step(weights, x):
    """Six blocks, of each of which three arrays as large as the batch are kept."""

    def loss(weights, x):
        for w in weights:
            x = x + jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", [600_000_000, 250_000_000])
def test_no_request_is_faster_than_the_search_where_the_batch_is_too_large(limit_bytes):
    args = [jax.ShapeDtypeStruct((256, 256), "float32")] * 6, jax.ShapeDtypeStruct((65_536, 256), "float32")

    def step_time_s(**options):
        try:
            plan = autopar.plan(
                blocks_step,
                *args,
                cluster="dgx-h100:1",
                cache_dir=None,
                **grouped(memory_limit_bytes=limit_bytes, **options),
            )
        except MemoryLimitError:
            return float("inf")
        assert max(plan.predicted.peak_bytes) <= limit_bytes
        return plan.predicted.step_time_s

    requests = [{"num_microbatches": m} for m in (2, 4, 8)]
    for m, policy in itertools.product((2, 4), ("matmuls every 2", "input")):
        requests.append({"plan": recipes.combine(dp=1, num_microbatches=m, recompute=policy)})
    of_requests_s = [step_time_s(**options) for options in requests]
    assert step_time_s() <= min(of_requests_s) < float("inf")
    assert float("inf") in of_requests_s


@pytest.mark.slow
@pytest.mark.parametrize("request_", [{}, {"num_microbatches": 4}])
def test_recomputation_that_fits_where_the_tables_say_that_none_does_is_found(request_):
    """Of small layers eight micro-batches take longer than four that recompute, of which the tables say too much."""
    case = STEPS["nerf"](32)
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.batch(0))
    options = {"cluster": "dgx-h100:1", "cache_dir": None}
    recipe = recipes.combine(dp=1, num_microbatches=4, recompute="input")
    asked = autopar.plan(case.step, state, batch, plan=recipe, **grouped(**options)).predicted
    limit_bytes = max(asked.peak_bytes)
    found = autopar.plan(
        case.step, state, batch, **grouped(memory_limit_bytes=limit_bytes, **options, **request_)
    ).predicted
    assert max(found.peak_bytes) <= limit_bytes
    assert found.step_time_s <= asked.step_time_s


def test_where_memory_is_short_no_stack_of_scanned_layers_is_whole_on_a_device():
    """Eight matrices of 16 MB: ample memory has them gathered before the loop, and their gradients summed behind it."""

    def train_step(params, x):
        def loss(params):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    arguments = jax.ShapeDtypeStruct((8, 2048, 2048), "float32"), jax.ShapeDtypeStruct((256, 2048), "float32")
    recipe = recipes.cut(recipes.zero(3), num_microbatches=2)
    matrix_bytes = 2048 * 2048 * 4
    for limit_bytes in (1 << 30, 7 * matrix_bytes):
        search = autopar.Search(memory_limit_bytes=limit_bytes)
        plan = autopar.plan(train_step, *arguments, cluster="dgx-h100", plan=recipe, search=search, cache_dir=None)
        is_short = limit_bytes < 8 * matrix_bytes
        assert (max(plan.predicted.peak_bytes) < 8 * matrix_bytes) == is_short
