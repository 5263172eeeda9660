"""Published constants of accelerators and of the links between them, each with its unit and source.

Peak rates are the vendors' (dense, no sparsity). What programs reach of them is a separate factor, measured where a
measurement was found. Rates per second, sizes in bytes, units of 1000.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator

from autopar.errors import InvalidArgumentError
from autopar.hardware.collective_cost import Fabric, Link, SwitchDetail

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
# XLA's CPU programs have their temporary values in one block from malloc, whose pages are new in every run if glibc
# takes it from the system, as it does larger ones (DEFAULT_MMAP_THRESHOLD_MAX). Of smaller ones, which all devices of
# a process give back, it keeps so much (twice that: mallopt(3), M_MMAP_THRESHOLD, on M_TRIM_THRESHOLD).
_LARGE_BLOCK_BYTES = 32 * 1024 * 1024
_KEPT_FREE_BYTES = 2 * _LARGE_BLOCK_BYTES
# Of the processors that devices share, one program on all of them uses so much: about 1.8 of 2 (cores in
# benchmarks/results/fresh_memory.md); `runtime/simulation/shared_cores.py` has what stages use.
_USED_BY_ONE_PROGRAM = 0.905
# Of many blocks that lie among others only what is at the end of a heap goes back to the system. How much is an
# observation over small models, and rough (benchmarks/results/fresh_memory.md).
_RENEWED_SHARE = 1 / 3


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
        peak_flops: (dtype, peak arithmetic operations per second of matrix units). Must name float32.
        memory_bytes: Memory of one device.
        peak_memory_bytes_per_s: Peak rate of that memory.
        launch_overhead_s: Time of a kernel beyond its arithmetic and memory traffic.
        flops_efficiency: Share of the peak that large matrix products reach, of all dtypes that are not named apart.
        memory_efficiency: Share of the peak that memory-bound kernels reach.
        source: Where the constants come from.
        widens_bfloat16: Whether XLA's backend for it sends bfloat16 arrays as 32 bits (its CPU backend does).
        dtype_efficiency: (dtype, share of its peak) where that was measured apart, instead of `flops_efficiency`.
        float32_fill_s: Time of filling and draining the matrix units in a float32 product, beside its arithmetic.
        fresh_bytes_per_s: Rate at which a step has memory that was given back after the last run, as temporary
            values of CPU programs are (`page_fault_s`), and a part of what pipelines hold (`held_page_fault_s`); None
            where a program keeps what it once had.
        call_s: Processor time of one run of a task of a pipeline beside its kernels, for being called and handing on
            what it makes, where devices share processors: as seconds in which nobody else has them.
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

        def ascending(points: tuple[tuple[float, float], ...]) -> bool:
            places = [place for place, _ in points]
            return all(above(x) for point in points for x in point) and sorted(set(places)) == places

        rates = {"peak_flops": self.peak_flops, "dtype_efficiency": self.dtype_efficiency}
        yield from ((name, "above zero") for name, of in rates.items() if not all(above(x) for _, x in of))
        needed = (
            "memory_bytes", "peak_memory_bytes_per_s", "flops_efficiency", "memory_efficiency", "convolution_share",
            "shared_by",
        )  # fmt: skip
        yield from ((name, "above zero") for name in needed if not above(getattr(self, name)))
        known = ("fresh_bytes_per_s", "packing_bytes_per_s", "host_link_bytes_per_s")
        yield from ((n, "above zero, or None") for n in known if (x := getattr(self, n)) is not None and not above(x))
        times = ("launch_overhead_s", "float32_fill_s", "call_s")
        yield from ((name, "of zero or more") for name in times if not 0 <= getattr(self, name) < math.inf)
        curves = ("memory_shares", "transposing")
        yield from ((n, "above zero, of ascending sizes") for n in curves if not ascending(getattr(self, n)))

    @property
    def memory_bytes_per_s(self) -> float:
        """Rate that memory-bound kernels reach."""
        return self.peak_memory_bytes_per_s * self.memory_efficiency

    def memory_s(self, moved_bytes: float, array_bytes: float) -> float:
        """Time of reading and writing so many bytes, of arrays of that size."""
        return moved_bytes / ((_interpolated(self.memory_shares, array_bytes) or 1.0) * self.memory_bytes_per_s)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak rate for a dtype by its numpy name; all float8 are one, and what is not listed goes as float32."""
        rates = dict(self.peak_flops)
        family = "float8" if dtype.startswith("float8") else dtype
        return rates.get(family, rates["float32"])

    def flops_per_s(self, dtype: str) -> float:
        """Rate that large matrix products reach."""
        return self.peak_flops_per_s(dtype) * dict(self.dtype_efficiency).get(dtype, self.flops_efficiency)

    def page_fault_s(self, temporary_bytes: float, runs: int = 1) -> float:
        """Time of having this much memory for temporary values in so many runs of a program, which make one step.

        Large blocks are new in every run. Of small ones what the process does not keep is new once a step: between its
        runs devices do not end all at once, and one takes what another has given back.
        """
        if self.fresh_bytes_per_s is None:
            return 0.0
        if temporary_bytes > _LARGE_BLOCK_BYTES:
            return runs * temporary_bytes / self.fresh_bytes_per_s
        return max(0.0, temporary_bytes - _KEPT_FREE_BYTES / self.shared_by) / self.fresh_bytes_per_s

    def held_page_fault_s(self, held_bytes: float, temporary_bytes: float) -> float:
        """Time of having anew what a step holds in many blocks and gives back: a part of what is not kept, beside
        temporary values of programs that run meanwhile.
        """
        if self.fresh_bytes_per_s is None:
            return 0.0
        small_bytes = temporary_bytes if temporary_bytes <= _LARGE_BLOCK_BYTES else 0.0
        kept_bytes = max(0.0, _KEPT_FREE_BYTES / self.shared_by - small_bytes)
        return _RENEWED_SHARE * max(0.0, held_bytes - kept_bytes) / self.fresh_bytes_per_s

    def in_one_program(self, num_devices: int) -> DeviceKind:
        """What is left of a device where so many run one program: of those that share processors all of them leave some
        idle while they wait for each other, which other programs would use. Rates of arithmetic and of memory tell so;
        what goes beside them (launches, packing, transposing) is left as it is.
        """
        if self.shared_by == 1 or num_devices < self.shared_by:
            return self
        return dataclasses.replace(
            self,
            flops_efficiency=self.flops_efficiency * _USED_BY_ONE_PROGRAM,
            dtype_efficiency=tuple((dtype, share * _USED_BY_ONE_PROGRAM) for dtype, share in self.dtype_efficiency),
            memory_efficiency=self.memory_efficiency * _USED_BY_ONE_PROGRAM,
        )

    def packing_s(self, operand_bytes: float) -> float:
        """Time of laying the operands of a matrix product out anew."""
        return 0.0 if self.packing_bytes_per_s is None else operand_bytes / self.packing_bytes_per_s

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _HostLink:
    """Between a device and the memory of its host, one way."""

    gb_per_s: float
    source: str

    def of(self, device: DeviceKind) -> DeviceKind:
        return dataclasses.replace(device, host_link_bytes_per_s=self.gb_per_s * _GIGA, host_link_source=self.source)


# One device at a time, pinned memory: two GPUs that share a switch on their way to the host get less each.
_PCIE3 = _HostLink(gb_per_s=12.2, source="PCIe 3 x16: bandwidthTest on a P100, 12.2 to, 12.9 back (gearshifft 82)")
_PCIE4 = _HostLink(gb_per_s=25.1, source="PCIe 4 x16: nvbandwidth on an A100-SXM4 (NVIDIA/nvbandwidth 42)")
_PCIE5 = _HostLink(gb_per_s=52.8, source="PCIe 5 x16: nvbandwidth on 8 H100, device to host (NVIDIA/nvbandwidth 24)")
_C2C_GH200 = _HostLink(
    gb_per_s=346.0, source="NVLink-C2C, 450 GB/s one way: GH200's copy engines (NVIDIA/nvbandwidth 23)"
)
# A Grace processor has two B200 beside it; how much of the link each can use was found in no measurement.
_C2C_GB200 = _HostLink(
    gb_per_s=173.0, source="NVLink-C2C, 450 GB/s one way for two GPUs (NVIDIA GB200 data sheet), the share as on GH200"
)
_TPU_HOST = _HostLink(gb_per_s=15.0, source="PCIe of a TPU host: 1.5e10 bytes/s a chip (scaling-book tpus.md)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """What matrix products show of a GPU: launch, shares of the peaks of half and of single precision, fill."""

    launch_us: float
    half: float
    single: float
    fill_us: float = 0.0


def _gpu(
    name: str, *, half: float, single: float, double: float, eight_bit: float | None, memory_gb: float,
    memory_gb_per_s: float, products: _Products, host: _HostLink, source: str, bfloat16: bool = True,
    memory_efficiency: float | None = None,
) -> DeviceKind:  # fmt: skip
    """Rates in Tflop/s. `single` is what float32 products run at: JAX allows TF32 on NVIDIA cards that have it."""
    rates = [("float16", half), ("float32", single), ("float64", double)]
    rates += [("bfloat16", half)] if bfloat16 else []
    rates += [("float8", eight_bit), ("int8", eight_bit)] if eight_bit else []
    device = DeviceKind(
        name=name,
        peak_flops=tuple((dtype, tera * _TERA) for dtype, tera in rates),
        memory_bytes=int(memory_gb * _GIGA),
        peak_memory_bytes_per_s=memory_gb_per_s * _GIGA,
        launch_overhead_s=products.launch_us * _MICRO,
        flops_efficiency=products.single,
        memory_efficiency=memory_efficiency or _GPU_MEMORY_EFFICIENCY,
        dtype_efficiency=tuple(
            (dtype, products.half) for dtype in ("float16", "bfloat16") if products is not _UNMEASURED
        ),
        float32_fill_s=products.fill_us * _MICRO,
        source=source,
    )
    return host.of(device)


def _tpu(name: str, *, half: float, int8: float, memory_gb: float, memory_gb_per_s: float) -> DeviceKind:
    """Rates in Tflop/s. float32 products run as bfloat16 ones: JAX's default precision on TPU is one bfloat16 pass."""
    device = DeviceKind(
        name=name,
        peak_flops=(("bfloat16", half * _TERA), ("float32", half * _TERA), ("int8", int8 * _TERA)),
        memory_bytes=int(memory_gb * _GIGA),
        peak_memory_bytes_per_s=memory_gb_per_s * _GIGA,
        launch_overhead_s=_TPU_LAUNCH_US * _MICRO,
        flops_efficiency=_TPU_EFFICIENCY,
        memory_efficiency=_TPU_MEMORY_EFFICIENCY,
        source="jax-ml/scaling-book tpus.md and Google Cloud TPU documentation (rates, memory)",
    )
    return _TPU_HOST.of(device)


# Share of the peak and time of the smallest kernel where no measurement of a GPU was found, and share of its memory's
# peak: meta-pytorch/autoparallel, cost_models/nccl_cost_model.py (compute 0.7, memory 0.7, kernel floor 7 us).
_UNMEASURED = _Products(launch_us=7.0, half=0.7, single=0.7)
_GPU_MEMORY_EFFICIENCY = 0.7
# What libtpu's compiler (0.0.42.1) estimates, in cycles of 1.5 GHz on v5e and 1.75 GHz on v5p (the clocks that their
# peaks imply): bfloat16 products of 2048 to 8192 a side reach 0.88 to 0.97 of the peak on v5e, 0.87 to 0.96 on v5p;
# x * 2 + 1 over 64 MB reaches 0.80 and 0.71 of the memory's; the least product takes 2.7 us, the least sum 1.3 us.
_TPU_EFFICIENCY, _TPU_MEMORY_EFFICIENCY, _TPU_LAUNCH_US = 0.9, 0.75, 2.0
# XLA's measured table of matrix products (openxla/xla, matmul performance table; sm_90 and sm_100, bfloat16 and
# float32, each 375 products of 256 to 4096 a side): launch, shares and fill of least mean, median and 90th percentile
# of the relative error of `autopar.cost.roofline.time_s`; benchmarks/hardware_model.py has the errors.
_H100_PRODUCTS = _Products(launch_us=3.7, half=0.80, single=0.625, fill_us=4.5)
_B200_PRODUCTS = _Products(launch_us=4.6, half=0.647, single=0.658, fill_us=3.1)


# One pair for all nine published iteration times of GPTs on A100s that `benchmarks.published_steps` lists (1.7B to 530B
# parameters; Narayanan et al., 2021, table 1; Korthikanti et al., 2022, table 5): all within 10 %.
_AMPERE = _Products(launch_us=7.0, half=0.78, single=0.78)
_AMPERE_MEMORY_EFFICIENCY = 0.78


def _ampere(name: str, *, memory_gb: float, memory_gb_per_s: float, source: str) -> DeviceKind:
    return _gpu(
        name, half=312.0, single=156.0, double=19.5, eight_bit=None, memory_gb=memory_gb,
        memory_gb_per_s=memory_gb_per_s, products=_AMPERE, host=_PCIE4, memory_efficiency=_AMPERE_MEMORY_EFFICIENCY,
        source=source,
    )  # fmt: skip


def _hopper(name: str, *, memory_gb: float, memory_gb_per_s: float, source: str) -> DeviceKind:
    return _gpu(
        name, half=989.0, single=494.5, double=67.0, eight_bit=1979.0, memory_gb=memory_gb,
        memory_gb_per_s=memory_gb_per_s, products=_H100_PRODUCTS, host=_PCIE5, source=source,
    )  # fmt: skip


V100 = _gpu(
    "V100-SXM2-16GB", half=125.0, single=15.7, double=7.8, eight_bit=None, memory_gb=16, memory_gb_per_s=900.0,
    products=_UNMEASURED, host=_PCIE3, bfloat16=False, source="NVIDIA V100 data sheet",
)  # fmt: skip
A100_40GB = _ampere(
    "A100-SXM4-40GB", memory_gb=40, memory_gb_per_s=1555.0, source="NVIDIA A100 data sheet; openxla a100_sxm_40"
)
A100_80GB = _ampere(
    "A100-SXM4-80GB", memory_gb=80, memory_gb_per_s=2039.0, source="NVIDIA A100 data sheet; openxla a100_sxm_80"
)
H100 = _hopper("H100-SXM5-80GB", memory_gb=80, memory_gb_per_s=3352.0, source="scaling-book gpus.md; openxla h100_sxm")
H200 = _hopper("H200-SXM-141GB", memory_gb=141, memory_gb_per_s=4800.0, source="NVIDIA H200 data sheet; openxla h200")
B200 = _gpu(
    "B200", half=2250.0, single=1125.0, double=37.0, eight_bit=4500.0, memory_gb=180, memory_gb_per_s=7672.0,
    products=_B200_PRODUCTS, host=_PCIE5, source="scaling-book gpus.md; openxla b200",
)  # fmt: skip
# The same beside a Grace processor.
GH200, GB200 = _C2C_GH200.of(H200), _C2C_GB200.of(B200)
TPU_V4 = _tpu("TPU v4", half=275.0, int8=275.0, memory_gb=32, memory_gb_per_s=1200.0)
TPU_V5E = _tpu("TPU v5e", half=197.0, int8=394.0, memory_gb=16, memory_gb_per_s=819.0)
TPU_V5P = _tpu("TPU v5p", half=459.0, int8=918.0, memory_gb=95, memory_gb_per_s=2765.0)
TPU_V6E = _tpu("TPU v6e", half=918.0, int8=1836.0, memory_gb=32, memory_gb_per_s=1638.0)

# Prefix of what jax calls a device (`Device.device_kind`) -> kind; the first that matches counts.
BY_JAX_NAME: tuple[tuple[str, DeviceKind], ...] = (
    ("Tesla V100", V100),
    ("NVIDIA A100-SXM4-40GB", A100_40GB),
    ("NVIDIA A100", A100_80GB),
    ("NVIDIA H200", H200),
    ("NVIDIA GH200", GH200),
    ("NVIDIA H100", H100),
    ("NVIDIA B200", B200),
    ("NVIDIA GB200", GB200),
    ("TPU v4", TPU_V4),
    ("TPU v5 lite", TPU_V5E),
    ("TPU v5e", TPU_V5E),
    ("TPU v5", TPU_V5P),
    ("TPU v6", TPU_V6E),
)
# The data-centre card of each compute capability, for NVIDIA cards of a name that is not in the table.
BY_COMPUTE_CAPABILITY: dict[str, DeviceKind] = {"7.0": V100, "8.0": A100_40GB, "9.0": H100, "10.0": B200}


def _link(
    overhead_us: float,
    latency_us: float,
    gb_per_s: float,
    source: str,
    fabric: Fabric = Fabric.SWITCHED,
    detail: SwitchDetail | None = None,
) -> Link:
    return Link(
        overhead_s=overhead_us * _MICRO,
        latency_s=latency_us * _MICRO,
        bytes_per_s=gb_per_s * _GIGA,
        source=source,
        fabric=fabric,
        detail=detail,
    )


def _detail(
    *, pair_gb_per_s: float, pair_ramp_us: float, kept_gb_per_s: float | None = None,
    switch_gb_per_s: float | None = None, tree_us: float | None = None,
) -> SwitchDetail:  # fmt: skip
    return SwitchDetail(
        kept_bytes_per_s=None if kept_gb_per_s is None else kept_gb_per_s * _GIGA,
        switch_bytes_per_s=None if switch_gb_per_s is None else switch_gb_per_s * _GIGA,
        tree_latency_s=None if tree_us is None else tree_us * _MICRO,
        pair_bytes_per_s=pair_gb_per_s * _GIGA,
        pair_ramp_s=pair_ramp_us * _MICRO,
    )


# `fitting.fit_link` of XLA's measured tables of collectives (openxla/xla, collective performance table: medians of 0.5
# MB to 2 GB over 2, 4 and 8 devices, GB200 to 32 GB over 4 to 72); benchmarks/hardware_model.py fits them again and has
# the errors. H100's switch adds up over eight devices only in that table, at 230 GB/s of the array, and over four a
# ring does 200; NVIDIA's own tests reach 275 over eight (NVIDIA/nccl-tests 212). 225 is within 20 % of all three.
NVLINK4 = _link(
    19.4, 2.35, 350.0, "fit to openxla's collective table, sm_90; switch: NVIDIA/nccl-tests 212 and that table",
    detail=_detail(kept_gb_per_s=685.0, switch_gb_per_s=225.0, tree_us=4.5, pair_gb_per_s=119.0, pair_ramp_us=908.0),
)  # fmt: skip
NVLINK5 = _link(
    29.2, 1.24, 636.0, "fit to openxla's collective table, sm_100",
    detail=_detail(kept_gb_per_s=1190.0, tree_us=3.2, pair_gb_per_s=139.0, pair_ramp_us=883.0),
)  # fmt: skip
NVLINK5_NVL72 = _link(
    16.2, 1.18, 671.0, "fit to openxla's collective table, GB200 NVL72",
    detail=_detail(kept_gb_per_s=1920.0, switch_gb_per_s=425.0, tree_us=4.15, pair_gb_per_s=23.7, pair_ramp_us=433.0),
)  # fmt: skip
# NCCL's own tuning constants (ring, Simple protocol: base 8.4 us, NVLink hop 3.4 us, network hop 14 us), as read in
# meta-pytorch/autoparallel, cost_models/nccl_cost_model.py; rates from reports in NVIDIA/nccl-tests.
_NCCL = "latency: NCCL's tuning table"
NVLINK3 = _link(8.4, 3.4, 200.0, f"{_NCCL}; rate: bus bandwidth of 8 A100, NVIDIA/nccl-tests 149")
NVLINK2 = _link(8.4, 3.4, 110.0, f"{_NCCL}; rate: openxla's model, 6 lanes x 20 GB/s x 0.92")
NDR400 = _link(8.4, 14.0, 47.0, f"{_NCCL}; rate: 46-48 GB/s a NIC, one NIC a GPU, NVIDIA/nccl-tests 290")
HDR200 = _link(8.4, 14.0, 24.0, f"{_NCCL}; rate: 96 % of 25 GB/s a NIC, one NIC a GPU, NVIDIA/nccl-tests 119")
ETHERNET_25G = _link(8.4, 14.0, 3.1 / 8, f"{_NCCL}; rate: 25 Gbit/s a host for 8 GPUs (Alpa, OSDI 2022, section 8)")
# One wire, one way; `autopar.hardware.torus` knows how many of them an axis has. Latency of one hop: scaling-book,
# sharding.md.
TPU_ICI = {
    TPU_V4.name: _link(0.0, 1.0, 45.0, "scaling-book tpus.md, sharding.md", Fabric.TORUS),
    TPU_V5E.name: _link(0.0, 1.0, 45.0, "scaling-book tpus.md, sharding.md", Fabric.TORUS),
    TPU_V5P.name: _link(0.0, 1.0, 90.0, "scaling-book tpus.md, sharding.md", Fabric.TORUS),
    TPU_V6E.name: _link(0.0, 1.0, 90.0, "scaling-book tpus.md, sharding.md", Fabric.TORUS),
}
# Between slices: 25 GB/s a host of 4 chips (scaling-book tpus.md). Latency of a step: the network hop of NCCL's table,
# for want of a published figure.
TPU_DCN = _link(0.0, 14.0, 25.0 / 4, "rate: 25 GB/s a host of 4 chips, scaling-book tpus.md; latency: as NCCL's")

# GPU -> (link inside a host, link between hosts) of the machine that it usually comes in.
GPU_LINKS: dict[str, tuple[Link, Link]] = {
    V100.name: (NVLINK2, ETHERNET_25G),
    A100_40GB.name: (NVLINK3, HDR200),
    A100_80GB.name: (NVLINK3, HDR200),
    H100.name: (NVLINK4, NDR400),
    H200.name: (NVLINK4, NDR400),
    B200.name: (NVLINK5, NDR400),
}

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
        name="CPU",
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
