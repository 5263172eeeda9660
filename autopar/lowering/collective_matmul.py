"""Products in pieces, so that what they gather or scatter is sent while they are computed ("collective matmul").

An operand that is gathered over mesh axes is sent round the devices of these axes part by part, and each part is
multiplied while the next one is on its way: by the first product that reads it and does not sum over the parts, or by
the first, if all do. What reads the operand behind it has nothing to wait for, and reads it put together. A sum that is
scattered is computed part by part, and each part's sum goes round while the next part is computed. In the instructions
these are the same moves and products as before, marked with `Pieces`.

Source: Wang et al., "Overlap communication with dependent computation via decomposition in large deep learning models",
2023.

On device i of n, piece k of an operand is the part of device (i + k) mod n: what comes from the next device. Of a
result, the device computes its summand of the part of device (i + n - 1 - k) mod n at step k, adds what came from the
device before it, and sends the sum on; the last part is its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from msgspec.structs import replace

from autopar.ir.jax_sharding import on_parts
from autopar.ir.resharding import ReshardStep, StepKind
from autopar.lowering.instructions import Compute, Instruction, Key, Loop, LoweredBlock, Move, Pieces, section_of
from autopar.ops.kernels.local import runs_locally


def with_collective_matmuls(lowered: LoweredBlock, axes: Collection[int]) -> LoweredBlock:
    """A block whose products run in pieces where one of their operands is gathered, or their result is scattered, over
    some of the axes.

    Left as they are: gathers that something else reads first (it wants the whole array), sums that something else
    reads, resharding of several steps, and products that leave another section than they read.
    """
    marking = _Marking(lowered, axes)
    for i, move in enumerate(marking.instructions):
        if not isinstance(move, Move) or len(move.steps) != 1 or not set(move.steps[0].axes) <= set(axes):
            continue
        if move.steps[0].kind is StepKind.ALL_GATHER:
            marking.gather(i, move, move.steps[0])
        elif move.steps[0].kind is StepKind.REDUCE_SCATTER:
            marking.scatter(i, move, move.steps[0])
    return dataclasses.replace(lowered, instructions=marking.in_order())


def _with_blocks(instruction: Instruction, axes: Collection[int]) -> Instruction:
    if not isinstance(instruction, Loop):
        return instruction
    blocks = tuple(with_collective_matmuls(block, axes) for block in instruction.blocks)
    return replace(instruction, blocks=blocks)


class _Marking:
    """The instructions of a block while they are marked: who reads and makes a value in a place, by position, and the
    products that run before another position than their own.
    """

    def __init__(self, lowered: LoweredBlock, axes: Collection[int]) -> None:
        self.instructions = [_with_blocks(i, axes) for i in lowered.instructions]
        self.kept = {(a, p) for a, p in zip(lowered.block.outputs, lowered.outputs, strict=True) if isinstance(a, int)}
        self.readers: dict[Key, list[int]] = {}
        self.maker: dict[Key, int] = {}
        self.before: dict[int, int] = {}
        for i, instruction in enumerate(self.instructions):
            for key in dict.fromkeys(instruction.keys_read):
                self.readers.setdefault(key, []).append(i)
            for key in instruction.keys_made:
                self.maker[key] = i

    def in_order(self) -> tuple[Instruction, ...]:
        places = sorted(range(len(self.instructions)), key=lambda i: (self.before.get(i, i), i not in self.before))
        return tuple(self.instructions[i] for i in places)

    def gather(self, at: int, move: Move, step: ReshardStep) -> None:
        """Marks a gather and the product that reads it first."""
        target = (move.value, move.target)
        readers = self.readers.get(target, [])
        if not readers or target in self.kept or not self.before.keys().isdisjoint(readers):
            return
        if any(section_of(self.instructions[i]) is not move.section for i in readers):
            return
        dim = _changed(step)
        lead = next((i for i in readers if self.can_lead(i, readers[0], target, dim)), readers[0])
        compute = self.instructions[lead]
        if not isinstance(compute, Compute) or not _is_plain(compute) or len(operands := _reading(compute, target)) > 1:
            return
        if lead != readers[0]:
            self.before[lead] = readers[0]
        axes = step.before.dims[dim][len(step.after.dims[dim]) :]
        pieces = Pieces(axes=axes, operand=operands[0], dim=dim, step=step, is_read_again=len(readers) > 1)
        self.instructions[lead] = replace(compute, pieces=pieces)
        self.instructions[at] = replace(move, in_pieces=True)

    def can_lead(self, i: int, first: int, target: Key, dim: int) -> bool:
        """Whether a reader is a product that could run before the first one, and does not sum over the pieces: sums of
        pieces are read and written with each of them.
        """
        compute = self.instructions[i]
        if not isinstance(compute, Compute) or not _is_plain(compute) or len(operands := _reading(compute, target)) > 1:
            return False
        for key in compute.keys_read:
            made = self.maker.get(key, -1)
            maker = self.instructions[made] if made >= 0 else None
            if made >= first or (key != target and isinstance(maker, Move) and maker.in_pieces):
                return False
        return Along.of(compute.op.eqn, operands[0], dim).result is not None

    def scatter(self, at: int, move: Move, step: ReshardStep) -> None:
        """Marks a reduce-scatter and the product whose result it takes."""
        source = (move.value, move.source)
        made = self.maker.get(source)
        compute = self.instructions[made] if made is not None else None
        if source in self.kept or self.readers[source] != [at] or not isinstance(compute, Compute):
            return
        if section_of(compute) is not move.section or not _is_plain(compute) or not compute.written_out:
            return
        dim = _changed(step)
        axes = step.after.dims[dim][len(step.before.dims[dim]) :]
        assert made is not None, "what is marked was made here"
        pieces = Pieces(axes=axes, operand=None, dim=dim, step=step)
        self.instructions[made] = replace(compute, pieces=pieces)
        self.instructions[at] = replace(move, in_pieces=True)


def _reading(compute: Compute, key: Key) -> list[int]:
    """The operands of a product that are a value in a place."""
    reads = zip(compute.op.inputs, compute.reads, strict=True)
    return [position for position, read in enumerate(reads) if read == key]


def _is_plain(compute: Compute) -> bool:
    """Whether it is a product of two arrays, summands of none, that is in no pieces yet."""
    op = compute.op
    is_product = op.primitive == "dot_general" and not runs_locally(op.eqn)
    is_even = op.rule is not None and not any(factor.rounded for factor in op.rule.factors)
    whole = all(place is not None and not place[0].partial for place in compute.reads)
    return is_product and is_even and whole and compute.strategy is not None and compute.pieces is None


def _changed(step: ReshardStep) -> int:
    """The dimension that a step gathers or scatters."""
    (dim,) = (d for d, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b)
    return dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """The dimensions of a product that run along with one of an operand, or of the result: by operand, and of the
    result, None where the product sums over it.
    """

    operands: Mapping[int, int]
    result: int | None

    @classmethod
    def of(cls, eqn: Any, operand: int | None, dim: int) -> Along:
        """Those of a `dot_general`, for a dimension of an operand, or of the result (operand None)."""
        summed, batch = eqn.params["dimension_numbers"]
        ranks = [len(v.aval.shape) for v in eqn.invars]
        free = [[d for d in range(ranks[i]) if d not in (*summed[i], *batch[i])] for i in (0, 1)]
        found = [cls(operands={0: a, 1: b}, result=i) for i, (a, b) in enumerate(zip(*batch, strict=True))]
        found += [cls(operands={0: d}, result=len(batch[0]) + i) for i, d in enumerate(free[0])]
        found += [cls(operands={1: d}, result=len(batch[0]) + len(free[0]) + i) for i, d in enumerate(free[1])]
        found += [cls(operands={0: a, 1: b}, result=None) for a, b in zip(*summed, strict=True)]
        (along,) = (a for a in found if (a.result if operand is None else a.operands.get(operand)) == dim)
        return along


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

    of_results = (result, pieces.step.after) if pieces.is_read_again else (result,)
    out, *whole = on_parts(local, mesh, layouts, of_results)(*operands)
    return out, whole[0] if whole else None


def scattered_product(compute: Compute, operands: Sequence[Any], mesh: Mesh) -> Any:
    """The product as a global array that lies as its reduce-scatter leaves it."""
    pieces = compute.pieces
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

    return on_parts(local, mesh, compute.strategy.operands, after)(*operands)


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
