"""`autopar.kernel`: a function of one device's part that a step calls, with its rule, its cost and its gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError, expect_function
from autopar.ir.graph import FactorKind, Rule
from autopar.ir.primitives import is_inexact
from autopar.ir.rules import rule_of_parts
from autopar.ops.kernels.operation import (
    UNNAMED,
    GradientOf,
    KernelRule,
    KernelWork,
    LocalFunction,
    Names,
    amount_of,
    bind,
    check_results,
    flops_in,
    parse,
    sizes_of,
    vjp_in,
)

# The gradient of a kernel from its own backward pass: a forward kernel with residuals, and a backward kernel.
#
# Factors of residuals follow from their shapes: a dimension of a residual has the factor with which it grows. What the
# backward pass gets that way is what the forward pass made on the same device. Where a residual cannot be told (one of
# its dimensions is of several factors, or it has not a factor that may be split and depends on it), the backward kernel
# computes the forward pass again. The gradient of an operand without a split factor is a sum over that factor's parts.

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


# What the plain-JAX twin of a kernel says about its factors: which of them each part computes by itself.


def agreed(rule: KernelRule, twin: Callable[..., tuple[Any, ...]], avals: Sequence[Any]) -> KernelRule:
    """The rule with every factor whole that the twin does not keep apart: what it sums over, takes the largest of, or
    numbers (positions in a mask). What the user's rule sums over is left to the kernel.
    """
    known = rule_of_parts(twin, avals)
    kept = {name for name in rule.split - rule.summed if _is_kept(name, rule, known)}
    whole = frozenset(rule.names - kept - rule.summed) | rule.whole
    return dataclasses.replace(rule, whole=whole)


def _is_kept(name: str, rule: KernelRule, known: Rule) -> bool:
    """Whether a name's dimensions are one factor of the twin, which is passed on to every result."""
    arrays = zip((*rule.operands, *rule.results), (*known.operands, *known.results), strict=True)
    places = {factors for names, dims in arrays for x, factors in zip(names, dims, strict=True) if x == name}
    if len(places) != 1:
        return False
    (factors,) = places
    in_results = all(name in names for names in rule.results)
    return in_results and len(factors) <= 1 and all(known.factors[f].kind is FactorKind.PASS for f in factors)


_Fun = TypeVar("_Fun", bound=Callable[..., Any])
# Of the work of an operation: a number for the shapes of the call, or a function of the operands' shapes.
Amount = float | Callable[..., float]


def kernel(
    fun: _Fun,
    rule: str,
    *,
    like: Callable[..., Any] | None = None,
    whole: Sequence[str] = (),
    summed: Sequence[str] = (),
    flops: Callable[..., float] | None = None,
    bytes: Callable[..., float] | None = None,
) -> _Fun:
    """A function that plans treat as one operation, and run on each device's part of its arguments.

    For kernels: Pallas calls, calls of foreign functions, and whatever the compiler cannot split by itself. Outside of
    a plan the function is called as it is.

    Args:
        fun: A function of arrays (or trees of arrays) that returns arrays, for any shapes that the rule allows. If it
            has a gradient of its own (`jax.custom_vjp` inside), forward and backward pass are two kernels.
        rule: The factor of each dimension of each array, as `"b h q [d], b h [k] [d], b h [k] [d] -> b h q [d]"`.
            Factors may be split over devices; those in brackets need whole operands; `_` is a whole dimension.
        like: A twin in plain JAX. Factors that it does not keep apart are whole, its arithmetic is the kernel's cost,
            and without a gradient of its own the kernel has that of the twin. `autopar.verify` compares the numbers.
        whole: Factors that need whole operands, as brackets say.
        summed: Factors over which each device's result is a summand of the whole.
        flops: A function from the operands' shapes (each a `jax.ShapeDtypeStruct`) to arithmetic operations; by default
            those of the twin, or those that the kernel's own program says or shows.
        bytes: The same for bytes of memory traffic; by default operands and results, once each.

    Raises: InvalidArgumentError for a rule that cannot be, with the line of the call; when called, for shapes that do
    not have the rule's dimensions; UnsupportedError when differentiated without any gradient.
    """
    name = getattr(fun, "__name__", type(fun).__name__)
    where = _place(f"autopar.kernel({name})")
    for argument, given in (("fun", fun), ("like", like), ("flops", flops), ("bytes", bytes)):
        if given is not None:
            hint = "flops and bytes are functions of the operands' shapes: lambda q, k, v: 4.0 * q.size * k.shape[1]"
            expect_function(f"{where}, {argument}", given, "a function", hint)
    parsed = parse(rule, whole, summed, where)
    if like is None:
        check_results(parsed, where)
    called = _Kernel(fun=fun, name=name, rule=parsed, like=like, flops=flops, nbytes=bytes)

    @functools.wraps(fun)
    def call(*args: Any) -> Any:
        return called(*args)

    return call  # type: ignore[return-value]  # `wraps` gives it the face of `fun`


def _place(name: str) -> str:
    line = jax_compat.present_line()
    return f"{name} at {line}" if line else name


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A function with its rule; calls on equal trees and shapes share one operation."""

    fun: Callable[..., Any]
    name: str
    rule: KernelRule
    like: Callable[..., Any] | None
    flops: Callable[..., float] | None
    nbytes: Callable[..., float] | None

    @functools.cached_property
    def _known(self) -> dict[Any, tuple[Callable[..., Any], Any]]:
        return {}

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        key = tree, tuple((a.shape, a.dtype) for a in arrays)
        if key not in self._known:
            self._known[key] = self.operation(tree, [jax_compat.shape_of(a) for a in arrays])
        run, out_tree = self._known[key]
        return jax.tree.unflatten(out_tree, run(*arrays))

    def operation(self, tree: Any, structs: Sequence[jax.ShapeDtypeStruct]) -> tuple[Callable[..., Any], Any]:
        """(differentiable function of flat arrays, tree of its results). Raises: InvalidArgumentError."""
        where = _place(f"kernel {self.name}")
        sizes_of(self.rule, [s.shape for s in structs], where)
        flat = _flattened(self.fun, tree)
        function = LocalFunction(name=self.name, function=flat, rule=self.rule)
        self.check_closure(function, structs, where)
        out = function.program(structs).out_avals
        sizes_of(self.rule, [*(s.shape for s in structs), *(a.shape for a in out)], where)
        rule, twin = self.rule, None
        if self.like is not None:
            twin = _flattened(self.like, tree)
            self.check_twin(twin, structs, out, where)
            rule = agreed(rule, twin, structs)
        work_on = self.work(flat, twin, tree, where)
        if self.flops is not None or self.nbytes is not None:
            work_on(structs)  # so that what is no amount is said at the call
        function = LocalFunction(name=self.name, function=flat, rule=rule, twin=twin, work_on=work_on)
        return self.differentiable(function, structs), jax.tree.structure(
            jax.eval_shape(self.fun, *_tree(tree, structs))
        )

    def check_closure(self, function: LocalFunction, structs: Sequence[Any], where: str) -> None:
        """Raises: InvalidArgumentError where the function reads arrays that are traced around it."""
        if any(map(jax_compat.is_tracer, jax_compat.jaxpr_consts(function.program(structs)))):
            raise InvalidArgumentError(
                where=where,
                expected="a function of its arguments alone",
                got="one that reads an array which is traced outside of it",
                hint="pass that array as an argument, with its factors in the rule",
            )

    def check_twin(self, twin: Callable[..., Any], structs: Sequence[Any], out: Sequence[Any], where: str) -> None:
        """Raises: InvalidArgumentError where the twin makes other arrays."""
        try:
            made = [(tuple(a.shape), str(a.dtype)) for a in jax.eval_shape(twin, *structs)]
        except Exception as error:  # the user's own code
            raise InvalidArgumentError(
                where=f"{where}, like= of autopar.kernel",
                expected="a twin that takes the arguments of the kernel",
                got=f"{type(error).__name__}: {error}",
                hint="let it have the same parameters as the kernel",
            ) from error
        expected = [(tuple(a.shape), str(a.dtype)) for a in out]
        if made != expected:
            raise InvalidArgumentError(
                where=where,
                expected=f"a twin (like=) that makes {expected}, as the kernel does",
                got=str(made),
                hint="let the twin return the same arrays in the same types",
            )

    def work(
        self, flat: Callable[..., Any], twin: Callable[..., Any] | None, tree: Any, where: str
    ) -> Callable[[Sequence[Any]], KernelWork]:
        own = LocalFunction(name=self.name, function=flat, rule=self.rule)

        def on(avals: Sequence[Any]) -> KernelWork:
            structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
            arguments = _tree(tree, structs)
            if twin is None or self.flops is not None:
                counted = own.counted(structs) if self.flops is None or self.nbytes is None else None
            else:
                counted = KernelWork(flops=flops_in(jax_compat.plain_jaxpr(twin, *structs)))
            flops, nbytes = (counted.flops, counted.nbytes) if counted else (0.0, None)
            if self.flops is not None:
                flops = amount_of(self.flops, arguments, f"{where}, flops= of autopar.kernel")
            if self.nbytes is not None:
                nbytes = amount_of(self.nbytes, arguments, f"{where}, bytes= of autopar.kernel")
            return KernelWork(flops=flops, nbytes=nbytes)

        return on

    # The gradient

    def differentiable(self, function: LocalFunction, structs: Sequence[Any]) -> Callable[..., Any]:
        has_own = any(
            jax_compat.has_own_gradient(eqn)
            for eqn in jax_compat.equations_in(jax_compat.open_jaxpr(function.program(structs)))
        )
        call = jax.custom_vjp(lambda *args: tuple(bind(function, args)))
        if function.twin is not None and not has_own:
            call.defvjp(*_of_twin(function, function.twin, structs))
        else:
            call.defvjp(*_of_own(function, structs))
        return call


def _tree(tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    args: tuple[Any, ...] = jax.tree.unflatten(tree, leaves)
    return args


def _flattened(fun: Callable[..., Any], tree: Any) -> Callable[..., tuple[Any, ...]]:
    return lambda *leaves: tuple(jnp.asarray(x) for x in jax.tree.leaves(fun(*_tree(tree, leaves))))


Pass = Callable[..., Any]


def _of_twin(function: LocalFunction, twin: Callable[..., Any], structs: Sequence[Any]) -> tuple[Pass, Pass]:
    """Forward the kernel, which keeps its operands; backward the gradient of the twin."""
    wrt = [i for i, s in enumerate(structs) if is_inexact(s.dtype)]

    def forward(*operands: Any) -> Any:
        return tuple(bind(function, operands)), operands

    def backward(operands: Any, changes: Any) -> tuple[Any, ...]:
        _, pull = vjp_in(twin, wrt, operands)
        return _at(wrt, pull(tuple(changes)), len(operands))

    return forward, backward


def _of_own(function: LocalFunction, structs: Sequence[Any]) -> tuple[Pass, Pass]:
    """Forward the kernel with its residuals, backward its backward pass as a kernel."""
    num_results = len(function.rule.results)
    where = _place(f"kernel {function.name}")

    @functools.cache
    def passes() -> Any:
        try:
            return passes_of(function, structs)
        except Exception as error:  # of the user's own code, and of jax's rules of its primitives
            raise UnsupportedError(
                where=where,
                expected="a kernel with a gradient, as the step differentiates it",
                got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                hint="give a twin in plain JAX (like=), or define its gradient with jax.custom_vjp",
            ) from error

    def forward(*operands: Any) -> Any:
        made = bind(passes().forward, operands)
        rest = iter(made[num_results:])
        kept = [next(rest) if source is None else operands[source] for source in passes().saved]
        return tuple(made[:num_results]), kept

    def backward(kept: Any, changes: Any) -> tuple[Any, ...]:
        inexact = [c for c in changes if is_inexact(c.dtype)]
        gradients = bind(passes().backward, [*kept, *inexact])
        return _at(passes().differentiated, gradients, len(structs))

    return forward, backward


def _at(positions: Sequence[int], gradients: Sequence[Any], count: int) -> tuple[Any, ...]:
    """The gradients of some operands, None for the others."""
    found = dict(zip(positions, gradients, strict=True))
    return tuple(found.get(i) for i in range(count))
