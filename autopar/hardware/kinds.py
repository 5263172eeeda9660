"""`DeviceKind`, a device for the cost model: its rates, its memory, and the times that follow from them.

Rates per second, sizes in bytes, units of 1000. `autopar.hardware.presets` has the devices that are known.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from autopar.errors import InvalidArgumentError

# In `DeviceKind.peak_flops`, products of float32 that round nothing, where "float32" is the rate of TF32.
FULL_FLOAT32 = "float32 without rounding"
# What the caches of a GPU hand over at once (CUDA C++ Programming Guide, "Device Memory Accesses"): a kernel that reads
# one number here and one there reads as much for each.
SECTOR_BYTES = 32
CPU_NAME = "CPU"  # of every `DeviceKind` that is a virtual device of a host's processors
# Between two turns of a loop, in which nothing runs: 3.7 and 5.1 us (LSTM) and 4.6 us (layers of a Llama) on an H200,
# as recorded from programs of jax 0.11 as command buffers.
_LOOP_TURN_S = 4.5e-6
_Bytes = TypeVar("_Bytes", float, np.ndarray)  # of one kernel, or of many
_Times = TypeVar("_Times", np.float64, np.ndarray)  # of an operation, or of one under each of many strategies


class Platform(enum.StrEnum):
    """Which of XLA's compilers makes programs for a device."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """Seconds of one run of the operations of a kind, as a step had them that was timed (`autopar.measure`).

    Attributes:
        kind: As `autopar.cost.cost_model.timed_kinds` names operations.
        predicted_s: By the constants of the device alone; ascending.
        measured_s: Of the same operations as they ran; not descending, so that more work never takes less time.
    """

    kind: str
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    def corrected_s(self, predicted_s: _Times) -> _Times:
        """Between two sizes on the line through their times; beyond them by the ratio of the nearest one."""
        inside: _Times = np.interp(predicted_s, self.predicted_s, self.measured_s)
        below_least = np.minimum(predicted_s / self.predicted_s[0], 1.0)
        return inside * below_least * np.maximum(predicted_s / self.predicted_s[-1], 1.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One device.

    Attributes:
        name: As people write it, `H100-SXM5`.
        peak_flops: (dtype, peak arithmetic operations per second of matrix units) of products with such operands. Must
            name float32, which stands for dtypes that are not named; all float8 are one. Products of scaled blocks go
            by their format (`autopar.ops.kernels.scaled`), where matrix units take it.
        flops_efficiency: (dtype, share of that peak that large matrix products reach); float32 stands for others here
            too.
        memory_bytes: Memory of one device.
        peak_memory_bytes_per_s: Peak rate of that memory.
        memory_efficiency: Share of the peak that memory-bound kernels reach.
        launch_overhead_s: Time of a kernel beyond its arithmetic and memory traffic; of products where that of other
            kernels is known.
        source: Where the constants come from.
        least_kernel_s: That time of a kernel that is no product, where it was measured: then every kernel of
            elementwise operations counts with it, and every turn of a loop with the time in which nothing runs.
        float32_fill_s: Time of filling and draining the matrix units in a float32 product, beside its arithmetic.
        sustained_share: Part of the rate of matrix products, and of kernels of attention, that is left in runs of
            minutes, where power limits the clock of a card; one where a device keeps the rate of single products.
        convolution_share: What part of the rate of matrix products convolutions reach; one where that was not measured.
        reorders_convolutions: Whether the library of convolutions copies float32 images to the order of dimensions that
            matrix units take, and results back: XLA lays them out channel by channel. cuDNN 8.0 did on A100s; runs of
            cuDNN 9 on H100 and H200 are faster than that.
        attention_shares: (width of a head, share forward, share backward) of the peak of matrix units that the kernel
            of attention reaches in short runs, by ascending width; arithmetic counts two products forward and five
            backward, and no blocks that a mask hides. Empty: it reaches the rate of products. None: there is no such
            kernel. That of GPUs is cuDNN's (NVIDIA, from compute capability 8.0 on).
        vector_memory_bytes: Memory beside that of the device in which its compiler keeps what a kernel reads and makes
            (VMEM of TPUs, without what kernels have for themselves); zero where it keeps none, or that is not known.
        host_link_bytes_per_s: Rate, one way, at which one device copies from pinned memory of its host, or to it; None
            where it is not known, so that nothing can be kept there.
        gathers_by_all_reduce: Whether its compiler gathers over all devices of a closed torus of three dimensions by an
            all-reduce of zeros and each device's own part.
        operation_times: Of a step that was timed on such a device, what its kinds of operations take beside what all
            other constants say of them; other kinds take what those say.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    flops_efficiency: tuple[tuple[str, float], ...]
    memory_bytes: int
    peak_memory_bytes_per_s: float
    memory_efficiency: float
    launch_overhead_s: float
    source: str
    least_kernel_s: float | None = None
    float32_fill_s: float = 0.0
    sustained_share: float = 1.0
    convolution_share: float = 1.0
    reorders_convolutions: bool = False
    attention_shares: tuple[tuple[int, float, float], ...] | None = None
    vector_memory_bytes: int = 0
    host_link_bytes_per_s: float | None = None
    gathers_by_all_reduce: bool = False
    operation_times: tuple[OperationTimes, ...] = ()

    def __post_init__(self) -> None:
        for field, of, example in (("peak_flops", "a rate", "989e12"), ("flops_efficiency", "a share", "0.8")):
            given = getattr(self, field)
            if not isinstance(given, tuple) or "float32" not in dict(given):
                raise InvalidArgumentError(
                    where=f"DeviceKind({self.name!r}).{field}",
                    expected=f"{of} for float32, which stands for all dtypes that are not named",
                    got=f"{given}",
                    hint=f"give pairs of a dtype and its number, as in (('float32', {example}),)",
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

        rates = {"peak_flops": self.peak_flops, "flops_efficiency": self.flops_efficiency}
        yield from ((name, "above zero") for name, of in rates.items() if not all(above(x) for _, x in of))
        needed = (
            "memory_bytes", "peak_memory_bytes_per_s", "memory_efficiency", "sustained_share", "convolution_share",
        )  # fmt: skip
        yield from ((name, "above zero") for name in needed if not above(getattr(self, name)))
        if self.host_link_bytes_per_s is not None and not above(self.host_link_bytes_per_s):
            yield "host_link_bytes_per_s", "above zero, or None"
        times = {"launch_overhead_s": self.launch_overhead_s, "float32_fill_s": self.float32_fill_s}
        yield from ((name, "of zero or more") for name, value in times.items() if not 0 <= value < math.inf)
        if self.least_kernel_s is not None and not 0 <= self.least_kernel_s < math.inf:
            yield "least_kernel_s", "of zero or more, or None"
        shares = self.attention_shares or ()
        widths = [width for width, _, _ in shares]
        if sorted(set(widths)) != widths or not all(above(x) for row in shares for x in row):
            yield "attention_shares", "above zero, of ascending widths"

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
    def loop_turn_s(self) -> float:
        """Time between two turns of a loop; zero where so small times are not known."""
        return 0.0 if self.least_kernel_s is None else _LOOP_TURN_S

    @property
    def memory_bytes_per_s(self) -> float:
        """Rate that memory-bound kernels reach."""
        return self.peak_memory_bytes_per_s * self.memory_efficiency

    def memory_s(self, moved_bytes: _Bytes) -> _Bytes:
        """Time of reading and writing so many bytes."""
        return moved_bytes / self.memory_bytes_per_s

    def corrected_s(self, kinds: Sequence[str], predicted_s: _Times) -> _Times:
        """Seconds of one run of operations, given those by all other constants: by the first kind that was timed."""
        times = next((times for kind in kinds for times in self.operation_times if times.kind == kind), None)
        return predicted_s if times is None else times.corrected_s(predicted_s)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak rate for a dtype by its numpy name, or for a format of scaled blocks."""
        return dict(self.peak_flops)[self._listed(dtype)]

    def _listed(self, dtype: str) -> str:
        """The row of `peak_flops` for a dtype: int4 and int2 that are not listed go as int8, float8 and float4 as
        float16 and formats of scaled blocks as bfloat16 (compilers widen them), all else as float32.
        """
        wider = {"int4": "int8", "int2": "int8", "mxfp8": "bfloat16", "mxfp4": "bfloat16", "nvfp4": "bfloat16"}
        names = [dtype, wider.get(dtype, dtype)]
        if dtype.startswith(("float8", "float4")):
            names = [dtype[:6], "float16"]
        return next((name for name in names if any(name == listed for listed, _ in self.peak_flops)), "float32")

    def flops_share(self, dtype: str) -> float:
        """Share of the peak that large matrix products of a dtype reach in short runs."""
        shares = dict(self.flops_efficiency)
        return shares.get(self._listed(dtype), shares["float32"])

    def flops_per_s(self, dtype: str) -> float:
        """Rate that large matrix products reach, in a long run."""
        return self.peak_flops_per_s(dtype) * self.flops_share(dtype) * self.sustained_share

    def attention_flops_per_s(self, dtype: str, width: int, *, backward: bool) -> float:
        """Rate of a kernel of attention with heads of this width, in a long run: its clock is that of products."""
        rows = self.attention_shares or ()
        for at, forward_share, backward_share in rows:
            if width <= at or at == rows[-1][0]:
                share = backward_share if backward else forward_share
                return self.peak_flops_per_s(dtype) * share * self.sustained_share
        return self.flops_per_s(dtype)

    def widening(self, dtype: str) -> float:
        """Bytes sent for each byte stored of a value of this type.

        XLA's CPU compiler does every collective of bfloat16 in 32 bits; those of float16 it does as they are.
        """
        return 2.0 if self.platform is Platform.CPU and dtype == "bfloat16" else 1.0

    def host_copy_s(self, nbytes: float) -> float:
        """Time of bringing so many bytes from the host's memory, or of taking them there."""
        assert self.host_link_bytes_per_s is not None, "without a rate nothing is kept in the host's memory"
        return self.launch_overhead_s + nbytes / self.host_link_bytes_per_s

    def fill_s(self, dtype: str) -> float:
        """Time of filling and draining the matrix units: shorter by as much as the dtype's peak is higher."""
        return self.float32_fill_s * self.peak_flops_per_s("float32") / self.peak_flops_per_s(dtype)
