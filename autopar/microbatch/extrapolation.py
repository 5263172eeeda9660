"""The program of a step for one number of examples, from those for two other numbers.

A trace on one example is another program for many functions: broadcasts over the examples disappear. The operations for
two and for three examples are equal, on shapes that grow by the same amount from example to example, and give the
program for one. Where a step is wanted for several numbers, this is faster than to trace it for each.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.microbatch.jaxpr_pairs import PairRewriter


def extrapolated(few: Any, more: Any, where: str, examples: tuple[int, int, int] = (1, 2, 3)) -> Any:
    """The jaxpr on the first number of examples, where `few` and `more` are the same function's on the others.

    Open or closed jaxprs; jaxprs inside of equations follow. Sizes, in shapes and in parameters, grow evenly;
    everything else must be equal, but for literals, which are those of `few`.
    Raises: UnsupportedError when they are not the same operations, or a size cannot grow evenly.
    """
    wanted, at_few, at_more = examples
    return _Extrapolation(Fraction(wanted - at_few, at_more - at_few), examples).rewrite(few, more, where)


class _Extrapolation(PairRewriter):
    """The program on few examples is the base, that on more the other; `part`: of the way from one to the other."""

    def __init__(self, part: Fraction, examples: tuple[int, int, int]) -> None:
        self.part, self.examples = part, examples

    def variable(self, base: Any, other: Any, where: str) -> Any:
        return jax_compat.variable_like(base, self.parameter(base.aval.shape, other.aval.shape, where))

    def literal(self, base: Any, other: Any) -> Any:
        return base

    def parameter(self, base: Any, other: Any, where: str) -> Any:
        """A size, or something of sizes, on the wanted number of examples."""
        if base is other or (type(base) is int and base == other):  # most are
            return base
        if isinstance(base, (tuple, list)) and type(base) is type(other) and len(base) == len(other):
            members = [self.parameter(a, b, where) for a, b in zip(base, other, strict=True)]
            return base._make(members) if hasattr(base, "_make") else type(base)(members)
        if isinstance(base, (int, np.integer)) and isinstance(other, (int, np.integer)) and not isinstance(base, bool):
            size = int(base) + (int(other) - int(base)) * self.part
            # Not so where a size names the third example, or the rest behind the second.
            if size.denominator != 1 or size < 0 <= base:
                raise self.difference(where, str(base), str(other))
            return type(base)(int(size))  # numpy's numbers stay such
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
        _, few, more = self.examples
        return UnsupportedError(
            where=where,
            expected=f"the same operations for {few} examples as for {more} ({base})",
            got=f"others ({other})",
            hint="do not let Python branch on the number of examples, or take micro-batches of two examples",
        )
