"""Whole values as partial sums, of which one device holds the value and the others hold zeros."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar.common import jax_compat
from autopar.ir.jax_sharding import named_sharding
from autopar.ir.layout import Layout, replicated
from autopar.lowering.instructions import Place


def one_summand(array: Any, before: Layout, after: Layout, mesh: Mesh) -> Any:
    """A whole value as a sum: the first device along the new axes holds it, the others hold zeros."""
    sizes = [mesh.shape[mesh.axis_names[a]] for a in before.partial]
    rest = array.shape[1:] if before.partial else array.shape
    array = array.reshape((*sizes, *rest))
    for position, axis in enumerate(after.partial):
        if axis not in before.partial:
            n = mesh.shape[mesh.axis_names[axis]]
            array = jnp.expand_dims(array, position)
            first = jax.lax.broadcasted_iota(
                jnp.int32, (*array.shape[:position], n, *array.shape[position + 1 :]), position
            )
            array = jnp.where(first == 0, array, jnp.zeros((), array.dtype))
    return jax.lax.with_sharding_constraint(array.reshape((-1, *rest)), named_sharding(after, mesh))


def literal_array(literal: Any, place: Place | None, mesh: Mesh) -> Any:
    """A literal: as it is where it has no place, else as a partial sum, such as a loop begins to add to."""
    if place is None:
        return literal.val
    array = jax_compat.with_type(literal.val, literal.aval)
    return one_summand(array, replicated(array.ndim), place[0], mesh)
