"""Compares the kernels of a step, and their gradients, with their twins, on random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    for eqn, line in kernels_in(jaxpr):
        function = eqn.params["function"]
        where = f"kernel {function.name} at {line}"
        if function.twin is not None:
            args = random_operands([v.aval for v in eqn.invars])
            _compare(where, "result", jax.jit(lambda *xs, f=function: f(*xs))(*args), jax.jit(function.twin)(*args))
        if function.gradient_of is not None:
            _compare(where, "gradient", *_gradients(function.gradient_of))


def kernels_in(jaxpr: Any) -> Iterator[tuple[Any, str]]:
    """An equation of each kernel of a step, and the line of its call."""
    seen: set[Any] = set()

    def found(inside: Any, line: str) -> Iterator[tuple[Any, str]]:
        for eqn in inside.eqns:
            here = jax_compat.source_line(eqn) or line
            if is_kernel(eqn) and eqn.params["function"] not in seen:
                seen.add(eqn.params["function"])
                yield eqn, here
            for inner in jax_compat.jaxprs_in(eqn):
                yield from found(inner, here)

    return found(jaxpr, "")


def _gradients(of: GradientOf) -> tuple[Any, Any]:
    """The gradients of a kernel and of its twin, for the same operands and the same gradients of results."""
    args = random_operands(of.operands)
    out = jax.eval_shape(of.twin, *args)
    numbers = iter(random_operands([a for a in out if is_inexact(a.dtype)]))
    changes = [next(numbers) if is_inexact(a.dtype) else np.zeros(a.shape, jax.dtypes.float0) for a in out]
    made, expected = (
        jax.jit(lambda xs, f=f: vjp_in(f, of.differentiated, xs)[1](tuple(changes)))(args)
        for f in (lambda *xs: tuple(of.function(*xs)), of.twin)
    )
    return made, expected


def _compare(where: str, name: str, made: Sequence[Any], expected: Sequence[Any]) -> None:
    """Of the forward pass of a differentiated call, the residuals stand behind the results."""
    for i, (got, want) in enumerate(zip(made, expected, strict=False)):
        off, allowed, digits = difference_of(got, want)
        if not off <= allowed:  # also where it is no number
            raise InvalidArgumentError(
                where=where,
                expected=f"the numbers of its twin (like=) in {name} {i}, to {digits:.1e} of the largest",
                got=f"a difference of {off:.3g}, on random operands",
                hint="one of the two is wrong, or they compute different things (a scale, a mask, a layout)",
            )


def difference_of(got: Any, want: Any) -> tuple[float, float, float]:
    """(largest difference of two arrays, the largest that rounding explains, the same of the largest number)."""
    exact = jnp.promote_types(want.dtype, jnp.float32)
    off = float(jnp.max(jnp.abs(got.astype(exact) - want.astype(exact)), initial=0.0))
    largest = float(jnp.max(jnp.abs(want.astype(exact)), initial=0.0))
    digits = half_of_digits(want.dtype)
    return off, digits * largest, digits


def half_of_digits(dtype: Any) -> float:
    """The relative difference at which half of a type's digits agree; 0 for integers."""
    return math.sqrt(float(jnp.finfo(dtype).eps)) if is_inexact(dtype) else 0.0


def random_operands(avals: Sequence[Any]) -> list[Any]:
    """Normal numbers; zeros of integers, which may be positions or lengths."""
    keys = jax.random.split(jax.random.key(0), max(1, len(avals)))
    return [
        jax.random.normal(key, a.shape, jnp.float32).astype(a.dtype)
        if is_inexact(a.dtype)
        else jnp.zeros(a.shape, a.dtype)
        for key, a in zip(keys, avals, strict=False)
    ]
