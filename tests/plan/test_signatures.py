"""Decisions are bound to the operations that they were made for."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import PlanMismatchError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.plan.codec import signature
from autopar.search.check_decisions import check_operations
from tests.small_steps import grouped

PARAMS = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
BATCH = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}


def step(params, batch):
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(batch["x"] @ p["w"])))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def with_one_more(params, batch):
    """One operation before all others, so that all numbers are others."""
    return step(params, {"x": jnp.cos(batch["x"])})


def transposed(params, batch):
    """The same numbers, kinds of operations and shapes of results."""
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(batch["x"] @ p["w"].T)))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def graph_of(function):
    return build_graph(trace(function, (PARAMS, BATCH), names=("params", "batch"), donate=(0,), batch=(1,)), RuleBook())


def plan_of(function, **options):
    return autopar.plan(function, PARAMS, BATCH, cluster="p3.16xlarge", cache_dir=None, **grouped(**options))


def test_every_decided_operation_has_a_signature_of_its_own():
    graph, decisions = graph_of(step), plan_of(step).record.decisions
    assert len(decisions.operations) == 4 * len(decisions.of_op)
    assert len({signature(op) for op in graph.ops()}) == len(list(graph.ops()))
    check_operations(decisions, graph, "$.plan.decisions", "step")


@pytest.mark.parametrize("other", [with_one_more, transposed])
def test_decisions_for_other_operations_are_refused_with_the_line_of_the_first(other):
    decisions = plan_of(step).record.decisions
    with pytest.raises(PlanMismatchError, match=r"of_op\.\d+.*another one: \w+ in .*test_signatures.py:\d+"):
        check_operations(decisions, graph_of(other), "$.plan.decisions", "step")


@pytest.mark.parametrize("recipe", [None, autopar.recipes.pipeline(1, num_microbatches=2)])
def test_a_plan_whose_signatures_are_others_is_refused(recipe):
    plan = plan_of(step, plan=recipe)
    record = plan.record

    def edited(decisions):
        first = "1" if decisions.operations[0] == "0" else "0"
        return dataclasses.replace(decisions, operations=first + decisions.operations[1:])

    if record.pipeline is None:
        record = dataclasses.replace(record, decisions=edited(record.decisions))
    else:
        (stage,) = record.pipeline.stages
        stages = (dataclasses.replace(stage, decisions=edited(stage.decisions)),)
        record = dataclasses.replace(record, pipeline=dataclasses.replace(record.pipeline, stages=stages))
    wrong = autopar.parallelize(step, plan=dataclasses.replace(plan, record=record), cache_dir=None)
    with pytest.raises(PlanMismatchError, match="as it was when the plan was made"):
        wrong.compile(PARAMS, BATCH)
