"""Time of a pass of attention on one device, by the kernel that runs it there."""

from __future__ import annotations

from autopar.attention.kernels import Kernel, inner_dim, kernel_for, library_of
from autopar.attention.work import block_bytes, flops, row_bytes, score_traffic_bytes
from autopar.hardware.kinds import DeviceKind
from autopar.ir.graph import Op
from autopar.sharding.strategies import Strategy


def kernel_under(op: Op, device: DeviceKind, in_ring: bool) -> Kernel:
    """The kernel that runs a pass; one round a ring takes blocks."""
    return kernel_for(op.eqn, library_of(device), in_ring)


def attention_s(op: Op, strategy: Strategy, moved_bytes: float, device: DeviceKind, kernel: Kernel) -> float:
    """Seconds of one run on one device that reads and writes so many bytes of operands and results.

    max(arithmetic / rate, memory traffic / bandwidth): kernels hide one behind the other. Blocks of scores that XLA
    computes go to memory and back.
    """
    dtype = str(op.eqn.invars[0].aval.dtype)
    rate = device.flops_per_s(dtype)
    if kernel is not Kernel.BLOCKS:
        width = op.eqn.invars[0].aval.shape[inner_dim(op.eqn.params["form"])]
        rate = device.attention_flops_per_s(dtype, width, backward=op.eqn.params["gradients"] is not None)
    traffic = moved_bytes + row_bytes(op.eqn, kernel) / strategy.split
    seconds = device.memory_s(traffic, traffic)
    if kernel.writes_scores:
        seconds += device.memory_s(score_traffic_bytes(op.eqn) / strategy.split, block_bytes(op.eqn, strategy.split))
    arithmetic_s = flops(op.eqn, kernel) / strategy.split / rate + device.fill_s(dtype)
    return max(arithmetic_s, seconds) + device.launch_overhead_s
