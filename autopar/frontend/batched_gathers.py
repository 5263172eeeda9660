"""Gathers and scatters of which each row of indices reads, or changes, a row of its own: `x[jnp.arange(n), labels]`.

One index counts the rows of the indices themselves, so that what it indexes is a batching dimension, as
`jnp.take_along_axis` has it: that is written into the jaxpr. A batching dimension splits over devices and into
micro-batches; of an index that may be anything no part of the operand is known to be enough.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.common.jax_compat import with_body, with_jaxprs
from autopar.ir.primitives import SCATTERS

# Which values of a jaxpr count from 0 on along a dimension, as `jnp.arange` does, whatever its arguments are.


# Constants of at most so many numbers are read, which takes milliseconds: larger ones are data, not positions.
MOST_NUMBERS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """A value that counts from 0 on along a dimension, and is the same along all others."""

    dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Numbers side by side in the last dimension: the dimension along which each counts, None where it may be any."""

    dims: tuple[int | None, ...]


class Truth(enum.Enum):
    """What is known of truth values."""

    FALSE = "false everywhere"


Fact = Counts | Columns | Truth
Known = Mapping[Any, Fact]


def known_constants(closed: Any) -> Known:
    """What is known of the constants of a closed jaxpr."""
    constants = zip(jax_compat.open_jaxpr(closed).constvars, jax_compat.jaxpr_consts(closed), strict=True)
    return {v: fact for v, value in constants if (fact := _of_constant(value)) is not None}


def known_in(inner: Any, known: Known) -> Known:
    """What is known of the variables of an open jaxpr, of what is known of its arguments."""
    found = dict(known)
    for eqn in inner.eqns:
        if jax_compat.called_jaxpr(eqn) is not None or eqn.primitive.name == "scan":
            for jaxpr in map(jax_compat.open_jaxpr, jax_compat.jaxprs_in(eqn)):
                if len(jaxpr.outvars) == len(eqn.outvars):
                    found |= _of_results(eqn, jaxpr, known_in(jaxpr, handed_on(eqn, jaxpr, found)))
        elif (rule := _RULES.get(eqn.primitive.name)) is not None:
            fact = rule(eqn, found)
            if fact is not None:
                found[eqn.outvars[0]] = fact
    return found


def handed_on(eqn: Any, jaxpr: Any, known: Known) -> Known:
    """What is known of the arguments of a jaxpr that an equation calls once, or in each trip of a scan."""
    invars, facts = jax_compat.open_jaxpr(jaxpr).invars, [_of(a, known) for a in eqn.invars]
    if len(invars) != len(facts):
        return {}
    if eqn.primitive.name == "scan":
        fixed, carried = jax_compat.scan_counts(eqn.params)
        slices = [_moved(fact, -1) for fact in facts[fixed + carried :]]
        facts = [*facts[:fixed], *[None] * carried, *slices]
    elif jax_compat.called_jaxpr(eqn) is None:
        return {}
    return {v: fact for v, fact in zip(invars, facts, strict=True) if fact is not None}


def _of_results(eqn: Any, jaxpr: Any, inside: Known) -> Known:
    """What is known of the results of an equation, of what is known in the jaxpr that it calls."""
    facts = [_of(a, inside) for a in jaxpr.outvars]
    if eqn.primitive.name == "scan":
        _, carried = jax_compat.scan_counts(eqn.params)
        facts = [*[None] * carried, *(_moved(fact, 1) for fact in facts[carried:])]
    return {v: fact for v, fact in zip(eqn.outvars, facts, strict=True) if fact is not None}


def _moved(fact: Fact | None, by: int) -> Fact | None:
    """What is known of the stack of what each trip of a scan makes, by 1; or of a trip's slice of a stack, by -1."""
    if isinstance(fact, Counts):
        return Counts(fact.dim + by) if fact.dim + by >= 0 else None
    if isinstance(fact, Columns):
        return _columns([None if dim is None or dim + by < 0 else dim + by for dim in fact.dims])
    return fact


def _columns(dims: Sequence[int | None]) -> Columns | None:
    return None if all(dim is None for dim in dims) else Columns(tuple(dims))


def _of(atom: Any, known: Known) -> Fact | None:
    return None if isinstance(atom, jax_compat.Literal) else known.get(atom)


def _dim(atom: Any, known: Known) -> int | None:
    """The dimension along which a value counts."""
    fact = _of(atom, known)
    return fact.dim if isinstance(fact, Counts) else None


def _of_constant(value: Any) -> Fact | None:
    """The dimension along which a constant counts, the first one; or that it is false."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    is_read = dtype is not None and any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.integer, np.bool_))
    if not is_read or not 0 < math.prod(shape) <= MOST_NUMBERS:
        return None
    array = np.asarray(value)
    if array.dtype == np.bool_:
        return None if array.any() else Truth.FALSE
    dims = (d for d in range(array.ndim) if (array == _count(array.shape, d)).all())
    return next(map(Counts, dims), None)


def _count(shape: tuple[int, ...], dim: int) -> np.ndarray:
    return np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])


def _literal(atom: Any) -> float | None:
    """The number of a literal."""
    return float(atom.val) if isinstance(atom, jax_compat.Literal) and not np.shape(atom.val) else None


def _can_count(dtype: Any, size: int) -> bool:
    """Whether numbers of a type tell so many apart."""
    return bool(np.issubdtype(dtype, np.integer)) and size - 1 <= np.iinfo(dtype).max


def _iota(eqn: Any, known: Known) -> Fact | None:
    dim = int(eqn.params["dimension"])
    return Counts(dim) if _can_count(eqn.params["dtype"], eqn.params["shape"][dim]) else None


def _broadcast(eqn: Any, known: Known) -> Fact | None:
    fact, dims = _of(eqn.invars[0], known), eqn.params["broadcast_dimensions"]
    if not isinstance(fact, Counts):
        return fact if fact is Truth.FALSE else None
    is_whole = eqn.invars[0].aval.shape[fact.dim] == eqn.params["shape"][dims[fact.dim]]
    return Counts(int(dims[fact.dim])) if is_whole else None


def _reshape(eqn: Any, known: Known) -> Fact | None:
    """Of dimensions of size one that come and go the others stay what they are."""
    fact, before, after = _of(eqn.invars[0], known), eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if not isinstance(fact, Counts):
        return fact if fact is Truth.FALSE else None
    if eqn.params["dimensions"] is not None or [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    if before[fact.dim] == 1:
        return fact if fact.dim < len(after) and after[fact.dim] == 1 else None
    number = sum(n != 1 for n in before[: fact.dim])
    return Counts([d for d, n in enumerate(after) if n != 1][number])


def _squeeze(eqn: Any, known: Known) -> Fact | None:
    fact, dropped = _of(eqn.invars[0], known), eqn.params["dimensions"]
    if not isinstance(fact, Counts):
        return fact if fact is Truth.FALSE else None
    return None if fact.dim in dropped else Counts(fact.dim - sum(d < fact.dim for d in dropped))


def _convert(eqn: Any, known: Known) -> Fact | None:
    dim = _dim(eqn.invars[0], known)
    is_counted = dim is not None and _can_count(eqn.params["new_dtype"], eqn.invars[0].aval.shape[dim])
    return _of(eqn.invars[0], known) if is_counted else None


def _less(eqn: Any, known: Known) -> Fact | None:
    """What counts is never less than zero."""
    least = _literal(eqn.invars[1])
    is_false = _dim(eqn.invars[0], known) is not None and least is not None and least <= 0
    return Truth.FALSE if is_false else None


def _select(eqn: Any, known: Known) -> Fact | None:
    """Indices below zero count from the end."""
    return _of(eqn.invars[1], known) if _of(eqn.invars[0], known) is Truth.FALSE else None


def _clamp(eqn: Any, known: Known) -> Fact | None:
    least, most, dim = _literal(eqn.invars[0]), _literal(eqn.invars[2]), _dim(eqn.invars[1], known)
    if dim is None or least is None or most is None:
        return None
    return Counts(dim) if least <= 0 and most >= eqn.invars[1].aval.shape[dim] - 1 else None


def _concatenate(eqn: Any, known: Known) -> Fact | None:
    """Numbers joined in the last dimension, one column of each."""
    last = len(eqn.outvars[0].aval.shape) - 1
    if eqn.params["dimension"] != last:
        return None
    dims: list[int | None] = []
    for piece in eqn.invars:
        width, dim = piece.aval.shape[last], _dim(piece, known)
        dims += [dim if width == 1 and dim != last else None] * width
    return _columns(dims)


_RULES: dict[str, Callable[[Any, Known], Fact | None]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "convert_element_type": _convert,
    "lt": _less,
    "select_n": _select,
    "clamp": _clamp,
    "concatenate": _concatenate,
}


def with_batched_gathers(closed: Any) -> Any:
    """A closed jaxpr in which such gathers and scatters have batching dimensions; the same where there are none."""
    return _rewritten(closed, known_constants(closed))


def _rewritten(closed: Any, known: Known) -> Any:
    """An open or closed jaxpr, rewritten; the same object where nothing changes."""
    inner = jax_compat.open_jaxpr(closed)
    found, made = known_in(inner, known), {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    eqns: list[Any] = []
    changed = False
    for eqn in inner.eqns:
        rewritten = _with_rewritten_params(eqn, found)
        if (rows := _own_rows(rewritten, found)) is not None:
            indices = _staying(rewritten, rows, made, eqns)
            rewritten = _batched(rewritten, rows, indices)
        changed = changed or rewritten is not eqn
        eqns.append(rewritten)
    return with_body(closed, inner.replace(eqns=eqns)) if changed else closed


def _with_rewritten_params(eqn: Any, known: Known) -> Any:
    """The equation with its jaxprs rewritten; a call or a scan hands on what is known of its operands."""
    if eqn.primitive.name in ("pallas_call", "shard_map"):  # kernels load by rules of their own, bodies see a part
        return eqn

    def rewritten(jaxpr: Any) -> Any:
        return _rewritten(jaxpr, handed_on(eqn, jaxpr, known))

    params = {name: with_jaxprs(value, rewritten) for name, value in eqn.params.items()}
    return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


@dataclasses.dataclass(frozen=True, slots=True)
class _OwnRows:
    """Of a gather or scatter: pairs (dimension of the operand, dimension of the indices), and which columns of the
    indices stay.
    """

    pairs: tuple[tuple[int, int], ...]
    staying: tuple[int, ...]


def _own_rows(eqn: Any, known: Known) -> _OwnRows | None:
    """The rows of a gather or scatter; None for another equation, or where there are none."""
    if eqn.primitive.name != "gather" and eqn.primitive.name not in SCATTERS:
        return None
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1]
    is_gather = eqn.primitive.name == "gather"
    single = numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims
    indexed = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    batching = numbers.start_indices_batching_dims if is_gather else numbers.scatter_indices_batching_dims
    columns = None if isinstance(indices, jax_compat.Literal) else known.get(indices)
    if not isinstance(columns, Columns):
        return None
    pairs: dict[int, int] = {}  # by the dimension of the indices
    staying = []
    for column, (operand_dim, at) in enumerate(zip(indexed, columns.dims, strict=True)):
        if (
            at is not None
            and at not in batching
            and at not in pairs
            and operand_dim in single
            and eqn.invars[0].aval.shape[operand_dim] == indices.aval.shape[at]
        ):
            pairs[at] = operand_dim
        else:
            staying.append(column)
    if not pairs or not staying:
        return None
    return _OwnRows(tuple((operand, of) for of, operand in pairs.items()), tuple(staying))


def _staying(eqn: Any, rows: _OwnRows, made: Mapping[Any, Any], eqns: list[Any]) -> Any:
    """The columns of the indices that stay: what they were joined of, or taken out of what comes from elsewhere, such
    as the forward pass. The equations that make them are added to the list.
    """
    indices = eqn.invars[1]
    joined, last = made.get(indices), len(indices.aval.shape) - 1
    if joined is None or joined.primitive.name != "concatenate":
        result, taking = _taken_out(indices, rows.staying)
        eqns += [each.replace(source_info=eqn.source_info) for each in taking]
        return result
    starts = itertools.accumulate((piece.aval.shape[last] for piece in joined.invars), initial=0)
    pieces = [piece for start, piece in zip(starts, joined.invars, strict=False) if start in rows.staying]
    if len(pieces) == 1:
        return pieces[0]
    shape = (*indices.aval.shape[:last], len(rows.staying))
    result = jax_compat.variable_like(indices, shape)
    eqns.append(joined.replace(invars=pieces, outvars=[result]))
    return result


def _taken_out(indices: Any, columns: Sequence[int]) -> tuple[Any, list[Any]]:
    """Some columns of an array, and the equations that take them."""

    def take(array: jax.Array) -> jax.Array:
        pieces = [jax.lax.slice_in_dim(array, column, column + 1, axis=-1) for column in columns]
        return pieces[0] if len(pieces) == 1 else jax.lax.concatenate(pieces, array.ndim - 1)

    taking = jax_compat.open_jaxpr(jax.make_jaxpr(take)(jax_compat.struct_of(indices.aval)))
    (argument,), (result,) = taking.invars, taking.outvars
    return result, [eqn.replace(invars=[indices if v is argument else v for v in eqn.invars]) for eqn in taking.eqns]


def _batched(eqn: Any, rows: _OwnRows, indices: Any) -> Any:
    """The equation with batching dimensions, reading the columns of its indices that stay."""
    numbers, of_operand = eqn.params["dimension_numbers"], [operand for operand, _ in rows.pairs]
    names = _GATHER_FIELDS if eqn.primitive.name == "gather" else _SCATTER_FIELDS
    single, indexed, operand_batching, indices_batching = (getattr(numbers, name) for name in names)
    pairs = sorted(
        (int(operand), int(of)) for operand, of in [*zip(operand_batching, indices_batching, strict=True), *rows.pairs]
    )
    values = (
        tuple(d for d in single if d not in of_operand),
        tuple(d for d in indexed if d not in of_operand),
        tuple(operand for operand, _ in pairs),
        tuple(of for _, of in pairs),
    )
    # Sorted are the rows with their numbers, not what is left of them.
    changes = {
        "dimension_numbers": numbers._replace(**dict(zip(names, values, strict=True))),
        "indices_are_sorted": False,
    }
    invars = [eqn.invars[0], indices, *eqn.invars[2:]]
    return eqn.replace(invars=invars, params=eqn.params | changes)


_GATHER_FIELDS = ("collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims")
_SCATTER_FIELDS = (
    "inserted_window_dims", "scatter_dims_to_operand_dims", "operand_batching_dims", "scatter_indices_batching_dims",
)  # fmt: skip
