"""Rings under windows and over packed sequences: whose keys come, what is left out, and the numbers of plain jax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import recipes
from autopar.ops.attention.ring_order import RingOrder, ring_order, visibility
from tests.ops.attention.test_kernels import FORM, POSITIONS, SCALED

LENGTH, HEADS, KEY_HEADS, WIDTH, FEATURES = 32, 4, 2, 8, 16
DISTANCE = ("sub", (), *POSITIONS)
SEGMENTS = ("eq", (), ("array", 0), ("array", 1))


def number(value, dtype="int32"):
    return ("const", value, dtype)


def seen_where(condition, hidden=-1e30, **arrays):
    score = ("select_n", (), condition, number(hidden, "float32"), SCALED)
    return dataclasses.replace(FORM, score=score, **arrays)


def window(before, behind):
    ends = ("le", (), DISTANCE, number(before)), ("ge", (), DISTANCE, number(-behind))
    return seen_where(("and", (), *ends))


@pytest.mark.parametrize(
    ("form", "positions", "count", "order"),
    [
        (FORM, 8, 4, RingOrder(count=4, ahead=3, balanced=True)),
        (FORM, 7, 4, RingOrder(count=4, ahead=3)),  # no two halves
        (FORM, 8, 1, RingOrder(count=1, ahead=0)),
        (dataclasses.replace(FORM, score=SCALED), 8, 4, RingOrder(count=4, ahead=3)),
        (window(0, 0), 8, 8, RingOrder(count=8, ahead=0)),
        (window(1, 0), 8, 8, RingOrder(count=8, ahead=1)),
        (window(8, 0), 8, 8, RingOrder(count=8, ahead=1)),
        (window(9, 0), 8, 8, RingOrder(count=8, ahead=2)),  # the first of a device sees one of two devices before
        (window(9, 1), 8, 8, RingOrder(count=8, ahead=2, behind=1)),
        (window(9, 9), 8, 4, RingOrder(count=4, ahead=3)),  # all come
        # Of 8 devices with 4 steps in order 5 blocks are computed, balanced 1 + 7 / 2.
        (window(25, 0), 8, 8, RingOrder(count=8, ahead=7, balanced=True)),
        (window(17, 0), 8, 8, RingOrder(count=8, ahead=3)),
    ],
)
def test_keys_go_as_far_as_a_window_reaches(form, positions, count, order):
    assert ring_order(form, positions, count) == order


CAUSAL = ("ge", (), *POSITIONS)
PACKED = {"arrays": ("bq", "bk"), "sources": (0, 0)}


@pytest.mark.parametrize(
    ("form", "balanced"),
    [
        (seen_where(("and", (), CAUSAL, SEGMENTS), **PACKED), True),
        (seen_where(("and", (), CAUSAL, ("not", (), ("ne", *SEGMENTS[1:]))), **PACKED), True),
        # Segments of other arrays: a row may see nothing, and weighs what is hidden.
        (seen_where(("and", (), CAUSAL, SEGMENTS), arrays=("bq", "bk"), sources=(0, 1)), False),
        (seen_where(("and", (), CAUSAL, SEGMENTS), -np.inf, arrays=("bq", "bk"), sources=(0, 1)), True),
        (seen_where(("or", (), CAUSAL, SEGMENTS), **PACKED), False),  # segments show what comes later
        (seen_where(("and", (), CAUSAL, ("array", 0)), arrays=("bk",), sources=(0,)), False),  # padding
        # A bias of any size may hide what it likes.
        (dataclasses.replace(seen_where(CAUSAL), score=("add", (), ("array", 0), FORM.score), arrays=("hqk",)), False),
    ],
)
def test_hidden_scores_are_left_out_where_no_row_loses_all(form, balanced):
    assert ring_order(form, 8, 4).balanced is balanced


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_surely_hidden_is_hidden_for_any_arrays(data):
    """Against all scores of random masks, evaluated with random segments."""
    leaves = st.sampled_from([CAUSAL, SEGMENTS, ("lt", (), DISTANCE, number(3)), ("ne", (), DISTANCE, number(2))])
    two = lambda inner: st.tuples(st.sampled_from(["and", "or"]), st.just(()), inner, inner)
    one = lambda inner: st.tuples(st.just("not"), st.just(()), inner)
    condition = data.draw(st.recursive(leaves, lambda inner: st.one_of(two(inner), one(inner)), max_leaves=5))
    seen = visibility(seen_where(condition, **PACKED), 6)
    segments = np.array(data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6)))
    query, key = np.meshgrid(np.arange(6), np.arange(6), indexing="ij")

    def value(node):
        match node:
            case ("eq", (), ("array", _), _):
                return segments[query] == segments[key]
            case ("iota", letter, _):
                return query if letter == "q" else key
            case ("const", constant, _):
                return constant
            case ("not", (), inner):
                return ~value(inner)
        names = {"and": np.logical_and, "or": np.logical_or, "ge": np.greater_equal, "lt": np.less}
        names |= {"ne": np.not_equal, "sub": np.subtract}
        return names[node[0]](value(node[2]), value(node[3]))

    visible = value(condition)
    assert not np.any(visible & ~seen.seen[query - key + 5])
    if seen.leaves_rows:
        assert np.all(np.diagonal(visible))


# Through recipes


def soft(scores, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def scores_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5


def segments_of(batch):
    return (batch["segments"][:, :, None] == batch["segments"][:, None, :])[:, None]


def causal():
    return jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def packed(q, k, v, batch):
    return soft(jnp.where(segments_of(batch) & causal(), scores_of(q, k), -1e30), v)


def packed_by_biases(q, k, v, batch):
    hidden = jnp.where(segments_of(batch), 0.0, -1e9) + (1.0 - causal().astype(jnp.float32)) * -1e9
    return soft(scores_of(q, k) + hidden, v)


def packed_stock(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, mask=segments_of(batch), is_causal=True)


def packed_stock_bias(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, bias=jnp.where(segments_of(batch) & causal(), 0.0, -1e9))


def packed_flax(q, k, v, batch):
    mask = nn.make_attention_mask(batch["segments"], batch["segments"], jnp.equal)
    return nn.dot_product_attention(q, k, v, mask=nn.combine_masks(nn.make_causal_mask(batch["segments"]), mask))


def packed_and_padded(q, k, v, batch):
    there = nn.make_attention_mask(batch["segments"] > 0, batch["segments"] > 0)
    mask = nn.make_attention_mask(batch["segments"], batch["segments"], jnp.equal)
    mask = nn.combine_masks(nn.make_causal_mask(batch["segments"]), mask, there)
    return nn.dot_product_attention(q, k, v, mask=mask)


def window_stock(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=6)


def window_both_ways(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(6, 3))


def window_of_numpy(q, k, v, batch):
    """A constant of the step says what is seen."""
    near = np.tril(np.triu(np.ones((LENGTH, LENGTH), bool), -5))
    return soft(jnp.where(near, scores_of(q, k), -jnp.inf), v)


def window_and_segments(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=6, mask=segments_of(batch))


def large_window(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=25)


def lengths(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=batch["length"])


def train_step(attention):
    def step(state, batch):
        def loss(state):
            q, k, v = (jnp.einsum("blw,whd->blhd", batch["x"], state[name]) for name in "qkv")
            k, v = (jnp.repeat(a, HEADS // KEY_HEADS, axis=2) for a in (k, v))
            out = jnp.einsum("bqhd,hdw->bqw", attention(q, k, v, batch), state["o"])
            return jnp.mean((out - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), (value, gradients)

    return step


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 8))
    sizes = dict.fromkeys("kv", (FEATURES, KEY_HEADS, WIDTH))
    sizes |= {"q": (FEATURES, HEADS, WIDTH), "o": (HEADS, WIDTH, FEATURES)}
    state = {name: 0.3 * jax.random.normal(next(keys), size) for name, size in sizes.items()}
    batch = {name: jax.random.normal(next(keys), (2, LENGTH, FEATURES)) for name in "xy"}
    segments = np.stack([np.repeat([1, 2], [13, 19]), np.repeat([1, 2, 3, 0], [5, 10, 9, 8])])
    return state, batch | {"segments": jnp.array(segments, jnp.int32), "length": jnp.array([5, LENGTH], jnp.int32)}


def check_equal(attention, recipe, devices):
    """Losses and gradients of plain jax.jit, to 1e-5; permutes as predicted. Returns their number."""
    state, batch = arguments()
    step = train_step(attention)
    expected = jax.jit(step)(state, batch)
    parallel = autopar.parallelize(
        step, plan=recipe, cluster=autopar.Cluster.local(devices, measured=False), cache_dir=None
    )
    made = autopar.verify(parallel, state, batch)
    assert made.total.predicted == made.total.compiled
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(parallel(state, batch)), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * float(abs(a).max()), rtol=0)
    return {count.name: count.compiled for count in made.counts}.get("collective-permute", 0)


SLOW = pytest.mark.slow
# Keys and values once forward, with their sums twice backward; of a balanced ring of four halves of 14 arrays twice,
# and those of the segments' in each pass.
WHOLE, BALANCED, SEGMENTED = 6 * 3, 6 * 3 + 2 * 14, 6 * 3 + 2 * 16


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("attention", "permutes"),
    [
        (packed, SEGMENTED),
        pytest.param(packed_by_biases, SEGMENTED, marks=SLOW),
        pytest.param(packed_stock, SEGMENTED, marks=SLOW),
        pytest.param(packed_stock_bias, SEGMENTED, marks=SLOW),
        pytest.param(packed_flax, SEGMENTED, marks=SLOW),
        pytest.param(packed_and_padded, WHOLE, marks=SLOW),
        (window_stock, 6),
        (window_both_ways, 12),
        pytest.param(window_of_numpy, 6, marks=SLOW),
        pytest.param(window_and_segments, 6, marks=SLOW),
        pytest.param(large_window, BALANCED, marks=SLOW),
        pytest.param(lengths, WHOLE, marks=SLOW),
    ],
)
def test_masks_in_a_ring_of_four(attention, permutes):
    assert check_equal(attention, recipes.sequence_parallel("ring"), 4) == permutes


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("attention", [packed, window_stock, window_both_ways, window_and_segments])
def test_masks_in_other_rings(attention, devices):
    check_equal(attention, recipes.sequence_parallel("ring"), devices)
