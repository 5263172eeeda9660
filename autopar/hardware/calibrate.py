"""Calibration on the devices of this program: the timed runs, their order, and the constants fitted to them.

Runs are timed in turn, over and over, each time in the other direction, and the median of a run's samples counts: what
else the machine does meanwhile falls on all of them alike. A machine that is busy measures as a slower one.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.common.progress import Progress
from autopar.common.text import text_of_bytes, text_of_rate, text_of_s
from autopar.errors import InvalidArgumentError
from autopar.hardware import discovery
from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind, Fabric, Link
from autopar.hardware.discovery import LocalDevices
from autopar.hardware.fit import LinkFit, RateFit, Timing, fit_link, fit_rate
from autopar.hardware.kinds import DeviceKind, Platform
from autopar.hardware.measurement import FitQuality, MeasuredOn, Measurement

# Microbenchmarks of kernels and collectives, as loops inside one program.
#
# What a call costs (dispatch, handing out to devices, memory that is new) is not in it: a sample is the difference of
# many repetitions and of a first one, divided by their number. Each repetition needs a number of the one before, so
# that no compiler takes it out. Every device works at once, in groups for collectives: a step leaves none idle, and
# devices may share cores or wires.


# One sample should take this long: a hundred times what the clock and the end of a loop leave uncertain.
SAMPLE_S = 10e-3
# Of products and convolutions on accelerators, where power limits a card's clock after a while: an H200 multiplies at
# 803 Tflop/s in samples of 10 ms, at 650 to 660 in runs of 0.1 s, at 641 after 0.2 s, and at 593 after 6 s of nothing
# else (1.3 to 1.5 GHz at 690 W). Those of less than 0.1 ms run 2,000 times, as all that is timed does at most.
POWERED_SAMPLE_S = 0.2
MOST_REPETITIONS = 2_000
# Repetitions that stand in a row in the loop's body, where they are short: going round costs microseconds on a GPU.
UNROLLED, SHORT_S = 8, 200e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRun:
    """A collective over `n` neighbours; `between_hosts`: over one device of each of `n` hosts. Bytes as in `Timing`."""

    kind: CollectiveKind
    result_bytes: int
    n: int
    between_hosts: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRun:
    """The products of a linear layer in training, of matrices of `width` numbers a side, on every device.

    Forward, gradient of the weights, gradient of the input: one operand of each of the latter is transposed.
    """

    dtype: str
    width: int

    PRODUCTS: ClassVar[int] = 3

    @property
    def flops(self) -> float:
        return self.PRODUCTS * 2.0 * self.width**3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """A kernel that reads and writes an array of `array_bytes` on every device and hardly computes."""

    array_bytes: int

    @property
    def moved_bytes(self) -> float:
        return 2.0 * self.array_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRun:
    """A convolution of images with kernels of 3 x 3 on every device, as many channels out as in."""

    images: int
    side: int
    channels: int
    dtype: str

    KERNEL: ClassVar[int] = 3

    @property
    def flops(self) -> float:
        return 2.0 * self.images * self.side**2 * self.KERNEL**2 * self.channels**2


Run = CollectiveRun | MatmulRun | StreamRun | ConvolutionRun


class Clock(Protocol):
    """Times runs on the devices that a measurement is of."""

    def prepare(self, run: Run) -> float:
        """Seconds of one repetition, roughly; all that is slow the first time is done."""

    def sample(self, run: Run) -> float:
        """Seconds of one repetition."""

    def slowest(self, seconds: float) -> float:
        """The most that any process of the program has to say, the same in all."""


class DeviceClock:
    """The clock of real devices. All processes of a program call it alike, and get the same seconds from it."""

    def __init__(self, devices: Sequence[Any], num_hosts: int) -> None:
        self._devices, self._num_hosts = devices, num_hosts
        self._programs: dict[Run, tuple[Callable[..., Any], Any, int]] = {}
        self._repetitions: dict[Run, int] = {}

    def prepare(self, run: Run) -> float:
        # Several streamed kernels in a row would be fused into one.
        seconds = math.inf if isinstance(run, StreamRun) else self._try(run, UNROLLED)
        if seconds > SHORT_S:
            seconds = self._try(run, 1)
        unrolled = self._programs[run][2]
        wanted = self._sample_s(run) / max(seconds, 1e-9)
        self._repetitions[run] = max(1, round(min(wanted, MOST_REPETITIONS) / unrolled)) * unrolled
        return seconds

    def _sample_s(self, run: Run) -> float:
        if isinstance(run, MatmulRun | ConvolutionRun) and self._devices[0].platform != Platform.CPU:
            return POWERED_SAMPLE_S
        return SAMPLE_S

    def sample(self, run: Run) -> float:
        return self._per_repetition_s(run, self._repetitions[run])

    def _try(self, run: Run, unrolled: int) -> float:
        self._programs[run] = self._compiled(run, unrolled)
        self._per_repetition_s(run, unrolled)
        return self._per_repetition_s(run, unrolled)

    def _per_repetition_s(self, run: Run, repetitions: int) -> float:
        program, operands, unrolled = self._programs[run]
        begun = time.perf_counter()
        jax.block_until_ready(program(1 + repetitions // unrolled, *operands))
        between = time.perf_counter()
        jax.block_until_ready(program(1, *operands))
        ended = time.perf_counter()
        seconds = (between - begun) - (ended - between)
        # A short run that other work disturbed may come out at nothing: then what it cost with the call counts.
        return self.slowest(seconds if seconds > 0 else between - begun) / repetitions

    def slowest(self, seconds: float) -> float:
        if jax.process_count() == 1:
            return seconds
        mesh = Mesh(np.array(self._devices), ("d",), axis_types=(AxisType.Auto,))
        own = np.full((1,), seconds, np.float32)
        seen = jax.make_array_from_callback(
            (len(self._devices),), NamedSharding(mesh, PartitionSpec("d")), lambda _: own
        )
        return float(jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(seen))

    def _compiled(self, run: Run, unrolled: int) -> tuple[Callable[..., Any], Any, int]:
        """(program of a number of rounds and operands, operands, repetitions in a round)."""
        mesh = self._mesh(run)
        repeat, operands = _work(run)

        def rounds(count: Any, *local: Any) -> Any:
            def one_round(_: Any, values: Any) -> Any:
                for _ in range(unrolled):
                    values = repeat(*values)
                return values

            return jax.lax.fori_loop(0, count, one_round, local)

        everywhere = PartitionSpec(mesh.axis_names)
        program = jax.jit(
            jax.shard_map(
                rounds,
                mesh=mesh,
                in_specs=(PartitionSpec(), *(everywhere for _ in operands)),
                out_specs=tuple(everywhere for _ in operands),
                check_vma=False,  # a sum is the same everywhere, and goes round the loop as if it were not
            )
        )
        sharding = NamedSharding(mesh, everywhere)
        return program, [_on_each_device(x, sharding, len(self._devices)) for x in operands], unrolled

    def _mesh(self, run: Run) -> Mesh:
        n = run.n if isinstance(run, CollectiveRun) else 1
        total = len(self._devices)
        stride = total // self._num_hosts if isinstance(run, CollectiveRun) and run.between_hosts else 1
        grid = np.array(self._devices).reshape(total // (n * stride), n, stride)
        return Mesh(grid, ("before", "group", "after"), axis_types=(AxisType.Auto,) * 3)


def _on_each_device(value: np.ndarray, sharding: NamedSharding, count: int) -> Any:
    shape = (count * value.shape[0], *value.shape[1:])
    return jax.make_array_from_callback(shape, sharding, lambda _: value)


def _work(run: Run) -> tuple[Callable[..., tuple[Any, ...]], list[np.ndarray]]:
    """(one repetition: values to values, the values on each device at first)."""
    match run:
        case MatmulRun():
            # A reflection: what is multiplied with it and its transpose stays as large, however often.
            normal = np.random.default_rng(0).standard_normal(run.width)
            reflection = np.eye(run.width) - 2 * np.outer(normal, normal) / (normal @ normal)
            matrix = reflection.astype(jnp.dtype(run.dtype))
            return _layer, [matrix, matrix, matrix]
        case StreamRun():
            size = max(1, run.array_bytes // 4)
            return lambda x, factor: (x * factor, factor), [np.ones(size, np.float32), np.ones(1, np.float32)]
        case CollectiveRun():
            return _fed_back(run)
        case ConvolutionRun():
            return _convolution(run)


def _convolution(run: ConvolutionRun) -> tuple[Callable[..., tuple[Any, ...]], list[np.ndarray]]:
    middle, dtype = run.KERNEL // 2, jnp.dtype(run.dtype)
    kernel = np.zeros((run.KERNEL, run.KERNEL, run.channels, run.channels), dtype)
    kernel[middle, middle] = np.eye(run.channels)  # images stay as they are, however often
    images = np.ones((run.images, run.side, run.side, run.channels), dtype)

    def convolved(x: Any, kernel: Any) -> tuple[Any, Any]:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers), kernel

    return convolved, [images, kernel]


def _layer(x: Any, weights: Any, _: Any) -> tuple[Any, Any, Any]:
    """(gradient of the input, weights, their gradient), taking y for its own gradient.

    The gradient of the weights goes round the loop although nobody reads it: like all that does it is laid out row by
    row, as an optimizer wants it. If a product read it in the loop, XLA would choose the layout that suits the two.
    """
    y = x @ weights
    return y @ weights.T, weights, x.T @ y


def _fed_back(run: CollectiveRun) -> tuple[Callable[..., tuple[Any, ...]], list[np.ndarray]]:
    n = run.n
    size = max(1, run.result_bytes // 4)

    def fed_back(collective: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
        """Where the result is larger or smaller than the operand, one number of it goes into the next operand."""
        return lambda x: (x.at[0].set(collective(x)[0]),)

    match run.kind:
        case CollectiveKind.ALL_REDUCE:
            return lambda x: (jax.lax.psum(x, "group"),), [np.zeros(size, np.float32)]
        case CollectiveKind.ALL_GATHER:
            gather = fed_back(lambda x: jax.lax.all_gather(x, "group", tiled=True))
            return gather, [np.zeros(math.ceil(size / n), np.float32)]
        case CollectiveKind.REDUCE_SCATTER:
            scatter = fed_back(lambda x: jax.lax.psum_scatter(x, "group", tiled=True))
            return scatter, [np.zeros(size * n, np.float32)]
        case CollectiveKind.ALL_TO_ALL:
            exchange = lambda x: (jax.lax.all_to_all(x, "group", 0, 0, tiled=True),)  # noqa: E731
            return exchange, [np.zeros(math.ceil(size / n) * n, np.float32)]
        case CollectiveKind.COLLECTIVE_PERMUTE:
            ring = [(i, (i + 1) % n) for i in range(n)]
            return lambda x: (jax.lax.ppermute(x, "group", ring),), [np.zeros(size, np.float32)]
        case _:
            raise AssertionError(f"plans use no {run.kind}, so that none is measured")


# From the times of runs to the constants of devices and links, with the quality of the fit.

# A run whose first repetition takes longer is left out, with all larger ones of its sort.
LONGEST_S = 0.25


def fitted(found: LocalDevices, on: MeasuredOn, times: dict[Run, float], conditions: str) -> Measurement:
    """The constants that give the times back best."""
    source = f"measured over {on.num_hosts} x {on.devices_per_host} devices, jax {on.jax_version}; {conditions}"
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
    waits = f"overhead {text_of_s(link.overhead_s)}, latency {text_of_s(link.latency_s)}"
    worst = f"{timing.kind.value} of {text_of_bytes(timing.result_bytes)} over {timing.n}: {ratio:.2f} of its time"
    fits.append(
        FitQuality(
            what=f"links {where}",
            constants=f"{waits}, {text_of_rate(link.bytes_per_s, 'B')}",
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
        convolution_share=_convolution_share(times, measured, launch_s, fill_s, fits),
        source=f"{table.source}; {source}",
    )
    if platform == Platform.CPU:
        untimed = {"float64": measured["float32"] / 2}  # half as many in a register
        return dataclasses.replace(
            device,
            peak_flops=tuple((untimed | measured).items()),
            peak_memory_bytes_per_s=memory.rate_per_s,
            source=f"{source}: rates as reached, not peaks",
        )
    shares = {dtype: rate / table.peak_flops_per_s(dtype) for dtype, rate in measured.items()}
    of_others = shares.get("bfloat16", shares["float32"])
    return dataclasses.replace(
        device,
        flops_efficiency=tuple((dict.fromkeys((dtype for dtype, _ in table.peak_flops), of_others) | shares).items()),
        memory_efficiency=memory.rate_per_s / table.peak_memory_bytes_per_s,
        sustained_share=1.0,  # samples of products last until power limits the card
    )


def _memory(times: dict[Run, float], has_products: bool, fits: list[FitQuality]) -> RateFit:
    """The rate of memory-bound kernels. Raises: InvalidArgumentError where too little was timed for a device."""
    streamed = [(run.moved_bytes, seconds) for run, seconds in times.items() if isinstance(run, StreamRun)]
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


def _products(times: dict[Run, float], fits: list[FitQuality]) -> dict[str, RateFit]:
    """Rates of matrix products by dtype."""
    rates: dict[str, RateFit] = {}
    products = {run: seconds for run, seconds in times.items() if isinstance(run, MatmulRun)}
    for dtype in dict.fromkeys(["float32", *(run.dtype for run in products)]):
        timed = [(run.flops, seconds) for run, seconds in products.items() if run.dtype == dtype]
        if len(timed) > 1:
            rates[dtype] = fit_rate(timed)
            fits.append(_rate_quality(f"{dtype} products", rates[dtype], len(timed), "flop"))
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
            # At least half of what was timed is arithmetic.
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


def _launch_and_fill(fit: RateFit, times: dict[Run, float]) -> tuple[float, float]:
    """Of a float32 product: what the smallest takes beyond its arithmetic, and what larger ones take beyond that."""
    smallest, seconds = min(
        ((r, s) for r, s in times.items() if isinstance(r, MatmulRun) and r.dtype == "float32"),
        key=lambda timed: timed[0].flops,
    )
    overhead_s = fit.overhead_s / MatmulRun.PRODUCTS
    least_s = max(0.0, seconds - smallest.flops / fit.rate_per_s) / MatmulRun.PRODUCTS
    launch_s = min(overhead_s, least_s)
    return launch_s, overhead_s - launch_s


def _rate_quality(what: str, fit: RateFit, points: int, unit: str) -> FitQuality:
    (work, _), ratio = fit.worst
    return FitQuality(
        what=what,
        constants=f"{text_of_rate(fit.rate_per_s, unit)}, overhead {text_of_s(fit.overhead_s)}",
        points=points,
        median_error=fit.median_error,
        worst=f"{work:.3g} {unit}: {ratio:.2f} of its time",
    )


# Seconds that a measurement takes at most, roughly, and samples of each run within them.
BUDGET_S = 45.0
ROUNDS = 7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is timed: arrays in collectives (the whole one: gathered, or to be scattered), matrices, streamed arrays,
    and `convolutions` (images, pixels of a side, channels) in bfloat16.
    """

    array_bytes: tuple[int, ...]
    widths: tuple[int, ...]
    stream_bytes: tuple[int, ...]
    convolutions: tuple[tuple[int, int, int], ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


# A virtual CPU device has a share of one host: what keeps an accelerator busy would take minutes there. The smallest
# product on both is all overhead. Of arrays in collectives those between tiny and a megabyte are left out on CPU:
# outside of its caches a byte takes longer, and large arrays are where the time of a step goes.
CPU_SIZES = Sizes(
    array_bytes=(1 << 12, 1 << 20, 1 << 22), widths=(16, 128, 256, 512), stream_bytes=(1 << 20, 1 << 22, 1 << 24)
)
ACCELERATOR_SIZES = Sizes(
    array_bytes=(1 << 12, 1 << 18, 1 << 22, 1 << 26, 1 << 28),
    widths=(64, 512, 1024, 2048, 4096, 8192),
    stream_bytes=(1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30),
    convolutions=((32, 16, 512), (32, 32, 256), (32, 64, 128)),
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
    sizes = sizes or (CPU_SIZES if on.platform == Platform.CPU else ACCELERATOR_SIZES)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    progress = Progress(f"autopar measures {len(devices)} x {found.device.name}", show=show_progress)
    times = median_times(make(devices, found), runs(found, sizes), rounds, budget_s, progress)
    conditions = (
        f"{datetime.date.today().isoformat()}, {os.cpu_count()} cores, load {load:.1f} before, "
        f"{time.perf_counter() - begun:.0f} s"
    )
    return fitted(found, on, times, conditions)


def runs(found: LocalDevices, sizes: Sizes) -> list[list[Run]]:
    """Everything to be timed, in series of growing size."""
    series: list[list[Run]] = [[MatmulRun(dtype=dtype, width=w) for w in sizes.widths] for dtype in sizes.dtypes]
    series.append([StreamRun(array_bytes=n) for n in sizes.stream_bytes])
    series.append(
        [
            ConvolutionRun(images=n, side=side, channels=channels, dtype="bfloat16")
            for n, side, channels in sizes.convolutions
        ]
    )
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
                if clock.prepare(run) > LONGEST_S:
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
        case StreamRun():
            return "memory"
        case ConvolutionRun():
            return "convolutions"
        case CollectiveRun():
            return f"{run.kind.value} over {run.n} {'hosts' if run.between_hosts else 'devices'}"
