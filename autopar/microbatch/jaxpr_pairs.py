"""Jaxprs written from two traces of one function on different shapes, equation by equation.

The two traces have to be the same operations on the same values. One of them, the base, gives the equations; a
`PairRewriter` chooses variables, literals and parameters.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from typing import Any

from autopar.common import jax_compat
from autopar.errors import UnsupportedError


class PairRewriter(abc.ABC):
    """Rewrites a base jaxpr along another one, with the jaxprs inside of equations."""

    @abc.abstractmethod
    def variable(self, base: Any, other: Any, where: str) -> Any:
        """The variable for a variable of the base and its counterpart."""

    @abc.abstractmethod
    def literal(self, base: Any, other: Any) -> Any:
        """The literal for two literals of equal shape and type."""

    @abc.abstractmethod
    def parameter(self, base: Any, other: Any, where: str) -> Any:
        """The parameter of an equation for two parameters without jaxprs."""

    @abc.abstractmethod
    def result(self, base: Any, other: Any, inner: Any, where: str) -> Any:
        """The rewritten jaxpr, open or closed as the base."""

    @abc.abstractmethod
    def difference(self, where: str, base: str, other: str) -> UnsupportedError:
        """The error for two jaxprs that differ."""

    def rewrite(self, base: Any, other: Any, where: str, caller: str = "") -> Any:
        """The rewritten jaxpr of a pair, open or closed as the base; `caller` is the place of the equation that has it.

        Raises: UnsupportedError for differences beyond sizes.
        """
        a, b = jax_compat.open_jaxpr(base), jax_compat.open_jaxpr(other)
        counts = [(len(j.constvars), len(j.invars), len(j.outvars), len(j.eqns)) for j in (a, b)]
        if counts[0] != counts[1]:
            raise self.difference(_first_difference(a, b, where), f"{len(a.eqns)} operations", f"{len(b.eqns)}")
        rewritten: dict[Any, Any] = {}  # by variable of the base
        counterpart: dict[Any, Any] = {}

        def bind(xs: Sequence[Any], ys: Sequence[Any], at: str) -> list[Any]:
            for x, y in zip(xs, ys, strict=True):
                rewritten[x], counterpart[x] = self.variable(x, y, at), y
            return [rewritten[x] for x in xs]

        def atom(x: Any, y: Any, at: str) -> Any:
            if isinstance(x, jax_compat.Literal) and isinstance(y, jax_compat.Literal):
                if x.aval.str_short() == y.aval.str_short():
                    return self.literal(x, y)
            elif not isinstance(x, jax_compat.Literal) and counterpart.get(x) is y:
                return rewritten[x]
            raise self.difference(at, *_types(x, y))

        constvars, invars = bind(a.constvars, b.constvars, where), bind(a.invars, b.invars, where)
        eqns = []
        for x, y in zip(a.eqns, b.eqns, strict=True):
            at = f"{where} at {jax_compat.source_line(x)}"
            if x.primitive.name != y.primitive.name:
                raise self.difference(at, x.primitive.name, y.primitive.name)
            if (len(x.invars), len(x.outvars)) != (len(y.invars), len(y.outvars)) or set(x.params) != set(y.params):
                raise self.difference(at, f"{x.primitive.name} of {len(x.invars)} operands", f"{len(y.invars)}")
            operands = [atom(v, w, at) for v, w in zip(x.invars, y.invars, strict=True)]
            params = {name: self._parameter(value, y.params[name], where, at) for name, value in x.params.items()}
            eqns.append(x.replace(invars=operands, outvars=bind(x.outvars, y.outvars, at), params=params))
        outvars = [atom(x, y, caller or where) for x, y in zip(a.outvars, b.outvars, strict=True)]
        inner = a.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)
        return self.result(base, other, inner, where)

    def _parameter(self, base: Any, other: Any, where: str, at: str) -> Any:
        if jax_compat.is_jaxpr(base):
            return self.rewrite(base, other, where, at)
        if isinstance(base, (tuple, list)) and any(map(jax_compat.is_jaxpr, base)):
            members = [self._parameter(x, y, where, at) for x, y in zip(base, other, strict=True)]
            return base._make(members) if hasattr(base, "_make") else type(base)(members)
        return self.parameter(base, other, at)


def _types(first: Any, second: Any) -> tuple[str, str]:
    """What tells two operands or results apart, in words of the user: their types, or that their makers differ."""
    types = [
        f"{'a number' if isinstance(x, jax_compat.Literal) else 'a value'} of type {x.aval.str_short()}"
        for x in (first, second)
    ]
    return (types[0], types[1]) if types[0] != types[1] else (f"{types[0]} of another operation", types[1])


def _first_difference(first: Any, second: Any, where: str) -> str:
    """The place at which two jaxprs begin to differ: `where` with the line of the user's code in the longer one."""
    longer, shorter = (first, second) if len(first.eqns) >= len(second.eqns) else (second, first)
    for a, b in itertools.zip_longest(longer.eqns, shorter.eqns):
        if b is None or a.primitive.name != b.primitive.name or len(a.invars) != len(b.invars):
            line = jax_compat.source_line(a)
            return f"{where} at {line}" if line else where
    return where


# Alignment of two traces of one function, on the whole batch and on a micro-batch.
#
# A step may depend on the number of examples in two ways. Shapes depend on it, as micro-batches require. Literals of
# the program depend on it too (a mean divides by it): they are taken from the trace of the whole batch, so that the
# partial sums of the micro-batches add up to the result of the whole batch.


def with_literals_of(whole: Any, part: Any, where: str) -> Any:
    """The jaxpr `part` with the literals and, where their shapes agree, the constants of `whole`.

    Both are open or closed jaxprs of one function on other shapes; jaxprs inside of equations are aligned too.
    Raises: UnsupportedError when they are not the same operations on the same values.
    """
    return _Alignment().rewrite(part, whole, where)


class _Alignment(PairRewriter):
    """The micro-batch's program is the base, the whole batch's the other."""

    def variable(self, base: Any, other: Any, where: str) -> Any:
        return base

    def literal(self, base: Any, other: Any) -> Any:
        return other

    def parameter(self, base: Any, other: Any, where: str) -> Any:
        return base

    def result(self, base: Any, other: Any, inner: Any, where: str) -> Any:
        consts = [
            b if a.shape == b.shape and a.dtype == b.dtype else a
            for a, b in zip(jax_compat.jaxpr_consts(base), jax_compat.jaxpr_consts(other), strict=True)
        ]
        return jax_compat.with_equations(base, inner.eqns, inner.outvars, consts)

    def difference(self, where: str, base: str, other: str) -> UnsupportedError:
        return UnsupportedError(
            where=where,
            expected=f"the same operations for a micro-batch as for the whole batch ({other})",
            got=f"others ({base})",
            hint="do not let Python branch on the number of examples, and take sizes from the arrays rather than "
            "writing them",
        )
