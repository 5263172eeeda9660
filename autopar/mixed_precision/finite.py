"""Whether gradients are finite, and the selection of a state by that."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from autopar.errors import InvalidArgumentError
from autopar.mixed_precision.loss_scale import LossScale

T = TypeVar("T")


def all_finite(tree: Any) -> jax.Array:
    """Whether no floating leaf has a NaN or an infinity; a bool without dimensions."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(finite).all() if finite else jnp.bool_(True)


def select(finite: jax.Array, new: T, old: T) -> T:
    """The new state or the old one, with its loss scales adjusted. Raises: InvalidArgumentError."""
    trees: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
    if trees[0] != trees[1]:
        raise InvalidArgumentError(
            where="apply_if_finite(gradients, new, old)", expected=f"two states of one structure, {_shown(old)}",
            got=_shown(new), hint="pass the whole state before and after the update",
        )  # fmt: skip

    def leaf(before: Any, after: Any) -> Any:
        if isinstance(before, LossScale):
            return before.adjust(finite)
        return before if after is before else jnp.where(finite, after, before)

    return jax.tree.map(leaf, old, new, is_leaf=lambda x: isinstance(x, LossScale))


def _shown(tree: Any) -> str:
    return f"{jax.tree.structure(tree)}"[:200]
