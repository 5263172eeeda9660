"""What is left out of the search over meshes: what a bound shows to be no plan."""

import bisect
import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, recipes
from autopar.common.progress import Progress
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.errors import MemoryLimitError
from autopar.frontend.tracing import trace
from autopar.ir.layout import LogicalMesh
from autopar.plan.context import Rejection
from autopar.plan.options import NEARLY_EQUAL, PlanRequest
from autopar.search.intra_op import build_choice_graph, spmd_search
from autopar.search.intra_op.mesh_searches import baseline_candidates, cannot_fit, fits_unfused, mesh_candidates
from autopar.search.intra_op.spmd_candidate import SpmdCandidate
from autopar.search.intra_op.spmd_search import (
    MeshSearch,
    _splits_an_axis,
    distinct_meshes,
    longest_s,
    search_mesh,
    worth_trying,
)
from autopar.search.planner import planning_context
from benchmarks.zoo import CASES
from tests.sections import BOOK
from tests.small_steps import MLP_BATCH, MLP_STATE, chain_step, grouped, mlp_step, slow_cluster


def context_on(cluster):
    traced = trace(mlp_step, (MLP_STATE, MLP_BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    return planning_context(traced, cluster, PlanRequest(), BOOK, Progress("", show=False))


def rejected(axis_sizes, least_s):
    return Rejection(source="logical meshes", why="slower", axis_sizes=axis_sizes, least_s=least_s)


def test_what_takes_longer_than_a_program_that_fits_is_no_plan():
    context = context_on(slow_cluster())
    assert longest_s(context, 1) == float("inf")
    (row, *_) = mesh_candidates(context)
    after = context.after([row])
    assert longest_s(after, 1) == pytest.approx(row.step_time_s * (1 + NEARLY_EQUAL), rel=1e-9)
    assert longest_s(after, 2) == pytest.approx(row.step_time_s / (1 + NEARLY_EQUAL), rel=1e-9)
    assert longest_s(dataclasses.replace(after, keep_tolerance=1.5), 2) == pytest.approx(row.step_time_s * 1.5)
    assert longest_s(dataclasses.replace(after, limit_bytes=1), 1) == float("inf")


def test_three_axes_are_left_out_where_two_were_shown_to_gain_nothing():
    context, cube = context_on(slow_cluster()), LogicalMesh(axis_sizes=(2, 2, 2))
    (row, *_) = mesh_candidates(context)
    after = context.after([row])
    assert worth_trying(cube, after)
    assert not worth_trying(cube, after.after([rejected((2, 4), row.step_time_s)]))
    assert worth_trying(cube, after.after([rejected((2, 4), 0.9 * row.step_time_s)]))


def test_baselines_tell_whether_a_third_axis_may_pay(monkeypatch):
    """Two axes gain a tenth over what is searched for on one, which says nothing where a baseline on one does too."""
    context, searched = context_on(slow_cluster()), []
    (row, *_) = mesh_candidates(context)

    def search(context, model, *_, **__):
        searched.append(model.links.mesh.axis_sizes)
        return row if len(searched) == 1 else rejected(searched[-1], 0.9 * row.step_time_s)

    monkeypatch.setattr("autopar.search.intra_op.mesh_searches.begin_on_mesh", search)
    for baselines in ([], [rejected((8,), 0.9 * row.step_time_s)]):
        monkeypatch.setattr("autopar.search.intra_op.mesh_searches.baseline_candidates", lambda *_, of=baselines: of)
        searched.clear()
        *_, last = mesh_candidates(context)
        assert searched == [(8,), (2, 4), (2, 2, 2)][: 2 if baselines else 3]
        assert last.why.startswith("not tried") == bool(baselines)


@pytest.mark.parametrize("cluster", [slow_cluster(4), Cluster.preset("dgx-h100")], ids=["no overlap", "overlap"])
def test_a_mesh_that_cannot_win_is_not_evaluated_and_says_so(cluster):
    """Beside a program that takes a thousandth of the time."""
    context = context_on(cluster)
    row = LogicalMesh(axis_sizes=(cluster.num_devices,))
    found = search_mesh(context, cost_model(cluster, row), time_limit_s=60.0)
    fast = dataclasses.replace(found, step_time_s=found.step_time_s / 1000)
    left = search_mesh(context.after([fast]), cost_model(cluster, row), time_limit_s=60.0)
    assert isinstance(left, Rejection)
    assert left.axis_sizes == row.axis_sizes
    assert fast.step_time_s < left.least_s <= found.step_time_s * 1.001
    assert left.why.startswith(("a bound says that it is slower by about ", "slower by "))


def deep_context(**request):
    """Of a step that is folded, however small its integer program is."""
    params = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 8
    examples = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    arguments = params, {"x": examples, "y": examples}
    traced = trace(chain_step, arguments, names=("params", "batch"), donate=(0,), batch=(1,))
    cluster = Cluster.preset("dgx-h100")
    return planning_context(traced, cluster, PlanRequest(**request), BOOK, Progress("", show=False))


@pytest.fixture
def evaluated(monkeypatch):
    """(mesh, bound, searches begun before) of each search that is evaluated on the whole step; without baselines."""
    begin, outcome, begun, seen = spmd_search.begin_on_mesh, MeshSearch.outcome, [], []

    def begins(*args, **named):
        begun.append(1)
        return begin(*args, **named)

    def evaluates(search, **named):
        seen.append((search.intra_op.model.links.mesh.axis_sizes, search.at_least_s, len(begun)))
        return outcome(search, **named)

    monkeypatch.setattr(spmd_search, "SMALL", 0)
    monkeypatch.setattr("autopar.search.intra_op.mesh_searches.begin_on_mesh", begins)
    monkeypatch.setattr(MeshSearch, "outcome", evaluates)
    monkeypatch.setattr("autopar.search.intra_op.mesh_searches.baseline_candidates", lambda *_: [])
    return seen


def test_the_mesh_that_may_be_fastest_is_evaluated_first(evaluated):
    """All of up to two axes are bounded before one is evaluated on the whole step, in the order of their bounds."""
    context = deep_context()
    found = [*mesh_candidates(context)]
    few = [each for each in evaluated if len(each[0]) < 3]
    assert [sizes for sizes, _, _ in few] != sorted((sizes for sizes, _, _ in few), key=len)
    assert [least_s for _, least_s, _ in few] == sorted(least_s for _, least_s, _ in few)
    meshes = distinct_meshes(context.cluster, 3)
    assert few[0][2] == sum(len(mesh.axis_sizes) < 3 for mesh in meshes)
    assert len(found) == len(meshes)


def test_without_time_the_first_mesh_is_evaluated_at_once(evaluated):
    first, *others = mesh_candidates(deep_context(time_limit_s=0.0))
    assert [number for _, _, number in evaluated] == [1]
    assert first.peak_bytes <= deep_context().limit_bytes
    assert all("time_limit_s" in other.why for other in others)


@pytest.mark.slow
def test_values_that_are_all_written_take_no_less_than_kernels_do():
    """So that a step that fits in this way is not lowered to find out whether it can."""
    for name in ("gpt", "gpt_scan_remat", "lstm"):
        case = CASES[name]()
        arguments = jax.eval_shape(case.init, jax.random.key(0)), case.batch(0)
        traced = trace(case.step, arguments, names=("state", "batch"), donate=(0,), batch=(1,))
        context = planning_context(traced, Cluster.flat(1), PlanRequest(), BOOK, Progress("", show=False))
        most_bytes = bisect.bisect_left(range(1 << 32), True, key=lambda b: fits_unfused(with_limit(context, b)))
        assert cannot_fit(with_limit(context, most_bytes)) is None
        state_bytes = sum(context.graph.values[v].nbytes for v in context.graph.block.inputs)
        assert not fits_unfused(with_limit(context, state_bytes))


def with_limit(context, limit_bytes):
    return dataclasses.replace(context, limit_bytes=limit_bytes)


def test_baselines_are_made_leaner_where_something_may_fit(monkeypatch):
    """No baseline fits into less than the smallest of them needs, which is more than all devices share of the step."""
    monkeypatch.setattr("autopar.search.intra_op.mesh_searches.LONG_STEP", 0)
    context, leaner, calls = deep_context(), MeshSearch.leaner, []
    monkeypatch.setattr(MeshSearch, "leaner", lambda *args: calls.append(1) or leaner(*args))
    least_bytes = min(each.peak_bytes for each in baseline_candidates(context) if isinstance(each, SpmdCandidate))
    assert not calls
    assert cannot_fit(with_limit(context, least_bytes - 1)) is None
    assert list(baseline_candidates(with_limit(context, least_bytes - 1)))
    assert calls
    calls.clear()
    found = list(baseline_candidates(with_limit(context, 1)))
    assert isinstance(found[0], SpmdCandidate)
    assert isinstance(found[-1].error, MemoryLimitError)
    assert not calls


def test_programs_on_one_mesh_share_their_tables(monkeypatch):
    """Another program on the mesh computes no seconds anew and builds nothing, unless axes split in another order."""
    context, computed, built = context_on(slow_cluster()), [], []
    seconds, build = NodeCosts._strategy_s, build_choice_graph.build_choice_graph
    monkeypatch.setattr(NodeCosts, "_strategy_s", lambda *args, **named: computed.append(1) or seconds(*args, **named))
    monkeypatch.setattr(
        build_choice_graph, "build_choice_graph", lambda *args, **named: built.append(1) or build(*args, **named)
    )

    def search(context, axis_sizes=(8,)):
        computed.clear(), built.clear()
        model = cost_model(context.cluster, LogicalMesh(axis_sizes=axis_sizes))
        return search_mesh(context, model, time_limit_s=60.0).step_time_s, bool(computed), len(built)

    step_time_s, *first = search(context)
    assert first == [True, 1]
    assert search(context) == (step_time_s, False, 0)
    assert search(context, (2, 4))[1:] == (True, 1)
    for recipe in (recipes.zero(1), recipes.zero(3)):
        bound = dataclasses.replace(context, request=recipe.request)
        again = search(bound)
    assert again[2] == 0


def many_matrices(form, dtype):
    """Twelve matrices of a megabyte, whose gradients the compiler adds up in one all-reduce."""

    def layer(x, w):
        return jnp.tanh(x @ w.astype(x.dtype)), None

    body = jax.checkpoint(layer) if form == "checkpointed" else layer

    def loss(weights, x):
        x = x.astype(dtype)
        if form == "scanned":
            x, _ = jax.lax.scan(body, x, weights)
        else:
            for w in weights:
                x, _ = body(x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    shape = jax.ShapeDtypeStruct((12, 512, 512) if form == "scanned" else (512, 512), jnp.float32)
    weights = shape if form == "scanned" else [shape] * 12
    return step, weights, jax.ShapeDtypeStruct((4096, 512), jnp.float32)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["unrolled", "scanned", "checkpointed"])
def test_collectives_that_are_combined_share_one_latency(form, dtype):
    """With a latency for each, no device would do less than all of the work."""
    step, *args = many_matrices(form, dtype)
    options = dict(cluster="dgx-h100", cache_dir=None)
    manual = autopar.plan(step, *args, plan=recipes.data_parallel(), **options)
    found = autopar.plan(step, *args, **options)
    assert found.predicted.step_time_s <= manual.predicted.step_time_s * (1 + NEARLY_EQUAL)
    objective_s = manual.record.solver.objective_s
    assert objective_s == pytest.approx(manual.predicted.step_time_s, rel=0.15)


def test_manual_plans_are_weighed_whatever_the_search_finds():
    """A step so small that the best program of the search sends nothing."""
    args = (MLP_STATE, MLP_BATCH)
    plan = autopar.plan(mlp_step, *args, cluster="dgx-h100", cache_dir=None)
    rejected = {r.text.rpartition(", ")[2] for r in plan.record.rejected if r.source == "baselines"}
    assert rejected == {
        "data parallelism", "ZeRO-1", "ZeRO-3", "tensor parallelism over 8", "FSDP along the largest dimensions",
    }  # fmt: skip
    assert all(r.step_time_s is not None or r.why for r in plan.record.rejected)


def test_no_manual_plan_is_faster_than_the_search():
    """Whose best program sends nothing here, so that the objective says little of what hides."""
    step, args, fixed = mlp_step, (MLP_STATE, MLP_BATCH), {"cluster": "dgx-h100", "cache_dir": None}
    plan = autopar.plan(step, *args, **grouped(**fixed))
    priced = {r.text for r in plan.record.rejected if r.source == "baselines" and r.why.startswith("slower")}
    assert {"data parallelism", "ZeRO-1", "ZeRO-3"} <= {text.rpartition(", ")[2] for text in priced}
    for recipe in (autopar.recipes.data_parallel(), autopar.recipes.zero(1), autopar.recipes.zero(3)):
        manual = autopar.plan(step, *args, plan=recipe, **grouped(**fixed))
        assert manual.predicted.step_time_s >= plan.predicted.step_time_s


@pytest.mark.parametrize(
    ("cluster", "of", "expected"),
    [
        ("dgx-h100x8", (16, 4), {(2, 8, 4), (8, 2, 4), (4, 4, 4), (16, 2, 2)}),  # neighbours: hosts lie outside
        ("dgx-h100", (4, 2), {(2, 2, 2)}),
        ("tpu-v5p:2x2x2", (2, 4), {(2, 2, 2)}),
    ],
)
def test_a_third_axis_splits_one_of_two(cluster, of, expected):
    cluster = Cluster.parse(cluster)
    meshes = [mesh for mesh in distinct_meshes(cluster, 3) if len(mesh.axis_sizes) == 3]
    assert {m.axis_sizes for m in meshes if _splits_an_axis(m, LogicalMesh(axis_sizes=of), cluster)} == expected
