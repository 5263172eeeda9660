"""Repeated layers taken out of a graph: what stays, what it counts for, and that it is a graph still."""

import jax
import numpy as np
import pytest

from autopar.cost.roofline import flops_of
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, read_by
from autopar.passes.assign_layers import assign_layers
from autopar.passes.fold_layers import fold_layers, layer_kinds, members_of
from autopar.passes.layers import find_layers
from autopar.passes.microbatch import micro_batched
from benchmarks.zoo import CASES
from tests.sections import BOOK
from tests.small_steps import chain_step


def chain(num_layers, width=8):
    """A train step of equal square layers, in two micro-batches."""
    examples = jax.ShapeDtypeStruct((4, width), np.float32)
    params = [jax.ShapeDtypeStruct((width, width), np.float32)] * num_layers
    traced = trace(
        chain_step, (params, {"x": examples, "y": examples}), names=("params", "batch"), donate=(0,), batch=(1,)
    )
    return micro_batched(traced, 2, BOOK)


def of_zoo(name, **sizes):
    case = CASES[name](**sizes)
    arguments = jax.eval_shape(case.init, jax.random.key(0)), case.batch(0)
    return micro_batched(trace(case.step, arguments, names=("state", "batch"), donate=(0,), batch=(1,)), 2, BOOK)


def contracted(graph):
    """(kinds of layers, the smaller graph)."""
    layers = find_layers(graph, flops_of)
    assignment = assign_layers(graph, layers)
    kinds = layer_kinds(graph, members_of(graph, assignment), len(layers))
    return kinds, fold_layers(graph, assignment, len(layers))


def flops(graph):
    return sum(flops_of(op) * op.count for op in graph.ops() if op.kind is OpKind.EQUATION)


def assert_is_a_graph(graph):
    made = set(graph.block.inputs)
    for op in graph.block.ops:
        missing = [v for v in read_by(op) if v not in made]
        assert not missing, f"{op.primitive} of {op.module} reads {missing} before it is made"
        made.update(op.outputs)
    assert all(v in made for v in graph.block.outputs if isinstance(v, int))
    assert all(i < len(graph.block.inputs) and o < len(graph.block.outputs) for i, o in graph.tied)


def test_a_chain_of_six_layers():
    kinds, smaller = contracted(chain(6))
    assert kinds == (0, 1, 1, 1, 1, 2)
    assert smaller.stands_for == (0, 1, 1, 4, 4, 5)
    assert smaller.weight == {0: 1.0, 1: 2.0, 4: 2.0, 5: 1.0}
    parameters = [smaller.graph.values[v].name for v in smaller.graph.block.inputs if v in smaller.copies()]
    assert parameters == ["params[1]", "params[4]"]
    assert_is_a_graph(smaller.graph)


def test_a_chain_whose_ends_stand_apart():
    """Layers 1 to 4 are equal: 1 and 4 stay for themselves, 2 for itself and 3, which 4 reads by way of 2."""
    graph = chain(6)
    layers = find_layers(graph, flops_of)
    smaller = fold_layers(graph, assign_layers(graph, layers), len(layers), ends_apart=True)
    assert smaller.stands_for == (0, 1, 2, 2, 4, 5)
    assert smaller.weight == {0: 1.0, 1: 1.0, 2: 2.0, 4: 1.0, 5: 1.0}
    assert flops(smaller.graph) == flops(graph)
    assert_is_a_graph(smaller.graph)


@pytest.mark.parametrize("num_layers", [2, 3, 4])
def test_short_chains_stay_whole(num_layers):
    graph = chain(num_layers)
    kinds, smaller = contracted(graph)
    assert smaller.graph == graph
    assert smaller.stands_for == tuple(range(len(kinds)))
    assert set(smaller.weight.values()) == {1.0}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt", "gpt_adamw"])
def test_layers_are_equal_however_their_names_are_sorted(name):
    """A tree of twelve layers is sorted 0, 1, 10, 11, 2: of two that make one layer, the second may come first."""
    graph = of_zoo(name, layers=12)
    layers = find_layers(graph, flops_of, max_layers=7)
    members = members_of(graph, assign_layers(graph, layers))
    assert layer_kinds(graph, members, len(layers)) == (0, 1, 1, 1, 1, 1, 2)
    for found in members.values():
        made = {v: position for position, op in enumerate(found) for v in op.outputs}
        assert all(made[v] < position for position, op in enumerate(found) for v in read_by(op) if v in made)


def test_the_size_is_that_of_two_layers_whatever_the_depth():
    sizes = {len(contracted(chain(n))[1].graph.block.ops) for n in (5, 8, 16)}
    assert len(sizes) == 1


@pytest.mark.parametrize(
    "graph",
    [
        lambda: chain(9),
        lambda: of_zoo("mlp", layers=6),
        pytest.param(lambda: of_zoo("gpt", layers=5), marks=pytest.mark.slow),
        pytest.param(lambda: of_zoo("moe", layers=5), marks=pytest.mark.slow),
        pytest.param(lambda: of_zoo("encoder_decoder", layers=4), marks=pytest.mark.slow),
    ],
    ids=["chain", "mlp", "gpt", "moe", "encoder_decoder"],
)
def test_work_and_state_count_for_those_taken_out(graph):
    whole = graph()
    _, smaller = contracted(whole)
    assert len(smaller.graph.block.ops) < len(whole.block.ops)
    assert_is_a_graph(smaller.graph)
    assert flops(smaller.graph) == pytest.approx(flops(whole))
    copies = smaller.copies()
    state = sum(
        smaller.graph.values[smaller.graph.block.inputs[i]].nbytes * copies.get(smaller.graph.block.inputs[i], 1)
        for i in smaller.graph.donated
    )
    assert state == sum(whole.values[whole.block.inputs[i]].nbytes for i in whole.donated)
