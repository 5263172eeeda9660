"""From the times of runs to the constants of devices and links, with the quality of the fit."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from autopar.common.units import text_of_bytes, text_of_rate, text_of_s
from autopar.errors import InvalidArgumentError
from autopar.hardware.collective_cost import CollectiveKind, Fabric, Link
from autopar.hardware.discovery import LocalDevices
from autopar.hardware.fit import LinkFit, RateFit, Timing, fit_link, fit_products, fit_proportion, fit_rate
from autopar.hardware.kinds import DeviceKind, Platform
from autopar.hardware.measurement import FitQuality, MeasuredOn, Measurement
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

# A run whose first repetition takes longer is left out, with all larger ones of its sort.
LONGEST_S = 0.25
# What of the rate of new memory is left in a step, where clearing pages takes caches from others: steps of small models
# beside the same ones by an allocator that keeps everything (`python -m benchmarks.fresh_memory`).
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
