"""Attention as it is written: which operations are kernels, and what they move, as in XLA's compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from tests.ops.attention.test_match import (
    BATCH,
    B,
    D,
    H,
    L,
    by_hand,
    causal,
    dropped,
    padded,
    recomputed,
    shapes,
    stock,
    trained,
)

SCORES = B * H * L * L


def moved(function, args):
    """Bytes that the kernels between products move, for each score, in the order of the step."""
    traced = trace(function, args, names=("state", "batch"), donate=(0,), batch=(1,))
    graph = build_graph(traced, RuleBook())
    return [(op.primitive, op.kernel_bytes / SCORES) for op in graph.ops() if op.kernel_bytes]


FORWARD = [("reduce_max", 4.0), ("div", 8.0)]  # scores read; scores read and weights written


@pytest.mark.parametrize("attention", [causal, padded, stock, by_hand, recomputed])
def test_scores_go_through_two_kernels_forward_and_one_backward(attention):
    found = moved(trained(attention), (shapes(), BATCH))
    times = 2 if attention is recomputed else 1
    assert [nbytes for _, nbytes in found[: 2 * times]] == [4.0, 8.0] * times
    # Scores and gradients of weights read, gradients of scores written.
    assert [nbytes for _, nbytes in found[2 * times :]] == [12.0]


def test_dropout_on_the_weights_is_part_of_their_kernel():
    found = moved(trained(dropped), (shapes(), BATCH))
    assert found[0] == ("reduce_max", 4.0)
    # What is dropped is drawn apart: 32 bits of each weight are read.
    assert found[1][1] == 12.0


def test_softmax_of_a_plain_product_is_no_attention():
    """The cross-entropy of a vocabulary has no matrices side by side."""

    def step(state, batch):
        def loss(state):
            return -jnp.mean(jax.nn.log_softmax(batch["x"] @ state["w"])[..., 0])

        return jax.grad(loss)(state)

    state = {"w": jax.ShapeDtypeStruct((H * D, 32), jnp.float32)}
    assert moved(step, (state, BATCH)) == []


def test_what_a_scan_over_layers_keeps_of_scores_is_written_and_read():
    def step(state, batch):
        def layer(x, weights):
            q, k, v = (jnp.einsum("blw,whd->blhd", x, w) for w in weights)
            return x + causal(q, k, v, batch).reshape(x.shape), None

        def loss(state):
            return jnp.sum(jnp.sin(jax.lax.scan(layer, batch["x"], state)[0]))

        return jax.grad(loss)(state)

    state = tuple(jax.ShapeDtypeStruct((2, H * D, H, D), jnp.float32) for _ in range(3))
    found = moved(step, (state, BATCH))
    assert found[0] == ("reduce_max", 4.0)
    assert sum(nbytes for _, nbytes in found) > 4.0 + 8.0 + 12.0


def test_numbers_among_operands_are_no_scores():
    """A slice at a place that is a number, in a step with attention and in one without."""

    def sliced(q, k, v, batch):
        return jax.lax.dynamic_slice_in_dim(causal(q, k, v, batch), 1, 2, axis=1)

    assert [nbytes for _, nbytes in moved(trained(sliced), (shapes(), BATCH))] == [4.0, 8.0, 12.0]


def grouped(query, key, value):
    """Two queries to a key; (batch, length, keys, group, head) and (batch, length, keys, head)."""
    scores = jnp.einsum("bqkgh,bskh->bkgqs", query, key).astype(jnp.float32)
    return jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(scores).astype(query.dtype), value)


def orders(attention, *shapes_of_operands):
    """(primitive, what the order of dimensions adds) of a gradient's operations, bytes for each of 2 x 2 x 2 x 32 x 32
    scores."""

    def step(state, batch):
        return jax.grad(lambda state: jnp.sum(jnp.sin(attention(*state).astype(jnp.float32))))(state)

    state = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes_of_operands)
    traced = trace(step, (state, BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    found = [(op.primitive, op.order_cost) for op in build_graph(traced, RuleBook()).ops() if op.order_cost is not None]
    return [
        (name, cost.copied_itemsize, cost.in_tiles, cost.rewritten_operand, cost.more_bytes / (2 * 2 * 2 * 32 * 32))
        for name, cost in found
    ]


def test_gradients_of_weights_of_grouped_heads_are_copied_in_the_order_of_the_scores():
    """Scores are (keys, queries, group): what is summed over keys is so in kernels of their own, two bytes a score."""
    query, key = (2, 32, 2, 2, 8), (2, 32, 2, 8)
    assert orders(grouped, query, key, key) == [
        ("reduce_sum", 0, True, None, 2.0),
        ("dot_general", 4, False, None, 0.0),  # written in float32; two queries to a key are too few for tiles
        ("dot_general", 0, True, 1, 0.0),  # by the weights, which another kernel writes for it
        ("reduce_sum", 0, True, None, 6.0),  # reads scores and the copy
        ("convert_element_type", 0, True, None, 2.0),  # reads the copy, of four bytes, and not two
        ("transpose", 0, True, None, 2.0),  # with the weights beside it
    ]


def test_a_group_as_wide_as_a_tile_is_copied_in_tiles():
    found = orders(grouped, (2, 32, 2, 16, 8), (2, 32, 2, 8), (2, 32, 2, 8))
    assert [(copied, in_tiles) for _, copied, in_tiles, _, _ in found if copied] == [(4, True)]


def test_heads_of_their_own_keys_have_one_order():
    def attention(query, key, value):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(query.dtype), value)

    assert orders(attention, *[(2, 32, 4, 8)] * 3) == []


def test_scores_of_keys_by_queries_are_copied_in_tiles_and_their_weights_read_as_they_lie():
    def attention(query, key, value):
        scores = jnp.swapaxes(jnp.einsum("bshd,bqhd->bhsq", key, query), -1, -2).astype(jnp.float32)
        return jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(scores).astype(query.dtype), value)

    found = orders(attention, *[(2, 32, 4, 8)] * 3)
    assert [(name, copied, in_tiles) for name, copied, in_tiles, _, _ in found if copied] == [("dot_general", 4, True)]
    assert [rewritten for *_, rewritten, _ in found if rewritten is not None] == []


def test_rows_of_keys_are_read_in_either_order_of_queries_and_group():
    """Both products of jax's own attention end with the keys."""
    assert orders(jax.nn.dot_product_attention, (2, 32, 4, 8), (2, 32, 2, 8), (2, 32, 2, 8)) == []
