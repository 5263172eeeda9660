"""Partial values as arrays, with one leading dimension over the devices that hold summands: made, and reduced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar.ir.jax_sharding import named_sharding, partition_spec
from autopar.ir.layout import Layout
from autopar.lowering.uneven_parts import cut_to, filled_up
from autopar.sharding.resharding import ReshardStep, StepKind


def as_sum(array: Any, before: Layout, after: Layout, mesh: Mesh) -> Any:
    """A whole value, or one that is partial over fewer axes, as a sum: the first device along the new axes holds it,
    the others hold zeros.
    """
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


def reduced(array: Any, step: ReshardStep, mesh: Mesh) -> Any:
    """The sum of a partial value, on all devices or scattered along the dimension that the step splits."""
    names = tuple(mesh.axis_names[a] for a in step.axes)
    grown = [d for d, (b, a) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b]

    def local(part: Any) -> Any:
        summand = part[0]
        if step.kind is StepKind.ALL_REDUCE:
            out = jax.lax.psum(summand, names)
        else:
            (d,) = grown
            out = jax.lax.psum_scatter(summand, names, scatter_dimension=d, tiled=True)
        return out[None] if step.after.partial else out

    specs = (partition_spec(step.before, mesh.axis_names), partition_spec(step.after, mesh.axis_names))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=False)
    summed = run(filled_up(array, step.before, mesh, step.after))
    summed = cut_to(summed, (*summed.shape[: len(step.after.partial) and 1], *array.shape[1:]))
    return jax.lax.with_sharding_constraint(summed, named_sharding(step.after, mesh))
