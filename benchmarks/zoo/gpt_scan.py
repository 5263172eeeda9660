"""Decoder-only language model in plain jax.numpy: the layers' parameters are stacked and `lax.scan` runs over them."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.training import cross_entropy, training_case


def init_params(key: jax.Array, *, layers: int, width: int, heads: int, vocabulary: int, length: int) -> PyTree:
    """Every array under "layers" has the layer as its first dimension; queries, keys and values are one projection."""
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    return {
        "token_embedding": normal(vocabulary, width),
        "position_embedding": normal(length, width),
        "layers": {
            "attention_scale": jnp.ones((layers, width)),
            "qkv": normal(layers, width, 3, heads, width // heads),
            "attention_out": normal(layers, heads, width // heads, width),
            "feed_forward_scale": jnp.ones((layers, width)),
            "feed_forward_in": normal(layers, width, 4 * width),
            "feed_forward_out": normal(layers, 4 * width, width),
        },
        "final_scale": jnp.ones(width),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
    """Causal self-attention, (batch, length, width) in and out."""
    query, key, value = jnp.einsum("blw,wshd->sblhd", x, qkv)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(query.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhqk,bkhd,hdw->bqw", weights, value, out)


def layer(x: jax.Array, params: PyTree) -> jax.Array:
    x = x + attention(rms_norm(x, params["attention_scale"]), params["qkv"], params["attention_out"])
    h = rms_norm(x, params["feed_forward_scale"])
    return x + jax.nn.gelu(h @ params["feed_forward_in"]) @ params["feed_forward_out"]


def logits(params: PyTree, tokens: jax.Array, *, remat: bool) -> jax.Array:
    body = jax.checkpoint(layer) if remat else layer
    x = params["token_embedding"][tokens] + params["position_embedding"]
    x, _ = jax.lax.scan(lambda carry, p: (body(carry, p), None), x, params["layers"])
    return rms_norm(x, params["final_scale"]) @ params["token_embedding"].T


def gpt_scan(
    *,
    layers: int = 4,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
    remat: bool = False,
    optimizer: optax.GradientTransformation | None = None,
    name: str = "gpt_scan",
) -> Case:
    return training_case(
        name=name,
        init_params=lambda key: init_params(
            key, layers=layers, width=width, heads=heads, vocabulary=vocabulary, length=length
        ),
        loss=lambda params, batch: cross_entropy(logits(params, batch["tokens"], remat=remat), batch["targets"]),
        batch=next_token_batch(batch=batch, length=length, vocabulary=vocabulary),
        optimizer=optimizer,
    )


def gpt_scan_remat(**sizes) -> Case:
    """`jax.checkpoint` on the body of the scan."""
    return gpt_scan(remat=True, name="gpt_scan_remat", **sizes)
