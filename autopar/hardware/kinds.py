"""`DeviceKind`, a device for the cost model: its rates, its memory, and the times that follow from them.

Rates per second, sizes in bytes, units of 1000. `autopar.hardware.presets` has the accelerators that are known,
`autopar.hardware.host_cpu` virtual CPU devices.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from collections.abc import Iterator

import numpy as np

from autopar.errors import InvalidArgumentError

# In `DeviceKind.peak_flops`, products of float32 that round nothing, where "float32" is the rate of TF32.
FULL_FLOAT32 = "float32 without rounding"
# What the caches of a GPU hand over at once (CUDA C++ Programming Guide, "Device Memory Accesses"): a kernel that reads
# one number here and one there reads as much for each.
SECTOR_BYTES = 32
CPU_NAME = "CPU"  # of every `DeviceKind` that is a virtual device of a host's processors


class Platform(enum.StrEnum):
    """Which of XLA's compilers makes programs for a device."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


def _interpolated(points: tuple[tuple[float, float], ...], at: float) -> float:
    """Between measured points by a power, beyond them as at the nearest; zero where nothing was measured."""
    if not points:
        return 0.0
    places, values = zip(*points, strict=True)
    i = bisect.bisect_left(places, at)
    if i == 0 or i == len(places):
        return values[min(i, len(places) - 1)]
    share = math.log(at / places[i - 1]) / math.log(places[i] / places[i - 1])
    return values[i - 1] * (values[i] / values[i - 1]) ** share


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One accelerator.

    Attributes:
        name: As people write it, `H100-SXM5`.
        peak_flops: (dtype, peak arithmetic operations per second of matrix units) of products with such operands. Must
            name float32; all float8 are one.
        memory_bytes: Memory of one device.
        peak_memory_bytes_per_s: Peak rate of that memory.
        launch_overhead_s: Time of a kernel beyond its arithmetic and memory traffic; of products where that of other
            kernels is known.
        least_kernel_s: That time of a kernel that is no product, where it was measured: then every kernel of
            elementwise operations counts with it.
        loop_turn_s: Time between two turns of a loop, in which nothing runs.
        flops_efficiency: Share of the peak that large matrix products reach, of all dtypes that are not named apart.
        memory_efficiency: Share of the peak that memory-bound kernels reach.
        source: Where the constants come from.
        widens_bfloat16: Whether XLA's backend for it sends bfloat16 arrays as 32 bits (its CPU backend does).
        dtype_efficiency: (dtype, share of its peak) where that was measured apart, instead of `flops_efficiency`.
        float32_fill_s: Time of filling and draining the matrix units in a float32 product, beside its arithmetic.
        fresh_bytes_per_s: Rate at which a step has memory that was given back after the last run, as temporary
            values of CPU programs are, and a part of what pipelines hold (`autopar.hardware.host_cpu`); None where a
            program keeps what it once had.
        call_s: Time of one run of a task of a pipeline beside its kernels, for being called and handing on what it
            makes, where that was measured.
        memory_shares: (bytes of an array, share of the rate of memory-bound kernels that is reached over arrays of that
            size), ascending, as measured; empty where one rate holds for all. Devices of one CPU share its caches:
            what no longer fits goes to memory and back.
        convolution_share: What part of the rate of matrix products convolutions reach; one where that was not measured.
        packing_bytes_per_s: Rate at which operands of a matrix product are laid out anew before its arithmetic, as
            libraries for CPUs do; None where that costs nothing beside it.
        transposing: (bytes of a row, seconds for each byte of an array whose rows become columns), ascending, as
            measured; empty where such copies cost no more than others. XLA's CPU programs go from row to row: the
            longer those are, the sooner a line of a cache is gone before its next number is asked for.
        host_link_bytes_per_s: Rate, one way, at which one device copies from pinned memory of its host, or to it; None
            where it is not known, so that nothing can be kept there.
        host_link_source: Where that rate comes from.
        sustained_share: Part of the rate of matrix products, and of kernels of attention, that is left in runs of
            minutes, where power limits the clock of a card; one where a device keeps the rate of single products.
        has_cudnn_attention: Whether cuDNN's fused attention runs on it (NVIDIA, from compute capability 8.0 on).
        attention_shares: (width of a head, share forward, share backward) of the peak of matrix units that the kernel
            of attention reaches in short runs, by ascending width; arithmetic counts two products forward and five
            backward, and no blocks that a mask hides. Empty: the rate of products.
        vector_memory_bytes: Memory beside that of the device in which its compiler keeps what a kernel reads and makes
            (VMEM of TPUs, without what kernels have for themselves); zero where it keeps none, or that is not known.
        shared_by: How many devices share the processors and memory that the rates are a part of, as virtual devices of
            a CPU do: the part of those that idle is there for the others. One where each has its own.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    peak_memory_bytes_per_s: float
    launch_overhead_s: float
    flops_efficiency: float
    memory_efficiency: float
    source: str
    widens_bfloat16: bool = False
    dtype_efficiency: tuple[tuple[str, float], ...] = ()
    float32_fill_s: float = 0.0
    fresh_bytes_per_s: float | None = None
    call_s: float = 0.0
    memory_shares: tuple[tuple[float, float], ...] = ()
    convolution_share: float = 1.0
    packing_bytes_per_s: float | None = None
    transposing: tuple[tuple[float, float], ...] = ()
    host_link_bytes_per_s: float | None = None
    host_link_source: str = ""
    shared_by: int = 1
    sustained_share: float = 1.0
    has_cudnn_attention: bool = False
    attention_shares: tuple[tuple[int, float, float], ...] = ()
    vector_memory_bytes: int = 0
    least_kernel_s: float | None = None
    loop_turn_s: float = 0.0

    def __post_init__(self) -> None:
        if "float32" not in dict(self.peak_flops):
            raise InvalidArgumentError(
                where=f"DeviceKind({self.name!r}).peak_flops",
                expected="a rate for float32, which stands for all dtypes that are not named",
                got=", ".join(dtype for dtype, _ in self.peak_flops) or "no rates",
                hint="add ('float32', operations per second)",
            )
        for field, wrong in self._wrong():
            raise InvalidArgumentError(
                where=f"DeviceKind({self.name!r}).{field}",
                expected=f"{field} {wrong}",
                got=f"{getattr(self, field)}",
                hint="give bytes, seconds, and operations or bytes per second; efficiencies are shares, such as 0.8",
            )

    def _wrong(self) -> Iterator[tuple[str, str]]:
        """Fields that no device can have, and what they should be. What is not finite is neither above nor below."""

        def above(value: float) -> bool:
            return 0 < value < math.inf

        def ascending(points: tuple[tuple[float, ...], ...]) -> bool:
            places = [point[0] for point in points]
            return all(above(x) for point in points for x in point) and sorted(set(places)) == places

        rates = {"peak_flops": self.peak_flops, "dtype_efficiency": self.dtype_efficiency}
        yield from ((name, "above zero") for name, of in rates.items() if not all(above(x) for _, x in of))
        needed = (
            "memory_bytes", "peak_memory_bytes_per_s", "flops_efficiency", "memory_efficiency", "convolution_share",
            "shared_by", "sustained_share",
        )  # fmt: skip
        yield from ((name, "above zero") for name in needed if not above(getattr(self, name)))
        known = ("fresh_bytes_per_s", "packing_bytes_per_s", "host_link_bytes_per_s")
        yield from ((n, "above zero, or None") for n in known if (x := getattr(self, n)) is not None and not above(x))
        times = ("launch_overhead_s", "float32_fill_s", "call_s", "loop_turn_s")
        yield from ((name, "of zero or more") for name in times if not 0 <= getattr(self, name) < math.inf)
        if self.least_kernel_s is not None and not 0 <= self.least_kernel_s < math.inf:
            yield "least_kernel_s", "of zero or more, or None"
        curves = ("memory_shares", "transposing", "attention_shares")
        yield from ((n, "above zero, of ascending sizes") for n in curves if not ascending(getattr(self, n)))

    @property
    def platform(self) -> Platform:
        """Read off the name, which is what files of clusters hold: jax calls every CPU so, and TPUs begin with it."""
        if self.name == CPU_NAME:
            return Platform.CPU
        return Platform.TPU if self.name.startswith("TPU") else Platform.GPU

    @property
    def small_kernel_s(self) -> float:
        """Time of a kernel that is no product, beyond what it moves."""
        return self.launch_overhead_s if self.least_kernel_s is None else self.least_kernel_s

    @property
    def memory_bytes_per_s(self) -> float:
        """Rate that memory-bound kernels reach."""
        return self.peak_memory_bytes_per_s * self.memory_efficiency

    def memory_s(self, moved_bytes: float, array_bytes: float) -> float:
        """Time of reading and writing so many bytes, of arrays of that size."""
        return moved_bytes / ((_interpolated(self.memory_shares, array_bytes) or 1.0) * self.memory_bytes_per_s)

    def memory_times_s(self, moved_bytes: np.ndarray, array_bytes: np.ndarray) -> np.ndarray:
        """`memory_s` of many at once."""
        if not self.memory_shares:
            return moved_bytes / self.memory_bytes_per_s
        shares = np.array([_interpolated(self.memory_shares, n) or 1.0 for n in array_bytes.tolist()])
        return moved_bytes / (shares * self.memory_bytes_per_s)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak rate for a dtype by its numpy name; float8 that is not listed goes as float16, int4 and int2 as int8
        (compilers widen them), all else as float32.
        """
        rates = dict(self.peak_flops)
        if dtype in ("int4", "int2"):
            return rates.get(dtype, rates.get("int8", rates["float32"]))
        if dtype.startswith("float8"):
            return rates.get("float8", rates.get("float16", rates["float32"]))
        return rates.get(dtype, rates["float32"])

    def flops_per_s(self, dtype: str) -> float:
        """Rate that large matrix products reach, in a long run."""
        family = "float8" if dtype.startswith("float8") else dtype
        share = dict(self.dtype_efficiency).get(family, self.flops_efficiency)
        return self.peak_flops_per_s(dtype) * share * self.sustained_share

    def attention_flops_per_s(self, dtype: str, width: int, *, backward: bool) -> float:
        """Rate of a kernel of attention with heads of this width, in a long run: its clock is that of products."""
        for at, forward_share, backward_share in self.attention_shares:
            if width <= at or at == self.attention_shares[-1][0]:
                share = backward_share if backward else forward_share
                return self.peak_flops_per_s(dtype) * share * self.sustained_share
        return self.flops_per_s(dtype)

    def widening(self, dtype: str) -> float:
        """Bytes sent for each byte stored of a value of this type.

        XLA's CPU compiler does every collective of bfloat16 in 32 bits; those of float16 it does as they are.
        """
        return 2.0 if self.widens_bfloat16 and dtype == "bfloat16" else 1.0

    def transposing_s(self, nbytes: float, row_bytes: float) -> float:
        """Time of copying an array so that another dimension is the last: between rows that were measured by a power
        of their length, beyond them as for the nearest.
        """
        return nbytes * _interpolated(self.transposing, row_bytes)

    def host_copy_s(self, nbytes: float) -> float:
        """Time of bringing so many bytes from the host's memory, or of taking them there."""
        assert self.host_link_bytes_per_s is not None, "without a rate nothing is kept in the host's memory"
        return self.launch_overhead_s + nbytes / self.host_link_bytes_per_s

    def fill_s(self, dtype: str) -> float:
        """Time of filling and draining the matrix units: shorter by as much as the dtype's peak is higher."""
        return self.float32_fill_s * self.peak_flops_per_s("float32") / self.peak_flops_per_s(dtype)
