"""The program of a step for one example, extrapolated from those for two and three examples.

Traced on one example, many functions become another program: broadcasts over the examples disappear. The operations for
two and for three examples are equal, on shapes that grow by the same amount from example to example. The program for
one example is extrapolated from them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.microbatch.alignment import first_difference


def extrapolated(two: Any, three: Any, where: str) -> Any:
    """The jaxpr on one example, where `two` and `three` are the same function's on two and on three.

    Open or closed jaxprs; jaxprs inside of equations follow. Sizes that grow evenly, in shapes and in parameters, are
    one step smaller than in `two`; everything else must be equal.
    Raises: UnsupportedError when they are not the same operations.
    """
    small, large = jax_compat.open_jaxpr(two), jax_compat.open_jaxpr(three)
    counts = [(len(j.constvars), len(j.invars), len(j.outvars), len(j.eqns)) for j in (small, large)]
    if counts[0] != counts[1]:
        raise _difference(first_difference(small, large, where), f"{counts[0][3]} operations", f"{counts[1][3]}")
    new: dict[Any, Any] = {}  # by variable of the smaller one
    counterpart: dict[Any, Any] = {}

    def variable(a: Any, b: Any) -> Any:
        new[a] = jax_compat.variable_like(a, _value(a.aval.shape, b.aval.shape, where))
        counterpart[a] = b
        return new[a]

    def atom(a: Any, b: Any) -> Any:
        if isinstance(a, jax_compat.Literal):
            if not isinstance(b, jax_compat.Literal) or a.aval.str_short() != b.aval.str_short():
                raise _difference(where, f"operand {a}", f"{b}")
            return a
        if counterpart.get(a) is not b:
            raise _difference(where, f"operand {a}", f"{b}")
        return new[a]

    constants: list[tuple[Any, Any]] = list(zip(small.constvars, large.constvars, strict=True))
    for one, other in constants:
        if one.aval.shape != other.aval.shape:
            raise _difference(where, f"a constant of shape {one.aval.shape}", f"{other.aval.shape}")
    constvars = [variable(a, b) for a, b in constants]
    invars = [variable(a, b) for a, b in zip(small.invars, large.invars, strict=True)]
    eqns = []
    for a, b in zip(small.eqns, large.eqns, strict=True):
        at = f"{where} at {jax_compat.source_line(a)}"
        shape_of_eqn = [(len(e.invars), len(e.outvars), sorted(e.params)) for e in (a, b)]
        if a.primitive.name != b.primitive.name or shape_of_eqn[0] != shape_of_eqn[1]:
            raise _difference(at, a.primitive.name, b.primitive.name)
        operands = [atom(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
        params = {name: _parameter(value, b.params[name], at) for name, value in a.params.items()}
        results = [variable(x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]
        eqns.append(a.replace(invars=operands, outvars=results, params=params))
    outvars = [atom(x, y) for x, y in zip(small.outvars, large.outvars, strict=True)]
    inner = small.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)
    return inner if small is two and not jax_compat.jaxpr_consts(two) else jax_compat.closed_like(two, inner)


def _parameter(two: Any, three: Any, where: str) -> Any:
    if hasattr(jax_compat.open_jaxpr(two), "eqns"):
        return extrapolated(two, three, where)
    return _value(two, three, where)


def _value(two: Any, three: Any, where: str) -> Any:
    """A size, or something of sizes, one step further down."""
    if isinstance(two, (tuple, list)) and type(two) is type(three) and len(two) == len(three):
        members = [_parameter(a, b, where) for a, b in zip(two, three, strict=True)]
        return two._make(members) if hasattr(two, "_make") else type(two)(members)
    if isinstance(two, (int, np.integer)) and isinstance(three, (int, np.integer)) and not isinstance(two, bool):
        one = 2 * int(two) - int(three)
        if one < 0 <= two:  # the third example, or the rest behind the second
            raise _difference(where, str(two), str(three))
        return type(two)(one)  # numpy's numbers stay such
    # Functions made by tracing are equal to nothing, and hold no sizes of their own.
    if callable(two) or hasattr(two, "call_wrapped"):
        return two
    try:
        same = bool(two == three) or repr(two) == repr(three)  # nan is not equal to itself
    except (TypeError, ValueError):  # arrays among them
        same = False
    if not same:
        raise _difference(where, repr(two)[:60], repr(three)[:60])
    return two


def _difference(where: str, two: str, three: str) -> UnsupportedError:
    return UnsupportedError(
        where=where,
        expected=f"the same operations for two examples as for three ({two})",
        got=f"others ({three})",
        hint="do not let Python branch on the number of examples, or take micro-batches of two examples",
    )
