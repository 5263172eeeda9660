"""Trees of a state compared bit by bit."""

from typing import Any

import jax
import numpy as np


def bits(leaf: Any) -> tuple[Any, ...]:
    """Kind, type, shape and bits of a leaf."""
    if isinstance(leaf, jax.Array):
        raw = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return "jax", str(leaf.dtype), leaf.shape, np.asarray(raw).tobytes()
    if isinstance(leaf, np.ndarray | np.generic):
        return "numpy", str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf).__name__, leaf.hex() if isinstance(leaf, float) else leaf


def assert_equal(got: Any, expected: Any) -> None:
    """The same structure, and every leaf bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert bits(a) == bits(b)
