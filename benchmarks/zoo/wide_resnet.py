"""Wide-ResNet with bottleneck blocks in Flax linen, sized as in the table of Alpa (Zheng et al., OSDI 2022, table 7).

He et al., "Deep residual learning", 2016, and Zagoruyko and Komodakis, "Wide residual networks", 2016. In the place of
BatchNorm stands GroupNorm (Wu and He, 2018), which has as many parameters but does not mix the examples of a batch: so
the batch may be cut into micro-batches without changing what is computed. Alpa normalised each micro-batch by itself.
"""

import math

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.zoo.case import Case
from benchmarks.zoo.data import image_batch
from benchmarks.zoo.training import cross_entropy, training_case

BLOCKS = {14: (1, 1, 1, 1), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}  # layers -> blocks of each stage
MOST_GROUPS, GROUP = 32, 4  # so many groups at most, of so many features at least: norms of few numbers are unstable


def conv_norm(x: jax.Array, features: int, kernel: int, stride: int, name: str, scale: float = 1.0) -> jax.Array:
    """Convolution and normalisation, whose scale begins as given; to be called inside of a compact module."""
    x = nn.Conv(features, (kernel, kernel), stride, use_bias=False, name=f"{name}_conv")(x)
    groups, begin = math.gcd(MOST_GROUPS, features // GROUP), nn.initializers.constant(scale)
    return nn.GroupNorm(groups, scale_init=begin, name=f"{name}_norm")(x)


class Bottleneck(nn.Module):
    """1x1 down to `base`, 3x3 at `base * width_factor`, 1x1 up to `4 * base`, beside a residual connection.

    The last scale begins with zeros, so that a new block adds nothing (Goyal et al., 2017, section 5.1).
    """

    base: int
    width_factor: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(conv_norm(x, self.base, 1, 1, "reduce"))
        y = nn.relu(conv_norm(y, self.base * self.width_factor, 3, self.stride, "spatial"))
        y = conv_norm(y, 4 * self.base, 1, 1, "expand", scale=0.0)
        if y.shape != x.shape:
            x = conv_norm(x, 4 * self.base, 1, self.stride, "shortcut")
        return nn.relu(x + y)


class WideResNet(nn.Module):
    """Images (batch, image, image, channels) to logits (batch, classes)."""

    layers: int
    base: int
    width_factor: int
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(conv_norm(images, self.base, 7, 2, "stem"))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate(BLOCKS[self.layers]):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.base * 2**stage, self.width_factor, stride, name=f"stage{stage}_block{block}")(x)
        return nn.Dense(self.classes, name="head")(x.mean(axis=(1, 2)))


def wide_resnet(
    *,
    layers: int = 14,
    base: int = 8,
    width_factor: int = 2,
    image: int = 64,
    channels: int = 3,
    classes: int = 10,
    batch: int = 8,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    """`wide_resnet(layers=50, base=160, image=224, classes=1024, batch=1536)` is Alpa's 250M."""
    model = WideResNet(layers, base, width_factor, classes)
    return training_case(
        name="wide_resnet",
        init_params=lambda key: model.init(key, jnp.zeros((1, image, image, channels))),
        loss=lambda params, batch: cross_entropy(model.apply(params, batch["images"]), batch["labels"]),
        batch=image_batch(batch=batch, image=image, channels=channels, classes=classes),
        optimizer=optimizer,
    )
