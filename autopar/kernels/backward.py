"""The gradient of a kernel from its own backward pass: a forward kernel with residuals, and a backward kernel.

Factors of residuals follow from their shapes: a dimension of a residual has the factor with which it grows. What the
backward pass gets that way is what the forward pass made on the same device. Where a residual cannot be told (one of
its dimensions is of several factors, or it has not a factor that may be split and depends on it), the backward kernel
computes the forward pass again. The gradient of an operand without a split factor is a sum over that factor's parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.ir.primitives import is_inexact
from autopar.kernels.factors import UNNAMED, KernelRule, Names
from autopar.kernels.operation import GradientOf, LocalFunction, vjp_in

# Sizes of a factor at which a kernel is traced to see what grows with it, as parts of the present one.
_OTHER_SIZES = ((1, 2), (2, 1), (3, 1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The two kernels of a differentiated call. `saved[i]`: the i-th residual is that operand, or (None) the next one
    that the forward kernel makes behind its results.
    """

    forward: LocalFunction
    backward: LocalFunction
    saved: tuple[int | None, ...]
    differentiated: tuple[int, ...]


def passes_of(function: LocalFunction, avals: Sequence[Any]) -> Passes:
    """The forward and the backward kernel of a function on operands of these shapes and types.

    Raises: what jax raises where the function cannot be differentiated.
    """
    return _Differentiated(function, avals).passes()


class _Differentiated:
    def __init__(self, function: LocalFunction, avals: Sequence[Any]) -> None:
        self.function, self.rule = function, function.rule
        self.structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        self.wrt = tuple(i for i, a in enumerate(avals) if is_inexact(a.dtype))
        self.num_results = len(function.rule.results)

    def vjp(self, *operands: Any) -> tuple[tuple[Any, ...], Any]:
        return vjp_in(self.function, self.wrt, operands)

    def with_residuals(self, *operands: Any) -> list[Any]:
        out, pull = self.vjp(*operands)
        return [*out, *jax.tree.leaves(pull)]

    def passes(self) -> Passes:
        jaxpr = jax_compat.open_jaxpr(jax.make_jaxpr(self.with_residuals)(*self.structs))
        residuals = jaxpr.outvars[self.num_results :]
        saved = tuple(jaxpr.invars.index(v) if v in jaxpr.invars else None for v in residuals)
        made = [i for i, source in enumerate(saved) if source is None]
        names = self.residual_names(jaxpr, made)
        if names is None:
            return self.recomputing()

        def forward(*operands: Any) -> tuple[Any, ...]:
            everything = self.with_residuals(*operands)
            return (*everything[: self.num_results], *(everything[self.num_results + i] for i in made))

        forward_rule = dataclasses.replace(self.rule, results=(*self.rule.results, *(names[i] for i in made)))
        kept = [names[i] if source is None else self.rule.operands[source] for i, source in enumerate(saved)]
        return Passes(
            forward=dataclasses.replace(self.function, function=forward, rule=forward_rule),
            backward=self.backward(kept, lambda residuals: residuals),
            saved=saved,
            differentiated=self.wrt,
        )

    def recomputing(self) -> Passes:
        """The backward kernel reads the operands, and makes the residuals itself."""

        def residuals(operands: Sequence[Any]) -> Sequence[Any]:
            return self.with_residuals(*operands)[self.num_results :]

        return Passes(
            forward=self.function,
            backward=self.backward(self.rule.operands, residuals),
            saved=tuple(range(len(self.structs))),
            differentiated=self.wrt,
        )

    def backward(self, kept: Sequence[Names], residuals: Callable[[Sequence[Any]], Sequence[Any]]) -> LocalFunction:
        out = self.function.program(self.structs).out_avals
        changing = [i for i, a in enumerate(out) if is_inexact(a.dtype)]
        changes = [self.rule.results[i] for i in changing]
        sizes = _read_sizes(self.rule.operands, [s.shape for s in self.structs])

        def run(*args: Any) -> tuple[Any, ...]:
            held, cotangents = args[: len(kept)], list(args[len(kept) :])
            here = {**sizes, **_read_sizes((*kept, *changes), [a.shape for a in args])}
            operands = [
                jax.ShapeDtypeStruct(tuple(here.get(x, n) for x, n in zip(names, s.shape, strict=True)), s.dtype)
                for names, s in zip(self.rule.operands, self.structs, strict=True)
            ]
            shapes, pull = jax.eval_shape(self.vjp, *operands)
            whole = [np.zeros(s.shape, jax.dtypes.float0) for s in shapes]
            for i, cotangent in zip(changing, cotangents, strict=True):
                whole[i] = cotangent
            return tuple(jax.tree.unflatten(jax.tree.structure(pull), residuals(held))(tuple(whole)))

        results = tuple(self.rule.operands[i] for i in self.wrt)
        split = self.rule.split
        rule = KernelRule(
            operands=(*kept, *changes),
            results=results,
            whole=self.rule.whole | {x for names in kept for x in names if x not in split},
            summed=frozenset(x for x in split if any(x not in names for names in results)),
        )
        twin = self.function.twin
        gradient_of = twin and GradientOf(
            function=self.function.function, twin=twin, operands=tuple(self.structs), differentiated=self.wrt
        )
        name = f"{self.function.name}, backward"
        return LocalFunction(name=name, function=run, rule=rule, gradient_of=gradient_of)

    # Factors of residuals

    def residual_names(self, jaxpr: Any, made: Sequence[int]) -> dict[int, Names] | None:
        """The factor of each dimension of the residuals that the forward pass makes; None where one cannot be told."""
        shapes = {i: tuple(jaxpr.outvars[self.num_results + i].aval.shape) for i in made}
        names: dict[int, list[str]] = {i: [UNNAMED] * len(shape) for i, shape in shapes.items()}
        for name in sorted(self.rule.split):
            grown = self.grown_with(name, shapes)
            if grown is None:
                return None
            for i, d in grown:
                if names[i][d] != UNNAMED or name in names[i]:
                    return None
                names[i][d] = name
        for i in made:
            if not self.read_by(jaxpr, jaxpr.outvars[self.num_results + i]) & self.rule.split <= {*names[i]}:
                return None
        return {i: tuple(x) for i, x in names.items()}

    def grown_with(self, name: str, shapes: dict[int, tuple[int, ...]]) -> list[tuple[int, int]] | None:
        """(residual, dimension) pairs whose sizes change with a factor, in proportion; None where that is not seen."""
        for times, by in _OTHER_SIZES:
            structs = []
            for names, s in zip(self.rule.operands, self.structs, strict=True):
                shape = tuple(n * times // by if x == name else n for x, n in zip(names, s.shape, strict=True))
                structs.append(jax.ShapeDtypeStruct(shape, s.dtype))
            sizes = _read_sizes(self.rule.operands, [s.shape for s in self.structs])
            if sizes.get(name, 1) % by or not sizes.get(name, 1) * times // by:
                continue
            try:
                other = jax.eval_shape(self.with_residuals, *structs)[self.num_results :]
            except Exception:  # the user's own code does not take this size
                continue
            grown = []
            for i, shape in shapes.items():
                if len(other) <= i or len(other[i].shape) != len(shape):
                    return None
                for d, (n, m) in enumerate(zip(shape, other[i].shape, strict=True)):
                    if n != m:
                        if n * times != m * by or n != sizes[name]:
                            return None
                        grown.append((i, d))
            return grown
        return None

    def read_by(self, jaxpr: Any, result: Any) -> frozenset[str]:
        """The factors of the operands that a result is computed of."""
        factors: dict[Any, frozenset[str]] = {
            v: frozenset(names) for v, names in zip(jaxpr.invars, self.rule.operands, strict=True)
        }
        for eqn in jaxpr.eqns:
            read = [factors.get(v, frozenset()) for v in eqn.invars if not isinstance(v, jax_compat.Literal)]
            for v in eqn.outvars:
                factors[v] = frozenset().union(*read)
        return frozenset() if isinstance(result, jax_compat.Literal) else factors.get(result, frozenset())


def _read_sizes(arrays: Sequence[Names], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    pairs = ((x, n) for names, shape in zip(arrays, shapes, strict=True) for x, n in zip(names, shape, strict=True))
    return {x: n for x, n in pairs if x != UNNAMED}
