"""U-Net that predicts the noise of a noisy image, in Flax linen: down, up, and across at every size.

Ronneberger et al., "U-Net", 2015; the residual blocks, the embedding of the noise level and the attention at the
smallest size are those of Ho et al., "Denoising diffusion probabilistic models", 2020, appendix B.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.training import training_case
from benchmarks.zoo.wide_resnet import GROUP, MOST_GROUPS


def norm(features: int, name: str) -> nn.Module:
    return nn.GroupNorm(math.gcd(MOST_GROUPS, features // GROUP), name=name)


class Residual(nn.Module):
    """Two convolutions, the embedded noise level between them."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        h = nn.Conv(self.features, (3, 3), name="in")(nn.silu(norm(x.shape[-1], "in_norm")(x)))
        h = h + nn.Dense(self.features, name="level")(level)[:, None, None, :]
        h = nn.Conv(self.features, (3, 3), name="out")(nn.silu(norm(self.features, "out_norm")(h)))
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1), name="shortcut")(x)
        return x + h


class Attention(nn.Module):
    """Every place of an image looks at every other."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        places = norm(x.shape[-1], "norm")(x).reshape(x.shape[0], -1, x.shape[-1])
        mixed = nn.MultiHeadDotProductAttention(self.heads, use_bias=False, name="attention")(places)
        return x + mixed.reshape(x.shape)


class UNet(nn.Module):
    """Images (batch, image, image, channels) and noise levels (batch,) to noise of the images' shape.

    Each entry of `multiples` is a size of the image, half as large as the one before, of so many times `base` features.
    """

    base: int
    multiples: tuple[int, ...]
    blocks: int
    heads: int

    @nn.compact
    def __call__(self, images: jax.Array, levels: jax.Array) -> jax.Array:
        level = nn.silu(nn.Dense(4 * self.base, name="level")(waves(levels, self.base)))
        x = nn.Conv(self.base, (3, 3), name="stem")(images)
        across = []
        for size, multiple in enumerate(self.multiples):
            for block in range(self.blocks):
                x = Residual(multiple * self.base, name=f"down{size}_block{block}")(x, level)
                across.append(x)
            if size + 1 < len(self.multiples):
                x = nn.Conv(x.shape[-1], (3, 3), 2, name=f"down{size}")(x)
        x = Attention(self.heads, name="middle_attention")(Residual(x.shape[-1], name="middle")(x, level))
        for size, multiple in reversed(list(enumerate(self.multiples))):
            for block in range(self.blocks):
                x = jnp.concatenate([x, across.pop()], axis=-1)
                x = Residual(multiple * self.base, name=f"up{size}_block{block}")(x, level)
            if size > 0:
                x = nn.Conv(x.shape[-1], (3, 3), name=f"up{size}")(doubled(x))
        return nn.Conv(images.shape[-1], (3, 3), name="head")(nn.silu(norm(x.shape[-1], "head_norm")(x)))


def waves(levels: jax.Array, features: int) -> jax.Array:
    """Sines and cosines of numbers, (batch,) to (batch, features)."""
    angles = levels[:, None] * jnp.exp(-math.log(1e4) * jnp.arange(features // 2) / (features // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def doubled(x: jax.Array) -> jax.Array:
    """Every place of an image four times."""
    batch, height, width, features = x.shape
    wide = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, features))
    return wide.reshape(batch, 2 * height, 2 * width, features)


def unet(
    *,
    base: int = 8,
    multiples: tuple[int, ...] = (1, 2),
    blocks: int = 1,
    heads: int = 2,
    image: int = 16,
    channels: int = 3,
    batch: int = 8,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    model = UNet(base, multiples, blocks, heads)

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal((batch, image, image, channels), dtype=np.float32)
        clean = rng.standard_normal((batch, image, image, channels), dtype=np.float32)
        kept = rng.uniform(0.1, 0.9, (batch,)).astype(np.float32)
        mixed = np.sqrt(kept)[:, None, None, None] * clean + np.sqrt(1 - kept)[:, None, None, None] * noise
        return {"images": mixed, "noise": noise, "levels": 1000 * (1 - kept)}

    def init_params(key: jax.Array) -> PyTree:
        return model.init(key, jnp.zeros((1, image, image, channels)), jnp.zeros((1,)))

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return jnp.mean((model.apply(params, batch["images"], batch["levels"]) - batch["noise"]) ** 2)

    return training_case(name="unet", init_params=init_params, loss=loss, batch=make_batch, optimizer=optimizer)
