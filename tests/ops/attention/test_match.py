"""Attention is found however it is written, and what cannot be done in blocks is named."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from autopar.errors import UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import Role
from autopar.ir.rules import RuleBook
from autopar.ops.attention.match import check_blockwise
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import read, run_graph, run_ops

B, L, H, D = 2, 8, 2, 4


def shapes(heads=H):
    state = {"q": (H * D, H, D), "k": (H * D, heads, D), "v": (H * D, heads, D)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in state.items()}


BATCH = {
    "x": jax.ShapeDtypeStruct((B, L, H * D), jnp.float32),
    "memory": jax.ShapeDtypeStruct((B, 2 * L, H * D), jnp.float32),
    "length": jax.ShapeDtypeStruct((B,), jnp.int32),
}


def trained(attention):
    """A step whose gradients go back through attention of projections."""

    def step(state, batch):
        def loss(state):
            q, k, v = (jnp.einsum("blw,whd->blhd", batch["x"], state[name]) for name in "qkv")
            return jnp.sum(jnp.sin(attention(q, k, v, batch)))

        return jax.grad(loss)(state)

    return step


def graph_of(attention, heads=H):
    args = (shapes(heads), BATCH)
    traced = trace(trained(attention), args, names=("state", "batch"), donate=(0,), batch=(1,))
    return build_graph(dataclasses.replace(traced, attention_kernel="BLOCKS"), RuleBook())


def operations(graph):
    return [(op.primitive, op.role) for op in graph.ops() if op.primitive.startswith("attention")]


def plain(q, k, v, batch):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def by_hand(q, k, v, batch):
    """Nothing of jax.nn: the gradient goes through the maximum too."""
    q, k, v = (a.transpose(0, 2, 1, 3) for a in (q * D**-0.5, k, v))
    scores = q @ k.swapaxes(-1, -2)
    exponentials = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True) @ v


def causal(q, k, v, batch):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -jnp.inf)), v
    )


def counted(q, k, v, batch):
    """As Haliax: ranges are counted from a start, in steps; here with a cast too."""
    queries, keys = jnp.arange(L) * 2 + 4, (2 * jnp.arange(L).astype(jnp.float32) + 4.0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(queries[:, None] >= keys, scores, -1e9)), v)


def window_by_addition(q, k, v, batch):
    at = jnp.arange(L)
    near = jnp.abs(at[:, None] - at[None, :]) < 3
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5 + jnp.where(near, 0.0, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def padded(q, k, v, batch):
    there = jnp.arange(L)[None, :] < batch["length"][:, None]
    return nn.dot_product_attention(q, k, v, mask=there[:, None, None, :])


def distance(q, k, v, batch):
    """A penalty that grows with the distance, at another rate for each head."""
    at = jnp.arange(L)
    penalty = 2.0 ** -jnp.arange(1, H + 1)[:, None, None] * jnp.abs(at[:, None] - at[None, :])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) - penalty
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def divided_behind(q, k, v, batch):
    """As MaxText: grouped queries, a softmax over joined heads, divided behind the product with the values."""
    heads = k.shape[2]
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, L, heads, H // heads, D), k)
    segments = jnp.arange(L) < batch["length"][:, None]
    segments = segments * jnp.arange(1, 1 + B)[:, None] - 1
    seen = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] >= 0)
    seen = seen & jnp.tril(jnp.ones((L, L), bool))
    seen = jnp.where(seen[:, None, None], 0.0, -1e30) > -1e29
    scores = jnp.where(seen, scores, -1e30).reshape(B, H, L, L)
    largest = scores.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(scores - largest)
    total = exponentials.sum(axis=-1, keepdims=True).transpose(0, 2, 1, 3)
    weighed = jnp.einsum("bkgts,bskd->btkgd", exponentials.reshape(B, heads, H // heads, L, L), v)
    return weighed.reshape(B, L, H, D) / total


def softmax_beside_sink(q, k, v, sink):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    scores = jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -1e30)
    column = jnp.broadcast_to(sink[:, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1))[..., :-1]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def sink_of_a_library(q, k, v, sink):
    """As KerasHub: the largest is taken off once more before the softmax."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    column = jnp.broadcast_to(sink.reshape(1, -1, 1, 1), (*scores.shape[:-1], 1))
    scores = jnp.concatenate([scores, column], axis=-1)
    scores = scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores)[..., :-1], v)


def sink_divided_behind(q, k, v, sink):
    """As MaxText: grouped queries, divided behind the product with the values."""
    heads = k.shape[2]
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, L, heads, H // heads, D), k)
    scores = jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -1e30).reshape(B, H, L, L)
    scores = jnp.concatenate([scores, jnp.broadcast_to(sink[None, :, None, None], (B, H, L, 1))], axis=-1)
    exponentials = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = exponentials.sum(axis=-1, keepdims=True).transpose(0, 2, 1, 3)
    exponentials = exponentials[..., :L].reshape(B, heads, H // heads, L, L)
    return jnp.einsum("bkgts,bskd->btkgd", exponentials, v).reshape(B, L, H, D) / total


def in_16_bits_beside_sink(q, k, v, sink):
    made = softmax_beside_sink(*(a.astype(jnp.bfloat16) for a in (q, k, v, sink)))
    return made.astype(jnp.float32)


@pytest.mark.cases(1)
@pytest.mark.parametrize("layers", ["scanned", "one", "unrolled"])
@pytest.mark.parametrize(
    ("attention", "heads"),
    [
        (softmax_beside_sink, H),
        (sink_of_a_library, H),
        (sink_divided_behind, H),
        (sink_divided_behind, 1),
        (in_16_bits_beside_sink, H),
    ],
)
def test_attention_with_a_sink_is_found(attention, heads, layers):
    def step(state, batch):
        def layer(x, weights):
            q, k, v = (jnp.einsum("blw,whd->blhd", x, weights[name]) for name in "qkv")
            return x + attention(q, k, v, weights["sink"]).reshape(x.shape)

        def loss(state):
            x = batch["x"]
            if layers == "scanned":
                x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, state)
            for i in range({"one": 1, "scanned": 0, "unrolled": 2}[layers]):
                x = (
                    jax.checkpoint(layer)(x, jax.tree.map(lambda w, i=i: w[i], state))
                    if i
                    else layer(x, jax.tree.map(lambda w: w[0], state))
                )
            return jnp.sum(jnp.sin(x))

        return jax.grad(loss)(state)

    state, batch = numbers(heads)
    state |= {"sink": jnp.array([0.7, -0.4])}
    state = jax.tree.map(lambda a: jnp.stack([a, -a, a]), state)
    traced = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = build_graph(dataclasses.replace(traced, attention_kernel="BLOCKS"), RuleBook())
    check_blockwise(graph)
    assert "attention_backward" in [primitive for primitive, _ in operations(graph)]
    scores = {(B, H, L, L), (B, H, L, L + 1), (B, heads, H // heads, L, L)}
    assert not any(v.shape in scores and v.dtype != "bool" for op in graph.ops() for v in made(graph, op))
    env = dict(zip(graph.block.inputs, [*graph.constants, *jax.tree.leaves((state, batch))], strict=True))
    run_ops(graph.block.ops, env, graph)
    error = 2e-6 if attention is not in_16_bits_beside_sink else 4 * float(jnp.finfo(jnp.bfloat16).eps)
    for a, b in zip(jax.tree.leaves(step(state, batch)), (read(env, v) for v in graph.block.outputs), strict=True):
        np.testing.assert_allclose(b, a, atol=error * float(abs(a).max()))


def scores_beside_sink(q, k, sink):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.concatenate([scores, jnp.broadcast_to(sink[:, None, None], (*scores.shape[:-1], 1))], axis=-1)


def without_largest(scores, axis=-1):
    return scores - jax.lax.stop_gradient(scores.max(axis, keepdims=True))


def first_key_dropped(q, k, sink):
    return jax.nn.softmax(scores_beside_sink(q, k, sink))[..., 1:]


def some_scores_logged(q, k, sink):
    scores = scores_beside_sink(q, k, sink)
    return jax.nn.softmax(scores)[..., :-1] + 1e-3 * scores[..., :3].sum()


def shifted_over_queries(q, k, sink):
    exponentials = jnp.exp(without_largest(without_largest(scores_beside_sink(q, k, sink)[..., :-1]), axis=-2))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def shifted_without_sink(q, k, sink):
    shifted = without_largest(scores_beside_sink(q, k, sink))
    return jnp.exp(without_largest(shifted[..., :-1])) / jnp.exp(shifted).sum(axis=-1, keepdims=True)


def divided_once_more(q, k, sink):
    weights = jax.nn.softmax(scores_beside_sink(q, k, sink))[..., :-1]
    return weights / jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (0, 1))).sum(axis=-1, keepdims=True)


def sink_returned(q, k, sink):
    weights = jax.nn.softmax(scores_beside_sink(q, k, sink))
    return weights[..., :-1] + weights[..., -1:]


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize(
    "weights",
    [
        first_key_dropped, some_scores_logged, shifted_over_queries, shifted_without_sink, divided_once_more,
        sink_returned,
    ],
)  # fmt: skip
def test_what_is_like_attention_with_a_sink_stays_as_it_is_written(weights, has_gradients):
    def step(state, batch):
        def loss(state):
            q, k, v = (jnp.einsum("blw,whd->blhd", batch["x"], state[name]) for name in "qkv")
            return jnp.sum(jnp.sin(jnp.einsum("bhqk,bkhd->bqhd", weights(q, k, state["sink"]), v)))

        return jax.grad(loss)(state) if has_gradients else (state, loss(state))

    state, batch = numbers()
    state |= {"sink": jnp.array([2.0, -0.4])}
    traced = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = build_graph(dataclasses.replace(traced, attention_kernel="BLOCKS"), RuleBook())
    assert operations(graph) == []
    env = dict(zip(graph.block.inputs, [*graph.constants, *jax.tree.leaves((state, batch))], strict=True))
    run_ops(graph.block.ops, env, graph)
    for a, b in zip(jax.tree.leaves(step(state, batch)), (read(env, v) for v in graph.block.outputs), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6 * float(abs(a).max()))


def long_chain(q, k, v, batch):
    penalty = (jnp.arange(L)[:, None] - jnp.arange(L)[None, :]).astype(jnp.float32)
    for _ in range(400):
        penalty = penalty * 0.5 + 1.0
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) - penalty
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def stock(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def recomputed(q, k, v, batch):
    return jax.checkpoint(lambda q, k, v: causal(q, k, v, batch))(q, k, v)


def of_a_library(q, k, v, batch):
    """As tokamax's: a rule for `jax.vmap`, and residuals that `jax.checkpoint` need not keep."""
    called = jax.custom_batching.sequential_vmap(lambda q, k, v: plain(q, k, v, batch=None))

    def forward(q, k, v):
        return called(q, k, v), (q, k, v)

    def backward(saved, change):
        return jax.vjp(lambda q, k, v: plain(q, k, v, batch=None), *saved)[1](change)

    attention = jax.custom_vjp(called)
    attention.defvjp(forward, backward, optimize_remat=True)
    return attention(q, k, v)


def numbers(heads=H):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    state = {name: 0.3 * jax.random.normal(next(keys), s.shape) for name, s in shapes(heads).items()}
    batch = {name: jax.random.normal(next(keys), BATCH[name].shape) for name in ("x", "memory")}
    return state, batch | {"length": jnp.array([5, 8], jnp.int32)}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("attention", "heads"),
    [
        (plain, H),
        (by_hand, H),
        (causal, H),
        (counted, H),
        (window_by_addition, H),
        (padded, H),
        (distance, H),
        (stock, H),
        (stock, 1),
        (recomputed, H),
        (of_a_library, H),
        (divided_behind, H),
        (divided_behind, 1),
    ],
)
def test_attention_becomes_an_operation_a_pass_and_computes_the_same(attention, heads):
    graph = graph_of(attention, heads)
    # Also under `jax.checkpoint`, which is there to keep no scores.
    assert operations(graph) == [("attention", Role.FORWARD), ("attention_backward", Role.BACKWARD)]
    assert not any(v.shape[-2:] == (L, L) and v.dtype == "float32" for op in graph.ops() for v in made(graph, op))
    check_results(graph, attention, heads)


def check_results(graph, attention, heads=H):
    args = numbers(heads)
    expected = jax.tree.leaves(trained(attention)(*args))
    env = dict(zip(graph.block.inputs, [*graph.constants, *jax.tree.leaves(args)], strict=True))
    run_ops(graph.block.ops, env, graph)
    for a, b in zip(expected, (read(env, atom) for atom in graph.block.outputs), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6 * float(abs(a).max()))


def test_a_mask_of_more_operations_than_calls_may_be_nested_stays_an_array_in_part():
    graph = graph_of(long_chain)
    assert operations(graph) == [("attention", Role.FORWARD), ("attention_backward", Role.BACKWARD)]
    check_results(graph, long_chain)


@pytest.mark.slow
def test_attention_in_micro_batches():
    """Its operations run once in each."""
    traced = trace(trained(causal), (shapes(), BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(dataclasses.replace(traced, attention_kernel="BLOCKS"), 2, RuleBook())
    assert [op.count for op in graph.ops() if op.primitive.startswith("attention")] == [2.0, 2.0]
    args = numbers(H)
    got = jax.jit(lambda leaves: run_graph(graph, leaves))(jax.tree.leaves(args))
    for a, b in zip(jax.tree.leaves(jax.jit(trained(causal))(*args)), got, strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6 * float(abs(a).max()))


def made(graph, op):
    return [graph.values[v] for v in op.outputs]


def test_scans_over_layers_stack_no_scores():
    def step(state, batch):
        def layer(x, weights):
            q, k, v = (jnp.einsum("blw,whd->blhd", x, w) for w in weights)
            return x + causal(q, k, v, batch).reshape(x.shape), None

        def loss(state):
            return jnp.sum(jnp.sin(jax.lax.scan(layer, batch["x"], state)[0]))

        return jax.grad(loss)(state)

    state, batch = numbers()
    state = tuple(jnp.stack([state[name], -state[name]]) for name in "qkv")
    traced = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = build_graph(dataclasses.replace(traced, attention_kernel="BLOCKS"), RuleBook())
    assert operations(graph) == [("attention", Role.FORWARD), ("attention_backward", Role.BACKWARD)]
    scans = [op for op in graph.block.ops if op.primitive == "scan"]
    assert not any(graph.values[v].shape == (2, B, H, L, L) for scan in scans for v in scan.outputs)
    env = dict(zip(graph.block.inputs, [*graph.constants, *jax.tree.leaves((state, batch))], strict=True))
    run_ops(graph.block.ops, env, graph)
    for a, b in zip(step(state, batch), (read(env, atom) for atom in graph.block.outputs), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6 * float(abs(a).max()))


@pytest.mark.cases(1)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_mask_that_layers_of_a_scan_share_is_computed_of_segments_inside_of_it(is_recomputed):
    def step(state, batch):
        segments = batch["length"][:, None] > jnp.arange(L)
        seen = (segments[:, None, :, None] == segments[:, None, None, :]) & jnp.tril(jnp.ones((L, L), bool))

        def layer(x, weights):
            q, k, v = (jnp.einsum("blw,whd->blhd", x, w) for w in weights)
            scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
            return x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape), None

        layer = jax.checkpoint(layer) if is_recomputed else layer
        return jax.grad(lambda state: jnp.sum(jnp.sin(jax.lax.scan(layer, batch["x"], state)[0])))(state)

    state, batch = numbers()
    state = tuple(jnp.stack([state[name], -state[name]]) for name in "qkv")
    traced = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = build_graph(dataclasses.replace(traced, attention_kernel="BLOCKS"), RuleBook())
    passes = [op for op in graph.ops() if op.primitive.startswith("attention")]
    assert len(passes) == 2 + is_recomputed
    for op in passes:
        form = op.eqn.params["form"]
        assert sorted(names.replace(form.position, "q")[-1] for names in form.arrays) == ["k", "q"]
        assert all(graph.values[v].size == B * L for v in op.inputs[-2:])
    made_here = [graph.values[v] for op in graph.ops() for v in op.outputs]
    assert not any(value.shape[-2:] == (L, L) and value.dtype == "bool" for value in made_here)
    env = dict(zip(graph.block.inputs, [*graph.constants, *jax.tree.leaves((state, batch))], strict=True))
    run_ops(graph.block.ops, env, graph)
    for a, b in zip(step(state, batch), (read(env, atom) for atom in graph.block.outputs), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6 * float(abs(a).max()))


POLICIES = {
    "everything": (jax.checkpoint_policies.everything_saveable, 1),
    "products": (jax.checkpoint_policies.dots_saveable, 1),
    "all but names": (jax.checkpoint_policies.save_anything_except_these_names("turned"), 1),
    "products of weights": (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, 2),
    "names": (jax.checkpoint_policies.save_only_these_names("turned"), 2),
    "nothing": (jax.checkpoint_policies.nothing_saveable, 2),
    "default": (None, 2),
}


def turned(x):
    """Queries or keys by their positions: what a policy that saves products computes again."""
    angle = jnp.arange(L)[:, None, None] * 0.3
    return checkpoint_name(x * jnp.cos(angle) + jnp.roll(x, 1, axis=-1) * jnp.sin(angle), "turned")


def rotated(q, k, v, batch):
    scores = jnp.einsum("bqhd,bkhd->bhqk", turned(q), turned(k))
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def in_16_bits(q, k, v, batch):
    """As MaxText by default: the exponentials' sum alone is taken in 32 bits."""
    q, k, v = (a.astype(jnp.bfloat16) for a in (turned(q), turned(k), v))
    return divided_behind(q, k, v, batch).astype(jnp.float32)


@pytest.mark.cases(1)
@pytest.mark.parametrize("is_scanned", [False, True])
@pytest.mark.parametrize(
    ("attention", "policy"),
    [
        *((rotated, policy) for policy in POLICIES),
        (counted, "everything"),
        (divided_behind, "everything"),
        (divided_behind, "products of weights"),
        (in_16_bits, "default"),
    ],
)
def test_attention_is_found_under_every_policy_of_checkpoint(attention, policy, is_scanned):
    saved, passes = POLICIES[policy]

    def step(state, batch):
        @functools.partial(jax.checkpoint, policy=saved)
        def layer(x, weights):
            q, k, v = (jnp.einsum("blw,whd->blhd", x, w) for w in weights)
            return x + attention(q, k, v, batch).reshape(x.shape)

        def loss(state):
            x = batch["x"]
            if is_scanned:
                return jnp.sum(jnp.sin(jax.lax.scan(lambda x, w: (layer(x, w), None), x, state)[0]))
            for i in range(3):
                x = layer(x, [w[i] for w in state])
            return jnp.sum(jnp.sin(x))

        return jax.grad(loss)(state)

    state, batch = numbers()
    state = tuple(jnp.stack([state[name], -state[name], state[name]]) for name in "qkv")
    traced = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = build_graph(dataclasses.replace(traced, attention_kernel="BLOCKS"), RuleBook())
    check_blockwise(graph)
    layers = 1 if is_scanned else 3
    found = [primitive for primitive, _ in operations(graph)]
    assert found.count("attention") == passes * layers
    assert found.count("attention_backward") == layers
    is_scores = [((B, H, L, L), dtype) for dtype in ("float32", "bfloat16")]
    assert not any((v.shape, v.dtype) in is_scores for op in graph.ops() for v in made(graph, op))
    env = dict(zip(graph.block.inputs, [*graph.constants, *jax.tree.leaves((state, batch))], strict=True))
    run_ops(graph.block.ops, env, graph)
    error = 2e-6 if attention is not in_16_bits else 4 * float(jnp.finfo(jnp.bfloat16).eps)
    for a, b in zip(step(state, batch), (read(env, atom) for atom in graph.block.outputs), strict=True):
        np.testing.assert_allclose(b, a, atol=error * float(abs(a).max()))


def test_the_mask_is_computed_of_positions():
    (op, *_) = (op for op in graph_of(causal).ops() if op.primitive == "attention")
    assert op.eqn.params["form"].arrays == ()
    assert "iota" in str(op.eqn.params["form"].score)


def test_positions_are_one_factor_that_goes_round():
    (op, *_) = (op for op in graph_of(padded).ops() if op.primitive == "attention")
    ring = [f for f, factor in enumerate(op.rule.factors) if factor.kind.value == "ring"]
    query, key, value, mask = op.rule.operands
    assert [query[1], key[1], value[1]] == [tuple(ring)] * 3
    assert all(f not in ring for dim in mask for f in dim)


def test_two_lengths_go_round_no_ring():
    def longer(q, k, v, batch):
        memory = batch["memory"].reshape(B, 2 * L, H, D)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, memory)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), memory)

    (op, *_) = (op for op in graph_of(longer).ops() if op.primitive == "attention")
    query, key, *_ = op.rule.operands
    assert [op.rule.factors[f].kind.value for f in (*query[1], *key[1])] == ["fixed", "fixed"]
    assert query[1] != key[1]


def dropped(q, k, v, batch):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, weights / 0.9, 0.0), v)


def handed_out(q, k, v, batch):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).sum() + jnp.sum(weights**2)


def not_softmax(q, k, v, batch):
    weights = jax.nn.sigmoid(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("attention", [dropped, handed_out, not_softmax])
def test_what_is_no_plain_attention_is_named(attention):
    graph = graph_of(attention)
    assert operations(graph) == []
    with pytest.raises(UnsupportedError, match=rf"attention/test_match.py:\d+.*{attention.__name__}"):
        check_blockwise(graph)
