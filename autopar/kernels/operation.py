"""The operation of a kernel: one jax primitive, whose parameters are a function of one device's part and its rule.

On one device the function runs on whole arrays, as under plain `jax.jit`. Under a plan it is traced again, on the
shapes of a device's part; a split on whose shapes it cannot be traced is no strategy (`admits`).
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.common import jax_compat, jax_local
from autopar.ir.graph import Rule
from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh
from autopar.kernels.factors import KernelRule, graph_rule
from autopar.kernels.work import KernelWork, counted_work

Shapes = tuple[tuple[int, ...], ...]
NAME = "kernel"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientOf:
    """What a backward pass is the gradient of: the kernel and its twin, in those of the operands that are named."""

    function: Callable[..., tuple[Any, ...]]
    twin: Callable[..., tuple[Any, ...]]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    differentiated: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LocalFunction:
    """A function from arrays to a tuple of arrays that runs on one device's part.

    `work_on` says what it does on operands of given shapes and types; by default its own program is counted. `twin`
    computes the results, without residuals, in plain JAX on whole arrays; None where there is none, or for a backward
    pass, which has `gradient_of` instead.
    """

    name: str
    function: Callable[..., tuple[Any, ...]] = dataclasses.field(compare=False)
    rule: KernelRule = dataclasses.field(compare=False)
    work_on: Callable[[Sequence[Any]], KernelWork] | None = dataclasses.field(default=None, compare=False)
    twin: Callable[..., tuple[Any, ...]] | None = dataclasses.field(default=None, compare=False)
    gradient_of: GradientOf | None = dataclasses.field(default=None, compare=False)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        return tuple(self.function(*arrays))

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(f"kernel {self.name} is only in the process in which it was made")

    @functools.cached_property
    def _programs(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def program(self, avals: Sequence[Any]) -> Any:
        """The closed jaxpr on operands of these shapes and types. Raises: what the function raises there."""
        key = tuple((tuple(a.shape), str(a.dtype)) for a in avals)
        if key not in self._programs:
            structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
            try:
                self._programs[key] = jax.make_jaxpr(lambda *args: self(*args))(*structs)
            except Exception as error:  # the user's own code: whatever it raises, it does not take these shapes
                self._programs[key] = error
        if isinstance(self._programs[key], Exception):
            raise self._programs[key]
        return self._programs[key]

    def work(self, avals: Sequence[Any]) -> KernelWork:
        return self.work_on(avals) if self.work_on is not None else self.counted(avals)

    def counted(self, avals: Sequence[Any]) -> KernelWork:
        """The work of the operations that the function traces to."""
        return counted_work(jax_compat.lowered_jaxpr(self.program(avals)))


def vjp_in(function: Callable[..., Any], differentiated: Sequence[int], operands: Sequence[Any]) -> tuple[Any, Any]:
    """`jax.vjp` of a function in some of its operands."""

    def of_moving(*moving: Any) -> Any:
        args = list(operands)
        for i, a in zip(differentiated, moving, strict=True):
            args[i] = a
        return function(*args)

    return jax.vjp(of_moving, *(operands[i] for i in differentiated))


def _whole(*args: Any, function: LocalFunction, rule: str) -> tuple[Any, ...]:
    return function(*args)


def _batched(args: Sequence[Any], dims: Sequence[int | None], *, function: LocalFunction, rule: str) -> Any:
    """Under `jax.vmap`: one more factor, which may be split."""
    taken = function.rule.names
    name = next(f"batch{i}" for i in range(len(taken) + 1) if f"batch{i}" not in taken)
    arrays = [a if d is None else jax.numpy.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    axes = tuple(None if d is None else 0 for d in dims)
    operands = zip(function.rule.operands, dims, strict=True)
    batched_rule = dataclasses.replace(
        function.rule,
        operands=tuple(names if d is None else (name, *names) for names, d in operands),
        results=tuple((name, *names) for names in function.rule.results),
    )
    twin = function.twin

    def work_on(avals: Sequence[Any]) -> KernelWork:
        of_one = [
            a if d is None else jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a, d in zip(avals, dims, strict=True)
        ]
        times = next(a.shape[0] for a, d in zip(avals, dims, strict=True) if d is not None)
        return function.work(of_one).times(times)

    batched = LocalFunction(
        name=function.name,
        function=jax.vmap(function.function, in_axes=axes),
        rule=batched_rule,
        work_on=work_on,
        twin=None if twin is None else jax.vmap(twin, in_axes=axes),
    )
    results = PRIMITIVE.bind(*arrays, function=batched, rule=str(batched_rule))
    return results, [0] * len(results)


PRIMITIVE = jax_local.primitive(NAME, _whole, _batched)


def bind(function: LocalFunction, args: Sequence[Any]) -> list[Any]:
    """Calls a function as one operation."""
    return list(PRIMITIVE.bind(*args, function=function, rule=str(function.rule)))


def is_kernel(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive is PRIMITIVE


def program_of(eqn: Any) -> Any:
    """The jaxpr of a kernel on the shapes of its equation."""
    return eqn.params["function"].program([v.aval for v in eqn.invars])


def rule_of(eqn: Any) -> Rule:
    return graph_rule(eqn.params["function"].rule, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])


@dataclasses.dataclass(frozen=True, slots=True)
class Admits:
    """Whether a kernel can be traced on parts of these shapes, and makes parts of the expected ones."""

    function: LocalFunction
    dtypes: tuple[Any, ...]

    def __call__(self, operands: Shapes, results: Shapes, layouts: tuple[Layout, ...], mesh: LogicalMesh) -> bool:
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(operands, self.dtypes, strict=True)]
        try:
            made = self.function.program(structs).out_avals
        except Exception:  # the user's own code does not take these shapes
            return False
        return tuple(tuple(a.shape) for a in made) == results
