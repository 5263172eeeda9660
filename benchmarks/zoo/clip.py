"""Contrastive loss between images and texts (CLIP): every example is compared with every other of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.training import training_case
from benchmarks.zoo.transformer import Block


class ImageTower(nn.Module):
    width: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(self.width, (3, 3), strides=2)(images))
        x = nn.relu(nn.Conv(self.width, (3, 3), strides=2)(x))
        return nn.Dense(self.width)(x.reshape(x.shape[0], -1))


class TextTower(nn.Module):
    vocabulary: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = Block(self.heads)(nn.Embed(self.vocabulary, self.width)(tokens))
        return nn.Dense(self.width)(x.mean(axis=1))


class CLIP(nn.Module):
    """Similarities of all images with all texts, (batch, batch)."""

    vocabulary: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        image, text = ImageTower(self.width)(images), TextTower(self.vocabulary, self.width, self.heads)(tokens)
        image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (image, text))
        log_scale = self.param("log_scale", nn.initializers.constant(np.log(10.0)), ())
        return jnp.exp(log_scale) * image @ text.T


def clip(
    *,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    length: int = 16,
    image: int = 16,
    channels: int = 3,
    batch: int = 16,
) -> Case:
    """The loss is not a mean of the examples' own losses, so the batch must not be cut into micro-batches."""
    model = CLIP(vocabulary, width, heads)

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        return {
            "images": rng.standard_normal((batch, image, image, channels), dtype=np.float32),
            "tokens": rng.integers(0, vocabulary, (batch, length), dtype=np.int32),
        }

    def init_params(key: jax.Array) -> PyTree:
        return model.init(key, jnp.zeros((1, image, image, channels)), jnp.zeros((1, length), jnp.int32))

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        similarities = model.apply(params, batch["images"], batch["tokens"])
        pairs = jnp.arange(similarities.shape[0])
        return 0.5 * sum(
            optax.softmax_cross_entropy_with_integer_labels(logits, pairs).mean()
            for logits in (similarities, similarities.T)
        )

    return training_case(name="clip", init_params=init_params, loss=loss, batch=make_batch)
