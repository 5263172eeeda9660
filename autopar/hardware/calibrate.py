"""Calibration on the devices of this program: the timed runs, their order, and the constants fitted to them.

Runs are timed in turn, over and over, each time in the other direction, and the median of a run's samples counts: what
else the machine does meanwhile falls on all of them alike. A machine that is busy measures as a slower one.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopar.common.progress import Progress
from autopar.hardware import discovery
from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind
from autopar.hardware.discovery import LocalDevices
from autopar.hardware.measured_constants import LONGEST_S, fitted
from autopar.hardware.measurement import MeasuredOn, Measurement
from autopar.hardware.microbenchmarks import Clock, DeviceClock
from autopar.hardware.timed_runs import (
    CallRun,
    CollectiveRun,
    ConvolutionRun,
    FreshRun,
    MatmulRun,
    RowsRun,
    Run,
    StreamRun,
    TransposeRun,
)

# Seconds that a measurement takes at most, roughly, and samples of each run within them.
BUDGET_S = 45.0
ROUNDS = 7
# Arrays that a task takes and hands on. Tasks of small models take and make 50 to 250, of which they send few; these
# are all sent. An observation: what more micro-batches cost is told too low with few (steps beside predictions in
# benchmarks/results/fresh_memory.md).
HANDED = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is timed: arrays in collectives (the whole one: gathered, or to be scattered), matrices, streamed arrays.

    `few_rows`: (rows, width) of float32 products that are not square, where packing of operands may cost time.
    `transposed_widths`: square matrices whose rows become columns, where that takes longer than another copy.
    `convolutions`: (images, pixels of a side, channels) of `convolution_dtype`.
    `handed_bytes`: of an array that tasks of a pipeline hand on, where being called takes time from other devices.
    `in_step`: kernels are timed with the devices of a host in step, but for products of less than that width.
    """

    array_bytes: tuple[int, ...]
    widths: tuple[int, ...]
    other_widths: tuple[int, ...]
    few_rows: tuple[tuple[int, int], ...] = ()
    stream_bytes: tuple[int, ...] = ()
    row_bytes: tuple[int, ...] = ()
    transposed_widths: tuple[int, ...] = ()
    fresh_bytes: tuple[int, ...] = ()
    convolutions: tuple[tuple[int, int, int], ...] = ()
    convolution_dtype: str = "float32"
    handed_bytes: int | None = None
    in_step: int | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


# A virtual CPU device has a share of one host: what keeps an accelerator busy would take minutes there. The smallest
# product on both is all overhead. Of arrays in collectives those between tiny and a megabyte are left out on CPU:
# outside of its caches a byte takes longer, and large arrays are where the time of a step goes.
CPU_SIZES = Sizes(
    array_bytes=(1 << 12, 1 << 20, 1 << 22),
    widths=(16, 128, 256, 512),
    other_widths=(128, 256),
    few_rows=((16, 256), (16, 512), (16, 1024), (64, 512), (64, 1024)),
    row_bytes=(1 << 18, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24),
    transposed_widths=(256, 512, 1024),
    fresh_bytes=(36 << 20, 48 << 20),
    convolutions=((4, 8, 128), (4, 16, 64), (4, 32, 32)),
    handed_bytes=1 << 16,
    in_step=128,
)
# One that has the host to itself, or shares it with another, gets larger parts of a step.
ROOMY_CPU_SIZES = dataclasses.replace(
    CPU_SIZES,
    widths=(16, 256, 512, 1024),
    other_widths=(256, 512),
    few_rows=((16, 512), (64, 512), (16, 1024), (64, 1024)),
    row_bytes=(1 << 20, 1 << 22, 1 << 24, 1 << 26),
    fresh_bytes=(72 << 20, 96 << 20),
    convolutions=((16, 8, 128), (16, 16, 64), (16, 32, 32)),
    transposed_widths=(256, 512, 1024, 2048),
)
ACCELERATOR_SIZES = Sizes(
    array_bytes=(1 << 12, 1 << 18, 1 << 22, 1 << 26, 1 << 28),
    widths=(64, 512, 1024, 2048, 4096, 8192),
    other_widths=(64, 512, 1024, 2048, 4096, 8192),
    stream_bytes=(1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30),
    convolutions=((32, 16, 512), (32, 32, 256), (32, 64, 128)),
    convolution_dtype="bfloat16",
)


def measure(
    num_devices: int | None = None,
    *,
    sizes: Sizes | None = None,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
    show_progress: bool = True,
    clock: Callable[[Sequence[Any], LocalDevices], Clock] | None = None,
) -> Measurement:
    """Times the first `num_devices` devices of this program, or all, while they do nothing else.

    In a program of several processes all call it alike. `clock` makes what times the runs.

    Raises:
        InvalidArgumentError, NotEnoughDevicesError: As `Cluster.local`; InvalidArgumentError too for times that do not
            grow with the work, as those of a machine that is much too busy.
    """
    devices, found = discovery.chosen(num_devices)
    make = clock or (lambda given, found: DeviceClock(given, found.num_hosts))
    on = discovery.measured_on(devices, found)
    sizes = sizes or _sizes(on)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    progress = Progress(f"autopar measures {len(devices)} x {found.device.name}", show=show_progress)
    times = median_times(make(devices, found), runs(found, sizes), rounds, budget_s, progress)
    conditions = (
        f"{datetime.date.today().isoformat()}, {os.cpu_count()} cores, load {load:.1f} before, "
        f"{time.perf_counter() - begun:.0f} s"
    )
    return fitted(found, on, times, conditions)


def _sizes(on: MeasuredOn) -> Sizes:
    if on.platform != "cpu":
        return ACCELERATOR_SIZES
    return CPU_SIZES if on.devices_per_host > 2 else ROOMY_CPU_SIZES


def runs(found: LocalDevices, sizes: Sizes) -> list[list[Run]]:
    """Everything to be timed, in series of growing size."""
    in_step = 1 if sizes.in_step is None else found.devices_per_host

    def matmul(dtype: str, width: int, rows: int | None = None) -> MatmulRun:
        alone = width < (sizes.in_step or 0)
        return MatmulRun(dtype=dtype, width=width, rows=rows, in_step=1 if alone else in_step)

    series: list[list[Run]] = [
        [matmul(dtype, w) for w in (sizes.widths if dtype == "float32" else sizes.other_widths)]
        for dtype in sizes.dtypes
    ]
    for rows in dict.fromkeys(rows for rows, _ in sizes.few_rows):
        series.append([matmul("float32", w, r) for r, w in sizes.few_rows if r == rows])
    series.append([StreamRun(array_bytes=n) for n in sizes.stream_bytes])
    series.append([RowsRun(array_bytes=n, in_step=in_step) for n in sizes.row_bytes])
    series.append([TransposeRun(width=w, in_step=in_step) for w in sizes.transposed_widths])
    series.append(
        [
            ConvolutionRun(images=n, side=side, channels=channels, dtype=sizes.convolution_dtype, in_step=in_step)
            for n, side, channels in sizes.convolutions
        ]
    )
    series.append([FreshRun(nbytes=n) for n in sizes.fresh_bytes])
    if sizes.handed_bytes is not None and found.num_hosts == 1 and found.devices_per_host > 1:
        series.append([CallRun(arrays=HANDED, array_bytes=sizes.handed_bytes)])
    for between, most in ((False, found.devices_per_host), (True, found.num_hosts)):
        for n in group_sizes(most):
            series += [[_collective(kind, size, n, between) for size in sizes.array_bytes] for kind in PLANNED_KINDS]
    return [growing for growing in series if growing]


def group_sizes(most: int) -> list[int]:
    """2, 4, 8, ... as far as they divide `most`, and `most` itself: the axes that a mesh may have."""
    powers = [2**i for i in range(1, most.bit_length()) if most % 2**i == 0]
    return powers if most in powers or most == 1 else [*powers, most]


def _collective(kind: CollectiveKind, array_bytes: int, n: int, between_hosts: bool) -> CollectiveRun:
    shared = n if kind is CollectiveKind.REDUCE_SCATTER else 1
    return CollectiveRun(kind=kind, result_bytes=array_bytes // shared, n=n, between_hosts=between_hosts)


def median_times(
    clock: Clock, series: Sequence[Sequence[Run]], rounds: int, budget_s: float, progress: Progress
) -> dict[Run, float]:
    """Median seconds of each run. Runs that take too long are not in it; where time is short, rounds are left out."""
    begun = time.perf_counter()
    ready: list[Run] = []
    for number, growing in enumerate(series):
        with progress.pass_(f"{number + 1}/{len(series)} {_name(growing[0])}"):
            for run in growing:
                if clock.prepare(run) > LONGEST_S and not isinstance(run, FreshRun):  # large steps wait for theirs
                    break
                ready.append(run)
    samples: dict[Run, list[float]] = {run: [] for run in ready}
    for number in range(rounds):
        with progress.pass_(f"round {number + 1}/{rounds}"):
            for run in ready if number % 2 else reversed(ready):
                samples[run].append(clock.sample(run))
        if clock.slowest(time.perf_counter() - begun) > budget_s:
            break
    return {run: statistics.median(seconds) for run, seconds in samples.items()}


def _name(run: Run) -> str:
    match run:
        case MatmulRun():
            return f"{run.dtype} products"
        case StreamRun() | RowsRun():
            return "memory"
        case TransposeRun():
            return "transposing"
        case ConvolutionRun():
            return "convolutions"
        case FreshRun():
            return "fresh memory"
        case CallRun():
            return "calls of tasks"
        case CollectiveRun():
            return f"{run.kind.value} over {run.n} {'hosts' if run.between_hosts else 'devices'}"
