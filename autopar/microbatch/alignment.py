"""Alignment of two traces of one function, on the whole batch and on a micro-batch.

A step may depend on the number of examples in two ways. Shapes depend on it, as micro-batches require. Literals of the
program depend on it too (a mean divides by it): they are taken from the trace of the whole batch, so that the partial
sums of the micro-batches add up to the result of the whole batch.
"""

from __future__ import annotations

from typing import Any

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.microbatch.jaxpr_pairs import PairRewriter


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
