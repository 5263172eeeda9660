"""Decoder-only language model in Flax linen, layers unrolled, embedding tied to the output projection."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from benchmarks.zoo.case import Case
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.training import cross_entropy, training_case
from benchmarks.zoo.transformer import Block


class GPT(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary); parameters are float32 whatever `dtype` is."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    remat: bool
    remat_attention: bool
    dtype: DTypeLike
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="token_embedding")
        positions = self.param("position_embedding", nn.initializers.normal(0.02), (self.length, self.width))
        x = embedding(tokens) + positions.astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        block = nn.remat(Block) if self.remat else Block
        how = {"dtype": self.dtype, "remat_attention": self.remat_attention, "dropout": self.dropout}
        for i in range(self.layers):
            x = block(self.heads, **how, name=f"layer{i}")(x, mask)
        return embedding.attend(nn.LayerNorm(dtype=self.dtype, name="final_norm")(x))


def gpt(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
    remat: bool = False,
    remat_attention: bool = False,
    dtype: DTypeLike = jnp.float32,
    dropout: float = 0.0,
    optimizer: optax.GradientTransformation | None = None,
    name: str = "gpt",
    tolerance: float = 1e-5,
) -> Case:
    """`gpt(layers=96, width=12_288, heads=96, vocabulary=50_304, length=2_048)` is GPT-3 175B.

    With `dropout` each step drops the same elements: fit for predicting times, not for training.
    """
    model = GPT(layers, width, heads, vocabulary, length, remat, remat_attention, dtype, dropout)

    def rngs() -> dict[str, jax.Array]:
        return {"dropout": jax.random.key(0, impl="rbg")} if dropout else {}

    return training_case(
        name=name,
        init_params=lambda key: model.init({"params": key, **rngs()}, jnp.zeros((1, length), jnp.int32)),
        loss=lambda params, batch: cross_entropy(model.apply(params, batch["tokens"], rngs=rngs()), batch["targets"]),
        batch=next_token_batch(batch=batch, length=length, vocabulary=vocabulary),
        optimizer=optimizer,
        tolerance=tolerance,
    )


def gpt_remat(**sizes) -> Case:
    """`jax.checkpoint` on every layer."""
    return gpt(remat=True, name="gpt_remat", **sizes)


def gpt_bf16(**sizes) -> Case:
    """Compute in bfloat16, master weights and optimiser state in float32."""
    return gpt(dtype=jnp.bfloat16, name="gpt_bf16", tolerance=5e-2, **sizes)


def gpt_odd(*, width: int = 12, heads: int = 3, vocabulary: int = 50_257, length: int = 7, batch: int = 6) -> Case:
    """Sizes that few meshes divide."""
    return gpt(width=width, heads=heads, vocabulary=vocabulary, length=length, batch=batch, name="gpt_odd")
