"""Optimizers that work on whole matrices, as people write them: Muon, Shampoo, SOAP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class _Matrices(NamedTuple):
    """The state of an optimizer: for each matrix a tuple of arrays, and the number of steps."""

    of_matrix: Any
    count: Any


def on_matrices(
    init: Callable[[Any], tuple[Any, ...]],
    update: Callable[[Any, tuple[Any, ...], Any], tuple[Any, tuple[Any, ...]]],
    learning_rate: float,
) -> optax.GradientTransformation:
    """An optimizer that treats each matrix alone, those of stacked layers (dimensions in front) too, and everything
    else by AdamW. `update(gradient, state, count)` returns the direction and the new state.
    """

    def over_layers(function: Callable[..., Any], rank: int, layered: tuple[int | None, ...]) -> Callable[..., Any]:
        for _ in range(rank - 2):
            function = jax.vmap(function, in_axes=layered)
        return function

    def init_all(params: Any) -> _Matrices:
        return _Matrices(jax.tree.map(lambda p: over_layers(init, p.ndim, (0,))(p), params), jnp.zeros((), jnp.int32))

    def update_all(grads: Any, state: _Matrices, params: Any = None) -> tuple[Any, _Matrices]:
        count = state.count + 1
        pairs = jax.tree.map(
            lambda g, s: over_layers(update, g.ndim, (0, 0, None))(g, s, count), grads, state.of_matrix
        )
        updates = jax.tree.map(lambda g, pair: -learning_rate * pair[0], grads, pairs)
        return updates, _Matrices(jax.tree.map(lambda g, pair: pair[1], grads, pairs), count)

    matrices = optax.GradientTransformation(init_all, update_all)
    return optax.partition({"matrix": matrices, "other": optax.adamw(learning_rate)}, _labels)


def _labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, p: "matrix" if "layers" in str(path[0]) else "other", params)


def muon(learning_rate: float = 1e-3, dtype: Any = jnp.float32) -> optax.GradientTransformation:
    """Momentum made orthogonal by five iterations of Newton and Schulz, in this type (Jordan et al., 2024)."""
    a, b, c = _NEWTON_SCHULZ

    def update(gradient: Any, state: tuple[Any, ...], _: Any) -> tuple[Any, tuple[Any, ...]]:
        momentum = 0.95 * state[0] + gradient
        x = (gradient + 0.95 * momentum).astype(dtype)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (jnp.linalg.norm(x) + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return (x.T if tall else x).astype(gradient.dtype), (momentum,)

    return on_matrices(lambda p: (jnp.zeros_like(p),), update, learning_rate)


def shampoo(learning_rate: float = 1e-3, damping: float = 1e-4) -> optax.GradientTransformation:
    """Gradients between the inverse fourth roots of their second moments (Gupta et al., 2018)."""

    def inverse_root(moment: Any) -> Any:
        values, vectors = jnp.linalg.eigh(moment)
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    def update(gradient: Any, state: tuple[Any, ...], _: Any) -> tuple[Any, tuple[Any, ...]]:
        left, right = state[0] + gradient @ gradient.T, state[1] + gradient.T @ gradient
        return inverse_root(left) @ gradient @ inverse_root(right), (left, right)

    return on_matrices(lambda p: tuple(damping * jnp.eye(n, dtype=p.dtype) for n in p.shape), update, learning_rate)


def soap(learning_rate: float = 1e-3, damping: float = 1e-4, epsilon: float = 1e-8) -> optax.GradientTransformation:
    """Adam in the basis of the eigenvectors of Shampoo's moments, which one QR decomposition a step follows (Vyas et
    al., 2024).
    """

    def init(p: Any) -> tuple[Any, ...]:
        rows, columns = (jnp.eye(n, dtype=p.dtype) for n in p.shape)
        return (damping * rows, damping * columns, rows, columns, jnp.zeros_like(p), jnp.zeros_like(p))

    def update(gradient: Any, state: tuple[Any, ...], count: Any) -> tuple[Any, tuple[Any, ...]]:
        left, right, of_rows, of_columns, mean, square = state
        left = 0.95 * left + 0.05 * gradient @ gradient.T
        right = 0.95 * right + 0.05 * gradient.T @ gradient
        mean = 0.95 * mean + 0.05 * gradient
        square = 0.95 * square + 0.05 * (of_rows.T @ gradient @ of_columns) ** 2
        rotated = of_rows.T @ mean @ of_columns
        step = of_rows @ (rotated / (1 - 0.95**count) / (jnp.sqrt(square / (1 - 0.95**count)) + epsilon)) @ of_columns.T
        of_rows, of_columns = (jnp.linalg.qr(m @ q)[0] for m, q in ((left, of_rows), (right, of_columns)))
        return step, (left, right, of_rows, of_columns, mean, square)

    return on_matrices(init, update, learning_rate)


def optax_muon() -> optax.GradientTransformation:
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=_dimension_numbers)


def _dimension_numbers(params: Any) -> Any:
    """Of matrices of layers, stacked or not, the last two dimensions; the embedding goes with AdamW."""
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree_util.tree_map_with_path(
        lambda path, p: numbers if "layers" in str(path[0]) and p.ndim > 1 else None, params
    )
