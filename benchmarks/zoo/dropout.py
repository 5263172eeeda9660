"""Dropout, with the random key in the state."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.mlp import init_mlp
from benchmarks.zoo.training import cross_entropy, momentum

RATE = 0.2


def apply_with_dropout(params: PyTree, x: jax.Array, key: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer, layer_key in zip(hidden, jax.random.split(key, len(hidden)), strict=True):
        x = jax.nn.gelu(x @ layer["weight"] + layer["bias"])
        x = jnp.where(jax.random.bernoulli(layer_key, 1 - RATE, x.shape), x / (1 - RATE), 0)
    return x @ last["weight"] + last["bias"]


def dropout(*, layers: int = 2, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
    tx = momentum()

    def init(key: jax.Array) -> PyTree:
        params_key, dropout_key = jax.random.split(key)
        params = init_mlp(params_key, (features, *[width] * layers, classes))
        return {"params": params, "opt_state": tx.init(params), "key": dropout_key}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        next_key, key = jax.random.split(state["key"])

        def loss_fn(params: PyTree) -> jax.Array:
            return cross_entropy(apply_with_dropout(params, batch["inputs"], key), batch["labels"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": next_key}, {"loss": loss}

    return Case(
        name="dropout",
        step=step,
        init=init,
        batch=vector_batch(batch=batch, features=features, classes=classes),
    )
