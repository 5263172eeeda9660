"""Compares the kernels of a step with their twins, on random numbers of the shapes of the calls."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.ir.primitives import is_inexact
from autopar.kernels.operation import is_kernel


def check_twins(jaxpr: Any) -> None:
    """Raises: InvalidArgumentError for a kernel whose results are not those of its twin to half of their digits."""
    _check_all(jaxpr, "", set())


def _check_all(jaxpr: Any, line: str, checked: set[Any]) -> None:
    """`line` is that of the call around a jaxpr, `checked` the functions that are done."""
    for eqn in jaxpr.eqns:
        here = jax_compat.source_line(eqn) or line
        if is_kernel(eqn) and eqn.params["function"].twin is not None and eqn.params["function"] not in checked:
            checked.add(eqn.params["function"])
            _check(eqn, here)
        for inner in jax_compat.jaxprs_in(eqn):
            _check_all(inner, here, checked)


def _check(eqn: Any, line: str) -> None:
    function = eqn.params["function"]
    keys = jax.random.split(jax.random.key(0), len(eqn.invars))
    args = [_random(key, v.aval) for key, v in zip(keys, eqn.invars, strict=True)]
    expected = jax.jit(function.twin)(*args)
    made = jax.jit(lambda *xs: function(*xs))(*args)[: len(expected)]
    for i, (got, want) in enumerate(zip(made, expected, strict=True)):
        exact = jnp.promote_types(want.dtype, jnp.float32)
        off = float(jnp.max(jnp.abs(got.astype(exact) - want.astype(exact)), initial=0.0))
        largest = float(jnp.max(jnp.abs(want.astype(exact)), initial=0.0))
        digits = math.sqrt(float(jnp.finfo(want.dtype).eps)) if is_inexact(want.dtype) else 0.0
        if not off <= digits * largest:  # also where it is no number
            raise InvalidArgumentError(
                where=f"kernel {function.name} at {line}",
                expected=f"the numbers of its twin (like=) in result {i}, to {digits:.1e} of the largest",
                got=f"a difference of {off:.3g}, on random operands",
                hint="one of the two is wrong, or they compute different things (a scale, a mask, a layout)",
            )


def _random(key: Any, aval: Any) -> Any:
    """Normal numbers; zeros of integers, which may be positions or lengths."""
    if not is_inexact(aval.dtype):
        return jnp.zeros(aval.shape, aval.dtype)
    return jax.random.normal(key, aval.shape, jnp.float32).astype(aval.dtype)
