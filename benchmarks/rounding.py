"""How far results of a step may be from those of plain `jax.jit`: what rounding in its arguments makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat


def results_of(step: Callable[..., Any], state: Any, batches: Iterable[Any]) -> list[Any]:
    """State and results of each call, copied: the next call takes the state over."""
    out = []
    for batch in batches:
        state, outputs = step(state, batch)
        out.append(jax.block_until_ready(jax.tree.map(_kept, (state, outputs))))
    return out


def _kept(x: Any) -> Any:
    return x.copy() if isinstance(x, jax.Array) else x


def perturbed_arguments(step: Callable[..., Any], args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """The arguments of a step, each float moved by what one operation of the step may round."""
    unit = _unit_of_rounding(jax.make_jaxpr(step)(*args).jaxpr)
    random = np.random.default_rng(seed)

    def moved(x: Any) -> Any:
        x = x if hasattr(x, "dtype") else np.asarray(x)
        if not jax.numpy.issubdtype(x.dtype, np.inexact):
            return x
        x = np.asarray(x)
        return (x * (1 + unit * random.uniform(-1, 1, x.shape))).astype(x.dtype)

    return jax.tree.map(moved, args)


def noise_of(plain: Sequence[Any], others: Sequence[Sequence[Any]]) -> list[list[float]]:
    """For each call and leaf the largest distance that results from other arguments have from the plain ones."""
    return [
        [max(_distance(a, b) for b in same) for a, *same in zip(*map(jax.tree.leaves, at), strict=True)]
        for at in zip(plain, *others, strict=True)
    ]


def _unit_of_rounding(jaxpr: Any) -> float:
    """What one operation may round in the coarsest float type that a program computes in, sub-programs included.

    Sums of many terms round more than once; those of half precision are kept in float32.
    """
    dtypes = {v.aval.dtype for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "dtype")}
    infos = [jax.numpy.finfo(dtype) for dtype in dtypes if jax.numpy.issubdtype(dtype, np.inexact)]
    own = [float(info.eps) * (0.5 if info.bits == 16 else 16) for info in infos]
    inner = [_unit_of_rounding(found) for eqn in jaxpr.eqns for found in jax_compat.jaxprs_in(eqn)]
    return max([*own, *inner], default=0.0)


def _numbers(x: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.dtype.kind in "biu":
        return x
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _distance(a: Any, b: Any) -> float:
    """The largest difference; infinite where NaNs, infinities or whole numbers differ."""
    x, y = _numbers(a), _numbers(b)
    if x.dtype.kind in "biu":
        return 0.0 if np.array_equal(x, y) else np.inf
    finite = np.isfinite(x)
    if not np.array_equal(finite, np.isfinite(y)) or not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return np.inf
    return float(np.abs(x[finite] - y[finite]).max(initial=0.0))


def difference(
    expected: list[Any], got: list[Any], noise: list[list[float]], in_float64: Callable[[], list[Any]] | None = None
) -> str:
    """The first leaf that differs by more than reassociation explains; "" where none does.

    A leaf may be off by 8 times what rounding in the arguments makes of it, and by some units in the last place of its
    largest number; or be nearer to the result `in_float64` than the expected one is. Whole numbers that
    rounding changes (a position of the largest) are not compared.
    """
    for i, (wanted, made, moved) in enumerate(zip(expected, got, noise, strict=True)):
        if jax.tree.structure(wanted) != jax.tree.structure(made):
            return f"step {i}: another tree, {jax.tree.structure(made)} where {jax.tree.structure(wanted)} is right"
        leaves = jax.tree_util.tree_leaves_with_path(wanted)
        for (path, a), b, rounding in zip(leaves, jax.tree.leaves(made), moved, strict=True):
            where = f"step {i}, result{jax.tree_util.keystr(path)}"
            x, y = jax.numpy.asarray(a), jax.numpy.asarray(b)
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                return f"{where}: {y.dtype}{list(y.shape)} where {x.dtype}{list(x.shape)} is right"
            if jax.typeof(x).weak_type != jax.typeof(b).weak_type:
                return f"{where}: weak type {jax.typeof(b).weak_type}, not {jax.typeof(x).weak_type}"
            off = _distance(a, b)
            if np.isinf(rounding):
                continue
            exact = _numbers(a)
            allowed = 8 * rounding
            if jax.numpy.issubdtype(x.dtype, np.inexact):
                largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
                allowed += 32 * float(jax.numpy.finfo(x.dtype).eps) * largest + 1e-7
            if off > allowed and not (in_float64 and _is_nearer(in_float64()[i], path, b, a)):
                return f"{where}: off by {off:.2e}, {allowed:.0e} allowed; {_short(b)} where {_short(a)} is right"
    return ""


def _is_nearer(exact: Any, path: Any, got: Any, expected: Any) -> bool:
    """Whether a leaf is nearer to the exact one than what was expected is."""
    right = dict(jax.tree_util.tree_leaves_with_path(exact)).get(path)
    return right is not None and _distance(right, got) < _distance(right, expected)


def _short(x: Any) -> str:
    return np.array2string(np.asarray(_numbers(x)).reshape(-1)[:4], precision=5, separator=",")
