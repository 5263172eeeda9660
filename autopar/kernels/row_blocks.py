"""Ragged products in blocks of rows, where XLA multiplies each row with the matrices of all groups.

XLA's compiler for GPUs expands a ragged product into a dense one with masked copies of the rows, that for TPUs so for
the gradient of the matrices: as many times the arithmetic as there are groups. In blocks, each turn of a loop takes the
next rows of every group, as many of each as a block has, and multiplies them by one product in batches of groups:

    product of rows    gather [g, b, k], product with [g, k, n] -> [g, b, n], scatter into [m, n]
    sum over rows      gather [g, b, k] and [g, b, n], product added to [g, k, n]

No matrix is copied, and none but the rows of a turn. Groups whose rows are all taken are multiplied still, so where few
have rows left, a second loop takes one block of one group in a turn, with a copy of its matrix: rows that a router
sends to few groups take no more turns than there are blocks of them. Results are those of the primitive: rows after
those of all groups, and matrices of groups without rows, are zero.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.hardware.kinds import DeviceKind, Platform

# Blocks are whole tiles of matrix units' kernels: cuBLAS and Triton multiply up to 128 rows in one, as do TPUs.
_TILE = 128
# The loop finds out whether there is another turn, and moves rows to the blocks and back, beside its product.
_SMALL_KERNELS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """[rows, inner] x [groups, inner, columns], or the sum over rows of [rows, inner] x [rows, columns] for each group.

    `dtype`, `made`: the types of operands and of the result.
    """

    rows: int
    inner: int
    columns: int
    groups: int
    sums_rows: bool
    dtype: Any
    made: Any

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns

    @property
    def added_in(self) -> Any:
        """The type in which sums over rows are added up from turn to turn."""
        return sum_type(self.made)


def sum_type(made: Any) -> Any:
    """The type in which parts of a sum of this type are added up, so that it is rounded once, as in one product."""
    is_short = jnp.issubdtype(made, jnp.floating) and jnp.dtype(made).itemsize < jnp.dtype(jnp.float32).itemsize
    return jnp.dtype(jnp.float32 if is_short else made)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """How ragged products are made on a device: in blocks, or as they are written, whichever takes less time.

    `room`: for how many times as many rows as groups are expected to have there is room.
    """

    device: DeviceKind
    room: int = 1

    def __repr__(self) -> str:  # a part of the texts of equations
        return f"RowBlocks({self.device.name}, {self.room})"

    def block(self, shape: ProductShape) -> int | None:
        """The rows of a group that a turn takes; None where the product as it is written takes less time."""
        return _block(self.device, shape, self.room)

    def least_groups(self, shape: ProductShape, block: int) -> int:
        """How many groups must have rows left for a turn of all to take no more time than a turn for each of these."""
        all_s, one_s = _turn_s(self.device, shape, block, shape.groups), _turn_s(self.device, shape, block, 1)
        return min(shape.groups, math.ceil(all_s / one_s))

    def held_bytes(self, shape: ProductShape) -> float:
        """What a product in blocks holds beside its operands and its result; zero of one that is as written."""
        block = self.block(shape)
        if block is None:
            return 0.0
        itemsize, made = shape.dtype.itemsize, shape.made.itemsize
        rows = shape.groups * block
        if not shape.sums_rows:
            of_row, matrix = shape.inner * itemsize + shape.columns * made, shape.inner * shape.columns * itemsize
            return float(max(rows * of_row, block * of_row + matrix))
        taken, num = rows * (shape.inner + shape.columns) * itemsize, shape.groups * shape.inner * shape.columns
        if shape.added_in == shape.made:
            return float(taken)
        # The result takes the place of the rows, once they are added to a sum of another type.
        return float(num * shape.added_in.itemsize + max(0, taken - num * made))

    def time_s(self, shape: ProductShape, load: float = 1.0, skew: float = 1.0) -> float:
        """Seconds of a product in blocks of `load` times as many rows as groups are expected to have (`_in_blocks_s`);
        zero of one that is as written.
        """
        block = self.block(shape)
        return 0.0 if block is None else _in_blocks_s(self.device, shape, block, load / self.room, skew)


@functools.lru_cache(4096)
def _block(device: DeviceKind, shape: ProductShape, room: int) -> int | None:
    if not shape.rows * shape.inner * shape.columns * shape.groups:
        return None
    sizes = [_TILE]
    while sizes[-1] < shape.rows:
        sizes.append(2 * sizes[-1])
    time_s, block = min((_in_blocks_s(device, shape, size, 1 / room), size) for size in sizes)
    return block if time_s < _as_written_s(device, shape) else None


def _in_blocks_s(device: DeviceKind, shape: ProductShape, block: int, filled: float = 1.0, skew: float = 1.0) -> float:
    """Seconds of a product in blocks of so many rows, of which this share is in groups.

    The largest group is `skew` times as large as the mean, or as large as that of rows that choose their groups at
    random: it exceeds the mean m by sqrt(2 m ln(groups)), as the largest of so many normal variables of variance m
    does. Of its last block half is filling. Turns are those of all groups, which take more time than those of one do
    where these are made.
    """
    made, mean = shape.made.itemsize, filled * shape.rows / shape.groups
    largest = min(filled * shape.rows, max(skew * mean, mean + math.sqrt(2.0 * mean * math.log(shape.groups))))
    turns = 1.0 if block >= shape.rows else max(1.0, largest / block + 0.5)
    if shape.sums_rows:
        rounded = made if shape.added_in != shape.made else 0
        once = shape.groups * shape.inner * shape.columns * (shape.added_in.itemsize + rounded)
    else:
        once = shape.rows * shape.columns * made
    return turns * _turn_s(device, shape, block, shape.groups) + device.memory_s(float(once)) + device.small_kernel_s


def _turn_s(device: DeviceKind, shape: ProductShape, block: int, groups: int) -> float:
    """Seconds of a turn of so many groups, of all or of one: a matrix of one is cut out, or a sum put in its place."""
    itemsize, made, rows = shape.dtype.itemsize, shape.made.itemsize, groups * block
    num, is_one = groups * shape.inner * shape.columns, groups < shape.groups
    cut = num if is_one else 0
    if shape.sums_rows:
        copied = float(rows * (shape.inner + shape.columns) * itemsize + cut * shape.added_in.itemsize)
        moved = copied + 2.0 * num * shape.added_in.itemsize
    else:
        copied = float(rows * (shape.inner * itemsize + shape.columns * made) + cut * itemsize)
        moved = copied + num * itemsize
    product_s = max(
        2.0 * block * num / device.flops_per_s(shape.dtype.name) + device.fill_s(shape.dtype.name),
        device.memory_s(moved),
    )
    started_s = device.launch_overhead_s + (_SMALL_KERNELS + is_one) * device.small_kernel_s + device.loop_turn_s
    return product_s + device.memory_s(2.0 * copied) + started_s


def _as_written_s(device: DeviceKind, shape: ProductShape) -> float:
    """Seconds of the dense product that XLA makes of it (`operation.masked_rows`)."""
    masked = shape.rows * shape.groups * (shape.inner + (shape.columns if shape.sums_rows else 0))
    copied_s = device.memory_s(2.0 * masked * shape.dtype.itemsize) if device.platform is Platform.GPU else 0.0
    multiplied_s = shape.flops * shape.groups / device.flops_per_s(shape.dtype.name)
    return multiplied_s + device.fill_s(shape.dtype.name) + copied_s + device.launch_overhead_s


# On arrays


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """`block`: the rows of a group that a turn takes; `least_groups`: with how many groups that have rows left a turn
    takes those of all.
    """

    block: int
    least_groups: int


def product_of_rows(
    rows: Any, matrices: Any, sizes: Any, turns: Turns, dims: tuple[int, int], **options: Any
) -> jax.Array:
    """Rows [m, k], in order of their groups, times the matrix of each one's group: [m, n].

    `dims`: of the matrices, those of groups and of k. `options`: those of `jax.lax.dot_general`.
    """
    num_rows, (groups, inner) = rows.shape[0], dims

    def product(taken: Any, of: Any) -> jax.Array:
        return lax.dot_general(taken, of, (((2,), (inner,)), ((0,), (groups,))), **options)

    def add(at: Any, is_row: Any, made: Any, group: Any) -> Any:
        of = matrices if group is None else lax.dynamic_slice_in_dim(matrices, group, 1, groups)
        # Places that are none are out of bounds, each another one.
        others = num_rows + jnp.arange(at.size, dtype=at.dtype).reshape(at.shape)
        at = jnp.where(is_row, at, others)
        taken = product(rows.at[at].get(mode="clip"), of)
        return made.at[at.reshape(-1)].set(taken.reshape(-1, taken.shape[-1]), mode="drop", unique_indices=True)

    of_one = jax.eval_shape(product, jax.ShapeDtypeStruct((sizes.shape[0], 1, rows.shape[1]), rows.dtype), matrices)
    return _in_turns(add, _zeros((num_rows, of_one.shape[-1]), of_one.dtype, rows), sizes, num_rows, turns)


def sum_over_rows(left: Any, right: Any, sizes: Any, turns: Turns, made: Any, **options: Any) -> jax.Array:
    """The sum over the rows of each group of left [m, k] times right [m, n]: [g, k, n] of type `made`.

    `options`: those of `jax.lax.dot_general`.
    """
    dtype = sum_type(made)

    def add(at: Any, is_row: Any, sums: Any, group: Any) -> Any:
        def taken(array: Any) -> Any:
            rows = array.at[at].get(mode="clip")
            return jnp.where(is_row[..., None], rows, jnp.zeros_like(rows))

        numbers = ((1,), (1,)), ((0,), (0,))
        more = lax.dot_general(taken(left), taken(right), numbers, preferred_element_type=dtype, **options)
        if group is None:
            return sums + more
        return lax.dynamic_update_slice_in_dim(sums, lax.dynamic_slice_in_dim(sums, group, 1) + more, group, 0)

    zeros = _zeros((sizes.shape[0], left.shape[1], right.shape[1]), dtype, right)
    return _in_turns(add, zeros, sizes, left.shape[0], turns).astype(made)


def _zeros(shape: tuple[int, ...], dtype: Any, rows: Any) -> jax.Array:
    """Zeros that rows come before: XLA for GPUs fills all arrays of a program that are filled by a constant in one
    kernel (jaxlib 0.10.2), and they would all be held from there on.
    """
    first = rows[0, 0]
    return jnp.broadcast_to(((first < 0) & (first > 0)).astype(dtype), shape)


def _in_turns(add: Any, made: Any, sizes: Any, num_rows: int, turns: Turns) -> Any:
    """The result of turns of all groups, and then of one. `add` takes the places of the rows of a turn, of each of its
    groups, which of them are rows, the result so far, and the group; None: all. Groups end with the rows, of which
    there are `num_rows`.
    """
    block, group_ends = turns.block, jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(group_ends[:1]), group_ends[:-1]])
    sizes = group_ends - starts
    num_blocks = -(-sizes // block)
    num_turns = jnp.sort(num_blocks)[-turns.least_groups]
    left = jnp.maximum(num_blocks - num_turns, 0)
    ends = jnp.cumsum(left)

    def rows(first: Any, group_sizes: Any, group_starts: Any, made: Any, group: Any) -> Any:
        within = first + jnp.arange(block, dtype=sizes.dtype)
        return add(group_starts[:, None] + within, within < group_sizes[:, None], made, group)

    def of_all(number: Any, made: Any) -> Any:
        return rows(number * block, sizes, starts, made, None)

    def of_one(number: Any, made: Any) -> Any:
        group = jnp.sum(number >= ends, dtype=sizes.dtype)
        first = (num_turns + number - (ends - left)[group]) * block
        return rows(first, sizes[group][None], starts[group][None], made, group)

    return lax.fori_loop(0, ends[-1], of_one, lax.fori_loop(0, num_turns, of_all, made))
