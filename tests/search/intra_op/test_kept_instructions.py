"""Candidates of one step keep the instructions that they have in common: each is what it is when it is made alone."""

import pytest

from autopar import Cluster
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.cost.roofline import flops_of
from autopar.ir.binding import Binding
from autopar.ir.layout import LogicalMesh
from autopar.ir.parallelisms import data_axis
from autopar.lowering.instructions import Compute
from autopar.passes.fold_step import ONE_EACH, GraphViews
from autopar.search.intra_op.build_choice_graph import SharedTables
from autopar.search.intra_op.ilp import GivenLayouts, IntraOp
from autopar.search.intra_op.mesh_searches import state_along_largest
from autopar.search.intra_op.slack import Exposure
from autopar.search.intra_op.spmd_candidate import timed_sharding
from tests.passes.test_fold_step import of_zoo

CLUSTERS = {"dgx-h100": (8,), "tpu-v5e:2x4": (2, 4)}


def shardings(graph, model):
    """Decisions of a search, the same with less of what can hide, of one with all state split, and the first again."""
    free = IntraOp(graph, model)
    arguments = graph.block.inputs[len(graph.constants) :]
    split = state_along_largest(graph, LogicalMesh(axis_sizes=(model.links.mesh.axis_sizes[0],)))
    fixed = IntraOp(graph, model, GivenLayouts(fixed={arguments[i]: layout for i, layout in split}))
    first = free.decode(free.solve(time_limit_s=60.0))
    hidden = free.decode(free.solve(time_limit_s=60.0, exposure=Exposure(0.1)))
    return [first, hidden, fixed.decode(fixed.solve(time_limit_s=60.0)), first]


def on_the_clock(ran):
    return ran.end_s, ran.compute_s, ran.send_s, ran.starts_s, [(work.name, work.seconds) for work in ran.order]


@pytest.mark.cases(1)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_candidates_with_common_instructions_are_what_they_are_alone(cluster):
    graph = of_zoo("gpt", layers=2)
    model = cost_model(Cluster.parse(cluster), LogicalMesh(axis_sizes=CLUSTERS[cluster]))
    costs = NodeCosts(graph, model)
    for sharding in shardings(graph, model):
        together, alone = timed_sharding(graph, model, sharding, costs), timed_sharding(graph, model, sharding)
        assert together.lowered == alone.lowered
        assert on_the_clock(together.ran) == on_the_clock(alone.ran)


def test_an_equation_decided_as_before_keeps_its_instruction_and_its_work():
    graph = of_zoo("gpt", layers=2)
    model = cost_model(Cluster.preset("dgx-h100"), LogicalMesh(axis_sizes=(8,)))
    costs = NodeCosts(graph, model)
    *_, other, sharding = shardings(graph, model)
    before, between, after = (timed_sharding(graph, model, at, costs) for at in (sharding, other, sharding))
    again = timed_sharding(graph, model, sharding, costs)
    computes = [
        [i for i in at.lowered.instructions if isinstance(i, Compute)] for at in (before, between, after, again)
    ]
    kept = sum(a is b for a, b in zip(computes[0], computes[1], strict=True))
    assert 0 < kept < len(computes[0])
    assert all(a is b for a, b in zip(computes[2], computes[3], strict=True))
    of_work = [{id(work) for work in at.ran.order} for at in (after, again)]
    assert len(of_work[0] & of_work[1]) > 0.8 * len(of_work[0])


def test_searches_whose_axes_have_no_order_share_the_tables_of_a_graph():
    views = GraphViews(of_zoo("gpt", layers=2), flops_of)
    mesh = LogicalMesh(axis_sizes=(8,))
    tables = SharedTables(views.graph, cost_model(Cluster.preset("dgx-h100"), mesh))
    _, constraints = Binding(axes=(data_axis(3),), sizes=(None,)).on(8)
    free = tables.built(views.graph, None, ONE_EACH, {}, {})
    assert tables.built(views.annotated, constraints, ONE_EACH, {}, {}) is free
