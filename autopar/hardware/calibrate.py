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
from autopar.common.units import text_of_bytes, text_of_rate, text_of_s
from autopar.errors import InvalidArgumentError
from autopar.hardware import discovery
from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind, Fabric, Link
from autopar.hardware.discovery import LocalDevices
from autopar.hardware.fit import LinkFit, RateFit, Timing, fit_link, fit_products, fit_proportion, fit_rate
from autopar.hardware.kinds import DeviceKind, Platform
from autopar.hardware.measurement import FitQuality, MeasuredOn, Measurement
from autopar.hardware.microbenchmarks import Clock, DeviceClock
from autopar.hardware.timed_runs import (
    CallRun,
    CollectiveRun,
    ConvolutionRun,
    FreshRun,
    Kernel,
    MatmulRun,
    RowsRun,
    Run,
    StreamRun,
    TransposeRun,
)

# From the times of runs to the constants of devices and links, with the quality of the fit.


# A run whose first repetition takes longer is left out, with all larger ones of its sort.
LONGEST_S = 0.25
# What of the rate of new memory is left in a step, where clearing pages takes caches from others: steps of small models
# beside the same ones by an allocator that keeps everything.
FRESH_IN_A_STEP = 0.75


def fitted(found: LocalDevices, on: MeasuredOn, times: dict[Run, float], conditions: str) -> Measurement:
    """The constants that give the times back best."""
    source = f"measured over {on.num_hosts} x {on.devices_per_host} devices, jax {on.jax_version}; {conditions}"
    times = {run: _without_waiting(run, times) for run in times}
    fits: list[FitQuality] = []
    device = _device(found.device, on.platform, times, source, fits)
    inside, timings = _link(found.inside_host, "inside a host", _timings(times, False), source, fits)
    between, timings_between = _link(found.between_hosts, "between hosts", _timings(times, True), source, fits)
    return Measurement(
        on=on,
        device=device,
        inside_host=inside,
        between_hosts=between,
        timings=timings,
        timings_between=timings_between,
        fits=tuple(fits),
        conditions=conditions,
    )


def _timings(times: dict[Run, float], between_hosts: bool) -> tuple[Timing, ...]:
    return tuple(
        Timing(kind=run.kind, result_bytes=run.result_bytes, n=run.n, seconds=seconds)
        for run, seconds in times.items()
        if isinstance(run, CollectiveRun) and run.between_hosts == between_hosts
    )


def _link(
    table: Link, where: str, timings: tuple[Timing, ...], source: str, fits: list[FitQuality]
) -> tuple[Link, tuple[Timing, ...]]:
    """The link of these timings, and those; the table's where there are none, as between the hosts of one host.

    On a torus the devices of a host are timed as if they stood in a line: what one wire does follows from that only
    roughly, so that there too the table's link counts.
    """
    if not timings or table.fabric is Fabric.TORUS:
        return table, timings
    fit: LinkFit = fit_link(timings, fabric=table.fabric, source=source)
    link, (timing, ratio) = fit.link, fit.worst
    rates = [f"{kind.value} {text_of_rate(rate, 'B')}" for kind, rate in link.kind_bytes_per_s]
    constants = ", ".join(
        [
            f"overhead {text_of_s(link.overhead_s)}",
            f"latency {text_of_s(link.latency_s)}",
            *(rates or [text_of_rate(link.bytes_per_s, "B")]),
        ]
    )
    worst = f"{timing.kind.value} of {text_of_bytes(timing.result_bytes)} over {timing.n}: {ratio:.2f} of its time"
    fits.append(
        FitQuality(
            what=f"links {where}",
            constants=constants,
            points=len(timings),
            median_error=fit.median_error,
            worst=worst,
        )
    )
    return link, timings


def _device(
    table: DeviceKind, platform: str, times: dict[Run, float], source: str, fits: list[FitQuality]
) -> DeviceKind:
    """The table's device with measured rates; its peaks stay, where they are peaks (not on CPU)."""
    rates = _products(times, fits)
    memory = _memory(times, "float32" in rates, fits)
    measured = {dtype: fit.rate_per_s for dtype, fit in rates.items()}
    launch_s, fill_s = _launch_and_fill(rates["float32"], times)
    device = dataclasses.replace(
        table,
        launch_overhead_s=launch_s,
        float32_fill_s=fill_s,
        memory_shares=_memory_shares(times, memory, fits),
        fresh_bytes_per_s=_fresh_bytes_per_s(times, fits),
        convolution_share=_convolution_share(times, measured, launch_s, fill_s, fits),
        call_s=_call_s(times, fits),
        packing_bytes_per_s=rates["float32"].packing_bytes_per_s,
        transposing=_transposing(times, fits),
        source=f"{table.source}; {source}",
    )
    if platform == Platform.CPU:
        untimed = {"float64": measured["float32"] / 2}  # half as many in a register
        return dataclasses.replace(
            device,
            peak_flops=tuple((untimed | measured).items()),
            flops_efficiency=1.0,
            peak_memory_bytes_per_s=memory.rate_per_s,
            memory_efficiency=1.0,
            source=f"{source}: rates as reached, not peaks",
        )
    efficiency = tuple((dtype, rate / table.peak_flops_per_s(dtype)) for dtype, rate in measured.items())
    return dataclasses.replace(
        device,
        dtype_efficiency=efficiency,
        flops_efficiency=dict(efficiency).get("bfloat16", dict(efficiency)["float32"]),
        memory_efficiency=memory.rate_per_s / table.peak_memory_bytes_per_s,
        sustained_share=1.0,  # samples of products last until power limits the card
    )


def _memory(times: dict[Run, float], has_products: bool, fits: list[FitQuality]) -> RateFit:
    """The rate of memory-bound kernels. Raises: InvalidArgumentError where too little was timed for a device."""
    streamed = [(run.moved_bytes, seconds) for run, seconds in times.items() if isinstance(run, StreamRun | RowsRun)]
    if not has_products or len(streamed) < 2:
        raise InvalidArgumentError(
            where="Cluster.measure",
            expected=f"float32 products and copies of several sizes that take less than {LONGEST_S} s",
            got=f"{len(times)} runs of all sorts, of these {len(streamed)} copies",
            hint="measure when the machine does nothing else",
        )
    memory = fit_rate(streamed)
    fits.append(_rate_quality("memory", memory, len(streamed), "B"))
    return memory


def _memory_shares(times: dict[Run, float], memory: RateFit, fits: list[FitQuality]) -> tuple[tuple[float, float], ...]:
    """(Bytes of an array, share of the rate of memory that is reached over arrays of that size), ascending."""
    rates = sorted(
        # At least half of what was timed is moving memory, as in `_without_waiting`.
        (float(run.array_bytes), run.moved_bytes / max(s - memory.overhead_s, s / 2))
        for run, s in times.items()
        if isinstance(run, RowsRun)
    )
    if rates:
        fits.append(_as_timed("memory by array", [(rate, f"arrays of {text_of_bytes(n)}") for n, rate in rates]))
    return tuple((nbytes, rate / memory.rate_per_s) for nbytes, rate in rates)


def _fresh_bytes_per_s(times: dict[Run, float], fits: list[FitQuality]) -> float | None:
    """The rate at which a step has memory that is new in every run; None where that was not timed."""
    fresh = [(float(run.nbytes), seconds) for run, seconds in times.items() if isinstance(run, FreshRun)]
    if not fresh:
        return None
    fit = fit_proportion(fresh)  # of pages, one like the other
    fits.append(_rate_quality("fresh memory", fit, len(fresh), "B"))
    return FRESH_IN_A_STEP * fit.rate_per_s


def _call_s(times: dict[Run, float], fits: list[FitQuality]) -> float:
    """Seconds of the call of a pipeline's task; zero where that was not timed."""
    call_s = next((seconds for run, seconds in times.items() if isinstance(run, CallRun)), 0.0)
    if call_s:
        text = f"{text_of_s(call_s)} each"
        fits.append(FitQuality(what="calls of tasks", constants=text, points=1, median_error=0.0, worst="as timed"))
    return call_s


def _transposing(times: dict[Run, float], fits: list[FitQuality]) -> tuple[tuple[float, float], ...]:
    """(Bytes of a row, seconds for each byte of an array whose rows become columns), ascending."""
    timed = sorted((run.row_bytes, s / run.copied_bytes) for run, s in times.items() if isinstance(run, TransposeRun))
    if timed:
        rows = [(1.0 / s_per_byte, f"rows of {text_of_bytes(row)}") for row, s_per_byte in timed]
        fits.append(_as_timed("transposing", rows))
    return tuple(timed)


def _products(times: dict[Run, float], fits: list[FitQuality]) -> dict[str, RateFit]:
    """Rates of matrix products by dtype. How fast operands are packed follows from float32 products of few rows."""
    rates: dict[str, RateFit] = {}
    packing_bytes_per_s: float | None = None
    products = {run: seconds for run, seconds in times.items() if isinstance(run, MatmulRun)}
    for dtype in dict.fromkeys(["float32", *(run.dtype for run in products)]):
        timed = [(run, seconds) for run, seconds in products.items() if run.dtype == dtype]
        if len(timed) < 2:
            continue
        packs = packing_bytes_per_s is not None or any(run.rows is not None for run, _ in timed)
        if packs:
            points = [(run.flops, run.operand_bytes, seconds) for run, seconds in timed]
            fit = fit_products(points, packing_bytes_per_s=packing_bytes_per_s)
            packing_bytes_per_s = fit.packing_bytes_per_s
        else:
            fit = fit_rate([(run.flops, seconds) for run, seconds in timed])
        rates[dtype] = fit
        fits.append(_rate_quality(f"{dtype} products", fit, len(timed), "flop"))
    return rates


def _convolution_share(
    times: dict[Run, float],
    flops_per_s: dict[str, float],
    launch_s: float,
    float32_fill_s: float,
    fits: list[FitQuality],
) -> float:
    """What part of the rate of matrix products convolutions reach, in the median, beyond a kernel's overhead; all of it
    at most, and where they or products of their dtype took too long to be timed.
    """
    shares = {}
    for run, seconds in times.items():
        if isinstance(run, ConvolutionRun) and run.dtype in flops_per_s:
            overhead_s = launch_s + (float32_fill_s if run.dtype == "float32" else 0.0)
            # At least half of what was timed is arithmetic, as in `_without_waiting`.
            shares[run] = run.flops / max(seconds - overhead_s, seconds / 2) / flops_per_s[run.dtype]
    if not shares:
        return 1.0
    share = min(1.0, statistics.median(shares.values()))
    off = {run: reached / share for run, reached in shares.items()}
    worst, ratio = max(off.items(), key=lambda item: abs(item[1] - 1))
    fits.append(
        FitQuality(
            what="convolutions",
            constants=f"{share:.0%} of {worst.dtype} products",
            points=len(shares),
            median_error=statistics.median(abs(ratio - 1) for ratio in off.values()),
            worst=f"{worst.channels} channels: {ratio:.2f} of its time",
        )
    )
    return share


def _without_waiting(run: Run, times: dict[Run, float]) -> float:
    """Seconds of a run itself: where devices keep in step, the smallest all-reduce among them is taken away."""
    if not isinstance(run, Kernel) or run.in_step == 1:
        return times[run]
    waits = [
        (other.result_bytes, seconds)
        for other, seconds in times.items()
        if isinstance(other, CollectiveRun)
        and (other.kind, other.n, other.between_hosts) == (CollectiveKind.ALL_REDUCE, run.in_step, False)
    ]
    waiting_s = min(waits)[1] if waits else 0.0
    # Half of a time that is nothing but waiting is left: some of it was computing.
    return max(times[run] - waiting_s, times[run] / 2)


def _launch_and_fill(fit: RateFit, times: dict[Run, float]) -> tuple[float, float]:
    """Of a float32 product: what the smallest takes beyond its arithmetic, and what larger ones take beyond that."""
    smallest, seconds = min(
        ((r, s) for r, s in times.items() if isinstance(r, MatmulRun) and r.dtype == "float32"),
        key=lambda timed: timed[0].flops,
    )
    packing_s = 0.0 if fit.packing_bytes_per_s is None else smallest.operand_bytes / fit.packing_bytes_per_s
    overhead_s = fit.overhead_s / MatmulRun.PRODUCTS
    least_s = max(0.0, seconds - smallest.flops / fit.rate_per_s - packing_s) / MatmulRun.PRODUCTS
    launch_s = min(overhead_s, least_s)
    return launch_s, overhead_s - launch_s


def _as_timed(what: str, rates: Sequence[tuple[float, str]]) -> FitQuality:
    """Of (bytes per second, in what): nothing is fitted, the times stand as they are."""
    constants = ", ".join(f"{text_of_rate(rate, 'B')} in {where}" for rate, where in rates)
    return FitQuality(what=what, constants=constants, points=len(rates), median_error=0.0, worst="as timed")


def _rate_quality(what: str, fit: RateFit, points: int, unit: str) -> FitQuality:
    (work, _), ratio = fit.worst
    packing = [] if fit.packing_bytes_per_s is None else [f"packing {text_of_rate(fit.packing_bytes_per_s, 'B')}"]
    return FitQuality(
        what=what,
        constants=", ".join([text_of_rate(fit.rate_per_s, unit), *packing, f"overhead {text_of_s(fit.overhead_s)}"]),
        points=points,
        median_error=fit.median_error,
        worst=f"{work:.3g} {unit}: {ratio:.2f} of its time",
    )


# Seconds that a measurement takes at most, roughly, and samples of each run within them.
BUDGET_S = 45.0
ROUNDS = 7
# Arrays that a task takes and hands on. Tasks of small models take and make 50 to 250, of which they send few; these
# are all sent. An observation: what more micro-batches cost is told too low with few.
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
