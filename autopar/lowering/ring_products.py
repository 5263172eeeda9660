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


def gathered_product(compute: Compute, operands: Sequence[Any], known: Sequence[Any], mesh: Mesh) -> tuple[Any, list]:
    """(the product, all pieces of the operand) as global arrays; of the last product that reads them no more pieces.

    `known` are the pieces that are there: the devices' own parts, or all. The operand in pieces is not looked at.
    """
    pieces, names = compute.pieces, mesh.axis_names
    strategy, (result,) = compute.strategy, compute.results
    assert pieces is not None, "runs in pieces"
    assert strategy is not None, "products in pieces are split"
    others = [i for i in range(len(operands)) if i != pieces.operand]
    ring = _Ring.over(pieces, mesh)
    returned = 0 if pieces.is_last or not pieces.sends else ring.size

    def local(*parts: Any) -> tuple[Any, ...]:
        *own, other = parts
        out, all_pieces = _multiply_pieces(compute, own, other, ring)
        if compute.reduced:
            out = jax.lax.psum(out, tuple(names[a] for a in compute.reduced))
        return out[None] if result.partial else out, *all_pieces[:returned]

    part = partition_spec(pieces.step.before, names)
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*(part for _ in known), *(partition_spec(strategy.operands[i], names) for i in others)),
        out_specs=(partition_spec(result, names), *(part for _ in range(returned))),
        check_vma=False,
    )
    out, *all_pieces = run(*known, *(operands[i] for i in others))
    return out, all_pieces or list(known)


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
            cut = [_part(part, along.operands.get(i), number, ring) for i, part in enumerate(parts)]
            if total is not None:
                # In order: else all products may be run first, and nothing is left to hide what is sent.
                total, *cut = jax.lax.optimization_barrier((total, *cut))
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


def _multiply_pieces(compute: Compute, own: Sequence[Any], other: Any, ring: _Ring) -> tuple[Any, list[Any]]:
    """The product on one device, and the pieces of the operand that it has seen."""
    pieces, eqn = compute.pieces, compute.op.eqn
    assert pieces is not None, "runs in pieces"
    assert pieces.operand is not None, "gathers an operand"
    along = Along.of(eqn, pieces.operand, pieces.dim)
    dtype, index, total = eqn.outvars[0].aval.dtype, ring.index(), None
    # A sum of pieces is rounded to 16 bits once, as the product of the whole is.
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
    seen = list(own)
    for k in range(ring.size):
        arriving = ring.send(seen[k], forward=False) if k + 1 == len(seen) < ring.size else None
        number = (index + k) % ring.size
        both = [seen[k], seen[k]]
        both[1 - pieces.operand] = _part(other, along.operands.get(1 - pieces.operand), number, ring)
        out = _product(eqn, both, wide if along.result is None else None)
        if arriving is not None:
            # In order: a compiler that does not know how long a product takes would have all pieces sent before it.
            arriving, out = jax.lax.optimization_barrier((arriving, out))
            seen.append(arriving)
        if along.result is None:
            total = out if total is None else total + out
            continue
        if total is None:
            shape = list(out.shape)
            shape[along.result] *= ring.size
            total = jnp.zeros(shape, out.dtype)
        total = jax.lax.dynamic_update_slice_in_dim(total, out, number * out.shape[along.result], along.result)
    assert total is not None, "a ring has devices"
    return total.astype(dtype), seen


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
