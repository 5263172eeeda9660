"""Encoder and decoder with cross-attention, for translation, in Flax linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.training import cross_entropy, training_case
from benchmarks.zoo.transformer import Block


class EncoderDecoder(nn.Module):
    """Source (batch, source_length) and shifted target (batch, target_length) to logits; one embedding for all."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="embedding")
        memory = embedding(source)
        for i in range(self.layers):
            memory = Block(self.heads, dtype=self.dtype, name=f"encoder{i}")(memory)
        memory = nn.LayerNorm(dtype=self.dtype, name="encoder_norm")(memory)
        x, mask = embedding(target), nn.make_causal_mask(target)
        for i in range(self.layers):
            x = Block(self.heads, dtype=self.dtype, name=f"decoder{i}")(x, mask, memory)
        return embedding.attend(nn.LayerNorm(dtype=self.dtype, name="decoder_norm")(x))


def encoder_decoder(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    source_length: int = 24,
    target_length: int = 16,
    batch: int = 8,
    dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    """`encoder_decoder(layers=24, width=1024, heads=16, vocabulary=32_128)` is as large as T5-large."""
    model = EncoderDecoder(layers, width, heads, vocabulary, dtype)

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        source = rng.integers(0, vocabulary, (batch, source_length), dtype=np.int32)
        target = rng.integers(0, vocabulary, (batch, target_length + 1), dtype=np.int32)
        return {"source": source, "decoder_input": target[:, :-1], "targets": target[:, 1:]}

    def init_params(key: jax.Array) -> PyTree:
        return model.init(key, jnp.zeros((1, source_length), jnp.int32), jnp.zeros((1, target_length), jnp.int32))

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return cross_entropy(model.apply(params, batch["source"], batch["decoder_input"]), batch["targets"])

    return training_case(
        name="encoder_decoder", init_params=init_params, loss=loss, batch=make_batch, optimizer=optimizer
    )
