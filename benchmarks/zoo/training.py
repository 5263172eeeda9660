"""The training step that most cases share: a loss of parameters, minimised by an optax optimiser."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from benchmarks.zoo.case import Case, PyTree


class TrainState(NamedTuple):
    """Parameters, the optimiser's state, and the number of steps taken."""

    step: jax.Array
    params: PyTree
    opt_state: PyTree


def momentum() -> optax.GradientTransformation:
    """The default optimiser: linear in the gradient, so it does not amplify rounding as Adam's division does."""
    return optax.sgd(0.1, momentum=0.9)


def descend(
    tx: optax.GradientTransformation,
    loss: Callable[..., Any],
    params: PyTree,
    opt_state: PyTree,
    *args: Any,
    has_aux: bool = False,
) -> tuple[Any, PyTree, PyTree]:
    """An update by the gradients of `loss(params, *args)`: (what that gave, new parameters, the optimiser's state)."""
    found, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, *args)
    updates, opt_state = tx.update(grads, opt_state, params)
    return found, optax.apply_updates(params, updates), opt_state


def training_case(
    *,
    name: str,
    init_params: Callable[[jax.Array], PyTree],
    loss: Callable[[PyTree, PyTree], jax.Array],
    batch: Callable[[int], PyTree],
    optimizer: optax.GradientTransformation | None = None,
    dtype: DTypeLike | None = None,
    tolerance: float = 1e-5,
) -> Case:
    """A case that minimises `loss(params, batch)`.

    With a `dtype` the loss reads parameters of that type, made once a step from those of the state; gradients are of it
    too, and so are their sums over micro-batches. The optimiser works in the state's own types.
    """
    tx = momentum() if optimizer is None else optimizer

    def cast(params: PyTree) -> PyTree:
        return params if dtype is None else jax.tree.map(lambda p: p.astype(dtype), params)

    def init(key: jax.Array) -> TrainState:
        params = init_params(key)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=tx.init(params))

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        value, grads = jax.value_and_grad(loss)(cast(state.params), batch)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), {"loss": value}

    return Case(name=name, step=step, init=init, batch=batch, tolerance=tolerance)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of integer labels, computed in float32 whatever the logits are."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def one_hot_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The same without a gather, for which a TPU keeps the logits in float32 too."""
    probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.sum(jax.nn.one_hot(labels, logits.shape[-1]) * probabilities, axis=-1).mean()
