"""Alignment of two traces of one function, on the whole batch and on a micro-batch.

A step may depend on the number of examples in two ways. Shapes depend on it, as micro-batches require. Literals of the
program depend on it too (a mean divides by it): they are taken from the trace of the whole batch, so that the partial
sums of the micro-batches add up to the result of the whole batch.
"""

from __future__ import annotations

import itertools
from typing import Any

from autopar.common import jax_compat
from autopar.errors import UnsupportedError

_HINT = "do not let Python branch on the number of examples, and take sizes from the arrays rather than writing them"


def with_literals_of(whole: Any, part: Any, where: str) -> Any:
    """The jaxpr `part` with the literals and, where their shapes agree, the constants of `whole`.

    Both are open or closed jaxprs of one function on other shapes; jaxprs inside of equations are held against each
    other too.
    Raises: UnsupportedError when they are not the same operations on the same values.
    """
    one, other = jax_compat.open_jaxpr(whole), jax_compat.open_jaxpr(part)
    number: dict[Any, Any] = {}
    sizes = (len(one.constvars), len(one.invars), len(one.outvars), len(one.eqns))
    if sizes != (len(other.constvars), len(other.invars), len(other.outvars), len(other.eqns)):
        at = first_difference(one, other, where)
        raise _difference(at, f"{len(one.eqns)} operations", f"{len(other.eqns)}")
    number.update(zip((*one.constvars, *one.invars), (*other.constvars, *other.invars), strict=True))

    def atom(a: Any, b: Any, at: str) -> Any:
        if isinstance(a, jax_compat.Literal) and isinstance(b, jax_compat.Literal):
            if a.aval.str_short() == b.aval.str_short():
                return a
        elif not isinstance(a, jax_compat.Literal) and number.get(a) is b:
            return b
        raise _difference(at, f"operand {a}", f"{b}")

    eqns = []
    for a, b in zip(one.eqns, other.eqns, strict=True):
        at = f"{where} at {jax_compat.source_line(b)}"
        if a.primitive is not b.primitive and a.primitive.name != b.primitive.name:
            raise _difference(at, a.primitive.name, b.primitive.name)
        if (len(a.invars), len(a.outvars)) != (len(b.invars), len(b.outvars)) or set(a.params) != set(b.params):
            raise _difference(at, f"{a.primitive.name} of {len(a.invars)} operands", f"{len(b.invars)}")
        invars = [atom(x, y, at) for x, y in zip(a.invars, b.invars, strict=True)]
        params = {k: _parameter(a.params[k], v, where) for k, v in b.params.items()}
        number.update(zip(a.outvars, b.outvars, strict=True))
        eqns.append(b.replace(invars=invars, params=params))
    outvars = [atom(x, y, where) for x, y in zip(one.outvars, other.outvars, strict=True)]
    consts = [
        a if a.shape == b.shape and a.dtype == b.dtype else b
        for a, b in zip(jax_compat.jaxpr_consts(whole), jax_compat.jaxpr_consts(part), strict=True)
    ]
    return jax_compat.with_equations(part, eqns, outvars, consts)


def first_difference(one: Any, other: Any, where: str) -> str:
    """Where two jaxprs begin to differ: `where` with the line of the user's code that the longer one has there."""
    longer, shorter = (one, other) if len(one.eqns) >= len(other.eqns) else (other, one)
    for a, b in itertools.zip_longest(longer.eqns, shorter.eqns):
        if b is None or a.primitive.name != b.primitive.name or len(a.invars) != len(b.invars):
            line = jax_compat.source_line(a)
            return f"{where} at {line}" if line else where
    return where


def _parameter(whole: Any, part: Any, where: str) -> Any:
    if hasattr(jax_compat.open_jaxpr(part), "eqns"):
        return with_literals_of(whole, part, where)
    if isinstance(part, (tuple, list)) and any(hasattr(jax_compat.open_jaxpr(p), "eqns") for p in part):
        members = [_parameter(a, b, where) for a, b in zip(whole, part, strict=True)]
        return part._make(members) if hasattr(part, "_make") else type(part)(members)
    return part


def _difference(where: str, whole: str, part: str) -> UnsupportedError:
    return UnsupportedError(
        where=where,
        expected=f"the same operations for a micro-batch as for the whole batch ({whole})",
        got=f"others ({part})",
        hint=_HINT,
    )
