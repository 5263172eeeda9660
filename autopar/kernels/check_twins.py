"""Compares the kernels of a step, and their gradients, with their twins, on random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.ir.primitives import is_inexact
from autopar.kernels.operation import GradientOf, is_kernel, vjp_in


def check_twins(jaxpr: Any) -> None:
    """Raises: InvalidArgumentError for a kernel whose results are not those of its twin to half of their digits."""
    _check_all(jaxpr, "", set())


def _check_all(jaxpr: Any, line: str, checked: set[Any]) -> None:
    """`line` is that of the call around a jaxpr, `checked` the functions that are done."""
    for eqn in jaxpr.eqns:
        here = jax_compat.source_line(eqn) or line
        if is_kernel(eqn) and eqn.params["function"] not in checked:
            function = eqn.params["function"]
            checked.add(function)
            where = f"kernel {function.name} at {here}"
            if function.twin is not None:
                args = _random([v.aval for v in eqn.invars])
                _compare(where, "result", jax.jit(lambda *xs, f=function: f(*xs))(*args), jax.jit(function.twin)(*args))
            if function.gradient_of is not None:
                _compare(where, "gradient", *_gradients(function.gradient_of))
        for inner in jax_compat.jaxprs_in(eqn):
            _check_all(inner, here, checked)


def _gradients(of: GradientOf) -> tuple[Any, Any]:
    """The gradients of a kernel and of its twin, for the same operands and the same gradients of results."""
    args = _random(of.operands)
    out = jax.eval_shape(of.twin, *args)
    numbers = iter(_random([a for a in out if is_inexact(a.dtype)]))
    changes = [next(numbers) if is_inexact(a.dtype) else np.zeros(a.shape, jax.dtypes.float0) for a in out]
    made, expected = (
        jax.jit(lambda xs, f=f: vjp_in(f, of.differentiated, xs)[1](tuple(changes)))(args)
        for f in (lambda *xs: tuple(of.function(*xs)), of.twin)
    )
    return made, expected


def _compare(where: str, name: str, made: Sequence[Any], expected: Sequence[Any]) -> None:
    """Of the forward pass of a differentiated call, the residuals stand behind the results."""
    for i, (got, want) in enumerate(zip(made, expected, strict=False)):
        exact = jnp.promote_types(want.dtype, jnp.float32)
        off = float(jnp.max(jnp.abs(got.astype(exact) - want.astype(exact)), initial=0.0))
        largest = float(jnp.max(jnp.abs(want.astype(exact)), initial=0.0))
        digits = math.sqrt(float(jnp.finfo(want.dtype).eps)) if is_inexact(want.dtype) else 0.0
        if not off <= digits * largest:  # also where it is no number
            raise InvalidArgumentError(
                where=where,
                expected=f"the numbers of its twin (like=) in {name} {i}, to {digits:.1e} of the largest",
                got=f"a difference of {off:.3g}, on random operands",
                hint="one of the two is wrong, or they compute different things (a scale, a mask, a layout)",
            )


def _random(avals: Sequence[Any]) -> list[Any]:
    """Normal numbers; zeros of integers, which may be positions or lengths."""
    keys = jax.random.split(jax.random.key(0), max(1, len(avals)))
    return [
        jax.random.normal(key, a.shape, jnp.float32).astype(a.dtype)
        if is_inexact(a.dtype)
        else jnp.zeros(a.shape, a.dtype)
        for key, a in zip(keys, avals, strict=False)
    ]
