"""Runs products in pieces on each device's part: parts of an operand come in, or sums of parts go out, round a ring.

On device i of n, piece k of an operand is the part of device (i + k) mod n: what comes from the next device. Of a
result, the device computes its summand of the part of device (i + n - 1 - k) mod n at step k, adds what came from the
device before it, and sends the sum on; the last part is its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar.ir.jax_sharding import partition_spec
from autopar.lowering.collective_matmul import Along
from autopar.lowering.instructions import Compute, Pieces


def gathered_product(compute: Compute, operands: Sequence[Any], mesh: Mesh) -> tuple[Any, Any | None]:
    """(the product, the operand put together from its pieces, where something reads it again) as global arrays; of the
    operand in pieces each device has its own part.
    """
    pieces, names = compute.pieces, mesh.axis_names
    strategy, (result,) = compute.strategy, compute.results
    assert pieces is not None, "runs in pieces"
    assert pieces.operand is not None, "gathers an operand"
    assert strategy is not None, "products in pieces are split"
    layouts = list(strategy.operands)
    layouts[pieces.operand] = pieces.step.before
    ring = _Ring.over(pieces, mesh)

    def local(*parts: Any) -> tuple[Any, ...]:
        out, whole = _multiply_pieces(compute, parts, ring)
        if compute.reduced:
            out = jax.lax.psum(out, tuple(names[a] for a in compute.reduced))
        out = out[None] if result.partial else out
        return (out,) if whole is None else (out, whole)

    specs = [partition_spec(layout, names) for layout in (*layouts, result, pieces.step.after)]
    of_results = specs[len(layouts) :] if pieces.is_read_again else specs[len(layouts) : -1]
    run = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(specs[: len(layouts)]), out_specs=tuple(of_results), check_vma=False
    )
    out, *whole = run(*operands)
    return out, whole[0] if whole else None


def scattered_product(compute: Compute, operands: Sequence[Any], mesh: Mesh) -> Any:
    """The product as a global array that lies as its reduce-scatter leaves it."""
    pieces, names = compute.pieces, mesh.axis_names
    assert pieces is not None, "runs in pieces"
    assert compute.strategy is not None, "products in pieces are split"
    ring, after = _Ring.over(pieces, mesh), pieces.step.after
    along = Along.of(compute.op.eqn, None, pieces.dim)

    def local(*parts: Any) -> Any:
        total: Any = None
        for k in range(ring.size):
            number = (ring.index() + ring.size - 1 - k) % ring.size
            if total is not None:
                # In order: else all products may be run first, and nothing is left to hide what is sent. The number of
                # the part waits, for operands that do, whole or in parts, would be written to memory beforehand.
                total, number = jax.lax.optimization_barrier((total, number))
            cut = [_part(part, along.operands.get(i), number, ring) for i, part in enumerate(parts)]
            arriving = None if total is None else ring.send(total, forward=True)
            summand = _product(compute.op.eqn, cut)
            total = summand if arriving is None else arriving + summand
        assert total is not None, "a ring has devices"
        return total[None] if after.partial else total

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition_spec(layout, names) for layout in compute.strategy.operands),
        out_specs=partition_spec(after, names),
        check_vma=False,
    )
    return run(*operands)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """The devices round which pieces go, as `jax.shard_map` names them."""

    names: tuple[str, ...]
    size: int

    @classmethod
    def over(cls, pieces: Pieces, mesh: Mesh) -> _Ring:
        names = tuple(mesh.axis_names[a] for a in pieces.axes)
        return cls(names=names, size=math.prod(mesh.shape[name] for name in names))

    def index(self) -> Any:
        return jax.lax.axis_index(self.names)

    def send(self, array: Any, *, forward: bool) -> Any:
        """To the next device (forward), or to the one before."""
        step = 1 if forward else -1
        return jax.lax.ppermute(array, self.names, [(i, (i + step) % self.size) for i in range(self.size)])


def _multiply_pieces(compute: Compute, operands: Sequence[Any], ring: _Ring) -> tuple[Any, Any | None]:
    """The product on one device, and the operand that came in pieces where it is read again."""
    pieces, eqn = compute.pieces, compute.op.eqn
    assert pieces is not None, "runs in pieces"
    assert pieces.operand is not None, "gathers an operand"
    piece, other = operands[pieces.operand], operands[1 - pieces.operand]
    along = Along.of(eqn, pieces.operand, pieces.dim)
    dtype, total, whole = eqn.outvars[0].aval.dtype, None, None
    # A sum of pieces is rounded to 16 bits once, as the product of the whole is.
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
    for k in range(ring.size):
        number = (ring.index() + k) % ring.size
        arriving = ring.send(piece, forward=False) if k + 1 < ring.size else None
        both = [piece, piece]
        both[1 - pieces.operand] = _part(other, along.operands.get(1 - pieces.operand), number, ring)
        out = _product(eqn, both, wide if along.result is None else None)
        if along.result is None:
            total = out if total is None else total + out
        else:
            total = _put(total, out, along.result, number, ring)
        if pieces.is_read_again:
            whole = _put(whole, piece, pieces.dim, number, ring)
        if arriving is not None:
            # In order: a compiler that does not know how long a product takes would have all pieces sent before it, and
            # one that is free to add up, or to put in their places, what products make would keep it all until then.
            piece, total, whole = jax.lax.optimization_barrier((arriving, total, whole))
    assert total is not None, "a ring has devices"
    return total.astype(dtype), whole


def _put(whole: Any | None, part: Any, dim: int, number: Any, ring: _Ring) -> Any:
    """An array with one of its parts along a dimension put in its place; None: of which there is none yet."""
    if whole is None:
        shape = list(part.shape)
        shape[dim] *= ring.size
        if part.size == 0:
            return jax.lax.full(shape, 0, part.dtype)
        # Of a number of the first part: XLA sets what waits for nothing aside long before.
        ones = [1] * part.ndim
        whole = jax.lax.broadcast(jax.lax.slice(part, [0] * part.ndim, ones).reshape(()), shape)
    return jax.lax.dynamic_update_slice_in_dim(whole, part, number * part.shape[dim], dim)


def _part(array: Any, dim: int | None, number: Any, ring: _Ring) -> Any:
    """One of the parts of an array along a dimension; all of it where it has no part in the pieces."""
    if dim is None:
        return array
    size = array.shape[dim] // ring.size
    return jax.lax.dynamic_slice_in_dim(array, number * size, size, dim)


def _product(eqn: Any, operands: Sequence[Any], dtype: Any = None) -> Any:
    lhs, rhs = operands
    return jax.lax.dot_general(
        lhs,
        rhs,
        eqn.params["dimension_numbers"],
        precision=eqn.params["precision"],
        preferred_element_type=dtype or eqn.params["preferred_element_type"],
    )
