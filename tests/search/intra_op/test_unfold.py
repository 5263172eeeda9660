"""Searches on a step with its repeated layers folded: the decisions of the search on the whole step, at its cost."""

import jax
import numpy as np
import pytest

import autopar
from autopar import Cluster
from autopar.cost.cost_model import cost_model
from autopar.cost.roofline import flops_of
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.layout import LogicalMesh
from autopar.passes.fold_step import ONE_EACH, GraphViews
from autopar.search.check_decisions import check_decisions
from autopar.search.intra_op.formulation import SMALL, whole_nodes
from autopar.search.intra_op.ilp import IntraOp
from autopar.search.intra_op.slack import Exposure
from autopar.search.intra_op.spmd_candidate import evaluated, timed_sharding, unfold
from autopar.solver import Status
from tests.passes.test_fold_step import chain, of_zoo
from tests.sections import BOOK
from tests.small_steps import chain_step, slow_cluster

CASES = {
    "gpt, a row": (lambda: of_zoo("gpt", layers=7), (4,)),
    "gpt, a grid": (lambda: of_zoo("gpt", layers=7), (2, 2)),
    "moe, a row": (lambda: of_zoo("moe", layers=7), (4,)),
}


def solved(intra_op):
    solution = intra_op.solve(time_limit_s=60.0)
    assert solution.status is Status.OPTIMAL
    return solution


def searched(graph, axis_sizes):
    """Of the folded search and of the whole one: the objective, and the candidate on the whole step."""
    views, model = GraphViews(graph, flops_of), cost_model(slow_cluster(4), LogicalMesh(axis_sizes=axis_sizes))
    step = views.folded
    whole = IntraOp(graph, model)
    folded = IntraOp(step.graph, model, paired_ops=step.paired_ops, weights=step.weights)
    assert len(folded.choices.nodes) < 0.8 * len(whole.choices.nodes)
    expected, found = solved(whole), solved(folded)
    nodes = whole_nodes(folded.choices, step.weights.of_value)
    assert nodes == pytest.approx(len(whole.choices.nodes), rel=0.1)
    assert nodes > SMALL
    sharding = unfold(folded.decode(found), views.partials, graph, step)
    check_decisions(sharding, graph, "$", "folded")
    of_folded = found.objective, evaluated(graph, model, sharding)
    return of_folded, (expected.objective, evaluated(graph, model, whole.decode(expected)))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name == "gpt, a grid" else name for name in CASES]
)
def test_the_folded_search_finds_what_the_whole_one_does(case):
    make, axis_sizes = CASES[case]
    (found, candidate), (expected, at_best) = searched(make(), axis_sizes)
    assert found == pytest.approx(expected, rel=1e-9)
    assert candidate.step_time_s == pytest.approx(at_best.step_time_s, rel=1e-9)
    assert candidate.peak_bytes <= at_best.peak_bytes


@pytest.mark.cases(1)
@pytest.mark.parametrize("axis_sizes", [(4,), (2, 2)], ids=["a row", "a grid"])
def test_layers_of_a_chain_cost_the_folded_search_what_they_cost_the_whole_one(axis_sizes):
    """A chain's layers are so thin that the whole search decides several at each end of it in their own way: that
    saves a part of one layer's time, the same at every length.
    """
    shorter, longer = (searched(chain(layers, width=64), axis_sizes) for layers in (24, 32))

    def seconds(searches):
        return np.array([[objective, candidate.step_time_s] for objective, candidate in searches])

    of_layers = (seconds(longer) - seconds(shorter)) / 8
    saved = np.subtract(*seconds(longer))
    np.testing.assert_allclose(of_layers[0], of_layers[1], rtol=1e-9)
    assert np.all((saved >= 0) & (saved < 0.1 * of_layers[1]))


@pytest.mark.slow
def test_a_folded_plan_computes_what_jit_does():
    """Forty layers on four devices, of which the search has seen five; the numbers of one step are those of jit."""
    random = np.random.default_rng(0)
    params = [random.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(40)]
    batch = {name: random.normal(size=(16, 64)).astype(np.float32) for name in ("x", "y")}
    expected = jax.jit(chain_step)(params, batch)
    step = autopar.parallelize(
        chain_step, cluster=slow_cluster(4), search=autopar.Search(num_microbatches=1), cache_dir=None
    )
    plan = step.plan(params, batch)
    assert plan.record.solver.nodes < 100
    found = step(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


def test_no_stream_works_longer_on_the_folded_step_than_the_whole_one_takes():
    graph = chain(9, width=64)
    views = GraphViews(graph, flops_of)
    step, model = views.folded, cost_model(Cluster.preset("dgx-h100"), LogicalMesh(axis_sizes=(8,)))
    intra_op = IntraOp(step.graph, model, paired_ops=step.paired_ops, weights=step.weights)
    for exposed_fraction in (1.0, 0.3, 0.0):
        sharding = intra_op.decode(intra_op.solve(time_limit_s=60.0, exposure=Exposure(exposed_fraction)))
        on_folded = timed_sharding(step.graph, model, sharding).ran
        on_whole = timed_sharding(graph, model, unfold(sharding, views.partials, graph, step)).ran
        assert on_folded.busy_s == pytest.approx(on_whole.busy_s, rel=1e-9)
        assert on_whole.busy_s <= on_whole.end_s * (1 + 1e-9)


def test_a_value_that_all_layers_read_is_copied_once():
    """One weight of all layers: what fills a copy of it counts once, although a layer that stays counts for five."""
    graph = chain_of_one_weight(9)
    step, mesh = GraphViews(graph, flops_of).folded, LogicalMesh(axis_sizes=(4,))
    model = cost_model(slow_cluster(4), mesh)
    weight = next(v for v in graph.block.inputs if graph.values[v].name == "params['shared']")

    def filled(intra_op):
        reshards = intra_op.choices.reshards
        return {r.count for r in reshards if r.value == weight and intra_op.choices.nodes[r.target.node].kind == "copy"}

    assert filled(IntraOp(graph, model)) == {1.0}
    assert filled(IntraOp(step.graph, model, paired_ops=step.paired_ops, weights=step.weights)) == {1.0}
    assert filled(IntraOp(step.graph, model, paired_ops=step.paired_ops, weights=ONE_EACH)) != {1.0}


def chain_of_one_weight(num_layers):
    """Layers with a matrix of their own and one in common."""

    def step(params, batch):
        def loss(params):
            x = batch["x"]
            for i, own in enumerate(params["own"]):
                with jax.named_scope(f"layer{i}"):
                    x = jax.numpy.tanh(x @ own) @ params["shared"]
            return ((x - batch["y"]) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    square, examples = jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((16, 64), np.float32)
    arguments = {"own": [square] * num_layers, "shared": square}, {"x": examples, "y": examples}
    return build_graph(trace(step, arguments, names=("params", "batch"), donate=(0,), batch=(1,)), BOOK)
