"""`autopar.kernel`: a function of one device's part that a step calls, with its rule, its cost and its gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.ir.primitives import is_inexact
from autopar.kernels.backward import passes_of
from autopar.kernels.factors import KernelRule, check_results, parse, sizes_of
from autopar.kernels.operation import LocalFunction, bind, vjp_in
from autopar.kernels.twin import agreed
from autopar.kernels.work import KernelWork, amount_of, flops_in

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
        if given is not None and not callable(given):
            raise InvalidArgumentError(
                where=f"{where}, {argument}", expected="a function", got=repr(given),
                hint="flops and bytes are functions of the operands' shapes: lambda q, k, v: 4.0 * q.size * k.shape[1]",
            )  # fmt: skip
    parsed = parse(rule, whole, summed, where)
    if like is None:
        check_results(parsed, where)
    called = _Kernel(fun=fun, name=name, rule=parsed, like=like, flops=flops, nbytes=bytes)

    @functools.wraps(fun)
    def call(*args: Any) -> Any:
        return called(*args)

    return call  # type: ignore[return-value]


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
