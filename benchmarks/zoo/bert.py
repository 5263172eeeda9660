"""Bidirectional encoder trained on masked tokens (BERT), in Flax linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.training import training_case
from benchmarks.zoo.transformer import Block

MASK_TOKEN = 0
MASKED_FRACTION = 0.15


class Encoder(nn.Module):
    """Tokens (batch, length) and which of them are real, bool (batch, length), to logits over the vocabulary."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens: jax.Array, real: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="token_embedding")
        positions = nn.Embed(self.length, self.width, dtype=self.dtype, name="position_embedding")
        x = embedding(tokens) + positions(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm(dtype=self.dtype, name="embedding_norm")(x)
        mask = nn.make_attention_mask(real, real)
        for i in range(self.layers):
            x = Block(self.heads, dtype=self.dtype, name=f"layer{i}")(x, mask)
        x = nn.gelu(nn.Dense(self.width, dtype=self.dtype, name="head")(x))
        x = nn.LayerNorm(dtype=self.dtype, name="head_norm")(x)
        bias = self.param("output_bias", nn.initializers.zeros, (self.vocabulary,))
        return embedding.attend(x) + bias.astype(self.dtype)


def masked_token_batch(*, batch: int, length: int, vocabulary: int) -> Batch:
    """Sequences of different lengths, padded; `predict` marks the tokens that were hidden."""

    def make(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        targets = rng.integers(1, vocabulary, (batch, length), dtype=np.int32)
        real = np.arange(length) < rng.integers(length // 2, length + 1, (batch, 1))
        predict = real & (rng.random((batch, length)) < MASKED_FRACTION)
        return {"tokens": np.where(predict, MASK_TOKEN, targets), "targets": targets, "real": real, "predict": predict}

    return make


def bert(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
    dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    """The loss is a mean over the hidden tokens, whose number differs from example to example."""
    model = Encoder(layers, width, heads, vocabulary, length, dtype)
    make_batch = masked_token_batch(batch=batch, length=length, vocabulary=vocabulary)

    def init_params(key: jax.Array) -> PyTree:
        return model.init(key, jnp.zeros((1, length), jnp.int32), jnp.ones((1, length), bool))

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        logits = model.apply(params, batch["tokens"], batch["real"])
        log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
        chosen = jnp.take_along_axis(log_probabilities, batch["targets"][..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen, where=batch["predict"]) / jnp.maximum(batch["predict"].sum(), 1)

    return training_case(name="bert", init_params=init_params, loss=loss, batch=make_batch, optimizer=optimizer)
