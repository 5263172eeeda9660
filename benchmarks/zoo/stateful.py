"""Perceptrons whose state holds more than parameters: a random key, a loss scale, counters and tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.mlp import apply_mlp, init_mlp
from benchmarks.zoo.training import cross_entropy, descend, momentum

RATE = 0.2
INITIAL_SCALE = 2.0**18  # high enough for the first step to overflow
GROWTH_INTERVAL_STEPS = 2000


def apply_with_dropout(params: PyTree, x: jax.Array, key: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer, layer_key in zip(hidden, jax.random.split(key, len(hidden)), strict=True):
        x = jax.nn.gelu(x @ layer["weight"] + layer["bias"])
        x = jnp.where(jax.random.bernoulli(layer_key, 1 - RATE, x.shape), x / (1 - RATE), 0)
    return x @ last["weight"] + last["bias"]


def dropout(*, layers: int = 2, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
    """Dropout, with the random key in the state."""
    tx = momentum()

    def init(key: jax.Array) -> PyTree:
        params_key, dropout_key = jax.random.split(key)
        params = init_mlp(params_key, (features, *[width] * layers, classes))
        return {"params": params, "opt_state": tx.init(params), "key": dropout_key}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        next_key, key = jax.random.split(state["key"])

        def loss_fn(params: PyTree) -> jax.Array:
            return cross_entropy(apply_with_dropout(params, batch["inputs"], key), batch["labels"])

        loss, params, opt_state = descend(tx, loss_fn, state["params"], state["opt_state"])
        return {"params": params, "opt_state": opt_state, "key": next_key}, {"loss": loss}

    return Case(
        name="dropout",
        step=step,
        init=init,
        batch=vector_batch(batch=batch, features=features, classes=classes),
    )


def loss_scaling(*, layers: int = 2, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
    """float16 with a dynamic loss scale: a step whose gradients overflow is skipped by a `lax.cond`."""
    tx = momentum()

    def init(key: jax.Array) -> PyTree:
        params = init_mlp(key, (features, *[width] * layers, classes))
        return {
            "params": params,
            "opt_state": tx.init(params),
            "scale": jnp.float32(INITIAL_SCALE),
            "good_steps": jnp.int32(0),
        }

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def scaled_loss(params: PyTree) -> tuple[jax.Array, jax.Array]:
            half_params, inputs = jax.tree.map(lambda x: x.astype(jnp.float16), (params, batch["inputs"]))
            loss = cross_entropy(apply_mlp(half_params, inputs), batch["labels"])
            return loss * state["scale"], loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(state["params"])
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))

        def update(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
            unscaled = jax.tree.map(lambda g: g / state["scale"], grads)
            updates, opt_state = tx.update(unscaled, opt_state)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = jax.lax.cond(
            finite, update, lambda params, opt_state: (params, opt_state), state["params"], state["opt_state"]
        )
        good_steps = jnp.where(finite, state["good_steps"] + 1, 0)
        grow = good_steps == GROWTH_INTERVAL_STEPS
        new_state = {
            "params": params,
            "opt_state": opt_state,
            "scale": state["scale"] * jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5),
            "good_steps": jnp.where(grow, 0, good_steps),
        }
        return new_state, {"loss": loss, "skipped": ~finite}

    make_batch = vector_batch(batch=batch, features=features, classes=classes)
    # float16 carries 11 bits, so that one rounding is 5e-4.
    return Case(name="loss_scaling", step=step, init=init, batch=make_batch, tolerance=5e-3)


def bookkeeping(*, layers: int = 2, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
    """Integers, booleans, tables and examples in the state.

    Metrics are a mean, a maximum, a norm, a table of sums, a value per example, and a nested tuple. The standardisation
    of the inputs and the classes' weights are constants that the step closes over.
    """
    tx = momentum()
    rng = np.random.default_rng(0)
    mean, deviation = rng.standard_normal((2, features), dtype=np.float32)
    class_weights = rng.uniform(0.5, 1.5, classes).astype(np.float32)
    trainable = np.arange(layers + 1) > 0

    def init(key: jax.Array) -> PyTree:
        params = init_mlp(key, (features, *[width] * layers, classes))
        return {
            "params": params,
            "opt_state": tx.init(params),
            "step": jnp.int32(0),
            "examples": jnp.uint32(0),
            "best_loss": jnp.float32(jnp.inf),
            "improved": jnp.bool_(False),
            "seen": jnp.zeros(classes, bool),
            "label_counts": jnp.zeros(classes, jnp.int32),
        }

    def loss_fn(params: PyTree, batch: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits = apply_mlp(params, (batch["inputs"] - mean) / (1 + deviation**2))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        losses = losses * jnp.asarray(class_weights)[batch["labels"]]
        return losses.mean(), (logits, losses)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        (loss, (logits, losses)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        grads = [jax.tree.map(lambda g, t=t: g * t, grad) for grad, t in zip(grads, trainable, strict=True)]
        updates, opt_state = tx.update(grads, state["opt_state"])
        labels = jax.nn.one_hot(batch["labels"], classes, dtype=jnp.int32)
        predictions = jax.nn.one_hot(jnp.argmax(logits, axis=-1), classes, dtype=jnp.int32)
        new_state = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
            "examples": state["examples"] + jnp.uint32(batch["labels"].shape[0]),
            "best_loss": jnp.minimum(loss, state["best_loss"]),
            "improved": loss < state["best_loss"],
            "seen": state["seen"] | (labels.sum(axis=0) > 0),
            "label_counts": state["label_counts"] + labels.sum(axis=0),
        }
        metrics = {
            "loss": loss,
            "worst_loss": losses.max(),
            "example_losses": losses,
            "gradient_norm": optax.tree.norm(grads),
            "confusion": labels.T @ predictions,
            "top_classes": jax.lax.top_k(logits, 3),
        }
        return new_state, metrics

    make_batch = vector_batch(batch=batch, features=features, classes=classes)
    return Case(name="bookkeeping", step=step, init=init, batch=make_batch)
