"""The GPT cases again under other optimisers, whose state and update differ in shape from momentum's."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.gpt import gpt
from benchmarks.zoo.gpt_scan import gpt_scan
from benchmarks.zoo.mlp import apply_mlp, init_mlp, mlp
from benchmarks.zoo.training import cross_entropy, momentum

EMA_DECAY = 0.99


def gpt_adamw(**sizes) -> Case:
    """AdamW under a warm-up and cosine schedule, gradients clipped by their global norm."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, warmup_steps=2, decay_steps=100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    return gpt(optimizer=optimizer, name="gpt_adamw", **sizes)


def gpt_adafactor(*, width: int = 128, vocabulary: int = 256, **sizes) -> Case:
    """Adafactor keeps row and column means instead of a second moment for matrices of at least 128 by 128."""
    optimizer = optax.adafactor(1e-3)
    return gpt_scan(width=width, vocabulary=vocabulary, optimizer=optimizer, name="gpt_adafactor", **sizes)


def mlp_multi_steps(**sizes) -> Case:
    """Gradients of two steps are averaged before the parameters move: a `lax.cond` on the state."""
    optimizer = optax.MultiSteps(momentum(), every_k_schedule=2).gradient_transformation()
    return mlp(optimizer=optimizer, name="mlp_multi_steps", **sizes)


def mlp_ema(*, layers: int = 2, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
    """An exponential moving average of the parameters, which judges the batch without gradients."""
    tx = momentum()

    def init(key: jax.Array) -> PyTree:
        params = init_mlp(key, (features, *[width] * layers, classes))
        # A copy, because a buffer that occurs twice in the state cannot be donated.
        return {"params": params, "ema": jax.tree.map(jnp.copy, params), "opt_state": tx.init(params)}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return cross_entropy(apply_mlp(params, batch["inputs"]), batch["labels"])

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(params, state["ema"], 1 - EMA_DECAY)
        metrics = {"loss": loss, "ema_loss": loss_fn(ema, batch)}
        return {"params": params, "ema": ema, "opt_state": opt_state}, metrics

    make_batch = vector_batch(batch=batch, features=features, classes=classes)
    return Case(name="mlp_ema", step=step, init=init, batch=make_batch)
