"""Graphs that differ in their numbers only, told apart from those that differ in more; decisions carried over."""

import dataclasses

import pytest
from msgspec.structs import replace

from autopar.ir.graph import Block, Section
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.partial_sums import find_partials
from autopar.ir.strategies import Strategy
from autopar.lowering.lower import ShardingPlan
from autopar.search.inter_op.decide_stages import canonical_graph, carried_over
from tests.hand_made import REPORT, two_layers, two_stages

ROWS = Layout(((0,), ()))


def renamed(graph, by=100):
    """The same graph with other numbers: values are moved by `by`, operations by twice that."""
    filling = [replace(graph.values[0], id=i, name="") for i in range(by)]
    values = [*filling, *(replace(v, id=v.id + by) for v in graph.values)]
    ops = tuple(
        replace(
            op,
            id=op.id + 2 * by,
            inputs=tuple(v + by for v in op.inputs),
            outputs=tuple(v + by for v in op.outputs),
        )
        for op in graph.block.ops
    )
    block = Block(
        inputs=tuple(v + by for v in graph.block.inputs), outputs=tuple(v + by for v in graph.block.outputs), ops=ops
    )
    return dataclasses.replace(graph, values=tuple(values), block=block)


def with_op(graph, at, **changes):
    ops = list(graph.block.ops)
    ops[at] = replace(ops[at], **changes)
    return dataclasses.replace(graph, block=replace(graph.block, ops=tuple(ops)))


def test_numbers_do_not_matter():
    graph = two_layers()
    one, other = canonical_graph(graph), canonical_graph(renamed(graph))
    assert one.key == other.key
    assert other.ops == tuple(op + 200 for op in one.ops)
    assert other.values == tuple(v + 100 for v in one.values)


def test_values_stand_in_the_order_in_which_they_appear():
    graph = two_layers()
    assert [graph.values[v].name for v in canonical_graph(graph).values] == [v.name for v in graph.values]


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: with_op(graph, 1, primitive="layer_c"),
        lambda graph: with_op(graph, 1, section=Section.BACKWARD),
        lambda graph: with_op(graph, 1, count=2.0),
        lambda graph: with_op(graph, 2, inputs=graph.block.ops[2].inputs[::-1]),
        lambda graph: dataclasses.replace(graph, num_microbatches=2),
        lambda graph: dataclasses.replace(graph, tied=((0, 0),)),
        lambda graph: dataclasses.replace(graph, donated=frozenset()),
        lambda graph: dataclasses.replace(graph, values=(replace(graph.values[0], dtype="float16"), *graph.values[1:])),
    ],
    ids=["primitive", "section", "count", "operands", "micro-batches", "tied", "donated", "dtype"],
)
def test_what_matters(change):
    assert canonical_graph(change(two_layers())).key != canonical_graph(two_layers()).key


def test_stages_of_different_layers_are_not_alike():
    first, second = two_stages()
    assert canonical_graph(first.graph).key != canonical_graph(second.graph).key


def test_decisions_go_to_the_counterparts():
    graph = two_layers()
    other = renamed(graph)
    layer = graph.block.ops[1]
    strategy = Strategy(operands=(replicated(2), ROWS), results=(ROWS,), split=2)
    plan = ShardingPlan(
        mesh=LogicalMesh(axis_sizes=(2,)),
        strategy={layer.id: strategy},
        partials=find_partials(graph),
        unreduced={0: ROWS},
        reduced={layer.outputs[0]: ROWS},
        copies={(1, "all"): replicated(2)},
        report=REPORT,
        transfer_layouts={layer.id: ROWS},
    )
    found = carried_over(plan, canonical_graph(graph), canonical_graph(other), other)
    assert found.unreduced == {100: ROWS}
    assert found.reduced == {layer.outputs[0] + 100: ROWS}
    assert found.copies == {(101, "all"): replicated(2)}
    assert found.transfer_layouts == {layer.id + 200: ROWS}
    assert found.strategy == {layer.id + 200: strategy}
    assert found.partials == find_partials(other)
