"""Gathers and scatters of which each row of indices reads, or changes, a row of its own: `x[jnp.arange(n), labels]`.

One index counts the rows of the indices themselves, so that what it indexes is a batching dimension, as
`jnp.take_along_axis` has it: that is written into the jaxpr. A batching dimension splits over devices and into
micro-batches; of an index that may be anything no part of the operand is known to be enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.common.jaxpr_parameters import with_body, with_jaxprs
from autopar.ir.primitives import SCATTERS

# Constants of at most so many numbers are read, which takes milliseconds: larger ones are data, not positions.
MOST_NUMBERS = 1 << 20
# What is known of a variable: the dimension along which it counts from 0 on, and is the same along all others; or that
# it is false.
FALSE = -1
Known = Mapping[Any, int]


def with_own_rows(closed: Any) -> Any:
    """A closed jaxpr in which such gathers and scatters have batching dimensions; the same where there are none."""
    inner, consts = jax_compat.open_jaxpr(closed), jax_compat.jaxpr_consts(closed)
    counted = {v: dim for v, value in zip(inner.constvars, consts, strict=True) if (dim := _counts(value)) is not None}
    return _rewritten(closed, counted)


def _rewritten(closed: Any, known: Known) -> Any:
    """An open or closed jaxpr, rewritten; the same object where nothing changes."""
    inner = jax_compat.open_jaxpr(closed)
    found, made = _known_in(inner, known), {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    eqns: list[Any] = []
    changed = False
    for eqn in inner.eqns:
        rewritten = _with_rewritten_params(eqn, found)
        if (rows := _own_rows(rewritten, found, made)) is not None:
            rewritten = _batched(rewritten, rows, eqns)
        changed = changed or rewritten is not eqn
        eqns.append(rewritten)
    return with_body(closed, inner.replace(eqns=eqns)) if changed else closed


def _with_rewritten_params(eqn: Any, known: Known) -> Any:
    """The equation with its jaxprs rewritten; a call hands on what is known of its operands."""
    if eqn.primitive.name in ("pallas_call", "shard_map"):  # kernels load by rules of their own, bodies see a part
        return eqn

    def rewritten(jaxpr: Any) -> Any:
        return _rewritten(jaxpr, _handed_on(eqn, jaxpr, known))

    params = {name: with_jaxprs(value, rewritten) for name, value in eqn.params.items()}
    return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def _handed_on(eqn: Any, jaxpr: Any, known: Known) -> Known:
    """What is known of the arguments of a jaxpr that an equation calls once."""
    invars = jax_compat.open_jaxpr(jaxpr).invars
    if not _is_call(eqn) or len(invars) != len(eqn.invars):
        return {}
    return {v: at for v, a in zip(invars, eqn.invars, strict=True) if (at := _of(a, known)) is not None}


def _is_call(eqn: Any) -> bool:
    return eqn.primitive.name in jax_compat.INLINED_CALLS or eqn.primitive.name in jax_compat.REMAT_CALLS


def _known_in(inner: Any, known: Known) -> Known:
    """What is known of the variables of an open jaxpr."""
    found = dict(known)
    for eqn in inner.eqns:
        if _is_call(eqn):
            for jaxpr in jax_compat.jaxprs_in(eqn):
                if len(jaxpr.outvars) == len(eqn.outvars):
                    inside = _known_in(jaxpr, _handed_on(eqn, jaxpr, found))
                    results = zip(eqn.outvars, jaxpr.outvars, strict=True)
                    found |= {v: at for v, a in results if (at := _of(a, inside)) is not None}
        elif (rule := _RULES.get(eqn.primitive.name)) is not None:
            at = rule(eqn, found)
            if at is not None:
                found[eqn.outvars[0]] = at
    return found


def _of(atom: Any, known: Known) -> int | None:
    return None if isinstance(atom, jax_compat.Literal) else known.get(atom)


def _counts(value: Any) -> int | None:
    """The dimension along which a constant counts, the first one; or that it is false. None for others."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    is_read = dtype is not None and any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.integer, np.bool_))
    if not is_read or not 0 < math.prod(shape) <= MOST_NUMBERS:
        return None
    array = np.asarray(value)
    if array.dtype == np.bool_:
        return None if array.any() else FALSE
    dims = (d for d in range(array.ndim) if (array == _count(array.shape, d)).all())
    return next(dims, None)


def _count(shape: tuple[int, ...], dim: int) -> np.ndarray:
    return np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])


def _literal(atom: Any) -> float | None:
    """The number of a literal."""
    return float(atom.val) if isinstance(atom, jax_compat.Literal) and not np.shape(atom.val) else None


def _iota(eqn: Any, known: Known) -> int | None:
    dim = int(eqn.params["dimension"])
    return dim if _can_count(eqn.params["dtype"], eqn.params["shape"][dim]) else None


def _can_count(dtype: Any, size: int) -> bool:
    """Whether numbers of a type tell so many apart."""
    return bool(np.issubdtype(dtype, np.integer)) and size - 1 <= np.iinfo(dtype).max


def _broadcast(eqn: Any, known: Known) -> int | None:
    at, dims = _of(eqn.invars[0], known), eqn.params["broadcast_dimensions"]
    if at is None or at == FALSE:
        return at
    is_whole = eqn.invars[0].aval.shape[at] == eqn.params["shape"][dims[at]]
    return int(dims[at]) if is_whole else None


def _reshape(eqn: Any, known: Known) -> int | None:
    """Of dimensions of size one that come and go the others stay what they are."""
    at, before, after = _of(eqn.invars[0], known), eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if at is None or at == FALSE or eqn.params["dimensions"] is not None:
        return at if at == FALSE else None
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    if before[at] == 1:
        return at if at < len(after) and after[at] == 1 else None
    number = sum(n != 1 for n in before[:at])
    return [d for d, n in enumerate(after) if n != 1][number]


def _squeeze(eqn: Any, known: Known) -> int | None:
    at, dropped = _of(eqn.invars[0], known), eqn.params["dimensions"]
    if at is None or at == FALSE:
        return at
    return None if at in dropped else at - sum(d < at for d in dropped)


def _convert(eqn: Any, known: Known) -> int | None:
    at = _of(eqn.invars[0], known)
    if at is None or at == FALSE:
        return None
    return at if _can_count(eqn.params["new_dtype"], eqn.invars[0].aval.shape[at]) else None


def _less(eqn: Any, known: Known) -> int | None:
    """What counts is never less than zero."""
    least, at = _literal(eqn.invars[1]), _of(eqn.invars[0], known)
    return FALSE if at is not None and at != FALSE and least is not None and least <= 0 else None


def _select(eqn: Any, known: Known) -> int | None:
    """Indices below zero count from the end."""
    return _of(eqn.invars[1], known) if _of(eqn.invars[0], known) == FALSE else None


def _clamp(eqn: Any, known: Known) -> int | None:
    least, most = _literal(eqn.invars[0]), _literal(eqn.invars[2])
    at = _of(eqn.invars[1], known)
    if at is None or at == FALSE or least is None or most is None:
        return None
    return at if least <= 0 and most >= eqn.invars[1].aval.shape[at] - 1 else None


_RULES: dict[str, Callable[[Any, Known], int | None]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "convert_element_type": _convert,
    "lt": _less,
    "select_n": _select,
    "clamp": _clamp,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _OwnRows:
    """Of a gather or scatter: pairs (dimension of the operand, dimension of the indices), and what of the `joined`
    indices stays.
    """

    pairs: tuple[tuple[int, int], ...]
    joined: Any
    staying: tuple[Any, ...]


def _own_rows(eqn: Any, known: Known, made: Mapping[Any, Any]) -> _OwnRows | None:
    """The rows of a gather or scatter; None for another equation, or where there are none."""
    if eqn.primitive.name != "gather" and eqn.primitive.name not in SCATTERS:
        return None
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1]
    is_gather = eqn.primitive.name == "gather"
    single = numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims
    indexed = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    batching = numbers.start_indices_batching_dims if is_gather else numbers.scatter_indices_batching_dims
    joined = None if isinstance(indices, jax_compat.Literal) else made.get(indices)
    last = len(indices.aval.shape) - 1
    if joined is None or joined.primitive.name != "concatenate" or joined.params["dimension"] != last:
        return None
    pairs: dict[int, int] = {}  # by the dimension of the indices
    staying, position = [], 0
    for piece in joined.invars:
        width, at = piece.aval.shape[last], _of(piece, known)
        operand_dim = indexed[position]
        position += width
        if (
            width == 1
            and at is not None
            and 0 <= at < last
            and at not in batching
            and at not in pairs
            and operand_dim in single
            and eqn.invars[0].aval.shape[operand_dim] == indices.aval.shape[at]
        ):
            pairs[at] = operand_dim
        else:
            staying.append(piece)
    if not pairs or not staying:
        return None
    return _OwnRows(tuple((operand, of) for of, operand in pairs.items()), joined, tuple(staying))


def _batched(eqn: Any, rows: _OwnRows, eqns: list[Any]) -> Any:
    """The equation with batching dimensions. The equation that joins the indices that stay is added to the list."""
    numbers, of_operand = eqn.params["dimension_numbers"], [operand for operand, _ in rows.pairs]
    if len(rows.staying) == 1:
        (indices,) = rows.staying
    else:
        shape = list(eqn.invars[1].aval.shape)
        shape[-1] = sum(piece.aval.shape[-1] for piece in rows.staying)
        indices = jax_compat.variable_like(rows.joined.outvars[0], shape)
        eqns.append(rows.joined.replace(invars=list(rows.staying), outvars=[indices]))
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
