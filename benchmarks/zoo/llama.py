"""Decoder-only language model as Llama has it, in plain jax.numpy, for long sequences.

Touvron et al., "Llama 2", 2023, and Grattafiori et al., "The Llama 3 herd of models", 2024: RMSNorm before each half
of a layer, rotary positions (Su et al., 2021), a gated feed-forward network (SwiGLU, Shazeer, 2020), fewer heads for
keys and values than for queries (Ainslie et al., "GQA", 2023), input and output embeddings of their own. Scores are
computed for one block of queries at a time and again in the backward pass, so that they never stand for a whole
sequence (as in Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021).
"""

import functools
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.float8 import float8_product
from benchmarks.zoo.gpt_scan import rms_norm
from benchmarks.zoo.training import cross_entropy, one_hot_cross_entropy, training_case

Product = Callable[[jax.Array, jax.Array, int], jax.Array]  # as jnp.tensordot
Core = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of queries (batch, length, k, g, head), keys and values
Named = Callable[[jax.Array, str], jax.Array]  # as `checkpoint_name`
ROTARY_BASE = 500_000.0  # Llama 3's, for long contexts


def rotary(x: jax.Array) -> jax.Array:
    """Turns each pair of a head's numbers by an angle that grows with the position; (batch, length, ..., head)."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-jnp.arange(half) / half)
    angle = jnp.arange(length)[:, None] * frequency
    angle = angle.reshape(length, *[1] * (x.ndim - 3), half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


def unnamed(x: jax.Array, _: str) -> jax.Array:
    return x


def attention(x: jax.Array, params: PyTree, core: Core, product: Product, named: Named) -> jax.Array:
    """Causal self-attention, (batch, length, width) in and out; g counts the queries that share keys and values."""
    query, key = rotary(product(x, params["query"], 1)), rotary(product(x, params["key"], 1))
    value = product(x, params["value"], 1)
    mixed = core(named(query, "query_proj"), named(key, "key_proj"), named(value, "value_proj"))
    return named(product(named(mixed, "context"), params["out"], 3), "out_proj")


def in_blocks(query: jax.Array, key: jax.Array, value: jax.Array, *, block: int) -> jax.Array:
    """Attention of `block` queries at a time."""
    length = query.shape[1]

    @jax.checkpoint
    def of_block(query: jax.Array, first: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqkgh,bskh->bkgqs", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
        seen = jnp.arange(length) <= first + jnp.arange(query.shape[1])[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min)).astype(query.dtype)
        return jnp.einsum("bkgqs,bskh->bqkgh", weights, value)

    if length <= block:
        return of_block(query, jnp.int32(0))
    blocks = jnp.moveaxis(query.reshape(query.shape[0], length // block, block, *query.shape[2:]), 1, 0)
    firsts = block * jnp.arange(length // block)
    _, mixed = jax.lax.scan(lambda _, at: (None, of_block(*at)), None, (blocks, firsts))
    return jnp.moveaxis(mixed, 0, 1).reshape(query.shape)


def layer(x: jax.Array, params: PyTree, core: Core, product: Product, named: Named = unnamed) -> jax.Array:
    """`named` gives values the names that policies of MaxText (`remat_policy=custom`) keep, or send to the host, by."""
    if "float8_scales" in params:
        product = functools.partial(product, scales=params["float8_scales"])
    x = named(x, "decoder_layer_input")
    x = x + attention(rms_norm(x, params["attention_scale"]), params, core, product, named)
    h = rms_norm(x, params["feed_forward_scale"])
    h = jax.nn.silu(product(h, params["gate"], 1)) * product(h, params["up"], 1)
    return x + named(product(h, params["down"], 1), "mlpwo")


def llama(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head: int | None = None,
    feed_forward: int = 96,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
    block: int = 8,
    core: Core | None = None,
    scan: bool = False,
    kept: Collection[str] = (),
    in_host: Collection[str] = (),
    float8: bool = False,
    delayed_scales: bool = False,
    one_hot_labels: bool = False,
    half_gradients: bool = False,
    half_weights: bool = False,
    dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
    tolerance: float = 1e-5,
) -> Case:
    """`llama(layers=32, width=4096, heads=32, kv_heads=8, feed_forward=14_336, vocabulary=128_256)` is Llama 3 8B.

    `block` divides the length, or is as long; `core` replaces attention in such blocks. Parameters are float32 whatever
    `dtype` is; with `half_weights` they and the optimizer's state are of `dtype`. With `scan` the layers are stacked
    and a scan runs over them, each recomputed in the backward pass, as MaxText has it, but for values that are `kept`
    or that wait `in_host`, in the host's memory, by their names in `layer`. `float8`: the products of all
    layers (not the last one, and not those of attention) have operands of 8 bits, with `delayed_scales` scaled by
    numbers that each layer holds. `one_hot_labels`: the loss multiplies with labels as one of 0 and 1 for each word, as
    MaxText has it too. `half_gradients`: gradients, and their sums over micro-batches, are of `dtype`, as of
    Megatron-LM without `--accumulate-allreduce-grads-in-fp32`.
    """
    head = head or width // heads
    assert float8 or not delayed_scales, "scales are those of float8"
    assert scan or not (kept or in_host), "values of layers in a scan"
    product = float8_product if float8 else jnp.tensordot
    core = core or functools.partial(in_blocks, block=block)

    def init_params(key: jax.Array) -> PyTree:
        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return 0.02 * jax.random.normal(key, shape)

        def init_layer(key: jax.Array) -> PyTree:
            keys = jax.random.split(key, 7)
            scales = {"float8_scales": jnp.ones(3)} if delayed_scales else {}
            return scales | {
                "attention_scale": jnp.ones(width),
                "query": normal(keys[0], width, kv_heads, heads // kv_heads, head),
                "key": normal(keys[1], width, kv_heads, head),
                "value": normal(keys[2], width, kv_heads, head),
                "out": normal(keys[3], kv_heads, heads // kv_heads, head, width),
                "feed_forward_scale": jnp.ones(width),
                "gate": normal(keys[4], width, feed_forward),
                "up": normal(keys[5], width, feed_forward),
                "down": normal(keys[6], feed_forward, width),
            }

        embedding_key, head_key, *layer_keys = jax.random.split(key, layers + 2)
        params = {
            "embedding": normal(embedding_key, vocabulary, width),
            "layers": jax.vmap(init_layer)(jnp.stack(layer_keys)) if scan else [init_layer(k) for k in layer_keys],
            "final_scale": jnp.ones(width),
            "head": normal(head_key, width, vocabulary),
        }
        return jax.tree.map(lambda p: p.astype(dtype), params) if half_weights else params

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        x = params["embedding"][batch["tokens"]]
        if scan:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(kept),
                names_which_can_be_offloaded=list(in_host),
                offload_src="device",
                offload_dst="pinned_host",
            )
            named = checkpoint_name if kept or in_host else unnamed
            recomputed = jax.checkpoint(
                lambda x, layer_params: (layer(x, layer_params, core, product, named), None), policy=policy
            )
            x, _ = jax.lax.scan(recomputed, x, params["layers"])
        else:
            for layer_params in params["layers"]:
                x = layer(x, layer_params, core, product)
        logits = rms_norm(x, params["final_scale"]) @ params["head"]
        return (one_hot_cross_entropy if one_hot_labels else cross_entropy)(logits, batch["targets"])

    return training_case(
        name="llama",
        init_params=init_params,
        loss=loss,
        batch=next_token_batch(batch=batch, length=length, vocabulary=vocabulary),
        optimizer=optimizer,
        dtype=dtype if half_gradients else None,
        tolerance=tolerance,
    )
