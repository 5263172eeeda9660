"""Rows looked up in a table whose rows are split: each device finds those that it has, and zeros in place of others.

So each has a summand of the result, which may be reduced in parts, over positions say. The partitioner does the same
and reduces at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.primitives import looked_up_dim


def local_rows(eqn: Any, table: Any, indices: Any, names: Sequence[str]) -> Any:
    """A device's summand of a gather. `table` are its rows; `names` the mesh axes that split them, major first."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    dim, out = looked_up_dim(eqn), eqn.outvars[0].aval
    assert dim is not None, "another gather is no lookup in a table"
    size, on_each = eqn.invars[0].aval.shape[dim], table.shape[dim]
    # As int32, unsigned indices of 2^31 and more are negative: on CPUs plain jax.jit takes them for that too.
    at = indices.astype(jnp.int64 if indices.dtype.itemsize > jnp.dtype(jnp.int32).itemsize else jnp.int32)
    if mode == jax.lax.GatherScatterMode.CLIP:
        at = jnp.clip(at, 0, size - 1)
    here = at - jax.lax.axis_index(tuple(names)) * on_each

    def as_result_mask(mask: Any) -> Any:
        """A mask of indices, on the dimensions of the result that the indices have."""
        rest = iter(mask.shape[:-1])
        return mask.reshape([1 if d in numbers.offset_dims else next(rest) for d in range(len(out.shape))])

    rows = jax.lax.gather(
        table, jnp.clip(here, 0, on_each - 1), numbers, eqn.params["slice_sizes"], mode=jax.lax.GatherScatterMode.CLIP
    )
    rows = jnp.where(as_result_mask((here >= 0) & (here < on_each)), rows, jnp.zeros((), rows.dtype))
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
        given = eqn.params["fill_value"]
        fill = jnp.asarray(jnp.nan if given is None else given, rows.dtype)
        is_out_of_range = ((at < 0) | (at >= size)) & (jax.lax.axis_index(tuple(names)) == 0)
        rows = jnp.where(as_result_mask(is_out_of_range), fill, rows)
    return rows
