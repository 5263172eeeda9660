"""How long what is sent may be on its way, on a step small enough to count."""

import math

import jax
import jax.numpy as jnp
import pytest

from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.passes.assign_stages import assign
from autopar.passes.microbatch import micro_batched
from autopar.passes.split_scan import split_scans
from autopar.search.inter_op.build_stages import cut_layers
from autopar.search.inter_op.staged import cut_stages, transfer_layouts_of
from autopar.search.intra_op.build_choice_graph import build_choice_graph
from autopar.search.intra_op.slack import slacks_s
from tests.small_steps import chain_step

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
STACK = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)


def traced():
    arguments = ([SQUARE, SQUARE], {"x": SQUARE, "y": SQUARE})
    return trace(chain_step, arguments, names=("params", "batch"), donate=(0,), batch=(1,))


def slacks(graph, **options):
    """Of each value, in order, the slack of each resharding of it, where a product takes a second and all else nothing.

    Values are named by what makes them, products by their number.
    """
    assembly = build_choice_graph(graph, LogicalMesh(axis_sizes=(4,)))
    products = [op for op in graph.ops() if op.primitive == "dot_general"]
    made_by = {v: op.primitive or op.kind.value for op in graph.ops() for v in op.outputs}
    made_by |= {op.outputs[0]: f"product {i}" for i, op in enumerate(products)}
    found = {}
    times = slacks_s(graph, assembly, lambda op: float(op.primitive == "dot_general"), **options)
    for reshard, slack_s in zip(assembly.reshards, times, strict=True):
        found.setdefault(made_by.get(reshard.value, graph.values[reshard.value].name), []).append(slack_s)
    return found


def test_who_waits_for_what_is_sent():
    found = slacks(build_graph(traced(), RuleBook()))
    # Forward, each product is read by the next one, through what takes no time.
    assert found["product 0"] == found["product 1"] == [0.0]
    # The first gradient is made two products before the update; the second one is the last product of all.
    assert (found["product 2"], found["product 4"]) == ([2.0], [0.0])
    assert found["product 3"] == [0.0]  # the gradient of an activation: the next product reads it
    assert found["reduce_sum"] == [3.0]  # nobody waits for the loss
    # Parameters and examples are there before the step begins.
    assert set(found["params[0]"] + found["params[1]"] + found["batch['x']"]) == {math.inf}


def test_what_a_loop_reads_has_the_time_until_that_loop():
    def step(stack, batch):
        rounded = jnp.sin(stack)
        batch, _ = jax.lax.scan(lambda x, w: (x @ w, None), batch, rounded)
        batch, _ = jax.lax.scan(lambda x, w: (x @ w, None), batch @ batch, rounded)
        return stack, batch

    graph = build_graph(trace(step, (STACK, SQUARE), names=("stack", "batch"), donate=(0,), batch=(1,)), RuleBook())
    # Of all readers; of the first loop; of the second, before which a product outside of loops takes a second, which
    # the stack shares with what the loop carries.
    share = STACK.size / (STACK.size + SQUARE.size)
    assert slacks(graph)["sin"] == pytest.approx([0.0, 0.0, share])
    assert slacks(graph, before_loops=False)["sin"] == [0.0, 0.0, 0.0]


def test_nothing_hides_behind_another_section():
    found = slacks(micro_batched(traced(), 4, RuleBook()))
    # In the loop the first gradient has the rest of the backward pass, the sums behind it have nothing to hide behind.
    assert found["transpose"] == [2.0, 0.0]
    assert found["accumulate"] == [3.0, 0.0, 0.0]
    # A copy of a parameter for all readers is gathered once, ahead of everything; those for one pass can come ahead.
    assert found["params[1]"] == [0.0, math.inf, math.inf]


def test_what_arrives_from_another_stage_is_there_when_its_section_begins():
    rules = RuleBook()
    cut = cut_layers(split_scans(traced(), 1, rules), 4, rules)
    assert len(cut.layers) == 2
    mesh = LogicalMesh(axis_sizes=(4,))
    stages = cut_stages(assign(cut.graph, cut.layers, (0, 1)), False, 2)
    received, sent = transfer_layouts_of(stages, [mesh, mesh])[1]
    second = stages[1]
    inputs = {second.graph.block.inputs[position] for position in second.graph.repeating}
    assembly = build_choice_graph(second.graph, mesh, sent, received)
    times = slacks_s(second.graph, assembly, lambda op: float(op.primitive == "dot_general"))
    found = [slack_s for r, slack_s in zip(assembly.reshards, times, strict=True) if r.value in inputs]
    assert found
    assert all(math.isfinite(slack_s) for slack_s in found)
    # The second stage's product waits for it at once, in its forward pass and as the first of its backward pass.
    assert min(found) == 0.0
