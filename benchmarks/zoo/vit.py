"""Vision transformer in Flax linen: patches by a strided convolution, a class token, learned positions."""

import jax
import jax.numpy as jnp
from flax import linen as nn

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

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (self.patch, self.patch), self.patch, padding="VALID", name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        class_token = self.param("class_token", nn.initializers.normal(0.02), (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(class_token, (x.shape[0], 1, self.width)), x], axis=1)
        x = x + self.param("position_embedding", nn.initializers.normal(0.02), x.shape[1:])
        for i in range(self.layers):
            x = Block(self.heads, name=f"layer{i}")(x)
        return nn.Dense(self.classes, name="head")(nn.LayerNorm(name="final_norm")(x)[:, 0])


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
) -> Case:
    model = ViT(layers, width, heads, patch, classes)
    return training_case(
        name="vit",
        init_params=lambda key: model.init(key, jnp.zeros((1, image, image, channels))),
        loss=lambda params, batch: cross_entropy(model.apply(params, batch["images"]), batch["labels"]),
        batch=image_batch(batch=batch, image=image, channels=channels, classes=classes),
    )
