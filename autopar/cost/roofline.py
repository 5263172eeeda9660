"""Time of operations on one device: a roofline of arithmetic and memory traffic.

Time = launch + max(operations / rate + fill, bytes / memory's rate), of one shard. Small products run at a part of the
rate that large ones reach: filling and draining the matrix units takes its time, whatever is between.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.attention import ring
from autopar.attention.work import flops as attention_flops
from autopar.hardware.cluster import DeviceKind
from autopar.ir.graph import FactorKind, Op
from autopar.ir.primitives import DECOMPOSITIONS, MATRIX_PRODUCTS, is_inexact, multiplications
from autopar.kernels import cudnn
from autopar.kernels.local import local_work, runs_locally
from autopar.sharding.strategies import Strategy

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
    operand_bytes: tuple[int, ...]
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


def rounding(op: Op) -> float:
    """How many times its arithmetic devices do together, where they split examples that they do not divide."""
    return math.prod(f.split_size / f.size for f in op.rule.factors if f.rounded) if op.rule is not None else 1.0


def launches_of(op: Op) -> float:
    """Kernels of a decomposition that follow one another, over all matrices; 0 of anything else."""
    if op.primitive not in DECOMPOSITIONS:
        return 0.0
    matrices = math.prod(op.eqn.invars[0].aval.shape[:-2])
    return _DECOMPOSED[op.primitive][1] * matrices * _columns(op.eqn)


def _columns(eqn: Any) -> int:
    """How many columns of each matrix follow one another."""
    return min(eqn.invars[0].aval.shape[-2:])


def local_s(op: Op, strategy: Strategy, moved_bytes: float, device: DeviceKind) -> float:
    """Seconds of one run on one device of what runs on each device's part by itself, and reads and writes so many bytes
    of operands and results: its arithmetic, or the memory traffic that it says it has, whichever is longer.
    """
    work = local_work(op.eqn)
    dtype = next((str(v.aval.dtype) for v in op.eqn.invars if is_inexact(v.aval.dtype)), "float32")
    traffic = moved_bytes if work.nbytes is None else work.nbytes / strategy.split
    arithmetic_s = work.flops / strategy.split / device.flops_per_s(dtype) + device.fill_s(dtype)
    return max(arithmetic_s, device.memory_s(traffic)) + device.launch_overhead_s


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
    return np.maximum(arithmetic_s, device.memory_s(read + written)) + launch_s + small_s + copied_s


def time_s(work: Work, split: int, shard_counts: tuple[tuple[int, ...], tuple[int, ...]], device: DeviceKind) -> float:
    """`times_s` of one strategy. `shard_counts`: into how many parts each operand and each result is split."""
    operand_parts, result_parts = ([np.array([parts], np.float64) for parts in counts] for counts in shard_counts)
    return float(times_s(work, np.array([split], np.float64), operand_parts, result_parts, device)[0])
