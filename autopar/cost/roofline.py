"""Time of operations on one device: a roofline of arithmetic and memory traffic.

Time = launch + max(operations / rate + fill, bytes / memory's rate), of one shard. Small products run at a part of the
rate that large ones reach: filling and draining the matrix units takes its time, whatever is between.

A matrix product's rate follows from the type of its operands and the precision that it asks for. What it adds up in, or
returns (`preferred_element_type`), does not slow it: bfloat16 operands with float32 results run at bfloat16's rate,
int8 ones with int32 results at int8's. A pass of attention takes the time of the kernel that runs it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar.hardware.kinds import FULL_FLOAT32, DeviceKind, Platform
from autopar.ir.graph import FactorKind, Op, OpGraph
from autopar.ir.primitives import (
    DECOMPOSITIONS,
    GROUPED_PRODUCT,
    MATRIX_PRODUCTS,
    RAGGED_PRODUCT,
    is_inexact,
    multiplications,
)
from autopar.ir.strategies import Strategy
from autopar.ops.attention import ring
from autopar.ops.attention.kernels import Kernel, inner_dim, kernel_for, library_of
from autopar.ops.attention.work import (
    flops,
    in_steps,
    launched_kernels,
    order_of,
    row_bytes,
    score_traffic_bytes,
    step_traffic_bytes,
)
from autopar.ops.attention.work import flops as attention_flops
from autopar.ops.kernels import cudnn
from autopar.ops.kernels.local import dense_work_of, local_work, runs_locally
from autopar.ops.kernels.operation import DenseWork, masked_rows
from autopar.ops.kernels.scaled import is_scaled_product, scaled_type

# Passes in bfloat16 that XLA's TPU compiler makes of a float32 product at each `jax.lax.Precision` (bfloat16_3x and
# bfloat16_6x among the names that jax has for them).
_TPU_PASSES = {jax.lax.Precision.DEFAULT: 1, jax.lax.Precision.HIGH: 3, jax.lax.Precision.HIGHEST: 6}
# First word of a `jax.lax.DotAlgorithmPreset` -> the type that operands are rounded to. Products of TF32 are what
# `DeviceKind` calls float32, as jax allows them for float32 operands.
_ALGORITHMS = {
    "ANY": "float8", "BF16": "bfloat16", "F16": "float16", "TF32": "float32", "F32": FULL_FLOAT32, "F64": "float64",
}  # fmt: skip

_REAL_PARTS = {"complex64": "float32", "complex128": "float64"}
_REAL_PRODUCTS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ProductRate:
    """A product runs as `passes` products of `dtype`, one of those that `DeviceKind.peak_flops` may list."""

    dtype: str
    passes: int = 1


def product_rate(eqn: Any, platform: Platform) -> ProductRate:
    """Of a product or convolution, whose operands are its first two."""
    if is_scaled_product(eqn):
        return ProductRate(scaled_type(eqn))
    operand = _operand_type(*(v.aval.dtype for v in eqn.invars[:2]))
    if operand in _REAL_PARTS:  # four products of real and imaginary parts
        real = product_rate_of(_REAL_PARTS[operand], eqn.params["precision"], platform)
        return ProductRate(real.dtype, _REAL_PRODUCTS * real.passes)
    return product_rate_of(operand, eqn.params["precision"], platform)


def product_rate_of(operand: str, precision: Any, platform: Platform) -> ProductRate:
    """Of a product of operands of one type at a precision."""
    levels = precision if isinstance(precision, tuple) else (precision,)
    if all(level is None or isinstance(level, jax.lax.Precision) for level in levels):
        return _at_precision(operand, [level for level in levels if level is not None], platform)
    return _of_algorithm(operand, precision, platform)


def _operand_type(left: np.dtype, right: np.dtype) -> str:
    """The name under which devices list products of these operands; of two types the wider."""
    names = {"float8" if t.name.startswith("float8") else t.name.replace("uint", "int") for t in (left, right)}
    if len(names) == 1:
        return names.pop()
    return max((left, right), key=lambda t: t.itemsize).name if left.itemsize != right.itemsize else "float32"


def _at_precision(operand: str, levels: list[jax.lax.Precision], platform: Platform) -> ProductRate:
    """Levels concern float32 only. GPUs round to TF32 for all but the highest (google/jax 18934), CPUs never do."""
    highest = max(levels, key=lambda level: _TPU_PASSES[level], default=jax.lax.Precision.DEFAULT)
    if operand != "float32":
        return ProductRate(operand)
    match platform:
        case Platform.TPU:
            return ProductRate(operand, _TPU_PASSES[highest])
        case Platform.GPU:
            return ProductRate(FULL_FLOAT32 if highest is jax.lax.Precision.HIGHEST else operand)
        case Platform.CPU:
            return ProductRate(operand)


def _of_algorithm(operand: str, algorithm: Any, platform: Platform) -> ProductRate:
    if isinstance(algorithm, jax.lax.DotAlgorithm):
        rounded = np.dtype(algorithm.lhs_precision_type), np.dtype(algorithm.rhs_precision_type)
        dtype, passes = _operand_type(*rounded), algorithm.num_primitive_operations
        dtype = FULL_FLOAT32 if dtype == "float32" else dtype
    elif algorithm is jax.lax.DotAlgorithmPreset.DEFAULT:
        return _at_precision(operand, [], platform)
    else:
        found = re.fullmatch(r"([A-Z]+\d*)_.*?(?:_X(\d+))?", algorithm.name)
        assert found is not None, f"an algorithm named otherwise than its types: {algorithm.name}"
        dtype, passes = _ALGORITHMS[found[1]], int(found[2] or 1)
    if dtype == FULL_FLOAT32 and platform is Platform.TPU:
        return ProductRate("float32", _TPU_PASSES[jax.lax.Precision.HIGHEST])
    return ProductRate(dtype, passes)


def main_dtype(graph: OpGraph) -> str:
    """The type of the operands of the largest matrix product, by which peak arithmetic is counted."""
    products = [op for op in graph.ops() if op.primitive in MATRIX_PRODUCTS]
    if not products:
        return "float32"
    largest = max(products, key=lambda op: max(v.aval.size for v in (*op.eqn.invars, *op.eqn.outvars)))
    return peak_dtype(largest.eqn)


def peak_dtype(eqn: Any) -> str:
    """The type by whose peak a product's arithmetic is counted: of its first operand, or the format of its blocks."""
    return scaled_type(eqn) if is_scaled_product(eqn) else str(eqn.invars[0].aval.dtype)


# Halves of arrays are cut out and written, arrive, and are read and put together.
_PASSES_OF_EXCHANGE = 4


def kernel_under(op: Op, device: DeviceKind, ring: int) -> Kernel:
    """The kernel that runs a pass, whose positions are split among so many devices."""
    return kernel_for(op.eqn, library_of(device), ring)


def attention_s(
    op: Op,
    strategy: Strategy,
    moved_bytes: float,
    device: DeviceKind,
    kernel: Kernel,
    ring: int = 1,
    *,
    exchanges: bool = True,
) -> float:
    """Seconds of one run on one device that reads and writes so many bytes of operands and results, in a ring of so
    many devices.

    max(arithmetic / rate, memory traffic / bandwidth): kernels hide one behind the other. Blocks of scores that XLA
    computes go to memory and back. Steps of a ring are kernels of their own, and between them results are joined.
    `exchanges`: whether positions change places for a balanced ring.
    """
    dtype = str(op.eqn.invars[0].aval.dtype)
    rate = device.flops_per_s(dtype)
    if kernel is not Kernel.BLOCKS:
        width = op.eqn.invars[0].aval.shape[inner_dim(op.eqn.params["form"])]
        rate = device.attention_flops_per_s(dtype, width, backward=op.eqn.params["gradients"] is not None)
    traffic = moved_bytes + row_bytes(op.eqn, kernel) / strategy.split
    seconds = device.memory_s(traffic)
    if kernel.writes_scores:
        scores = score_traffic_bytes(op.eqn, ring) / strategy.split
        seconds += device.memory_s(scores)
    order = order_of(op.eqn, ring)
    steps = order.steps + 1
    arithmetic_s = flops(op.eqn, kernel, ring) / strategy.split / rate + steps * device.fill_s(dtype)
    joining_s = 0.0
    if in_steps(op.eqn, kernel, ring):
        joined = step_traffic_bytes(op.eqn) / strategy.split
        joining_s = order.steps * (device.memory_s(joined) + device.launch_overhead_s)
        if order.balanced and exchanges:
            joining_s += device.memory_s(_PASSES_OF_EXCHANGE * moved_bytes)
    launches = steps * launched_kernels(op.eqn, kernel, ring)
    return max(arithmetic_s, seconds) + joining_s + launches * device.launch_overhead_s


# Primitives that XLA does not fuse into their neighbours. The others are elementwise, or only move or make values.
_NOT_FUSED = MATRIX_PRODUCTS | DECOMPOSITIONS | {
    "gather", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "sort", "top_k", "cumsum",
    "cumprod", "cummax", "cummin", "cumlogsumexp", "fft",
    "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
    "random_bits", "threefry2x32", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod",
    "reduce_xor", "argmax", "argmin", "concatenate", "dynamic_update_slice", "attention", "attention_backward",
    "kernel", "pallas_call", "ffi_call", "tpu_custom_call", "shard_map", "custom_partitioning", *cudnn.NAMES,
}  # fmt: skip
# Of each decomposition of an n x n matrix, arithmetic operations for n^3 of them (Golub and Van Loan, "Matrix
# Computations", 4th edition: 4.2, 5.2, 7.4, 7.5, 8.3, 8.6; with all vectors), and launches of kernels for each column:
# columns follow one another, which takes longer than the arithmetic. These are of one H100 in float32 (JAX 0.11, n of
# 128 to 4096): 97.7 ms for eigh of n = 4096 and 11.4 of 1024, 29.5 and 4.9 for qr, 13.1 and 2.4 for lu, 51 for svd of
# 1024, 1.9 and 0.6 for cholesky, 3.2 and 0.4 for triangular_solve. The others are put beside the one they are like.
_DECOMPOSED = {
    "cholesky": (1 / 3, 0.13), "eig": (25.0, 11.0), "eigh": (9.0, 3.0), "geqrf": (4 / 3, 0.75),
    "hessenberg": (10 / 3, 1.5), "householder_product": (4 / 3, 0.75), "lu": (2 / 3, 0.65), "qr": (8 / 3, 1.5),
    "schur": (25.0, 11.0), "svd": (26.0, 11.0), "triangular_solve": (1.0, 0.1), "tridiagonal": (4 / 3, 1.5),
}  # fmt: skip
# Where the traffic of kernels is not known (`kernel_traffic` is of GPUs): a fused operation makes no memory traffic of
# its own but shares its kernel's reads and writes. This is an assumption, not a measurement: it only has to make
# replicated elementwise work cost something, in the order of its real cost.
FUSED_TRAFFIC_SHARE = 0.5


def is_fusible(primitive: str) -> bool:
    """Whether XLA fuses the primitive into its neighbours, so that its result need not be written to memory."""
    return primitive not in _NOT_FUSED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderCopy:
    """A copy of a result in another order of dimensions. `in_tiles`: at the rate of memory-bound kernels; else it reads
    sectors of caches, which come at no less than the peak rate of the memory behind them.
    """

    read_bytes: float
    written_bytes: float
    in_tiles: bool

    def times_s(self, parts: np.ndarray, device: DeviceKind) -> np.ndarray:
        """Of one shard of so many, under each of many strategies."""
        moved = (self.read_bytes + self.written_bytes) / parts
        moving_s = device.memory_s(moved) if self.in_tiles else moved / device.peak_memory_bytes_per_s
        return moving_s + device.small_kernel_s


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What an operation does in all, before it is split: arithmetic, bytes of each operand and each result.

    `multiplies`: a matrix product of any sort or a convolution, whose kernels take longer to start than others.
    `is_convolution`: it reaches another rate. `kernel_bytes`: what the operation adds to the traffic of the kernels
    that it is in; None of one that is priced by itself. `order_copy`: what a product's result is copied to before
    anything reads it. `small_kernels`: how many kernels end with the operation, beside its own of one that is priced by
    itself. `launches`: kernels of its own that follow one another.
    """

    flops: float
    dtype: str
    operand_bytes: tuple[float, ...]
    result_bytes: tuple[int, ...]
    fusible: bool
    multiplies: bool = False
    is_convolution: bool = False
    kernel_bytes: float | None = None
    order_copy: OrderCopy | None = None
    small_kernels: int = 0
    launches: float = 0.0


def flops_of(op: Op) -> float:
    """Arithmetic operations of one run. A matmul counts 2 m n k; elementwise operations one for each element."""
    assert op.rule is not None, "only equations have a rule"
    if op.primitive in ring.PRIMITIVES:
        return attention_flops(op.eqn)
    if runs_locally(op.eqn):
        return local_work(op.eqn).flops
    if (multiplied := multiplications(op.eqn)) is not None:
        return 2.0 * multiplied
    if op.primitive in DECOMPOSITIONS:
        operand = op.eqn.invars[-1 if op.primitive == "triangular_solve" else 0]
        return _DECOMPOSED[op.primitive][0] * operand.aval.size * _columns(op.eqn)
    sizes = [v.aval.size for v in op.eqn.outvars]
    if any(f.kind in (FactorKind.SUM, FactorKind.EXTREMUM) for f in op.rule.factors):
        sizes += [v.aval.size for v in op.eqn.invars]
    return float(max(sizes, default=0))


# Of a convolution of 3 x 3, tiles of 2 x 2 results take 16 multiplications in place of 36 (Lavin and Gray, "Fast
# algorithms for convolutional neural networks", 2016, section 4.1).
_WINOGRAD_SHARE = 16 / 36


def multiplied_share(op: Op, dtype: str, device: DeviceKind) -> float:
    """What devices multiply as a multiple of `flops_of`, of operands of a type of `DeviceKind`.

    Libraries for GPUs multiply less of a convolution in whole float32, which no matrix unit takes, with a window or a
    gradient of 3 x 3 and no strides. Of a ragged product XLA multiplies each row with the matrices of other groups too;
    one in blocks of rows is priced by `local_s`.
    """
    if op.primitive in (RAGGED_PRODUCT, GROUPED_PRODUCT):
        dense = dense_work_of(op.eqn, device.platform.value)
        return dense.flops / dense.own_flops if dense.flops else 1.0
    is_whole = dtype == FULL_FLOAT32 or (dtype == "float32" and FULL_FLOAT32 not in dict(device.peak_flops))
    if op.primitive != "conv_general_dilated" or device.platform is not Platform.GPU or not is_whole:
        return 1.0
    params, (_, kernel), (result,) = op.eqn.params, op.eqn.invars, op.eqn.outvars
    numbers = params["dimension_numbers"]
    steps = (*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"])
    groups = params["feature_group_count"], params["batch_group_count"]
    window = tuple(kernel.aval.shape[d] for d in numbers.rhs_spec[2:])
    results = tuple(result.aval.shape[d] for d in numbers.out_spec[2:])
    return _WINOGRAD_SHARE if {*steps, *groups} == {1} and (3, 3) in (window, results) else 1.0


def rounding(op: Op) -> float:
    """How many times its arithmetic devices do together, where they split examples that they do not divide."""
    return math.prod(f.split_size / f.size for f in op.rule.factors if f.rounded) if op.rule is not None else 1.0


def moved_times(op: Op, device: DeviceKind) -> list[float]:
    """How often each operand is moved: once, and where a ragged product masks it, each copy is written and read."""
    is_ragged = op.primitive in (RAGGED_PRODUCT, GROUPED_PRODUCT)
    copies = masked_rows(op.eqn, device.platform.value) if is_ragged else {}
    return [1.0 + 2.0 * copies.get(v, 0) for v in op.eqn.invars] if copies else [1.0] * len(op.inputs)


def launches_of(op: Op) -> float:
    """Kernels of a decomposition that follow one another, over all matrices; 0 of anything else."""
    if op.primitive not in DECOMPOSITIONS:
        return 0.0
    matrices = math.prod(op.eqn.invars[0].aval.shape[:-2])
    return _DECOMPOSED[op.primitive][1] * matrices * _columns(op.eqn)


def _columns(eqn: Any) -> int:
    """How many columns of each matrix follow one another."""
    return min(eqn.invars[0].aval.shape[-2:])


def local_s(
    op: Op,
    strategy: Strategy,
    moved_bytes: float,
    device: DeviceKind,
    busiest: float = 1.0,
    in_turn: tuple[float, DenseWork] | None = None,
) -> float:
    """Seconds of one run on one device of what runs on each device's part by itself, and reads and writes so many bytes
    of operands and results: its arithmetic, or the memory traffic that it says it has, whichever is longer. The busiest
    device has so many times its share of grouped products, but for dense ones. `in_turn`: where devices exchange rows,
    the bytes that one moves between products, and its dense products.
    """
    work, split = local_work(op.eqn), strategy.split
    dense = dense_work_of(op.eqn, device.platform.value, split)
    blocks_s = dense.blocks_s if in_turn is None else in_turn[1].blocks_s
    between_bytes, dense_flops, masked_bytes = (n / split for n in (work.between_bytes, dense.flops, dense.nbytes))
    if in_turn is not None:
        between_bytes, dense_flops, masked_bytes = in_turn[0], in_turn[1].flops, in_turn[1].nbytes
    dtype = next((str(v.aval.dtype) for v in op.eqn.invars if is_inexact(v.aval.dtype)), "float32")
    traffic = moved_bytes if work.nbytes is None else work.nbytes / split
    traffic += work.product_bytes * (1.0 if masked_bytes else busiest) / split + between_bytes
    multiplied = (work.flops - dense.own_flops) * busiest / split + dense_flops
    arithmetic_s = multiplied / device.flops_per_s(dtype) + device.fill_s(dtype) + blocks_s
    return max(arithmetic_s, device.memory_s(traffic)) + device.memory_s(masked_bytes) + device.launch_overhead_s


def times_s(
    work: Work,
    split: np.ndarray,
    operand_parts: Sequence[np.ndarray],
    result_parts: Sequence[np.ndarray],
    device: DeviceKind,
) -> np.ndarray:
    """Seconds of one run on one device under each of many strategies: of work that is divided among `split` devices,
    with each operand and each result split into so many parts.
    """  # fmt: skip
    operands = [n / parts for n, parts in zip(work.operand_bytes, operand_parts, strict=True)]
    results = [n / parts for n, parts in zip(work.result_bytes, result_parts, strict=True)]
    none = np.zeros(len(split))
    read, written = sum(operands, none), sum(results, none)
    small_s = work.small_kernels * device.small_kernel_s
    if work.kernel_bytes is not None:
        # A part of kernels of several operations: its arithmetic, and what it adds to their traffic.
        moved = work.kernel_bytes / split
        return work.flops / split / device.flops_per_s("float32") + device.memory_s(moved) + small_s
    if work.fusible:
        return device.memory_s(FUSED_TRAFFIC_SHARE * written) + small_s
    rate = device.flops_per_s(work.dtype) * (device.convolution_share if work.is_convolution else 1.0)
    arithmetic_s = work.flops / split / rate + device.fill_s(work.dtype)
    launch_s = device.launch_overhead_s if work.multiplies else device.small_kernel_s
    if work.launches:
        arithmetic_s += work.launches / split * device.launch_overhead_s
    copied_s = work.order_copy.times_s(result_parts[0], device) if work.order_copy is not None else 0.0
    if work.is_convolution and work.dtype == "float32" and device.reorders_convolutions:
        copied_s = copied_s + device.memory_s(2 * (read + written)) + 3 * device.small_kernel_s
    return np.maximum(arithmetic_s, device.memory_s(read + written)) + launch_s + small_s + copied_s


def time_s(work: Work, split: int, shard_counts: tuple[tuple[int, ...], tuple[int, ...]], device: DeviceKind) -> float:
    """`times_s` of one strategy. `shard_counts`: into how many parts each operand and each result is split."""
    operand_parts, result_parts = ([np.array([parts], np.float64) for parts in counts] for counts in shard_counts)
    return float(times_s(work, np.array([split], np.float64), operand_parts, result_parts, device)[0])
