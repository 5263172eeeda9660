"""Multilayer perceptron in plain jax.numpy: parameters are a list of dictionaries."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.training import cross_entropy, training_case


def init_mlp(key: jax.Array, widths: tuple[int, ...]) -> PyTree:
    """Layers of `widths[i]` inputs and `widths[i + 1]` outputs, He-initialised."""
    initializer = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"weight": initializer(k, (inputs, outputs)), "bias": jnp.zeros(outputs)}
        for k, (inputs, outputs) in zip(keys, itertools.pairwise(widths), strict=True)
    ]


def apply_mlp(params: PyTree, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu) -> jax.Array:
    """(batch, widths[0]) to (batch, widths[-1])."""
    *hidden, last = params
    for layer in hidden:
        x = activation(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def mlp(
    *,
    layers: int = 3,
    width: int = 64,
    features: int = 32,
    classes: int = 16,
    batch: int = 16,
    optimizer: optax.GradientTransformation | None = None,
    name: str = "mlp",
) -> Case:
    """`layers` hidden layers of `width`, and a linear classifier."""
    return training_case(
        name=name,
        init_params=lambda key: init_mlp(key, (features, *[width] * layers, classes)),
        loss=lambda params, batch: cross_entropy(apply_mlp(params, batch["inputs"]), batch["labels"]),
        batch=vector_batch(batch=batch, features=features, classes=classes),
        optimizer=optimizer,
    )
