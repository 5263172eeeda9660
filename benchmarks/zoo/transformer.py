"""The pre-norm transformer block that the Flax linen language and vision models share."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


class Block(nn.Module):
    """Self-attention, optional cross-attention, feed-forward; (batch, length, width) in and out.

    Projections of the attention carry no bias: a bias on the keys has a gradient of exactly zero, so that its
    update would be nothing but rounding.
    """

    heads: int
    feed_forward_ratio: int = 4
    dtype: DTypeLike = jnp.float32
    remat_attention: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None, memory: jax.Array | None = None) -> jax.Array:
        x = x + self.attention("self_attention")(self.norm("self_attention_norm")(x), mask=mask)
        if memory is not None:
            x = x + self.attention("cross_attention")(self.norm("cross_attention_norm")(x), memory)
        h = self.norm("feed_forward_norm")(x)
        h = nn.Dense(self.feed_forward_ratio * x.shape[-1], dtype=self.dtype, name="feed_forward_in")(h)
        return x + nn.Dense(x.shape[-1], dtype=self.dtype, name="feed_forward_out")(nn.gelu(h))

    def attention(self, name: str) -> nn.Module:
        core = rematerialised_attention if self.remat_attention else nn.dot_product_attention
        return nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, use_bias=False, attention_fn=core, name=name
        )

    def norm(self, name: str) -> nn.Module:
        return nn.LayerNorm(dtype=self.dtype, name=name)


def rematerialised_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None, mask=None, **options
) -> jax.Array:
    """Attention whose scores are computed again in the backward pass ("selective recomputation")."""

    @jax.checkpoint
    def core(query, key, value):
        return nn.dot_product_attention(query, key, value, bias=bias, mask=mask, **options)

    return core(query, key, value)
