"""A language model with multi-head latent attention, in plain jax.numpy.

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", 2024, section 2.1:
queries, and keys and values together, come from latent vectors that are narrower than all heads; a part of each key is
rotated by its position and shared by all heads. Keys are wider than values.
"""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.gpt_scan import rms_norm
from benchmarks.zoo.llama import Core, rotary
from benchmarks.zoo.training import cross_entropy, training_case


def causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention as it is written; (batch, length, head, width), values of another width than keys."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min)).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def latent_attention(x: jax.Array, params: PyTree, *, rotated: int, core: Core) -> jax.Array:
    """(batch, length, width) in and out. `rotated`: the width of the part that carries positions."""
    query = jnp.einsum("blr,rhd->blhd", rms_norm(x @ params["query_down"], params["query_scale"]), params["query_up"])
    latent = x @ params["latent_down"]  # what a cache of keys and values would hold
    shared = rotary(latent[..., :rotated])[:, :, None, :]
    both = jnp.einsum("blr,rhd->blhd", rms_norm(latent[..., rotated:], params["latent_scale"]), params["latent_up"])
    plain = query.shape[-1] - rotated
    key = jnp.concatenate([both[..., :plain], jnp.broadcast_to(shared, (*both.shape[:3], rotated))], -1)
    query = jnp.concatenate([query[..., :plain], rotary(query[..., plain:])], -1)
    return jnp.einsum("blhd,hdw->blw", core(query, key, both[..., plain:]), params["out"])


def mla(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    query_rank: int = 24,
    latent_rank: int = 16,
    plain: int = 8,
    rotated: int = 4,
    value: int = 8,
    feed_forward: int = 64,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
    core: Core = causal,
    dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    """`plain` and `rotated`: the widths of the two parts of a head's key; `core` replaces attention itself.

    `mla(layers=60, width=5120, heads=128, query_rank=1536, latent_rank=512, plain=128, rotated=64, value=128)` has the
    attention of DeepSeek-V2.
    """

    def init_params(key: jax.Array) -> PyTree:
        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return 0.1 * jax.random.normal(key, shape)

        def init_layer(key: jax.Array) -> PyTree:
            keys = jax.random.split(key, 7)
            return {
                "attention_scale": jnp.ones(width),
                "query_down": normal(keys[0], width, query_rank),
                "query_scale": jnp.ones(query_rank),
                "query_up": normal(keys[1], query_rank, heads, plain + rotated),
                "latent_down": normal(keys[2], width, rotated + latent_rank),
                "latent_scale": jnp.ones(latent_rank),
                "latent_up": normal(keys[3], latent_rank, heads, plain + value),
                "out": normal(keys[4], heads, value, width),
                "feed_forward_scale": jnp.ones(width),
                "up": normal(keys[5], width, feed_forward),
                "down": normal(keys[6], feed_forward, width),
            }

        embedding_key, *layer_keys = jax.random.split(key, layers + 1)
        return {"embedding": normal(embedding_key, vocabulary, width), "layers": [init_layer(k) for k in layer_keys]}

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        x = params["embedding"][batch["tokens"]]
        for layer in params["layers"]:
            x = x + latent_attention(rms_norm(x, layer["attention_scale"]), layer, rotated=rotated, core=core)
            x = x + jax.nn.silu(rms_norm(x, layer["feed_forward_scale"]) @ layer["up"]) @ layer["down"]
        return cross_entropy(x @ params["embedding"].T, batch["targets"])

    return training_case(
        name="mla",
        init_params=init_params,
        loss=loss,
        batch=next_token_batch(batch=batch, length=length, vocabulary=vocabulary),
        optimizer=optimizer,
    )
