"""Repeated layers taken out of a step that is not cut, and what each operation and value of it is like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cost.roofline import flops_of
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, Role, Section
from autopar.ir.semantics import annotate_semantics
from autopar.passes.fold_step import GraphViews, fold_step
from benchmarks.zoo import CASES
from tests.sections import BOOK
from tests.small_steps import chain_step


def chain(num_layers, width=8):
    """The graph of a train step of equal square layers."""
    examples = jax.ShapeDtypeStruct((4, width), np.float32)
    params = [jax.ShapeDtypeStruct((width, width), np.float32)] * num_layers
    arguments = params, {"x": examples, "y": examples}
    return build_graph(trace(chain_step, arguments, names=("params", "batch"), donate=(0,), batch=(1,)), BOOK)


def of_zoo(name, **sizes):
    case = CASES[name](**sizes)
    arguments = jax.eval_shape(case.init, jax.random.key(0)), case.batch(0)
    return build_graph(trace(case.step, arguments, names=("state", "batch"), donate=(0,), batch=(1,)), BOOK)


def flops(graph):
    return sum(flops_of(op) * op.count for op in graph.ops() if op.kind is OpKind.EQUATION)


def test_a_chain_of_seven_layers():
    graph = chain(7)
    step = fold_step(graph, flops_of)
    names = {graph.values[v].name: graph.values[step.value_of[v]].name for v in graph.block.inputs}
    assert names == {
        "params[0]": "params[0]",
        "params[1]": "params[1]",
        "params[2]": "params[2]",
        "params[3]": "params[2]",
        "params[4]": "params[2]",
        "params[5]": "params[5]",
        "params[6]": "params[6]",
        "batch['x']": "batch['x']",
        "batch['y']": "batch['y']",
    }
    weights = {graph.values[v].name: n for v, n in step.weights.of_value.items() if v in graph.block.inputs}
    assert weights == {"params[2]": 3.0}
    assert all(op.section is Section.WHOLE for op in step.graph.ops())


def test_what_is_taken_out_is_like_an_operation_of_the_same_kind_and_shapes():
    graph = chain(7)
    step = fold_step(graph, flops_of)
    stay = {op.id: op for op in step.graph.ops()}
    for op in graph.ops():
        like = stay[step.op_of[op.id]]
        assert (op.primitive, op.role) == (like.primitive, like.role)
        assert [step.value_of[v] for v in op.outputs] == list(like.outputs)
    for v, like in step.value_of.items():
        assert graph.values[v].shape == graph.values[like].shape
    assert flops(step.graph) == flops(graph)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_casts_of_all_layers_at_once_belong_to_the_layers_that_read_them(is_recomputed):
    def layer(x, weight):
        return jnp.tanh(x @ weight)

    def train(params, batch):
        def loss(params):
            x, apply = batch["x"].astype(jnp.bfloat16), jax.checkpoint(layer) if is_recomputed else layer
            for weight in jax.tree.map(lambda p: p.astype(jnp.bfloat16), params):
                x = apply(x, weight)
            return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    examples = jax.ShapeDtypeStruct((4, 8), np.float32)
    arguments = [jax.ShapeDtypeStruct((8, 8), np.float32)] * 9, {"x": examples, "y": examples}
    graph = build_graph(trace(train, arguments, names=("params", "batch"), donate=(0,), batch=(1,)), BOOK)
    step = fold_step(graph, flops_of)
    products = sum(op.primitive == "dot_general" and op.role is Role.FORWARD for op in step.graph.ops())
    casts = [op for op in step.graph.ops() if op.primitive == "convert_element_type" and op.role is Role.FORWARD]
    assert sum(graph.values[op.inputs[0]].shape == (8, 8) for op in casts) == products < 9


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5])
def test_short_chains_have_nothing_to_take_out(num_layers):
    """Of five layers the inner three are equal, and all of them stay."""
    assert fold_step(chain(num_layers), flops_of) is None


def test_steps_that_only_read_their_parameters_are_folded_too():
    def evaluate(params, batch):
        x = batch["x"]
        for weight in params:
            x = jax.numpy.tanh(x @ weight)
        return ((x - batch["y"]) ** 2).mean()

    examples = jax.ShapeDtypeStruct((4, 8), np.float32)
    arguments = [jax.ShapeDtypeStruct((8, 8), np.float32)] * 8, {"x": examples, "y": examples}
    graph = build_graph(trace(evaluate, arguments, names=("params", "batch"), donate=(), batch=(1,)), BOOK)
    step = fold_step(graph, flops_of)
    assert len(step.graph.block.ops) < len(graph.block.ops)
    assert flops(step.graph) == flops(graph)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt_adamw", "moe", "encoder_decoder", "vit"])
def test_semantics_are_those_of_the_whole_graph(name):
    graph = of_zoo(name, layers=7)
    views = GraphViews(graph, flops_of)
    assert views.folded is not None
    assert len(views.folded.graph.block.ops) < 0.8 * len(graph.block.ops)
    there = {v for op in graph.ops() for v in op.outputs} | set(graph.block.inputs)
    whole = annotate_semantics(graph)
    for v in there:
        assert views.annotated.values[v] == whole.values[v]
