"""Train a residual network with BatchNorm on scikit-learn's handwritten digits, on all devices at once.

    python examples/resnet_digits.py

The statistics are those of the whole batch, as on one device, however the batch is sharded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import autopar

jax.config.update("jax_num_cpu_devices", 8)  # where there are no accelerators

BATCH = 128
EPOCHS = 8
WIDTHS = (16, 32, 64)


class ResNet(nn.Module):
    """Images (batch, 8, 8) to logits of ten digits."""

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        def conv_norm(x: jax.Array, width: int, kernel: int, stride: int = 1) -> jax.Array:
            x = nn.Conv(width, (kernel, kernel), stride, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)

        x = nn.relu(conv_norm(images[..., None], WIDTHS[0], 3))
        for stage, width in enumerate(WIDTHS):
            stride = 1 if stage == 0 else 2
            y = conv_norm(nn.relu(conv_norm(x, width, 3, stride)), width, 3)
            x = nn.relu(y + (x if stage == 0 else conv_norm(x, width, 1, stride)))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


model = ResNet()


def create_state(key: jax.Array) -> TrainState:
    variables = model.init(key, jnp.zeros((1, 8, 8)), train=False)
    return TrainState.create(apply_fn=model.apply, tx=optax.sgd(0.1, momentum=0.9, nesterov=True), **variables)


@autopar.parallelize
def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["images"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss, updates["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}


@autopar.parallelize(plan=train_step)  # the state stays where training has it
def accuracy_of(state: TrainState, batch: dict[str, jax.Array]) -> jax.Array:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["images"], train=False)
    return jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"])


def main() -> None:
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=0.2, random_state=0)

    state = train_step.init(create_state, jax.random.key(0))
    rng = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            batch = {"images": images[chosen], "labels": labels[chosen]}
            state, metrics = train_step(state, train_step.put_batch(batch))
        accuracy = accuracy_of(state, {"images": test_images, "labels": test_labels})
        print(f"epoch {epoch + 1}  loss {metrics['loss']:.4f}  test accuracy {accuracy:.1%}")
    print(train_step.plan(state, batch))


if __name__ == "__main__":
    main()
