"""Plans of one step under several requests share its graphs, and are those that each would be alone."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.common.progress import Progress
from autopar.errors import UnsupportedError
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.passes import microbatch
from autopar.plan.context import StepGraphs
from autopar.plan.plan import Trees
from autopar.search import step_ways
from autopar.search.inter_op import requested
from autopar.search.planner import make_plan
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
    counted(monkeypatch, step_ways, "graph_as_written", calls)
    counted(monkeypatch, requested, "cut_layers", calls)
    assert [plan(request, graphs) for request in REQUESTS] == alone
    assert calls == ["graph_as_written", "cut_layers"]


def test_stages_in_other_numbers_of_micro_batches_share_the_parts_of_a_scan(monkeypatch):
    """And interleaved stages, whose parts are others, share the traces of a micro-batch with them."""
    traces, calls = [], []

    def step(params, batch):
        traces.append(batch.shape)

        def loss(params):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)
            return (x**2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    state, batch = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 16, 16), (8, 16)))
    trees = Trees(
        arguments=(jax.tree.structure(state), jax.tree.structure(batch)),
        names=("params", "batch"),
        donated=frozenset({0}),
        batch=frozenset({1}),
    )
    traced = trace(step, (state, batch), names=("params", "batch"), donate=(0,), batch=(1,))
    # As for a step with a kernel whose sizes are its own, of which a micro-batch has to be traced.
    monkeypatch.setattr(microbatch, "cut_dims", refusing)
    options = [{"num_microbatches": 2}, {"num_microbatches": 4}, {"num_microbatches": 2, "schedule": "interleaved"}]
    requests = [recipes.pipeline(2, **each).request for each in options]

    def plan(request, shared=None):
        return make_plan(traced, trees, slow_cluster(2), request, RuleBook(), Progress("", show=False), shared).record

    alone = [plan(request) for request in requests]
    counted(monkeypatch, requested, "split_scans", calls)
    counted(monkeypatch, requested, "build_graph", calls)
    traces.clear()
    graphs = StepGraphs()
    assert [plan(request, graphs) for request in requests] == alone
    assert calls == 2 * ["split_scans", "build_graph"]
    assert traces == [(4, 16), (2, 16)]


def refusing(*_):
    raise UnsupportedError(where="step", expected="sizes that can be cut", got="a kernel", hint="trace it")


def counted(monkeypatch, module, name, calls):
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **named: calls.append(name) or function(*args, **named))


@pytest.mark.parametrize("change", [{"attention_kernel": "BLOCKS"}, {"per_microbatch": ("norm*",)}])
def test_a_step_that_is_read_otherwise_has_graphs_of_its_own(change):
    step = trace(mlp_step, (MLP_STATE, MLP_BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    graphs = StepGraphs()
    assert graphs.of(step, "whole", lambda: 1) == 1
    assert graphs.of(step, "whole", lambda: 2) == 1
    assert graphs.of(dataclasses.replace(step, **change), "whole", lambda: 3) == 3
