"""Compares each kernel of a step with itself in parts, along each factor that its rule lets devices split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.ir.graph import FactorKind
from autopar.ir.primitives import is_inexact
from autopar.ops.kernels.operation import GradientOf, LocalFunction, Names, is_kernel, kind_of, vjp_in

# Compares the kernels of a step, and their gradients, with their twins, on random numbers.


def check_twins(jaxpr: Any) -> None:
    """Raises: InvalidArgumentError for a kernel whose results are not those of its twin to half of their digits."""
    for eqn, line in kernels_in(jaxpr):
        function = eqn.params["function"]
        where = f"kernel {function.name} at {line}"
        if function.twin is not None:
            args = random_operands([v.aval for v in eqn.invars])
            _compare_twins(
                where, "result", jax.jit(lambda *xs, f=function: f(*xs))(*args), jax.jit(function.twin)(*args)
            )
        if function.gradient_of is not None:
            _compare_twins(where, "gradient", *_gradients(function.gradient_of))


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


def _compare_twins(where: str, name: str, made: Sequence[Any], expected: Sequence[Any]) -> None:
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


def check_rules(jaxpr: Any) -> tuple[str, ...]:
    """The factors that could not be checked because the kernel does not run here, whole or in parts, with the reason.

    A factor is cut by its smallest divisor. Parts on whose shapes the kernel cannot be traced are no strategy, and are
    left out. Random numbers for the whole are cut for the parts; their results are joined, or added up.

    Raises: InvalidArgumentError for a kernel whose parts are not its result to half of their digits.
    """
    unchecked: list[str] = []
    for eqn, line in kernels_in(jaxpr):
        function, out = eqn.params["function"], [v.aval for v in eqn.outvars]
        operands = random_operands([v.aval for v in eqn.invars])
        run = jax.jit(lambda *xs, f=function: f(*xs))
        for name in sorted(function.rule.split):
            parts = _parts(function, name, operands, out)
            if parts is None:
                continue
            where = f"kernel {function.name} at {line}"
            try:
                whole, made = run(*operands), [run(*part) for part in parts]
            except Exception as error:  # of the user's own code, or of a compiler that does not take these shapes
                unchecked.append(f"{where}, factor {name!r}: {type(error).__name__}: {str(error)[:80]}")
                continue
            _compare(where, function, name, whole, made)
    return tuple(unchecked)


def _parts(
    function: LocalFunction, name: str, operands: Sequence[Any], out: Sequence[Any]
) -> list[tuple[Any, ...]] | None:
    """The operands of each part of a factor; None where the factor is not split, or the kernel takes no such parts."""
    rule = function.rule
    arrays = zip((*rule.operands, *rule.results), (*operands, *out), strict=True)
    size = next(a.shape[names.index(name)] for names, a in arrays if name in names)
    if size < 2 or kind_of(rule, name, out) is FactorKind.FIXED:
        return None
    count = next(n for n in range(2, size + 1) if size % n == 0)
    cut = [
        jnp.split(a, count, names.index(name)) if name in names else [a] * count
        for names, a in zip(rule.operands, operands, strict=True)
    ]
    parts = list(zip(*cut, strict=True))
    try:
        made = function.program(parts[0]).out_avals
    except Exception:  # the user's own code does not take these shapes
        return None
    expected = [
        tuple(n // count if x == name else n for x, n in zip(names, a.shape, strict=True))
        for names, a in zip(rule.results, out, strict=True)
    ]
    return parts if [tuple(a.shape) for a in made] == expected else None


def _compare(where: str, function: LocalFunction, name: str, whole: Sequence[Any], made: Sequence[Any]) -> None:
    rule, summed = function.rule, kind_of(function.rule, name, whole) is FactorKind.SUM
    for i, (names, want) in enumerate(zip(rule.results, whole, strict=True)):
        known = jnp.isfinite(want)  # what a kernel leaves unwritten, or random numbers overflow, says nothing
        joined = _joined(names, name, [results[i] for results in made], summed)
        off, allowed, digits = max(
            (difference_of(jnp.where(known, got, 0), jnp.where(known, want, 0)) for got in joined),
            key=lambda found: math.inf if math.isnan(found[0]) else found[0],
        )
        if not off <= allowed:
            raise InvalidArgumentError(
                where=where,
                expected=f"its numbers in result {i}, to {digits:.1e} of the largest, also when {len(made)} parts "
                f"along factor {name!r} are {'added up' if summed and name not in names else 'put together'}, as the "
                f"rule allows: {rule}",
                got=f"a largest difference of {off:.3g}, on random operands",
                hint=f"mark it [{name}], or whole=({name!r},), where the kernel needs it whole; summed=({name!r},) "
                "where each part gives a summand; a twin (like=) says which it is",
            )


def _joined(names: Names, name: str, made: Sequence[Any], summed: bool) -> list[Any]:
    """The whole result from those of the parts; each of them where every part should make the same."""
    if name in names:
        return [jnp.concatenate(made, names.index(name))]
    return [sum(made[1:], made[0])] if summed else list(made)
