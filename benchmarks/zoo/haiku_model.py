"""A Haiku model with state: convolution, BatchNorm, and a recurrent read-out by `hk.dynamic_unroll`."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import image_batch
from benchmarks.zoo.training import cross_entropy, momentum


def haiku_model(*, width: int = 16, image: int = 8, channels: int = 3, classes: int = 10, batch: int = 16) -> Case:
    """Rows of the feature map are the time steps of the recurrent network."""
    tx = momentum()

    @hk.transform_with_state
    def network(images: jax.Array) -> jax.Array:
        x = hk.Conv2D(width, 3, with_bias=False)(images)
        x = jax.nn.relu(hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training=True))
        rows = x.swapaxes(0, 1).reshape(image, x.shape[0], -1)
        core = hk.GRU(width)
        outputs, _ = hk.dynamic_unroll(core, rows, core.initial_state(x.shape[0]))
        return hk.Linear(classes)(outputs[-1])

    def init(key: jax.Array) -> PyTree:
        params, network_state = network.init(key, jnp.zeros((1, image, image, channels)))
        return {"params": params, "network": network_state, "opt_state": tx.init(params)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def loss_fn(params: PyTree) -> tuple[jax.Array, PyTree]:
            logits, network_state = network.apply(params, state["network"], None, batch["images"])
            return cross_entropy(logits, batch["labels"]), network_state

        (loss, network_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "network": network_state, "opt_state": opt_state}, {"loss": loss}

    return Case(
        name="haiku_model",
        step=step,
        init=init,
        batch=image_batch(batch=batch, image=image, channels=channels, classes=classes),
    )
