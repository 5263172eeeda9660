"""Layouts that a partitioner gives to the values of a step: by literal steps, and as XLA has them."""

import jax
import jax.numpy as jnp
import pytest

from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.recipes.given_layouts import propagated

BOOK = RuleBook()
SIZES = {"data": 2, "model": 4}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def laid(function, args, layouts, sizes=SIZES):
    """(primitive, layouts of its results) of each operation, where arguments lie as `layouts` says (None: open)."""
    names = [f"a{i}" for i in range(len(args))]
    graph = build_graph(trace(function, args, names=names, donate=(), batch=()), BOOK)
    inputs = graph.block.inputs[len(graph.constants) :]
    given = {v: dims for v, dims in zip(inputs, layouts, strict=True) if dims is not None}
    found = propagated(graph, sizes, given)
    return [(op.primitive, found[op.outputs[0]]) for op in graph.ops()], [found[v] for v in inputs]


def test_a_product_hands_on_what_splits_rows_and_columns():
    made, _ = laid(lambda x, w: x @ w, (array(8, 16), array(16, 32)), [(("data",), ()), ((), ("model",))])
    assert made == [("dot_general", (("data",), ("model",)))]


def test_a_product_sums_over_what_splits_the_inner_dimension():
    made, _ = laid(lambda x, w: x @ w, (array(8, 16), array(16, 32)), [((), ("model",)), (("model",), ())])
    assert made == [("dot_general", ((), ()))]


def test_of_two_that_want_an_axis_the_larger_value_has_it():
    rows, columns = [(("data",), ()), ((), ("data",))], (("data",), ())
    made, _ = laid(lambda x, w: x @ w, (array(64, 16), array(16, 32)), rows)
    assert made[-1] == ("dot_general", columns)
    made, _ = laid(lambda x, w: x @ w, (array(8, 16), array(16, 32)), rows)
    assert made[-1] == ("dot_general", ((), ("data",)))


def test_an_open_argument_lies_as_what_reads_it():
    _, arguments = laid(lambda x, w: x @ w, (array(8, 16), array(16, 32)), [None, (("model",), ())])
    assert arguments[0] == ((), ("model",))


def test_what_is_given_stays_and_what_does_not_divide_is_whole():
    made, arguments = laid(jnp.add, (array(6, 16), array(6, 16)), [((), ()), (("model",), ())])
    assert arguments == [((), ()), ((), ())]
    assert made == [("add", ((), ()))]


def test_a_vector_that_is_added_does_not_decide_before_a_product_does():
    def function(x, w, scale):
        return (x @ w) * scale

    args = array(64, 16), array(16, 32), array(32)
    made, _ = laid(function, args, [(("data",), ()), ((), ()), (("data",),)])
    assert made[-1] == ("mul", (("data",), ()))
    made, _ = laid(function, args, [((), ()), ((), ()), (("data",),)])
    assert made[-1] == ("mul", ((), ("data",)))


def test_slices_of_a_loop_hand_on_before_what_it_carries():
    """As XLA has it: what a loop over split weights carries is split as the weights are, not as the batch."""

    def function(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    args = array(64, 16), array(3, 16, 16)
    made, _ = laid(function, args, [(("data",), ()), ((), ("data",), ())])
    assert dict(made)["dot_general"] == ((), ("data",))
    made, _ = laid(function, args, [(("data",), ()), ((), (), ())])
    assert dict(made)["dot_general"] == (("data",), ())


def test_a_merged_dimension_has_the_axes_of_its_major_part():
    made, _ = laid(lambda x: x.reshape(8, 64), (array(8, 4, 16),), [(("data",), ("model",), ())])
    assert made == [("reshape", (("data",), ("model",)))]


@pytest.mark.parametrize(("left", "right"), [(("data",), ("model",)), (("data", "model"), ())])
def test_two_dimensions_that_become_one(left, right):
    made, _ = laid(lambda x: x.reshape(32, 16), (array(8, 4, 16),), [(left, right, ())])
    assert made[0][1][0] == (("data",) if right else ("data", "model"))
