"""A step on fewer examples: the number of examples in its batch, its trace on a smaller batch, and this trace with the
literals of the whole batch.

A step may depend on the number of examples in two ways. Shapes depend on it, as micro-batches require. Literals of the
program depend on it too (a mean divides by it): they are taken from the trace of the whole batch, so that the partial
sums of the micro-batches add up to the result of the whole batch. Both traces have to be the same operations on the
same values, and are aligned equation by equation, with the jaxprs inside of equations.

A trace on one example is another program for many functions: broadcasts over the examples disappear. The program of one
follows from a trace on two and that of the whole batch, as sizes grow evenly with the examples.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.errors import BatchMismatchError, UnsupportedError
from autopar.ir.traced_step import TracedStep


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


def with_literals_of(whole: Any, part: Any, where: str, way: Fraction = Fraction(0)) -> Any:
    """The jaxpr `part` with the literals and, where their shapes agree, the constants of `whole`.

    Both are open or closed jaxprs of one function on other shapes. `way`: the part of the way from `part` to `whole` at
    which the sizes are wanted; below 0: on fewer examples than `part` has.
    Raises: UnsupportedError when they are not the same operations on the same values, or a size does not grow evenly.
    """
    return _Alignment(way).rewrite(part, whole, where)


class _Alignment:
    """Rewrites a jaxpr, the base, along another one with as many operations."""

    def __init__(self, way: Fraction) -> None:
        self.way = way

    def rewrite(self, base: Any, other: Any, where: str, caller: str = "") -> Any:
        """The rewritten jaxpr, open or closed as the base; `caller` is the place of the equation that has it."""
        a, b = jax_compat.open_jaxpr(base), jax_compat.open_jaxpr(other)
        counts = [(len(j.constvars), len(j.invars), len(j.outvars), len(j.eqns)) for j in (a, b)]
        if counts[0] != counts[1]:
            raise self._difference(_first_difference(a, b, where), f"{len(a.eqns)} operations", f"{len(b.eqns)}")
        rewritten: dict[Any, Any] = {}  # by variable of the base
        counterpart: dict[Any, Any] = {}

        def bind(xs: Sequence[Any], ys: Sequence[Any], at: str) -> list[Any]:
            for x, y in zip(xs, ys, strict=True):
                shape = self._size(x.aval.shape, y.aval.shape, at) if self.way else ()
                rewritten[x] = jax_compat.variable_like(x, shape) if self.way else x
                counterpart[x] = y
            return [rewritten[x] for x in xs]

        def atom(x: Any, y: Any, at: str) -> Any:
            if isinstance(x, jax_compat.Literal) and isinstance(y, jax_compat.Literal):
                if x.aval.str_short() == y.aval.str_short():
                    return y
            elif not isinstance(x, jax_compat.Literal) and counterpart.get(x) is y:
                return rewritten[x]
            raise self._difference(at, *_types(x, y))

        for x, y in zip(a.constvars, b.constvars, strict=True) if self.way else ():
            if x.aval.shape != y.aval.shape:  # its numbers on other examples are not known
                raise self._difference(where, f"a constant of shape {x.aval.shape}", f"{y.aval.shape}")
        constvars, invars = bind(a.constvars, b.constvars, where), bind(a.invars, b.invars, where)
        eqns = []
        for x, y in zip(a.eqns, b.eqns, strict=True):
            at = f"{where} at {jax_compat.source_line(x)}"
            if x.primitive.name != y.primitive.name:
                raise self._difference(at, x.primitive.name, y.primitive.name)
            if (len(x.invars), len(x.outvars)) != (len(y.invars), len(y.outvars)) or set(x.params) != set(y.params):
                raise self._difference(at, f"{x.primitive.name} of {len(x.invars)} operands", f"{len(y.invars)}")
            operands = [atom(v, w, at) for v, w in zip(x.invars, y.invars, strict=True)]
            params = {name: self._parameter(value, y.params[name], where, at) for name, value in x.params.items()}
            eqns.append(x.replace(invars=operands, outvars=bind(x.outvars, y.outvars, at), params=params))
        outvars = [atom(x, y, caller or where) for x, y in zip(a.outvars, b.outvars, strict=True)]
        inner = a.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)
        pairs = zip(jax_compat.jaxpr_consts(base), jax_compat.jaxpr_consts(other), strict=True)
        consts = [b if a.shape == b.shape and a.dtype == b.dtype else a for a, b in pairs]
        closed = inner if a is base and not consts else jax_compat.closed_like(base, inner)
        return jax_compat.with_equations(closed, eqns, outvars, consts)

    def _parameter(self, base: Any, other: Any, where: str, at: str) -> Any:
        """A parameter of an equation, with the jaxprs in it."""
        if jax_compat.is_jaxpr(base):
            return self.rewrite(base, other, where, at)
        if isinstance(base, (tuple, list)) and any(map(jax_compat.is_jaxpr, base)):
            members = [self._parameter(x, y, where, at) for x, y in zip(base, other, strict=True)]
            return base._make(members) if hasattr(base, "_make") else type(base)(members)
        return self._size(base, other, at) if self.way else base

    def _size(self, base: Any, other: Any, at: str) -> Any:
        """A size, or something of sizes, on the wanted number of examples; everything else must be equal."""
        if base is other or (type(base) is int and base == other):  # most are
            return base
        if isinstance(base, (tuple, list)) and type(base) is type(other) and len(base) == len(other):
            members = [self._size(a, b, at) for a, b in zip(base, other, strict=True)]
            return base._make(members) if hasattr(base, "_make") else type(base)(members)
        if isinstance(base, (int, np.integer)) and isinstance(other, (int, np.integer)) and not isinstance(base, bool):
            size = int(base) + (int(other) - int(base)) * self.way
            # Not so where a size names the third example, or the rest behind the second.
            if size.denominator != 1 or size < 0 <= base:
                raise self._difference(at, str(base), str(other))
            return type(base)(int(size))  # numpy's numbers stay such
        # Functions made by tracing are equal to nothing, and hold no sizes of their own.
        if callable(base) or hasattr(base, "call_wrapped"):
            return base
        try:
            is_equal = bool(base == other) or repr(base) == repr(other)  # nan is not equal to itself
        except (TypeError, ValueError):  # arrays among them
            is_equal = False
        if not is_equal:
            raise self._difference(at, repr(base)[:60], repr(other)[:60])
        return base

    def _difference(self, where: str, base: str, other: str) -> UnsupportedError:
        """The error for two jaxprs that differ."""
        return UnsupportedError(
            where=where,
            expected=f"the same operations for a micro-batch as for the whole batch ({other})",
            got=f"others ({base})",
            hint="do not let Python branch on the number of examples, and take sizes from the arrays rather than "
            f"writing them{', or take micro-batches of two examples' if self.way else ''}",
        )


def num_examples(traced: TracedStep) -> int:
    """The size that most leaves of the batch share in the dimension of examples (the first size in a tie)."""
    dims = ((i, traced.example_dim(i)) for i in sorted(traced.batch))
    sizes = collections.Counter(traced.in_avals[i].shape[dim] for i, dim in dims if dim is not None)
    if not sizes:
        raise BatchMismatchError(
            where=traced.name,
            expected="a batch with arrays that have a dimension of examples: the first, or that of batch_axis",
            got="no array with a dimension of examples",
            hint="name the argument that holds the batch in batch_argnums, and the dimension in batch_axis",
        )
    ((examples, _),) = sizes.most_common(1)
    if not examples:
        raise BatchMismatchError(
            where=traced.name,
            expected="a batch with examples, to be cut into micro-batches or to go through stages",
            got="a batch without examples",
            hint="skip empty batches, or run them as one program: plan=autopar.recipes.data_parallel()",
        )
    return examples


def example_leaves(traced: TracedStep) -> dict[int, int]:
    """The leaves of the batch that carry examples -> the dimension that counts them."""
    examples = num_examples(traced)
    dims = ((i, traced.example_dim(i)) for i in sorted(traced.batch))
    return {i: dim for i, dim in dims if dim is not None and traced.in_avals[i].shape[dim] == examples}


def smaller_step(traced: TracedStep, examples: int) -> TracedStep:
    """The step traced on fewer examples. Raises: UnsupportedError."""
    return traced_at(traced, smaller_avals(traced, examples))


def like_whole(traced: TracedStep, examples: int) -> tuple[TracedStep, TracedStep]:
    """The step on fewer examples with the literals of the whole batch, and the trace that it is made of, which is on
    two or three examples for one. Raises: UnsupportedError where that is not like the trace of the whole batch.
    """
    all_examples = num_examples(traced)
    traced_on = examples if examples > 1 else 2 if all_examples > 2 else 3
    few = smaller_step(traced, traced_on)
    way = Fraction(examples - traced_on, all_examples - traced_on)
    jaxpr = with_literals_of(traced.jaxpr, few.jaxpr, traced.name, way)
    constants = tuple(a if a.shape == b.shape else b for a, b in zip(traced.constants, few.constants, strict=True))
    return _of_jaxpr(few, jaxpr, constants, smaller_avals(traced, examples)), few


def smaller_avals(traced: TracedStep, examples: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the arguments with this number of examples."""
    leaves = example_leaves(traced)
    return tuple(
        a
        if (dim := leaves.get(i)) is None
        else jax.ShapeDtypeStruct((*a.shape[:dim], examples, *a.shape[dim + 1 :]), a.dtype, weak_type=a.weak_type)
        for i, a in enumerate(traced.in_avals)
    )


def traced_at(traced: TracedStep, in_avals: Sequence[jax.ShapeDtypeStruct]) -> TracedStep:
    """The step traced on other shapes. Raises: UnsupportedError when the trace fails."""
    try:
        closed = traced.retrace(in_avals)
    except Exception as error:  # the user's function may raise anything
        text = str(error).strip().split("\n")[0]
        line = jax_compat.line_of_error(error)
        raise UnsupportedError(
            where=f"{traced.name} at {line}" if line else traced.name,
            expected="a step that can be traced on fewer examples",
            got=f"{type(error).__name__}: {text}",
            hint="take sizes from the arrays rather than writing them into the step; where a kernel's block is larger "
            "than a micro-batch, use fewer micro-batches",
        ) from error
    return _of_jaxpr(traced, jax_compat.open_jaxpr(closed), tuple(jax_compat.jaxpr_consts(closed)), in_avals)


def _of_jaxpr(
    traced: TracedStep, jaxpr: Any, constants: tuple[Any, ...], in_avals: Sequence[jax.ShapeDtypeStruct]
) -> TracedStep:
    out_avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars)
    return dataclasses.replace(traced, jaxpr=jaxpr, constants=constants, in_avals=tuple(in_avals), out_avals=out_avals)
