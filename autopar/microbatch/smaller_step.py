"""A step on fewer examples: the number of examples in its batch, and its trace on a smaller batch.

That trace may be written from two others of the same function, equation by equation. The two traces have to be the same
operations on the same values. One of them, the base, gives the equations; a `PairRewriter` chooses variables, literals
and parameters.
"""

from __future__ import annotations

import abc
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


# The program of a step for one number of examples, from those for two other numbers.
#
# A trace on one example is another program for many functions: broadcasts over the examples disappear. The operations
# for two and for three examples are equal, on shapes that grow by the same amount from example to example, and give the
# program for one. Where a step is wanted for several numbers, this is faster than to trace it for each.


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


def num_examples(traced: TracedStep) -> int:
    """The size that most leaves of the batch share in the dimension of examples (the first size in a tie)."""
    dims = ((i, traced.example_dim(i)) for i in sorted(traced.batch))
    sizes = collections.Counter(traced.in_avals[i].shape[dim] for i, dim in dims if dim is not None)
    if not sizes:
        raise BatchMismatchError(
            where=traced.name,
            expected="a batch with arrays that have a dimension of examples: the first, or that of batch_axis",
            got="none",
            hint="name the argument that holds the batch in batch_argnums, and the dimension in batch_axis",
        )
    ((examples, _),) = sizes.most_common(1)
    if not examples:
        raise BatchMismatchError(
            where=traced.name,
            expected="a batch with examples, to be cut into micro-batches or to go through stages",
            got="an empty one",
            hint="skip empty batches, or run them as one program: plan=autopar.recipes.data_parallel()",
        )
    return examples


def example_leaves(traced: TracedStep) -> dict[int, int]:
    """The leaves of the batch that carry examples -> the dimension that counts them."""
    examples = num_examples(traced)
    dims = ((i, traced.example_dim(i)) for i in sorted(traced.batch))
    return {i: dim for i, dim in dims if dim is not None and traced.in_avals[i].shape[dim] == examples}


def smaller_step(traced: TracedStep, examples: int) -> TracedStep:
    """The step traced on fewer examples. The program of one example follows from those of two and of three.

    Raises: UnsupportedError.
    """
    if examples > 1:
        return traced_at(traced, smaller_avals(traced, examples))
    two, three = (traced_at(traced, smaller_avals(traced, n)) for n in (2, 3))
    return step_on(1, two, three, (2, 3))


def step_on(wanted: int, few: TracedStep, more: TracedStep, examples: tuple[int, int]) -> TracedStep:
    """The step on a number of examples, from traces on two other numbers: `few`, then `more`; literals are those of
    `few`. Raises: UnsupportedError where the sizes do not grow evenly.
    """
    jaxpr = extrapolated(few.jaxpr, more.jaxpr, more.name, (wanted, *examples))
    in_avals = tuple(
        jax.ShapeDtypeStruct(v.aval.shape, a.dtype, weak_type=a.weak_type)
        for v, a in zip(jaxpr.invars, few.in_avals, strict=True)
    )
    out_avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars)
    return dataclasses.replace(few, jaxpr=jaxpr, in_avals=in_avals, out_avals=out_avals)


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
    jaxpr = jax_compat.open_jaxpr(closed)
    return dataclasses.replace(
        traced,
        jaxpr=jaxpr,
        constants=tuple(jax_compat.jaxpr_consts(closed)),
        in_avals=tuple(in_avals),
        out_avals=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars),
    )
