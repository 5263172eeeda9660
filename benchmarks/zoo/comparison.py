"""How far the results of a parallel run are from those of plain `jax.jit`."""

import dataclasses
import re

import jax
import numpy as np

from benchmarks.zoo.case import Case, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The leaf that differs most: max |difference| / max |leaf|, infinite where NaNs, integers or shapes differ."""

    relative: float
    path: str


def worst_difference(case: Case, reference: PyTree, result: PyTree) -> Difference:
    """Compares pytrees of one structure leaf by leaf; leaves that `case` calls zero are held against the largest leaf.

    Raises: ValueError when the structures differ.
    """
    wanted, structure = jax.tree_util.tree_flatten_with_path(reference)
    if jax.tree.structure(result) != structure:
        raise ValueError(f"{case.name}: expected the structure {structure}, got {jax.tree.structure(result)}")
    leaves = [(jax.tree_util.keystr(path), as_numpy(leaf)) for path, leaf in wanted]
    largest = max(np.abs(leaf).max(initial=0) for _, leaf in leaves if leaf.dtype.kind == "f")

    def difference(path: str, expected: np.ndarray, got: np.ndarray) -> Difference:
        zero = case.zero_gradient is not None and re.search(case.zero_gradient, path) is not None
        scale = largest if zero else np.abs(expected).max(initial=0) if expected.dtype.kind == "f" else 0
        return Difference(relative=relative_difference(expected, got, scale), path=path)

    differences = [
        difference(path, expected, as_numpy(got))
        for (path, expected), got in zip(leaves, jax.tree.leaves(result), strict=True)
    ]
    return max(differences, key=lambda d: d.relative)


def relative_difference(expected: np.ndarray, got: np.ndarray, scale: float) -> float:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return np.inf
    if np.array_equal(expected, got, equal_nan=expected.dtype.kind == "f"):
        return 0.0
    if expected.dtype.kind != "f" or not np.array_equal(np.isfinite(expected), np.isfinite(got)):
        return np.inf
    finite = np.isfinite(expected)
    return float(np.abs(expected[finite] - got[finite]).max() / scale)


def as_numpy(leaf: jax.Array) -> np.ndarray:
    """Random keys as their data; short floating-point types as float32, of which numpy knows the kind."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.float32) if jax.dtypes.issubdtype(array.dtype, np.inexact) else array
