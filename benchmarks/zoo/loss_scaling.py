"""Training in float16 with a dynamic loss scale: a step whose gradients overflow is skipped by a `lax.cond`."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.mlp import apply_mlp, init_mlp
from benchmarks.zoo.training import cross_entropy, momentum

INITIAL_SCALE = 2.0**18  # high enough for the first step to overflow
GROWTH_INTERVAL_STEPS = 2000


def loss_scaling(*, layers: int = 2, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
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
