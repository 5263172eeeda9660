"""Train a Flax NNX network on scikit-learn's handwritten digits, on all devices at once.

python examples/digits_nnx.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import autopar

jax.config.update("jax_num_cpu_devices", 8)  # where there are no accelerators

BATCH = 128
EPOCHS = 20


class Network(nnx.Module):
    """Images (batch, 8, 8) to logits of ten digits."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 32, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.conv(images[..., None])), (2, 2), (2, 2))
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.head(self.dropout(x))


def create(key: jax.Array) -> tuple[Network, nnx.Optimizer]:
    network = Network(nnx.Rngs(key))
    return network, nnx.Optimizer(network, optax.adam(1e-3), wrt=nnx.Param)


@autopar.parallelize  # in place of nnx.jit: the network and its optimizer are changed in place
def train_step(network: Network, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def loss_fn(network: Network) -> jax.Array:
        logits = network(batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(network)
    optimizer.update(network, grads)
    return {"loss": loss}


@autopar.parallelize(plan=train_step)  # the network stays where training has it
def accuracy_of(network: Network, batch: dict[str, jax.Array]) -> jax.Array:
    logits = nnx.view(network, deterministic=True)(batch["images"])
    return jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"])


def main() -> None:
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=0.2, random_state=0)

    network, optimizer = train_step.init(create, jax.random.key(0))
    rng = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            batch = {"images": images[chosen], "labels": labels[chosen]}
            metrics = train_step(network, optimizer, train_step.put_batch(batch))
        if (epoch + 1) % 5 == 0:
            accuracy = accuracy_of(network, {"images": test_images, "labels": test_labels})
            print(f"epoch {epoch + 1:2}  loss {metrics['loss']:.4f}  test accuracy {accuracy:.1%}")
    print(train_step.plan(network, optimizer, batch))


if __name__ == "__main__":
    main()
