"""Time of a pass of attention on one device, by the kernel that runs it there."""

from __future__ import annotations

from autopar.attention.kernels import Kernel, inner_dim, kernel_for, library_of
from autopar.attention.work import (
    flops,
    in_steps,
    launched_kernels,
    order_of,
    row_bytes,
    score_traffic_bytes,
    step_traffic_bytes,
)
from autopar.hardware.kinds import DeviceKind
from autopar.ir.graph import Op
from autopar.sharding.strategies import Strategy

# Halves of arrays are cut out and written, arrive, and are read and put together.
_PASSES_OF_EXCHANGE = 4


def kernel_under(op: Op, device: DeviceKind, ring: int) -> Kernel:
    """The kernel that runs a pass, whose positions are split among so many devices."""
    return kernel_for(op.eqn, library_of(device), ring)


def attention_s(
    op: Op, strategy: Strategy, moved_bytes: float, device: DeviceKind, kernel: Kernel, ring: int = 1
) -> float:
    """Seconds of one run on one device that reads and writes so many bytes of operands and results, in a ring of so
    many devices.

    max(arithmetic / rate, memory traffic / bandwidth): kernels hide one behind the other. Blocks of scores that XLA
    computes go to memory and back. Steps of a ring are kernels of their own, and between them results are joined.
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
        if order.balanced:
            joining_s += device.memory_s(_PASSES_OF_EXCHANGE * moved_bytes)
    launches = steps * launched_kernels(op.eqn, kernel, ring)
    return max(arithmetic_s, seconds) + joining_s + launches * device.launch_overhead_s
