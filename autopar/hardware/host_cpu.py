"""Virtual CPU devices: the constants and corrections that follow from sharing the cores and memory of one host.

Accelerators have memory and arithmetic of their own. Virtual devices have a part of one host's, and the pages of their
memory come from malloc and are new in every run. Nothing else tells them from accelerators: plans of both come out of
the same search. Every function here leaves devices that share nothing as they are.
"""

from __future__ import annotations

import dataclasses

from autopar.hardware.collective_cost import Fabric, Link
from autopar.hardware.kinds import CPU_NAME, DeviceKind

# XLA's CPU programs have their temporary values in one block from malloc, whose pages are new in every run if glibc
# takes it from the system, as it does larger ones (DEFAULT_MMAP_THRESHOLD_MAX). Of smaller ones, which all devices of
# a process give back, it keeps so much (twice that: mallopt(3), M_MMAP_THRESHOLD, on M_TRIM_THRESHOLD).
_LARGE_BLOCK_BYTES = 32 * 1024 * 1024
_KEPT_FREE_BYTES = 2 * _LARGE_BLOCK_BYTES
# Of the processors that devices share, one program on all of them uses so much: about 1.8 of 2.
_USED_BY_ONE_PROGRAM = 0.905
# Of many blocks that lie among others only what is at the end of a heap goes back to the system. How much is an
# observation over small models, and rough.
_RENEWED_SHARE = 1 / 3

# Virtual CPU devices share one host's cores and memory. Measured on 2 cores of an AMD EPYC, jax 0.10.2, medians of
# loops of 32: float32 products of 256 to 1024 a side; x * c over 16 MB; collectives of 1 kB to 8 MB over 2, 4, 8.
_CPU_SOURCE = "measured on 2 cores of an AMD EPYC with 2, 4 and 8 virtual devices, jax 0.10.2"
_CPU_FLOPS_PER_S_PER_CORE = 105e9
_CPU_MEMORY_BYTES_PER_S_PER_HOST = 90e9
_CPU_COLLECTIVE_BYTES_PER_S_PER_HOST = 10e9
_CPU_LAUNCH_S = 4e-6
# A collective waits for every thread: 1 kB takes 17, 41 and 116 us over 2 of 2, 4 of 4, 8 of 8 devices, 45 over 2 of 8.
_CPU_WAIT_S_PER_DEVICE = 3e-6
_CPU_WAIT_S_PER_STEP = 14e-6


def cpu_device(*, num_devices: int, cores: int, host_bytes: int) -> DeviceKind:
    """One of `num_devices` virtual devices of a host: its share of the cores and of the memory."""
    single = _CPU_FLOPS_PER_S_PER_CORE * cores / num_devices
    return DeviceKind(
        name=CPU_NAME,
        peak_flops=(("float32", single), ("float64", single / 2)),
        memory_bytes=host_bytes // num_devices,
        peak_memory_bytes_per_s=_CPU_MEMORY_BYTES_PER_S_PER_HOST / num_devices,
        launch_overhead_s=_CPU_LAUNCH_S,
        flops_efficiency=1.0,
        memory_efficiency=1.0,
        widens_bfloat16=True,
        # The device's memory is the host's: a copy reads it and writes it.
        host_link_bytes_per_s=_CPU_MEMORY_BYTES_PER_S_PER_HOST / num_devices / 2,
        host_link_source=f"half of the memory's rate, {_CPU_SOURCE}",
        shared_by=num_devices,
        source=f"{_CPU_SOURCE}: rates as reached, not peaks; float64 as half of float32 (half as many in a register)",
    )


def cpu_link(num_devices: int) -> Link:
    """Between the `num_devices` virtual devices of one process."""
    return Link(
        overhead_s=_CPU_WAIT_S_PER_DEVICE * num_devices,
        latency_s=_CPU_WAIT_S_PER_STEP,
        bytes_per_s=_CPU_COLLECTIVE_BYTES_PER_S_PER_HOST / num_devices,
        fabric=Fabric.SHARED_MEMORY,
        source=_CPU_SOURCE,
    )


def cpu_process_link(num_devices: int) -> Link:
    """Between processes of `num_devices` virtual devices each, by Gloo.

    Measured with two processes on one machine, 2 busy cores: permute of 1 kB 98 us, of 8 MB 10.6 ms; all-reduce of 8 MB
    15.7 ms. Between machines the network decides, which only a measurement can tell.
    """
    return Link(
        latency_s=100e-6,
        bytes_per_s=0.7e9 / num_devices,
        fabric=Fabric.SHARED_MEMORY,
        source="measured between 2 CPU processes on one machine, Gloo, jax 0.10.2",
    )


def page_fault_s(device: DeviceKind, temporary_bytes: float, runs: int = 1) -> float:
    """Time of having this much memory for temporary values in so many runs of a program, which make one step.

    Large blocks are new in every run. Of small ones what the process does not keep is new once a step: between its
    runs devices do not end all at once, and one takes what another has given back.
    """
    if device.fresh_bytes_per_s is None:
        return 0.0
    if temporary_bytes > _LARGE_BLOCK_BYTES:
        return runs * temporary_bytes / device.fresh_bytes_per_s
    return max(0.0, temporary_bytes - _KEPT_FREE_BYTES / device.shared_by) / device.fresh_bytes_per_s


def held_page_fault_s(device: DeviceKind, held_bytes: float, temporary_bytes: float) -> float:
    """Time of having anew what a step holds in many blocks and gives back: a part of what is not kept, beside
    temporary values of programs that run meanwhile.
    """
    if device.fresh_bytes_per_s is None:
        return 0.0
    small_bytes = temporary_bytes if temporary_bytes <= _LARGE_BLOCK_BYTES else 0.0
    kept_bytes = max(0.0, _KEPT_FREE_BYTES / device.shared_by - small_bytes)
    return _RENEWED_SHARE * max(0.0, held_bytes - kept_bytes) / device.fresh_bytes_per_s


def in_one_program(device: DeviceKind, num_devices: int) -> DeviceKind:
    """What is left of a device where so many run one program: of those that share processors all of them leave some
    idle while they wait for each other, which other programs would use. Rates of arithmetic and of memory tell so;
    what goes beside them (launches, packing, transposing) is left as it is.
    """
    if device.shared_by == 1 or num_devices < device.shared_by:
        return device
    return dataclasses.replace(
        device,
        flops_efficiency=device.flops_efficiency * _USED_BY_ONE_PROGRAM,
        dtype_efficiency=tuple((dtype, share * _USED_BY_ONE_PROGRAM) for dtype, share in device.dtype_efficiency),
        memory_efficiency=device.memory_efficiency * _USED_BY_ONE_PROGRAM,
    )
