"""Gathers and scatters of which each row of indices reads, or changes, a row of its own: `x[jnp.arange(n), labels]`.

One index counts the rows of the indices themselves, so that what it indexes is a batching dimension, as
`jnp.take_along_axis` has it: that is written into the jaxpr. A batching dimension splits over devices and into
micro-batches; of an index that may be anything no part of the operand is known to be enough.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.common.jaxpr_parameters import with_body, with_jaxprs
from autopar.frontend.counted_values import Columns, Known, handed_on, known_constants, known_in
from autopar.ir.primitives import SCATTERS


def with_own_rows(closed: Any) -> Any:
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
