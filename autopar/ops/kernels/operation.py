"""The operation of a kernel: its rule in text, its work, and one jax primitive with a function of one device's part.

On one device the function runs on whole arrays, as under plain `jax.jit`. Under a plan it is traced again, on the
shapes of a device's part; a split on whose shapes it cannot be traced is no strategy (`admits`).

A rule (`"b h q d, b h k d -> b h q d"`) names the factor of each dimension. A name stands for the same factor wherever
it stands. A name in brackets (`[k]`) in any array, or among `whole`, is whole in all of them; so is `_`, a dimension
without a name. Over a factor that is `summed` each device's result is a summand of the whole. Every other factor may be
split, and then stands in every result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from msgspec.structs import replace

from autopar.common import jax_compat, jax_local
from autopar.errors import InvalidArgumentError
from autopar.ir.graph import Factor, FactorKind, NamedDims, Rule
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.primitives import GROUPED_PRODUCT, RAGGED_PRODUCT, is_inexact, multiplications
from autopar.ops.kernels.grouped import blocks_of, grouped_places, is_dense, is_grouped_product, sums_groups
from autopar.ops.kernels.row_exchange import Devices, turns_of

# The rule

UNNAMED = "_"
_NAME = re.compile(r"[A-Za-z]\w*|_")
_BRACKETS = re.compile(r"\[(.*)\]|([^\[\]]*)")
Names = tuple[str, ...]
_HINT = 'write it as "b h q [d], b h [k] [d] -> b h q [d]": one name for each dimension, commas between arrays'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """The factor of each dimension of operands and results; `whole` may not be split, `summed` leave summands.

    `exchanged`: (a factor, another one whose parts devices exchange for those of the first).
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    whole: frozenset[str]
    summed: frozenset[str] = frozenset()
    exchanged: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for names in (*self.operands, *self.results) for name in names)

    @property
    def split(self) -> frozenset[str]:
        """The factors that may be split."""
        return self.names - self.whole

    def __str__(self) -> str:
        def text(names: Names) -> str:
            return " ".join(f"[{x}]" if x in self.whole and x != UNNAMED else x for x in names)

        arrays = (", ".join(map(text, side)) for side in (self.operands, self.results))
        summed = f", summed over {' '.join(sorted(self.summed))}" if self.summed else ""
        return " -> ".join(arrays) + summed


def parse(text: str, whole: Iterable[str], summed: Iterable[str], where: str) -> KernelRule:
    """The rule that a text says. Raises: InvalidArgumentError."""
    sides = text.split("->")
    if len(sides) != 2:
        raise _error(where, "a rule with one arrow between operands and results", repr(text), _HINT)
    marked = {*whole, *re.findall(r"\[(\w+)\]", text), UNNAMED}
    operands, results = ([_names(part, where) for part in side.split(",")] for side in sides)
    rule = KernelRule(
        operands=tuple(operands), results=tuple(results), whole=frozenset(marked), summed=frozenset(summed)
    )
    unknown = sorted((rule.whole | rule.summed) - rule.names - {UNNAMED})
    if unknown:
        raise _error(where, f"names of the rule {text!r}", ", ".join(unknown), "whole and summed name factors of it")
    for name in sorted(rule.summed):
        if name in rule.whole:
            raise _error(where, f"factor {name!r} whole or summed", "both", "leave out one of the two")
        if all(name in names for names in rule.results):
            raise _error(
                where,
                f"a result without the factor {name!r}, as it is summed over",
                f"the rule {text!r}",
                "leave it out of summed= where each part makes its part of the result",
            )
    made = frozenset(x for names in rule.results for x in names) - {x for names in rule.operands for x in names}
    return dataclasses.replace(rule, whole=rule.whole | made)


def _names(text: str, where: str) -> Names:
    parts = [_BRACKETS.fullmatch(part) or part for part in text.split()]
    names = tuple(part if isinstance(part, str) else part[1] or part[2] or "" for part in parts)
    for name in names:
        if not _NAME.fullmatch(name):
            raise _error(
                where, "names of letters, digits and underscores, each alone or in brackets", repr(name), _HINT
            )
        if name != UNNAMED and names.count(name) > 1:
            raise _error(where, "each factor once in an array", f"{name!r} twice in {text.strip()!r}", _HINT)
    return names


def check_results(rule: KernelRule, where: str) -> None:
    """Raises: InvalidArgumentError where a factor that may be split is missing in a result."""
    for name in sorted(rule.split - rule.summed):
        if any(name not in names for names in rule.results):
            raise _error(
                where,
                f"factor {name!r} in every result, as it may be split",
                f"the rule {rule}",
                f"mark it [{name}] where the kernel needs it whole, name it in summed=({name!r},) where each part "
                "of it gives a summand of the result, or give a twin (like=) that says which it is",
            )


def sizes_of(rule: KernelRule, shapes: Sequence[Sequence[int]], where: str) -> dict[str, int]:
    """The size of each factor from the shapes of operands, or of operands and results. Raises: InvalidArgumentError."""
    arrays = (*rule.operands, *rule.results)
    if len(shapes) not in (len(rule.operands), len(arrays)):
        got = f"{len(shapes)} (the rule: {rule})"
        raise _error(where, f"{len(rule.operands)} operands and {len(rule.results)} results", got, _HINT)
    sizes: dict[str, int] = {}
    for number, (names, shape) in enumerate(zip(arrays, shapes, strict=False)):
        kind = "operand" if number < len(rule.operands) else "result"
        at = number if number < len(rule.operands) else number - len(rule.operands)
        if len(names) != len(shape):
            expected = f"{len(names)} dimensions ({' '.join(names)}) of {kind} {at}"
            raise _error(where, expected, f"shape {list(shape)}", _HINT)
        for name, n in zip(names, shape, strict=True):
            if name != UNNAMED and sizes.setdefault(name, n) != n:
                expected = f"factor {name!r} of size {sizes[name]} in {kind} {at} as before"
                raise _error(where, expected, f"shape {list(shape)}", "give dimensions of other sizes other names")
    return sizes


def kind_of(rule: KernelRule, name: str, results: Sequence[Any]) -> FactorKind:
    """What becomes of the results, of these types, where a factor is split."""
    if name in rule.whole:
        return FactorKind.FIXED
    if name in dict(rule.exchanged):
        return FactorKind.EXCHANGE
    if name not in rule.summed or all(name in names for names in rule.results):
        return FactorKind.PASS  # a residual without it depends on nothing that has it
    # Sums in any order are of floating point only.
    return FactorKind.SUM if all(is_inexact(a.dtype) for a in results) else FactorKind.FIXED


def graph_rule(rule: KernelRule, operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The rule of the operation in a graph, for operands and results of these shapes and types."""

    def named(arrays: Sequence[Names], avals: Sequence[Any]) -> NamedDims:
        return [
            ([(x,) if x != UNNAMED else () for x in names], a.shape) for names, a in zip(arrays, avals, strict=True)
        ]

    found = Rule.by_names(
        named(rule.operands, operands), named(rule.results, results), lambda x, n: Factor(n, kind_of(rule, x, results))
    )
    described = zip((*rule.operands, *rule.results), (*found.operands, *found.results), strict=True)
    number = {x: dim[0] for names, dims in described for x, dim in zip(names, dims, strict=True) if dim}
    factors = list(found.factors)
    for name, other in rule.exchanged:
        if name in number and other in number:
            factors[number[name]] = dataclasses.replace(factors[number[name]], along=number[other])
    return replace(found, factors=tuple(factors))


def _error(where: str, expected: str, got: str, hint: str) -> InvalidArgumentError:
    return InvalidArgumentError(where=where, expected=expected, got=got, hint=hint)


# What a program for one device does: arithmetic operations, and bytes it moves, from its jaxpr. A Pallas call says so
# itself (`cost_estimate`), or its body is counted, once for each point of its grid.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """`flops`: arithmetic operations; `nbytes`: of memory traffic, None: operands and results, once each;
    `product_bytes`: beside them, of the rows of grouped products between them; `between_bytes`: of other arrays there.
    """

    flops: float
    nbytes: float | None = None
    product_bytes: float = 0.0
    between_bytes: float = 0.0

    def times(self, count: float) -> KernelWork:
        """The work of so many."""
        nbytes = None if self.nbytes is None else self.nbytes * count
        times = {"product_bytes": self.product_bytes * count, "between_bytes": self.between_bytes * count}
        return KernelWork(flops=self.flops * count, nbytes=nbytes, **times)


def amount_of(function: Callable[..., Any], arguments: Sequence[Any], where: str) -> float:
    """What a user's function says of operands of these shapes. Raises: InvalidArgumentError where it is no amount."""
    problem: Exception | None = None
    try:
        said = function(*arguments)
        amount = math.nan if isinstance(said, str) else float(said)
        got = repr(said)
    except Exception as error:  # of the user's own code, or of the conversion of what it returned
        problem, amount, got = error, math.nan, f"{type(error).__name__}: {error}"
    if not 0 <= amount < math.inf:
        raise InvalidArgumentError(
            where=where,
            expected="a function of the operands' shapes that returns a finite number, zero or more",
            got=got,
            hint="it takes as many arguments as the kernel, each a jax.ShapeDtypeStruct: "
            "lambda q, k, v: 4.0 * q.size * k.shape[1]",
        ) from problem
    return amount


def counted_work(closed: Any) -> KernelWork:
    """The work of a program."""
    jaxpr = jax_compat.open_jaxpr(closed)
    alone = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None
    if alone is not None and alone.primitive.name == "pallas_call":
        return call_work(alone)
    return KernelWork(flops=flops_in(jaxpr))


def call_work(eqn: Any) -> KernelWork:
    """The work of the call of an unknown kernel."""
    estimate = _estimate(eqn)
    return KernelWork(flops=_flops(eqn), nbytes=float(estimate.bytes_accessed) if estimate is not None else None)


def equations_of_first_turn(jaxpr: Any) -> Iterator[Any]:
    """Those of a program and of the programs in it, without loops of as many turns as values say: most take none."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "while":
            yield eqn
            for inner in jax_compat.jaxprs_in(eqn):
                yield from equations_of_first_turn(inner)


def ragged_work(program: Any) -> KernelWork:
    """Arithmetic, and the rows that products, gathers and scatters move; what is computed of single rows is part of
    these. Matrices are operands and results, of which each device moves those that it has.
    """
    product_bytes = between_bytes = 0.0
    for eqn in equations_of_first_turn(jax_compat.open_jaxpr(program)):
        arrays = [*eqn.invars, *eqn.outvars]
        if is_grouped_product(eqn):
            _, (matrices, _) = grouped_places(eqn)
            del arrays[matrices]
            product_bytes += sum(v.aval.size * jax_compat.itemsize(v.aval) for v in arrays)
        elif eqn.primitive.name in ("gather", "scatter-add", "sort"):
            between_bytes += sum(v.aval.size * jax_compat.itemsize(v.aval) for v in arrays)
    return KernelWork(flops=flops_in(program), product_bytes=product_bytes, between_bytes=between_bytes)


def flops_in(jaxpr: Any) -> float:
    """Arithmetic operations of a jaxpr: 2 m n k of a matrix product, one for each element of other results."""
    return math.fsum(map(_flops, jax_compat.open_jaxpr(jaxpr).eqns))


def _flops(eqn: Any) -> float:
    name = eqn.primitive.name
    if name == "pallas_call":
        estimate = _estimate(eqn)
        if estimate is not None:
            return float(estimate.flops + estimate.transcendentals)
        grid: Sequence[Any] = eqn.params["grid_mapping"].grid
        return math.prod(n for n in grid if isinstance(n, int)) * flops_in(eqn.params["jaxpr"])
    inner = [flops_in(jaxpr) for jaxpr in jax_compat.jaxprs_in(eqn)]
    if name == "scan":
        return float(eqn.params["length"]) * sum(inner)
    if inner:
        return max(inner) if name == "cond" else sum(inner)
    multiplied = multiplications(eqn)
    if multiplied is not None:
        return 2.0 * multiplied
    return float(max((math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars), default=0))


# What compilers write for itself: other operations are part of the kernels that read them.
_WRITTEN = frozenset(
    {RAGGED_PRODUCT, GROUPED_PRODUCT, "dot_general", "sort", "all_to_all", "ragged_all_to_all", "all_gather"}
)
_WRITTEN_AFRESH = frozenset({"gather", "scatter-add", "cumsum"})


def held_bytes(closed: Any, platform: str) -> float:
    """The most bytes that a program holds at once between its operands and its results.

    Element-by-element results take memory from their first reading by a product, a sort or a collective on. Until then
    their operands do. Of rows of a ragged product their masked copies (`masked_rows`) take the place; one in blocks of
    rows holds these beside them.
    """
    jaxpr = jax_compat.open_jaxpr(closed)
    eqns = [e for e in equations_of_first_turn(jaxpr) if not list(jax_compat.jaxprs_in(e))]
    if platform == "gpu":
        eqns = _gradients_last(eqns)
    first: dict[Any, int] = {}  # where a value that an operation computes element by element is written
    last: dict[Any, int] = {}
    for i, eqn in reversed([*enumerate(eqns)]):
        is_written = eqn.primitive.name in _WRITTEN | _WRITTEN_AFRESH
        at = i if is_written else max((first.get(v, last.get(v, i)) for v in eqn.outvars), default=i)
        for v in _variables(eqn):
            last[v] = max(last.get(v, i), at)
            if eqn.primitive.name in _WRITTEN:
                first[v] = i
    copies = {v: groups for e in eqns for v, groups in masked_rows(e, platform).items()}
    grouped = {v for e in eqns for v in masked_rows(e, platform) if sums_groups(e)}
    changes = [0.0] * (len(eqns) + 1)

    def hold(v: Any, begin: int, end: int) -> None:
        nbytes = float(v.aval.size * jax_compat.itemsize(v.aval)) * copies.get(v, 1)
        changes[begin] += nbytes
        changes[end + 1] -= nbytes

    for v in copies.keys() & set(jaxpr.invars):
        hold(v, first[v], last[v])
    for i, eqn in enumerate(eqns):
        is_written = eqn.primitive.name in _WRITTEN | _WRITTEN_AFRESH
        for v in eqn.outvars:
            if v in last and (is_written or v in first):
                hold(v, i if is_written else first[v], last[v])
        for v, groups in masked_rows(eqn, platform).items():
            if v in grouped and groups > 1 and not sums_groups(eqn):
                hold(v, i, i)  # in the other order
        beside = bytes_in_blocks(eqn)
        changes[i], changes[i + 1] = changes[i] + beside, changes[i + 1] - beside
    return max(itertools.accumulate(changes), default=0.0)


def _gradients_last(eqns: Sequence[Any]) -> list[Any]:
    """Ragged products that only make results behind the last collective, where XLA's scheduler for GPUs puts them."""
    if not any(e.primitive.name == "ragged_all_to_all" for e in eqns):
        return [*eqns]
    read: set[Any] = set()  # by what is written, or by what that is computed of
    for eqn in reversed(eqns):
        if eqn.primitive.name in _WRITTEN | _WRITTEN_AFRESH or not read.isdisjoint(eqn.outvars):
            read.update(_variables(eqn))
    made: set[Any] = set()
    for eqn in eqns:
        is_gradient = eqn.primitive.name in (RAGGED_PRODUCT, GROUPED_PRODUCT) and read.isdisjoint(eqn.outvars)
        if is_gradient or not made.isdisjoint(_variables(eqn)):
            made.update(eqn.outvars)
    return sorted(eqns, key=lambda e: not made.isdisjoint(e.outvars))


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, jax_compat.Literal)]


def masked_rows(eqn: Any, platform: str) -> dict[Any, int]:
    """The rows that a ragged product masks, and how many copies of them: one for each group, zero in other groups.

    XLA's compiler for GPUs makes them (jaxlib and jax-cuda13-pjrt 0.10.2, for H100): of rows (m, k) in the order (m,
    groups, k), which one product multiplies with all matrices; for the gradient of the matrices, of both operands in
    the order (groups, m, k). That for TPUs (libtpu 0.0.42.1, v5p) makes none: it calls a kernel that multiplies each
    row once, and masks within the product for the gradient of the matrices.
    """
    if platform != "gpu" or not _is_as_written(eqn):
        return {}
    groups = eqn.invars[2].aval.shape[-1]
    return dict.fromkeys(eqn.invars[: 2 if sums_groups(eqn) else 1], groups)


def _is_as_written(eqn: Any) -> bool:
    """Whether an equation is a ragged product that XLA's compiler is given."""
    return eqn.primitive.name == RAGGED_PRODUCT or (blocks_of(eqn) is not None and not is_in_blocks(eqn))


def is_in_blocks(eqn: Any) -> bool:
    """Whether an equation is a ragged product that is made in blocks of rows (`row_blocks`)."""
    of = blocks_of(eqn)
    return of is not None and of[0].block(of[1]) is not None


def bytes_in_blocks(eqn: Any, operands: Sequence[Any] | None = None) -> float:
    """What a ragged product in blocks of rows holds beside its operands, or parts of them, and its result; zero of all
    else.
    """
    of = blocks_of(eqn, operands)
    return 0.0 if of is None else of[0].held_bytes(of[1])


@dataclasses.dataclass(frozen=True, slots=True)
class DenseWork:
    """What ragged products do beside multiplying each row with the matrix of its own group. `flops`: with all matrices;
    `own_flops`: of these products and those in blocks of rows, with the own ones; `nbytes`: traffic of masked rows,
    which are written and read; `blocks_s`: seconds of those in blocks on one device.
    """

    flops: float = 0.0
    own_flops: float = 0.0
    nbytes: float = 0.0
    blocks_s: float = 0.0

    def times(self, count: float) -> DenseWork:
        """The work of so many."""
        return DenseWork(*(count * getattr(self, field.name) for field in dataclasses.fields(self)))


def dense_work(
    eqns: Iterable[Any],
    platform: str,
    split: int = 1,
    load: float = 1.0,
    skew_of: Callable[[int], float] = lambda groups: 1.0,
) -> DenseWork:
    """That of XLA's compilers: all ragged products on GPUs (`masked_rows`), the gradient of the matrices on TPUs. It is
    as much however the rows are spread over groups. Products in blocks take what one of `split` devices does with its
    share of the rows, of `load` times as many as are expected, the largest of so many groups `skew_of` times the mean.
    """
    flops = own_flops = nbytes = blocks_s = 0.0
    for eqn in eqns:
        own = 2.0 * (multiplications(eqn) or 0.0)
        if (of := blocks_of(eqn)) is not None and is_in_blocks(eqn):
            part = dataclasses.replace(of[1], rows=-(-of[1].rows // split))
            own_flops, blocks_s = own_flops + own, blocks_s + of[0].time_s(part, load, skew_of(part.groups))
        elif _is_as_written(eqn) and is_dense(eqn, platform):
            flops, own_flops = flops + own * eqn.invars[2].aval.shape[-1], own_flops + own
            copies = masked_rows(eqn, platform).items()
            nbytes += sum(2.0 * n * v.aval.size * jax_compat.itemsize(v.aval) for v, n in copies)
    return DenseWork(flops, own_flops, nbytes, blocks_s)


def _estimate(eqn: Any) -> Any | None:
    return eqn.params.get("cost_estimate")


# The operation


Shapes = tuple[tuple[int, ...], ...]
NAME = "kernel"
EXCHANGED = "exchanged"  # the mesh axis of the devices that share an exchanged factor, in a program for one of them


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
    pass, which has `gradient_of` instead. `exchanged`: (array, dimension), of operands and then results, of a factor of
    which each device has a part while it has a part of another one too; the function is then told the devices
    (`devices=`), of which the busiest has `busiest` times its share to do, by their number. `is_program`: it is made of
    operations of XLA, whose results in between take memory. `takes_any_part`: it can be traced on parts of any size.
    """

    name: str
    function: Callable[..., tuple[Any, ...]] = dataclasses.field(compare=False)
    rule: KernelRule = dataclasses.field(compare=False)
    work_on: Callable[[Sequence[Any]], KernelWork] | None = dataclasses.field(default=None, compare=False)
    twin: Callable[..., tuple[Any, ...]] | None = dataclasses.field(default=None, compare=False)
    gradient_of: GradientOf | None = dataclasses.field(default=None, compare=False)
    exchanged: tuple[int, int] | None = dataclasses.field(default=None, compare=False)
    busiest: Callable[[int], float] = dataclasses.field(default=lambda count: 1.0, compare=False)
    is_program: bool = dataclasses.field(default=False, compare=False)
    takes_any_part: bool = dataclasses.field(default=False, compare=False)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        return tuple(self.function(*arrays))

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

    def exchanging_program(self, avals: Sequence[Any], count: int, platform: str) -> Any:
        """The jaxpr on one device's parts, of `count` devices of a platform that share the exchanged factor."""
        key = (tuple((tuple(a.shape), str(a.dtype)) for a in avals), count, platform)
        if key not in self._programs:
            devices = Devices(axes=(EXCHANGED,), count=count, platform=platform)
            run = functools.partial(self.function, devices=devices)
            self._programs[key] = jax.make_jaxpr(run, axis_env=[(EXCHANGED, count)])(*avals)
        return self._programs[key]

    def work_in_turn(self, avals: Sequence[Any], count: int, platform: str) -> tuple[float, DenseWork]:
        """(bytes between products, dense products) on one device's parts, of `count` devices that share the exchanged
        factor, in all turns that their load takes: all its room is moved and multiplied, whatever rows there are.
        """
        key = ("in turn", tuple((tuple(a.shape), str(a.dtype)) for a in avals), count, platform)
        if key not in self._programs:
            program = jax_compat.open_jaxpr(self.exchanging_program(avals, count, platform))
            eqns, busiest = equations_of_first_turn(program), self.busiest(count)
            load, skew_of = busiest / self.num_turns(count), lambda groups: self.busiest(count * groups) / busiest
            dense = dense_work(eqns, platform, 1, load, skew_of)
            self._programs[key] = ragged_work(program).between_bytes, dense
        between_bytes, dense = self._programs[key]
        n = self.num_turns(count)
        return n * between_bytes, dense.times(n)

    def num_turns(self, count: int) -> int:
        """The turns in which rows are sent to the busiest of `count` devices."""
        return turns_of(self.busiest(count), count)

    def held_bytes(self, avals: Sequence[Any], count: int, platform: str) -> float:
        """What one device holds beside operands and results, of `count` devices that share the exchanged factor."""
        key = ("held", tuple((tuple(a.shape), str(a.dtype)) for a in avals), count, platform)
        if key not in self._programs:
            program = self.exchanging_program(avals, count, platform) if count > 1 else self.program(avals)
            self._programs[key] = held_bytes(jax_compat.lowered_jaxpr(program), platform)
        held: float = self._programs[key]
        return held

    def dense_work(self, avals: Sequence[Any], platform: str, split: int = 1) -> DenseWork:
        """`dense_work` of a program of XLA's operations on these whole arrays; none of another kernel."""
        key = ("dense", tuple((tuple(a.shape), str(a.dtype)) for a in avals), platform, split)
        if key not in self._programs:
            eqns = jax_compat.equations_in(jax_compat.open_jaxpr(self.program(avals))) if self.is_program else ()
            self._programs[key] = dense_work(eqns, platform, split, skew_of=self.busiest)
        work: DenseWork = self._programs[key]
        return work

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
        array, dim = self.function.exchanged or (0, 0)
        count = mesh.size(layouts[array].dims[dim]) if self.function.exchanged else 1
        try:
            if count > 1:
                made = self.function.exchanging_program(structs, count, "cpu").out_avals  # alike on all platforms
            else:
                made = self.function.program(structs).out_avals
        except Exception:  # the user's own code does not take these shapes
            return False
        return tuple(tuple(a.shape) for a in made) == results
