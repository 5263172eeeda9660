"""Plans of one step under several requests share its graphs, and are those that each would be alone."""

import dataclasses

import jax
import pytest

from autopar import recipes
from autopar.common.progress import Progress
from autopar.compiler import whole_graph
from autopar.compiler.planner import make_plan
from autopar.frontend.tracing import trace
from autopar.inter_op import requested_step
from autopar.plan.plan import Trees
from autopar.plan.step_graphs import StepGraphs
from autopar.sharding.rules import RuleBook
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step, slow_cluster

REQUESTS = [
    recipes.combine(num_microbatches=2).request,
    recipes.combine(zero=3, num_microbatches=2).request,
    recipes.data_parallel().request,
]


def test_plans_that_share_graphs_are_those_that_each_would_be(monkeypatch):
    step = trace(mlp_step, (MLP_STATE, MLP_BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    trees = Trees(
        arguments=(jax.tree.structure(MLP_STATE), jax.tree.structure(MLP_BATCH)),
        names=("state", "batch"),
        donated=frozenset({0}),
        batch=frozenset({1}),
    )
    rules, graphs, calls = RuleBook(), StepGraphs(), []

    def plan(request, shared=None):
        return make_plan(step, trees, slow_cluster(2), request, rules, Progress("", show=False), shared).record

    alone = [plan(request) for request in REQUESTS]
    counted(monkeypatch, whole_graph, "build_graph", calls)
    counted(monkeypatch, requested_step, "cut_layers", calls)
    assert [plan(request, graphs) for request in REQUESTS] == alone
    assert calls == ["build_graph", "cut_layers"]


def counted(monkeypatch, module, name, calls):
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **named: calls.append(name) or function(*args, **named))


@pytest.mark.parametrize("change", [{"blockwise_attention": True}, {"per_microbatch": ("norm*",)}])
def test_a_step_that_is_read_otherwise_has_graphs_of_its_own(change):
    step = trace(mlp_step, (MLP_STATE, MLP_BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    graphs = StepGraphs()
    assert graphs.of(step, "whole", lambda: 1) == 1
    assert graphs.of(step, "whole", lambda: 2) == 1
    assert graphs.of(dataclasses.replace(step, **change), "whole", lambda: 3) == 3
