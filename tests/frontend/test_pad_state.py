"""Padded state in a graph: what is computed padded, what is cut, and what a sum leaves out."""

import jax
import jax.numpy as jnp
import numpy as np

from autopar.frontend.build_graph import build_graph
from autopar.frontend.pad_state import _sum_without_padding, padded_step, store, unstore
from autopar.frontend.tracing import trace
from autopar.ir.graph import Role
from autopar.ir.padded import PaddedForm
from autopar.sharding.rules import RuleBook

ROWS = PaddedForm((5, 3), (6, 3))
FLAT = PaddedForm((5, 3), (16,))


def momentum_step(state, batch):
    def loss(w):
        return jnp.mean((batch @ w) ** 2)

    gradient = jax.grad(loss)(state["w"])
    gradient = gradient / (1.0 + jnp.sqrt(jnp.sum(gradient**2)))
    momentum = 0.9 * state["m"] + gradient
    return {"m": momentum, "w": state["w"] - 0.1 * momentum / (1.0 + jnp.max(momentum))}


def graph_of(form, leaves):
    state = {"m": jnp.zeros((5, 3)), "w": jnp.ones((5, 3))}
    args = (state, jnp.ones((8, 5)))
    traced = trace(momentum_step, args, names=("state", "batch"), donate=(0,), batch=(1,))
    return build_graph(padded_step(traced, dict.fromkeys(leaves, form)), RuleBook())


def shapes(graph, role, primitive):
    return [graph.values[op.outputs[0]].shape for op in graph.ops() if (op.role, op.primitive) == (role, primitive)]


def test_what_is_stored_is_what_the_code_has_and_padding():
    x = np.arange(15.0).reshape(5, 3)
    assert store(x, ROWS).shape == (6, 3)
    assert store(x, FLAT).shape == (16,)
    assert np.array_equal(unstore(store(x, ROWS), ROWS), x)
    assert np.array_equal(unstore(store(x, FLAT), FLAT), x)


def test_the_update_is_computed_in_the_stored_shape_from_the_gradient_on():
    graph = graph_of(ROWS, [0])  # the momentum alone, as under ZeRO 1
    inputs, outputs = ([graph.values[v].shape for v in vs] for vs in (graph.block.inputs, graph.block.outputs))
    assert inputs == [(6, 3), (5, 3), (8, 5)]
    assert outputs == [(6, 3), (5, 3)]
    assert shapes(graph, Role.BACKWARD, "pad") == [(6, 3)]  # the gradient, once, where it is made
    assert set(shapes(graph, Role.UPDATE, "mul")) == {(6, 3)}
    # A maximum reads what the code has: the padding may hold anything.
    (largest,) = (op for op in graph.ops() if op.primitive == "reduce_max")
    assert graph.values[largest.inputs[0]].shape == (5, 3)


def test_a_sum_of_all_elements_leaves_the_padding_out():
    graph = graph_of(ROWS, [0])
    (norm,) = (op for op in graph.ops() if op.primitive == "reduce_sum" and op.role is Role.UPDATE)
    maker = {v: op for op in graph.ops() for v in op.outputs}
    assert maker[norm.inputs[0]].primitive == "select_n"
    assert graph.values[norm.inputs[0]].shape == (6, 3)


def test_each_pass_cuts_a_parameter_anew():
    graph = graph_of(FLAT, [0, 1])  # all state, as under ZeRO 3
    stored = graph.block.inputs[1]
    cuts = [op.role for op in graph.ops() if op.primitive == "slice" and stored in op.inputs]
    assert cuts.count(Role.FORWARD) == 1
    assert len(cuts) == len(set(cuts))


def test_a_plan_for_one_padding_is_none_for_another():
    state = {"m": jnp.zeros((5, 3)), "w": jnp.ones((5, 3))}
    traced = trace(momentum_step, (state, jnp.ones((8, 5))), names=("state", "batch"), donate=(0,), batch=(1,))
    prints = {padded_step(traced, {0: form}).fingerprint for form in (ROWS, FLAT)} | {traced.fingerprint}
    assert len(prints) == 3


def test_a_parameter_is_rounded_before_it_is_cut():
    def step(state, batch):
        loss = lambda w: jnp.mean((batch @ w.astype(jnp.bfloat16).astype(jnp.float32)) ** 2)
        return {"w": state["w"] - 0.1 * jax.grad(loss)(state["w"])}

    traced = trace(step, ({"w": jnp.ones((5, 3))}, jnp.ones((8, 5))), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = build_graph(padded_step(traced, {0: ROWS}), RuleBook())
    (rounded,) = (
        op for op in graph.ops() if op.inputs and op.inputs[0] == graph.block.inputs[0] and op.role is Role.FORWARD
    )
    assert rounded.primitive == "convert_element_type"
    assert graph.values[rounded.outputs[0]].shape == (6, 3)
    cuts = [op for op in graph.ops() if op.primitive == "slice" and rounded.outputs[0] in op.inputs]
    assert cuts


def test_parts_that_are_padded_each_keep_their_numbers_and_their_sum():
    form = PaddedForm((4, 3), (6, 3), (2, 1, 1))
    array = jnp.arange(12.0).reshape(4, 3)
    stored = store(array, form).at[jnp.array([3, 5])].set(99.0)
    np.testing.assert_array_equal(stored[jnp.array([0, 1, 2, 4])], array)
    np.testing.assert_array_equal(unstore(stored, form), array)
    assert _sum_without_padding(stored, form) == array.sum()
