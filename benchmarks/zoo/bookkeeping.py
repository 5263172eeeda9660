"""A step that keeps more than parameters and reports more than a loss: integers, booleans, tables, examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.mlp import apply_mlp, init_mlp
from benchmarks.zoo.training import momentum


def bookkeeping(*, layers: int = 2, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
    """Metrics are a mean, a maximum, a norm, a table of sums, a value per example, and a nested tuple.

    The standardisation of the inputs and the classes' weights are constants that the step closes over.
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
