"""Operations in groups: ragged and grouped products (`jax.lax.ragged_dot`, megablox), and convolutions.

Of a product rows are in groups, each with a matrix of its own. The sizes of the groups are known to every device. A
device that has some of the rows finds by them how many of each group are its own; a device that has some of the groups
moves their rows to the front. So rows, groups, columns and the inner dimension may all be split:

    product of rows (`rows`)       [m, k] x [g, k, n] -> [m, n]    m, n: parts; k, g: each device makes a summand
    sum over rows (its gradient)   [m, k] x [m, n] -> [g, k, n]    k, n, g: parts; m: each device makes a summand

XLA's partitioner splits none of them on a TPU or a GPU, where a ragged product is one call. Where XLA multiplies each
row with the matrices of all groups, it is made in blocks of rows. XLA's compiler for GPUs expands a ragged product into
a dense one with masked copies of the rows, that for TPUs so for the gradient of the matrices: as many times the
arithmetic as there are groups. In blocks, each turn of a loop takes the next rows of every group, as many of each as a
block has, and multiplies them by one product in batches of groups:

    product of rows    gather [g, b, k], product with [g, k, n] -> [g, b, n], scatter into [m, n]
    sum over rows      gather [g, b, k] and [g, b, n], product added to [g, k, n]

No matrix is copied, and none but the rows of a turn. Groups whose rows are all taken are multiplied still, so where few
have rows left, a second loop takes one block of one group in a turn, with a copy of its matrix: rows that a router
sends to few groups take no more turns than there are blocks of them. Results are those of the primitive: rows after
those of all groups, and matrices of groups without rows, are zero.

Convolutions in groups of channels or of examples run on each device's own groups. XLA's SPMD partitioner is not used
for them: on a mesh of two axes it doubles the gradient of a depthwise kernel, and where groups are split further it
ends the process. Shardy's rule of such a convolution has a factor for the groups and, minor to it, one for what lies in
a group, so that each device holds whole groups, or a part of one group: it runs the same convolution on its part, with
as many groups as it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.common import jax_compat, jax_local
from autopar.hardware.kinds import DeviceKind, Platform
from autopar.ir.graph import Factor, FactorKind, Rule
from autopar.ir.primitives import GROUPED_PRODUCT, RAGGED_PRODUCT, is_inexact

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


# A part of a dimension: (number of the part, parts).
Part = tuple[Any, int]
WHOLE: Part = (0, 1)
_NUM_OPERANDS = 3
_RANK_OF_MATRICES = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Where the rows are in the first operand, the groups (None: in the result) and the inner dimension in the second.

    `sums_rows`: the result has one matrix for each group, a sum over its rows. `inner`: the dimension of each operand
    that is summed over beside the rows; None where the rows are.
    """

    rows: int
    groups: int | None
    inner: tuple[int, int] | None

    @property
    def sums_rows(self) -> bool:
        return self.groups is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Megablox:
    """How a call of `jax.experimental.pallas.ops.tpu.megablox` is made again on other shapes."""

    tiling: tuple[int, int, int]
    dtype: Any
    interpret: Any
    transposed: bool


def _call_grouped(*args: Any, dims: Dims, call: Megablox | RowBlocks, **params: Any) -> tuple[Any, ...]:
    """`params` are those of a ragged product; of megablox for what looks at products by them."""
    lhs, rhs, sizes = args
    if isinstance(call, RowBlocks):
        return (_ragged_product(lhs, rhs, sizes, dims, call, **params),)
    k, n = lhs.shape[1 - dims.rows], rhs.shape[1 if call.transposed and not dims.sums_rows else -1]
    tiling = call.tiling[0], min(call.tiling[1], k), min(call.tiling[2], n)
    options = {"preferred_element_type": call.dtype, "tiling": tiling, "interpret": call.interpret}
    if dims.sums_rows:
        return (jax_local.megablox().tgmm(lhs, rhs, sizes, **options),)
    return (jax_local.megablox().gmm(lhs, rhs, sizes, transpose_rhs=call.transposed, **options),)


def _call_written(*args: Any, dims: Dims, call: Megablox | RowBlocks, **params: Any) -> tuple[Any, ...]:
    """The same, of ragged products without blocks."""
    if isinstance(call, RowBlocks):
        return (lax.ragged_dot_general(*args, **params),)
    return _call_grouped(*args, dims=dims, call=call, **params)


_PRIMITIVE = jax_local.primitive(GROUPED_PRODUCT, _call_grouped, like=_call_written)


def is_grouped_product(eqn: Any) -> bool:
    return eqn is not None and (
        eqn.primitive is _PRIMITIVE or (eqn.primitive.name == RAGGED_PRODUCT and dims_of(eqn) is not None)
    )


def dims_of(eqn: Any) -> Dims | None:
    """The dimensions of a product of plain matrices; None where groups have batches, or several dimensions sum."""
    if eqn.primitive is _PRIMITIVE:
        dims: Dims = eqn.params["dims"]
        return dims
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left, right), batches = numbers.dot_dimension_numbers
    plain = len(eqn.invars[0].aval.shape) == 2 and len(left) == 1 and not any(map(len, batches))
    if not plain or len(eqn.invars) != _NUM_OPERANDS or len(eqn.invars[2].aval.shape) != 1:
        return None
    (rows,) = numbers.lhs_ragged_dimensions
    groups = tuple(numbers.rhs_group_dimensions)
    if len(groups) == 1 and rows not in left:
        return Dims(rows=rows, groups=groups[0], inner=(left[0], right[0]))
    return Dims(rows=rows, groups=None, inner=None) if not groups and tuple(left) == (rows,) else None


# Ragged products in blocks of rows


def in_blocks(eqn: Any, device: DeviceKind | None) -> Any:
    """The equation of a product that may be made in blocks of rows, where XLA makes a dense one for such a device; any
    other equation as it is, and products of complex numbers or of an algorithm that says how sums are rounded.
    """
    if device is None or eqn.primitive.name != RAGGED_PRODUCT or (dims := dims_of(eqn)) is None:
        return eqn
    levels = eqn.params["precision"]
    levels = levels if isinstance(levels, tuple) else (levels,)
    is_plain = all(level is None or isinstance(level, lax.Precision) for level in levels)
    is_plain &= not any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in eqn.invars)
    if not is_plain or not is_dense(eqn, device.platform.value):
        return eqn
    names = ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")
    params = {name: eqn.params[name] for name in names}
    return jax_local.with_primitive(eqn, _PRIMITIVE, dims=dims, call=RowBlocks(device=device), **params)


def with_room(eqn: Any, room: int) -> Any:
    """The equation of a product that may be in blocks, with room for so many times the rows that groups have; any other
    equation as it is.
    """
    if blocks_of(eqn) is None:
        return eqn
    params = eqn.params | {"call": dataclasses.replace(eqn.params["call"], room=room)}
    return jax_local.with_primitive(eqn, _PRIMITIVE, **params)


def sums_groups(eqn: Any) -> bool:
    """Whether a ragged product makes one matrix for each group."""
    return not eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions


def is_dense(eqn: Any, platform: str) -> bool:
    """Whether XLA's compiler for a platform multiplies each row of a ragged product with the matrices of all groups."""
    return platform == "gpu" or (platform == "tpu" and sums_groups(eqn))


def blocks_of(eqn: Any, parts: Sequence[Any] | None = None) -> tuple[RowBlocks, ProductShape] | None:
    """How a product is made, and its shape, where that may be in blocks of rows; None of all else. `parts`: of its
    operands, which it is made of.
    """
    if eqn.primitive is not _PRIMITIVE or not isinstance(eqn.params["call"], RowBlocks):
        return None
    lhs, rhs, sizes = parts or [v.aval for v in eqn.invars]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    return eqn.params["call"], _shape_of(lhs, rhs, sizes, eqn.params["dims"], numbers, eqn.outvars[0].aval.dtype)


def _shape_of(lhs: Any, rhs: Any, sizes: Any, dims: Dims, numbers: Any, made: Any) -> ProductShape:
    if dims.sums_rows:
        columns = rhs.shape[1 - numbers.dot_dimension_numbers[0][1][0]]
    else:
        (groups, inner) = _places_in_matrices(dims)
        columns = rhs.shape[_RANK_OF_MATRICES - groups - inner]
    return ProductShape(
        rows=lhs.shape[dims.rows], inner=lhs.shape[1 - dims.rows], columns=columns, groups=sizes.shape[0],
        sums_rows=dims.sums_rows, dtype=lhs.dtype, made=made,
    )  # fmt: skip


def _ragged_product(
    lhs: Any, rhs: Any, sizes: Any, dims: Dims, call: RowBlocks, *,
    ragged_dot_dimension_numbers: Any, precision: Any, preferred_element_type: Any,
) -> Any:  # fmt: skip
    """A ragged product in blocks of rows, or as it is written."""
    numbers = ragged_dot_dimension_numbers
    options = {"precision": precision, "preferred_element_type": preferred_element_type}

    def as_written(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return lax.ragged_dot_general(lhs, rhs, sizes, numbers, **options)

    made = jax.eval_shape(as_written, lhs, rhs, sizes).dtype
    shape = _shape_of(lhs, rhs, sizes, dims, numbers, made)
    block = call.block(shape)
    if block is None:
        return as_written(lhs, rhs, sizes)
    turns = Turns(block=block, least_groups=call.least_groups(shape, block))
    rows = jnp.moveaxis(lhs, dims.rows, 0)
    if dims.sums_rows:
        right = jnp.moveaxis(rhs, numbers.dot_dimension_numbers[0][1][0], 0)
        return sum_over_rows(rows, right, sizes, turns, made, precision=precision)
    return product_of_rows(rows, rhs, sizes, turns, _places_in_matrices(dims), **options)


def _places_in_matrices(dims: Dims) -> tuple[int, int]:
    """The dimensions of groups and of the inner one in the matrices that rows are multiplied with."""
    assert dims.groups is not None, "of products of rows"
    assert dims.inner is not None, "of products of rows"
    return dims.groups, dims.inner[1]


# Calls of megablox


def as_grouped_product(eqn: Any) -> Any | None:
    """The equation of a product for a call of megablox's `gmm` or `tgmm`; None of everything else.

    Known by the function's name, its file, its operands and the one Pallas call in it. A call with a group offset, or
    with an output to be written into, is not among them.
    """
    name = eqn.params.get("name")
    if name not in ("gmm", "tgmm") or len(eqn.invars) != _NUM_OPERANDS or len(eqn.outvars) != 1:
        return None
    calls = [e for e in jax_compat.equations_in(eqn.params["jaxpr"]) if e.primitive.name == "pallas_call"]
    if len(calls) != 1 or not jax_local.function_of(calls[0].params["jaxpr"])[1].endswith(jax_local.MEGABLOX_FILE):
        return None
    (call,) = calls
    lhs, rhs, sizes = (v.aval.shape for v in eqn.invars)
    blocks = [[jax_local.block_rows(n) for n in b.block_shape] for b in call.params["grid_mapping"].block_mappings]
    out = eqn.outvars[0].aval
    if len(sizes) != 1 or len(lhs) != 2 or len(blocks) != _NUM_OPERANDS:
        return None
    if name == "tgmm" and len(rhs) == 2 and out.shape == (sizes[0], lhs[0], rhs[1]):
        dims, transposed = Dims(rows=1, groups=None, inner=None), False
        tiling = blocks[0][0], blocks[0][1], blocks[1][1]
        numbers: Any = (((1,), (0,)), ((), ())), (1,), ()
    elif name == "gmm" and len(rhs) == _RANK_OF_MATRICES and rhs[0] == sizes[0]:
        transposed = rhs[2] == lhs[1] and (rhs[1] != lhs[1] or _reads_transposed(call))
        dims = Dims(rows=0, groups=0, inner=(1, 2 if transposed else 1))
        tiling = blocks[0][0], blocks[0][1], blocks[2][1]
        numbers = (((1,), (2 if transposed else 1,)), ((), ())), (0,), (0,)
    else:
        return None
    again = Megablox(
        tiling=tiling,  # type: ignore[arg-type]  # a block may be mapped, these are not
        dtype=out.dtype,
        interpret=call.params["interpret"],
        transposed=transposed,
    )
    return jax_local.with_primitive(
        eqn, _PRIMITIVE, dims=dims, call=again, precision=None, preferred_element_type=None,
        ragged_dot_dimension_numbers=lax.RaggedDotDimensionNumbers(*numbers),
    )  # fmt: skip


def _reads_transposed(call: Any) -> bool:
    """Whether the blocks of a square matrix go with the inner dimension in their last one: it is innermost."""
    matrix = call.params["grid_mapping"].block_mappings[1]
    jaxpr = jax_compat.open_jaxpr(matrix.index_map_jaxpr)
    return jaxpr.outvars[2] is jaxpr.invars[2]


# The rule, and the product on a part


def grouped_rule(eqn: Any) -> Rule:
    """The factors of the table above."""
    dims = dims_of(eqn)
    assert dims is not None, "asked of grouped products only"
    lhs, rhs = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    groups = eqn.invars[2].aval.shape[0]
    sum_kind = FactorKind.SUM if is_inexact(eqn.outvars[0].aval.dtype) else FactorKind.FIXED
    m, k, n, g, sizes = range(5)
    kinds = {m: FactorKind.PASS, k: sum_kind, n: FactorKind.PASS, g: sum_kind, sizes: FactorKind.FIXED}
    other = 1 - dims.rows
    if dims.sums_rows:
        kinds |= {m: sum_kind, k: FactorKind.PASS, g: FactorKind.PASS}
        (over,) = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][1]
        right = [m if d == over else n for d in range(2)]
        made = [g, k, n]
        num_columns = rhs[1 - over]
    else:
        assert dims.inner is not None, "of products of rows"
        right = [g if d == dims.groups else k if d == dims.inner[1] else n for d in range(_RANK_OF_MATRICES)]
        made = [m, n]
        num_columns = rhs[right.index(n)]
    left = [m if d == dims.rows else k for d in range(2)]
    length = {m: lhs[dims.rows], k: lhs[other], n: num_columns, g: groups, sizes: groups}
    factors = tuple(Factor(length[f], kinds[f]) for f in range(5))

    def of(row: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple((f,) if length[f] > 1 else () for f in row)

    return Rule(factors, (of(left), of(right), of([sizes])), (of(made),))


def grouped_places(eqn: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """(array, dimension) of the rows and of the groups; arrays are operands, then the result."""
    dims = dims_of(eqn)
    assert dims is not None, "asked of grouped products only"
    return (0, dims.rows), (_NUM_OPERANDS, 0) if dims.groups is None else (1, dims.groups)


def product_on_part(eqn: Any, parts: Sequence[Any], rows: Part, groups: Part) -> list[Any]:
    """What one device makes of its parts of both operands and of all sizes of groups."""
    dims = dims_of(eqn)
    assert dims is not None, "asked of grouped products only"
    lhs, rhs, sizes = parts
    run = _run(eqn)
    if rows[1] == 1 and groups[1] == 1:
        return [run(lhs, rhs, sizes)]
    num_rows = lhs.shape[dims.rows]
    first = rows[0] * num_rows
    ends = jnp.clip(jnp.cumsum(sizes), first, first + num_rows)
    starts = jnp.concatenate([jnp.clip(jnp.zeros_like(ends[:1]), first, first + num_rows), ends[:-1]])
    here = (ends - starts).astype(sizes.dtype)
    if groups[1] == 1:
        return [run(lhs, rhs, here)]
    count = sizes.shape[0] // groups[1]
    mine = lax.dynamic_slice_in_dim(here, groups[0] * count, count)
    before = lax.dynamic_index_in_dim(starts, groups[0] * count, keepdims=False) - first
    lhs = jnp.roll(lhs, -before, dims.rows)
    if dims.sums_rows:
        (over,) = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][1]
        return [run(lhs, jnp.roll(rhs, -before, over), mine)]
    made = run(lhs, rhs, mine)
    own = jnp.arange(num_rows)[:, None] < jnp.sum(mine)  # kernels leave the other rows as they were in memory
    return [jnp.roll(jnp.where(own, made, jnp.zeros_like(made)), before, 0)]


def _run(eqn: Any) -> Callable[..., Any]:
    return lambda *operands: jax_compat.bind(eqn, operands)[0]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedAdmits:
    """Whether a grouped product can be made of parts of these shapes: rows are whole tiles."""

    tile: int
    rows: int

    def __call__(self, operands: Any, results: Any, layouts: Any, mesh: Any) -> bool:
        return operands[0][self.rows] % self.tile == 0


def grouped_admits(eqn: Any) -> GroupedAdmits | None:
    """What a strategy of a call of megablox is asked; None of a ragged product, which takes all."""
    if eqn.primitive is not _PRIMITIVE or not isinstance(eqn.params["call"], Megablox):
        return None
    return GroupedAdmits(eqn.params["call"].tiling[0], eqn.params["dims"].rows)


def is_grouped(eqn: Any) -> bool:
    """Whether an equation is a convolution in more than one group."""
    if eqn is None or eqn.primitive.name != "conv_general_dilated":
        return False
    return bool(eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1)


def convolved_part(eqn: Any, parts: Sequence[Any], result_examples: int) -> Any:
    """The convolution of one device's parts of images and kernel, of which the result has so many examples."""
    images, kernel = parts
    numbers = eqn.params["dimension_numbers"]
    lhs_examples, lhs_channels = (images.shape[d] for d in numbers.lhs_spec[:2])
    params = {
        **eqn.params,
        "feature_group_count": lhs_channels // kernel.shape[numbers.rhs_spec[1]],
        "batch_group_count": lhs_examples // result_examples,
    }
    (result,) = jax_compat.bind(eqn.replace(params=params), parts)
    return result
