"""Unevenly split arrays, filled up with zeros where a program takes equal parts only (`shard_map`, gathers)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar.ir.jax_sharding import named_sharding
from autopar.ir.layout import Layout
from autopar.ir.primitives import SCATTERS


def filled_up(array: Any, at: Layout, mesh: Mesh, parts: Layout | None = None) -> Any:
    """An array with zeros behind those dimensions that the mesh axes of its layout, or of `parts`, do not divide.

    A dimension that is split unevenly has room for them in its last parts: nothing is sent.
    """
    sizes = array.shape[1:] if at.partial else array.shape
    by = [math.prod(mesh.shape[mesh.axis_names[a]] for a in axes) for axes in (parts or at).dims]
    more = [(0, -n % k) for n, k in zip(sizes, by, strict=True)]
    if not any(m for _, m in more):
        return array
    filled = jnp.pad(array, [(0, 0), *more] if at.partial else more)
    return jax.lax.with_sharding_constraint(filled, named_sharding(at, mesh))


def cut_to(array: Any, shape: Sequence[int]) -> Any:
    """The first part of an array, without what was filled up in its operands."""
    return array if array.shape == tuple(shape) else jax.lax.slice(array, [0] * array.ndim, shape)


def params_of_filled(eqn: Any, operands: Sequence[Any], filled: Sequence[Any]) -> dict[str, Any]:
    """The parameters that an equation has otherwise on operands that are filled up.

    Zeros add nothing, and where they make rows of their own these are cut off. Of indices they repeat the first one.
    """
    shapes = [(before.shape, after.shape) for before, after in zip(operands, filled, strict=True)]
    if all(before == after for before, after in shapes):
        return {}
    if eqn.primitive.name in SCATTERS:
        return {"unique_indices": False, "indices_are_sorted": False}
    if eqn.primitive.name == "gather":  # a whole row stays one
        rows = zip(eqn.params["slice_sizes"], *shapes[0], strict=True)
        return {"slice_sizes": tuple(after if size == before else size for size, before, after in rows)}
    return {}
