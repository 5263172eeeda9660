"""The program of a step for one example, extrapolated from those for two and three examples.

A trace on one example is another program for many functions: broadcasts over the examples disappear. The operations for
two and for three examples are equal, on shapes that grow by the same amount from example to example, and give the
program for one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.microbatch.jaxpr_pairs import PairRewriter


def extrapolated(two: Any, three: Any, where: str) -> Any:
    """The jaxpr on one example, where `two` and `three` are the same function's on two and on three.

    Open or closed jaxprs; jaxprs inside of equations follow. Sizes that grow evenly, in shapes and in parameters, are
    one step smaller than in `two`; everything else must be equal.
    Raises: UnsupportedError when they are not the same operations.
    """
    return _Extrapolation().rewrite(two, three, where)


class _Extrapolation(PairRewriter):
    """The program on two examples is the base, that on three the other."""

    def variable(self, base: Any, other: Any, where: str) -> Any:
        return jax_compat.variable_like(base, self.parameter(base.aval.shape, other.aval.shape, where))

    def literal(self, base: Any, other: Any) -> Any:
        return base

    def parameter(self, base: Any, other: Any, where: str) -> Any:
        """A size, or something of sizes, one step further down."""
        if isinstance(base, (tuple, list)) and type(base) is type(other) and len(base) == len(other):
            members = [self.parameter(a, b, where) for a, b in zip(base, other, strict=True)]
            return base._make(members) if hasattr(base, "_make") else type(base)(members)
        if isinstance(base, (int, np.integer)) and isinstance(other, (int, np.integer)) and not isinstance(base, bool):
            of_one = 2 * int(base) - int(other)
            if of_one < 0 <= base:  # the third example, or the rest behind the second
                raise self.difference(where, str(base), str(other))
            return type(base)(of_one)  # numpy's numbers stay such
        # Functions made by tracing are equal to nothing, and hold no sizes of their own.
        if callable(base) or hasattr(base, "call_wrapped"):
            return base
        try:
            is_equal = bool(base == other) or repr(base) == repr(other)  # nan is not equal to itself
        except (TypeError, ValueError):  # arrays among them
            is_equal = False
        if not is_equal:
            raise self.difference(where, repr(base)[:60], repr(other)[:60])
        return base

    def result(self, base: Any, other: Any, inner: Any, where: str) -> Any:
        constvars = (jax_compat.open_jaxpr(j).constvars for j in (base, other))
        for a, b in zip(*constvars, strict=True):
            if a.aval.shape != b.aval.shape:
                raise self.difference(where, f"a constant of shape {a.aval.shape}", f"{b.aval.shape}")
        is_open = jax_compat.open_jaxpr(base) is base and not jax_compat.jaxpr_consts(base)
        return inner if is_open else jax_compat.closed_like(base, inner)

    def difference(self, where: str, base: str, other: str) -> UnsupportedError:
        return UnsupportedError(
            where=where,
            expected=f"the same operations for two examples as for three ({base})",
            got=f"others ({other})",
            hint="do not let Python branch on the number of examples, or take micro-batches of two examples",
        )
