"""Leaves of a compiled step: arguments, constants on the devices, results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.common import jax_compat
from autopar.ir.traced_step import TracedStep
from autopar.runtime.execution.global_arrays import aval_of, from_whole


def leaves_of(traced: TracedStep, args: tuple[Any, ...]) -> list[Any]:
    """The leaves of the dynamic arguments. Raises: TypeError for arguments of another structure."""
    leaves, tree = jax.tree.flatten(args)
    if tree != traced.in_tree:
        raise TypeError(f"expected arguments with the structure {traced.in_tree}, got {tree}")
    return leaves


def put(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> tuple[Any, ...]:
    """Arrays that every process has, on the devices."""
    if jax.process_count() == 1:
        return tuple(jax.device_put(list(arrays), list(shardings)))
    return tuple(from_whole(a, aval_of(a), s) for a, s in zip(arrays, shardings, strict=True))


def result_like(value: Any, aval: jax.ShapeDtypeStruct) -> Any:
    """A result with the weak type that jax gives it; of a literal an array."""
    if not isinstance(value, jax.Array):
        value = jax.numpy.asarray(np.asarray(value), aval.dtype)
    return jax_compat.with_weak_type(value, bool(aval.weak_type))
