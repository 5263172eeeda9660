"""The pre-norm transformer block that the Flax linen language and vision models share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


class Block(nn.Module):
    """Self-attention, optional cross-attention, feed-forward; (batch, length, width) in and out.

    Projections of the attention carry no bias: a bias on the keys has a gradient of exactly zero, so that its
    update would be nothing but rounding. `dropout` is the rate at which attention's probabilities and the results of
    both halves are dropped, by the stream "dropout".
    """

    heads: int
    feed_forward_ratio: int = 4
    dtype: DTypeLike = jnp.float32
    remat_attention: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None, memory: jax.Array | None = None) -> jax.Array:
        x = x + self.dropped(self.attention("self_attention")(self.norm("self_attention_norm")(x), mask=mask))
        if memory is not None:
            x = x + self.attention("cross_attention")(self.norm("cross_attention_norm")(x), memory)
        h = self.norm("feed_forward_norm")(x)
        h = nn.Dense(self.feed_forward_ratio * x.shape[-1], dtype=self.dtype, name="feed_forward_in")(h)
        return x + self.dropped(nn.Dense(x.shape[-1], dtype=self.dtype, name="feed_forward_out")(nn.gelu(h)))

    def dropped(self, x: jax.Array) -> jax.Array:
        return dropped(self.make_rng("dropout"), x, self.dropout) if self.dropout else x

    def attention(self, name: str) -> nn.Module:
        core = nn.dot_product_attention
        if self.dropout:
            core = functools.partial(dropped_attention, key=self.make_rng("dropout"), rate=self.dropout)
        if self.remat_attention:
            core = functools.partial(rematerialised_attention, core)
        return nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, use_bias=False, attention_fn=core, name=name
        )

    def norm(self, name: str) -> nn.Module:
        return nn.LayerNorm(dtype=self.dtype, name=name)


def dropped(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Without the share `rate` of the elements, to 1/256; the others scaled up. A byte of random bits an element."""
    out_of_256 = round(256 * rate)
    assert 0 < out_of_256 < 256, f"a rate of at least 1/256, got {rate}"
    kept = jax.random.bits(key, x.shape, jnp.uint8) >= out_of_256
    return jnp.where(kept, x * (256 / (256 - out_of_256)), 0).astype(x.dtype)


def dropped_attention(
    query: jax.Array,
    keys: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    key: jax.Array,
    rate: float,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    **of_flax_dropout: Any,
) -> jax.Array:
    """Attention with dropout of its probabilities, in the place of Flax's own dropout, whose options it is given."""
    weights = nn.dot_product_attention_weights(query, keys, bias=bias, mask=mask, dtype=dtype, precision=precision)
    return jnp.einsum("...hqk,...khd->...qhd", dropped(key, weights, rate), value, precision=precision)


def rematerialised_attention(
    attention: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Attention whose scores are computed again in the backward pass ("selective recomputation")."""

    @jax.checkpoint
    def core(query, key, value):
        return attention(query, key, value, bias=bias, mask=mask, **options)

    return core(query, key, value)
