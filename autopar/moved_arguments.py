"""How far rounding alone goes: arguments that are moved by a unit in their last place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat


def moved(args: Any, seed: int) -> Any:
    """The arguments with each number of their floating-point arrays moved by a unit in its last place, up or down."""
    random = np.random.default_rng(seed)

    def leaf(x: Any) -> Any:
        is_array = isinstance(x, jax.Array | np.ndarray)
        if not is_array or jax_compat.is_key_dtype(x.dtype) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        values = np.asarray(x)
        wide = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
        unit = float(jnp.finfo(values.dtype).eps)
        return (wide * (1 + unit * random.choice((-1.0, 1.0), values.shape))).astype(values.dtype)

    return jax.tree.map(leaf, args)
