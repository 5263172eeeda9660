"""Dynamic slices with clamped starts: XLA drops the clamp of a slice that a plan splits.

A start that is out of range counts as the nearest start in range. A plan that splits the result slices it once more,
and XLA's algebraic simplifier merges the two slices without the clamp of the first (openxla/xla, issue 49121): it reads
the wrong rows. With starts in range both programs are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def with_starts_in_range(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of an equation, with clamped starts where it slices an array or updates a slice of one."""
    if eqn is None or eqn.primitive.name not in ("dynamic_slice", "dynamic_update_slice"):
        return list(operands)
    is_update = eqn.primitive.name == "dynamic_update_slice"
    sizes = eqn.invars[1].aval.shape if is_update else eqn.params["slice_sizes"]
    arrays, starts = (list(operands[:2]), operands[2:]) if is_update else (list(operands[:1]), operands[1:])
    whole = eqn.invars[0].aval.shape
    return arrays + [_clamped(start, n - size) for start, n, size in zip(starts, whole, sizes, strict=True)]


def _clamped(start: Any, largest: int) -> jax.Array:
    dtype = jax.numpy.result_type(start)
    # A type too small for the largest start cannot hold one beyond it either.
    largest = min(largest, int(jax.numpy.iinfo(dtype).max))
    return jax.lax.clamp(np.asarray(0, dtype), jax.numpy.asarray(start, dtype), np.asarray(largest, dtype))
