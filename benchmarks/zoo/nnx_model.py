"""A Flax NNX model, used functionally: `nnx.merge` at the start of the step, `nnx.state` at its end."""

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import image_batch
from benchmarks.zoo.training import cross_entropy, momentum


class ConvNet(nnx.Module):
    """Images (batch, image, image, channels) to logits, with BatchNorm and dropout."""

    def __init__(self, *, image: int, channels: int, width: int, classes: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(channels, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.Linear((image // 2) ** 2 * width, width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(images))), (2, 2), (2, 2))
        x = self.dropout(x.reshape(x.shape[0], -1))
        return self.head(nnx.relu(self.hidden(x)))


def nnx_model(*, width: int = 16, image: int = 8, channels: int = 3, classes: int = 10, batch: int = 16) -> Case:
    """The state holds parameters, running statistics, the optimiser's state, and random keys with their counters."""

    def create(key: jax.Array) -> tuple[ConvNet, nnx.Optimizer]:
        model = ConvNet(image=image, channels=channels, width=width, classes=classes, rngs=nnx.Rngs(key))
        return model, nnx.Optimizer(model, momentum(), wrt=nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: create(jax.random.key(0))))

    def init(key: jax.Array) -> PyTree:
        return nnx.state(create(key))

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def loss_fn(model: ConvNet) -> tuple[jax.Array, jax.Array]:
            logits = model(batch["images"])
            return cross_entropy(logits, batch["labels"]), logits

        model, optimizer = nnx.merge(graph, state)
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"])
        return nnx.state((model, optimizer)), {"loss": loss, "accuracy": accuracy}

    return Case(
        name="nnx_model",
        step=step,
        init=init,
        batch=image_batch(batch=batch, image=image, channels=channels, classes=classes),
    )
