"""Residual convolutional network with BatchNorm in Flax linen; the running statistics are part of the state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import image_batch
from benchmarks.zoo.training import cross_entropy, momentum


class ResNet(nn.Module):
    """Images (batch, image, image, channels) to logits (batch, classes); each stage halves the image."""

    widths: tuple[int, ...]
    blocks: int
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        def conv_norm(x: jax.Array, features: int, kernel: int, stride: int = 1) -> jax.Array:
            x = nn.Conv(features, (kernel, kernel), stride, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)

        x = nn.relu(conv_norm(images, self.widths[0], 3))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                y = conv_norm(nn.relu(conv_norm(x, width, 3, stride)), width, 3)
                if y.shape != x.shape:
                    x = conv_norm(x, width, 1, stride)
                x = nn.relu(x + y)
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def resnet(
    *,
    widths: tuple[int, ...] = (8, 16),
    blocks: int = 1,
    image: int = 16,
    channels: int = 3,
    classes: int = 10,
    batch: int = 16,
) -> Case:
    """Normalisation mixes the examples of a batch, so the batch must not be cut into micro-batches."""
    model = ResNet(widths, blocks, classes)

    def init(key: jax.Array) -> TrainState:
        variables = model.init(key, jnp.zeros((1, image, image, channels)), train=True)
        return TrainState.create(
            apply_fn=None, params=variables["params"], batch_stats=variables["batch_stats"], tx=optimizer
        )

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        def loss_fn(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = model.apply(variables, batch["images"], train=True, mutable=["batch_stats"])
            return cross_entropy(logits, batch["labels"]), (logits, updates["batch_stats"])

        (loss, (logits, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"])
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss, "accuracy": accuracy}

    optimizer: optax.GradientTransformation = momentum()
    return Case(
        name="resnet",
        step=step,
        init=init,
        batch=image_batch(batch=batch, image=image, channels=channels, classes=classes),
    )
