"""Which values are kept partial: only sums that are added to other sums before they are reduced."""

import jax
import jax.numpy as jnp

from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.partial_sums import find_partials
from autopar.ir.rules import RuleBook

BOOK = RuleBook()


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def kept(function, *args):
    """The primitives whose results may stay partial, in program order; `carried` for a loop's carried value."""
    traced = trace(function, args, names="abcd"[: len(args)], donate=(), batch=())
    graph = build_graph(traced, BOOK)
    partials = find_partials(graph)
    made_by = {v: op.primitive for op in graph.ops() for v in op.outputs}
    return [made_by.get(v, "carried") for v in sorted(partials.kept)]


def gram(a):
    return jax.lax.dot_general(a, a, (((0,), (0,)), ((), ())))


def test_two_products_that_are_added_are_kept_partial():
    assert kept(lambda a, b: gram(a) + gram(b), shape(4, 2), shape(4, 2)) == ["dot_general", "dot_general", "add"]


def test_linear_operations_in_between_carry_them():
    found = kept(lambda a, b: gram(a) + (2.0 * gram(b)).T, shape(4, 2), shape(4, 2))
    assert found == ["dot_general", "dot_general", "mul", "transpose", "add"]


def test_a_sum_over_a_dimension_of_size_one_carries_them():
    """As in the gradient of what was broadcast: over the examples first, then over what is left of that dimension."""

    def bias(a):
        return jnp.sum(a, axis=0).reshape(1, 2).sum(axis=0)

    found = kept(lambda a, b: bias(a) + bias(b), shape(4, 2), shape(4, 2))
    assert found.count("reduce_sum") == 4


def test_three_products_are_one_sum():
    found = kept(lambda a, b, c: gram(a) + gram(b) + gram(c), *[shape(4, 2)] * 3)
    assert found.count("dot_general") == 3
    assert found.count("add") == 2


def test_one_product_gains_nothing_by_staying_partial():
    assert kept(lambda a, b: gram(a) + b, shape(4, 2), shape(2, 2)) == []


def stacked(a):
    return jax.lax.scan(lambda _, piece: ((), gram(piece)), (), a)[1]


def test_sums_that_scans_stack_are_kept_partial_where_the_stacks_are_added():
    found = kept(lambda a, b: stacked(a) + stacked(b), shape(3, 4, 2), shape(3, 4, 2))
    assert sorted(found) == ["add", "dot_general", "dot_general", "scan", "scan"]
    assert kept(stacked, shape(3, 4, 2)) == []


def test_a_sum_added_to_itself_is_one_origin():
    def step(a):
        product = gram(a)
        return product + 2.0 * product

    assert kept(step, shape(4, 2)) == []


def test_what_is_not_linear_reduces_first():
    assert kept(lambda a, b: jnp.exp(gram(a)) + gram(b), shape(4, 2), shape(4, 2)) == []


def test_a_product_with_a_whole_tensor_reduces_first():
    assert kept(lambda a, b, c: gram(a) * c + gram(b), shape(4, 2), shape(4, 2), shape(2, 2)) == []


def test_rounding_to_fewer_bits_reduces_first():
    def step(a, b):
        return gram(a).astype(jnp.bfloat16) + gram(b).astype(jnp.bfloat16)

    assert kept(step, shape(4, 2), shape(4, 2)) == []


def test_whole_numbers_are_not_kept_partial():
    assert kept(lambda a, b: gram(a) + gram(b), *[shape(4, 2, dtype=jnp.int32)] * 2) == []


def test_a_sum_accumulated_by_a_scan_stays_partial_until_the_loop_ends():
    def step(rows):
        return jax.lax.scan(lambda total, row: (total + gram(row), None), jnp.zeros((2, 2)), rows)[0]

    assert kept(step, shape(3, 4, 2)) == ["carried", "dot_general", "add"]


def test_a_carried_sum_that_the_body_reads_is_whole():
    def step(rows):
        return jax.lax.scan(lambda total, row: (total + gram(row), total.sum()), jnp.zeros((2, 2)), rows)

    assert kept(step, shape(3, 4, 2)) == []
