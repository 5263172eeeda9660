"""Vision transformer in Flax linen: patches by a strided convolution, a class token, learned positions."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from benchmarks.zoo.case import Case
from benchmarks.zoo.data import image_batch
from benchmarks.zoo.training import cross_entropy, training_case
from benchmarks.zoo.transformer import Block


class ViT(nn.Module):
    """Images (batch, image, image, channels) to logits (batch, classes)."""

    layers: int
    width: int
    heads: int
    patch: int
    classes: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patches = nn.Conv(
            self.width, (self.patch, self.patch), self.patch, padding="VALID", dtype=self.dtype, name="patches"
        )
        x = patches(images)
        x = x.reshape(x.shape[0], -1, self.width)
        class_token = self.param("class_token", nn.initializers.normal(0.02), (1, 1, self.width))
        class_token = class_token.astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(class_token, (x.shape[0], 1, self.width)), x], axis=1)
        positions = self.param("position_embedding", nn.initializers.normal(0.02), x.shape[1:])
        x = x + positions.astype(self.dtype)
        for i in range(self.layers):
            x = Block(self.heads, dtype=self.dtype, name=f"layer{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="final_norm")(x)[:, 0]
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


def vit(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    image: int = 16,
    patch: int = 4,
    channels: int = 3,
    classes: int = 10,
    batch: int = 8,
    dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    model = ViT(layers, width, heads, patch, classes, dtype)
    return training_case(
        name="vit",
        init_params=lambda key: model.init(key, jnp.zeros((1, image, image, channels))),
        loss=lambda params, batch: cross_entropy(model.apply(params, batch["images"]), batch["labels"]),
        batch=image_batch(batch=batch, image=image, channels=channels, classes=classes),
        optimizer=optimizer,
    )
