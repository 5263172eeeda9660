"""Published machines, and constants of accelerators and of the links between them, each with its unit and source; of
CPU devices what was measured on one machine.

Peak rates are the vendors' (dense, no sparsity). What programs reach of them is a separate factor, measured where a
measurement was found. Rates per second, sizes in bytes, units of 1000. Of these devices and links are the published
machines that `Cluster.preset` knows by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re

from autopar.errors import InvalidArgumentError
from autopar.hardware.collective_cost import Fabric, Link, SwitchDetail
from autopar.hardware.kinds import CPU_NAME, FULL_FLOAT32, DeviceKind

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _HostLink:
    """Between a device and the memory of its host, one way."""

    gb_per_s: float
    source: str

    def of(self, device: DeviceKind) -> DeviceKind:
        source = f"{device.source}; link to the host: {self.source}"
        return dataclasses.replace(device, host_link_bytes_per_s=self.gb_per_s * _GIGA, source=source)


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
_C2C_RUBIN = _HostLink(
    gb_per_s=346.0, source="NVLink-C2C, 900 GB/s one way for two GPUs (NVIDIA, Vera Rubin NVL72), the share as on GH200"
)
_TPU_HOST = _HostLink(gb_per_s=15.0, source="PCIe of a TPU host: 1.5e10 bytes/s a chip (scaling-book tpus.md)")
_V6E_HOST = _HostLink(gb_per_s=32.0, source="PCIe of a TPU host: 32 GB/s a chip (scaling-book tpus.md)")
_TPU7X_HOST = _HostLink(gb_per_s=16.0, source="not published: half of v6e's for each of a chip's two devices")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """What matrix products show of a GPU: launch, shares of the peaks of half and of single precision, fill.

    Those of 8 bits are taken to reach the share of half precision: both are bound by the same matrix units, and float32
    by its conversion to TF32 too.
    """

    launch_us: float
    half: float
    single: float
    fill_us: float = 0.0
    small_kernel_us: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Peaks:
    """Tflop/s by type. `single` is what float32 products run at: JAX allows TF32 on NVIDIA cards that have it, where
    `full` is the rate without rounding. `block_scaled`: by format (`autopar.ops.kernels.scaled`).
    """

    half: float
    single: float
    double: float
    full: float | None = None
    eight_bit: float | None = None
    int8: float | None = None  # where it is not that of float8
    bfloat16: bool = True
    block_scaled: tuple[tuple[str, float], ...] = ()

    def by_dtype(self) -> tuple[tuple[str, float], ...]:
        rates = [("float16", self.half), ("float32", self.single), ("float64", self.double)]
        rates += [("bfloat16", self.half)] if self.bfloat16 else []
        rates += [(FULL_FLOAT32, self.full)] if self.full else []
        rates += [("float8", self.eight_bit), ("int8", self.int8 or self.eight_bit)] if self.eight_bit else []
        return tuple((dtype, tera * _TERA) for dtype, tera in (*rates, *self.block_scaled))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    gb: float
    gb_per_s: float


def _gpu(name: str, peaks: _Peaks, memory: _Memory, products: _Products, host: _HostLink, source: str) -> DeviceKind:
    device = DeviceKind(
        name=name,
        peak_flops=peaks.by_dtype(),
        memory_bytes=int(memory.gb * _GIGA),
        peak_memory_bytes_per_s=memory.gb_per_s * _GIGA,
        launch_overhead_s=products.launch_us * _MICRO,
        flops_efficiency=(
            ("float32", products.single),
            *(
                (dtype, products.half)
                for dtype, _ in peaks.by_dtype()
                if products is not _UNMEASURED and dtype not in ("float32", "float64", FULL_FLOAT32)
            ),
        ),
        memory_efficiency=_GPU_MEMORY_EFFICIENCY,
        float32_fill_s=products.fill_us * _MICRO,
        least_kernel_s=None if products.small_kernel_us is None else products.small_kernel_us * _MICRO,
        source=source,
    )
    return host.of(device)


def _tpu(
    name: str, *, half: float, memory_gb: float, memory_gb_per_s: float, int8: float | None = None,
    float8: float | None = None, matrix_unit: int = 128, vector_mib: int = 0,
) -> DeviceKind:  # fmt: skip
    """Rates in Tflop/s; a matrix unit is a square of so many multipliers a side.

    float32 products run as bfloat16 ones: JAX's default precision on TPU is one bfloat16 pass.

    Vector memory in MiB: the most that libtpu 0.0.42.1 gives to values in compiled programs, 112 of 128 on v5e, 96 of
    128 on v6e, 48 of 64 on v5p. Kernels have the rest.
    """
    return DeviceKind(
        name=name,
        peak_flops=tuple(
            (dtype, tera * _TERA)
            for dtype, tera in (("bfloat16", half), ("float32", half), ("int8", int8), ("float8", float8))
            if tera is not None
        ),
        memory_bytes=int(memory_gb * _GIGA),
        peak_memory_bytes_per_s=memory_gb_per_s * _GIGA,
        launch_overhead_s=_TPU_LAUNCH_US * _MICRO,
        flops_efficiency=(("float32", _TPU_EFFICIENCY),),
        memory_efficiency=_TPU_MEMORY_EFFICIENCY,
        attention_shares=tuple(
            (width, _TPU_EFFICIENCY * width / matrix_unit, _TPU_EFFICIENCY * width / matrix_unit)
            for width in (64, 128, 256)
            if width <= matrix_unit
        ),
        vector_memory_bytes=vector_mib << 20,
        source="jax-ml/scaling-book tpus.md and Google Cloud TPU documentation (rates, memory)",
    )


# Share of the peak and time of the smallest kernel where no measurement of a GPU was found: meta-pytorch/autoparallel,
# cost_models/nccl_cost_model.py (compute 0.7, kernel floor 7 us).
_UNMEASURED = _Products(launch_us=7.0, half=0.7, single=0.7)
# Softmaxes, norms, GELU, Adam, copies and transposes on an H200: of what XLA counts that they
# read and write, 0.71 to 0.92 of the peak's rate, 0.81 in the middle.
_GPU_MEMORY_EFFICIENCY = 0.82
# What libtpu's compiler (0.0.42.1) estimates, in cycles of 1.5 GHz on v5e and 1.75 GHz on v5p (the clocks that their
# peaks imply): bfloat16 products of 2048 to 8192 a side reach 0.88 to 0.97 of the peak on v5e, 0.87 to 0.96 on v5p;
# x * 2 + 1 over 64 MB reaches 0.80 and 0.71 of the memory's; the least product takes 2.7 us, the least sum 1.3 us.
# Of attention, each product has one side as long as a head is wide: a narrower one leaves a part of the matrix unit
# empty. Its side: 128 multipliers, from v6e on 256 (Google Cloud, "TPU architecture").
_TPU_EFFICIENCY, _TPU_MEMORY_EFFICIENCY, _TPU_LAUNCH_US = 0.9, 0.75, 2.0
# XLA's measured table of matrix products (openxla/xla, matmul performance table; sm_90 and sm_100, bfloat16 and
# float32, each 375 products of 256 to 4096 a side): launch, shares and fill of least mean, median and 90th percentile
# of the relative error of `autopar.cost.roofline.time_s`; some of its rows are in `tests/hardware`.
# Other kernels as recorded on an H200 (programs of jax 0.11, as command buffers): the sum of two numbers takes 1.2 to
# 1.3 us, 0.1 us pass between kernels.
_SMALL_KERNEL_US = 1.35
_H100_PRODUCTS = _Products(launch_us=3.7, half=0.80, single=0.625, fill_us=4.5, small_kernel_us=_SMALL_KERNEL_US)
_B200_PRODUCTS = _Products(launch_us=4.6, half=0.647, single=0.658, fill_us=3.1, small_kernel_us=_SMALL_KERNEL_US)


# One share for all nine published iteration times of GPTs on A100s that `benchmarks.ledger` lists (1.7B to
# 530B parameters; Narayanan et al., 2021, table 1; Korthikanti et al., 2022, table 5).
_AMPERE = _Products(launch_us=7.0, half=0.68, single=0.68)


# cuDNN's fused attention needs compute capability 8.0. Its rates on an H100 SXM: sequences of 8,192 without a mask, 412
# and 600 Tflop/s forward, 432 and 518 backward, of 989 (Shah et al., "FlashAttention-3", 2024, figures 5 and 6). A100:
# up to 73 % forward and 63 % backward (Dao, "FlashAttention-2", 2023, section 4.1). Causal sequences of 8,192 on GB200
# and GB300: 1,574 and 1,856 Tflop/s forward, 1,332 and 1,435 backward, of 2,250 and 2,500
# (NVIDIA/cudnn-frontend@3929da2ef4, benchmark/sdpa_benchmark_training/results/llama3.1: cuDNN 9.22, bfloat16; GB300
# makes exponentials at twice the rate).
_HOPPER_ATTENTION = ((64, 0.417, 0.437), (128, 0.607, 0.524))
_AMPERE_ATTENTION = ((128, 0.73, 0.63),)
_BLACKWELL_ATTENTION = ((128, 0.70, 0.592),)
_BLACKWELL_ULTRA_ATTENTION = ((128, 0.742, 0.574),)


def _with_cudnn(device: DeviceKind, shares: tuple[tuple[int, float, float], ...] = ()) -> DeviceKind:
    return dataclasses.replace(device, attention_shares=shares)


def _ampere(name: str, *, memory_gb: float, memory_gb_per_s: float, source: str) -> DeviceKind:
    peaks = _Peaks(half=312.0, single=156.0, double=19.5, full=19.5)
    memory = _Memory(gb=memory_gb, gb_per_s=memory_gb_per_s)
    return _with_cudnn(_gpu(name, peaks, memory, _AMPERE, _PCIE4, source), _AMPERE_ATTENTION)


# What power leaves of those shares in a run of minutes, of 700 W: 0.60 of the data sheet in bfloat16
# (`benchmarks.calibrate`: Megatron-Core's 1.7B on 48 H100, torchtitan's 8B on 32 H200).
_HOPPER_SUSTAINED = 0.75


def _hopper(name: str, *, memory_gb: float, memory_gb_per_s: float, source: str) -> DeviceKind:
    peaks = _Peaks(half=989.0, single=494.5, double=67.0, full=67.0, eight_bit=1979.0)
    device = _gpu(name, peaks, _Memory(gb=memory_gb, gb_per_s=memory_gb_per_s), _H100_PRODUCTS, _PCIE5, source)
    return _with_cudnn(dataclasses.replace(device, sustained_share=_HOPPER_SUSTAINED), _HOPPER_ATTENTION)


# The same of a B200 in float8 (`benchmarks.calibrate`: Llama 8B on 8 B200 and on 8 GB200, Megatron-Bridge), and of a
# GB300 (8B on 8, 70B on 64). Of B300 there are too few runs for a share of its own.
_BLACKWELL_SUSTAINED, _GB300_SUSTAINED = 0.845, 0.955


def _blackwell(
    device: DeviceKind, shares: tuple[tuple[int, float, float], ...], sustained: float = _BLACKWELL_SUSTAINED
) -> DeviceKind:
    return _with_cudnn(dataclasses.replace(device, sustained_share=sustained), shares)


def _nvidia_scaled(eight_bit: float, four_bit: float) -> tuple[tuple[str, float], ...]:
    return (("mxfp8", eight_bit), ("mxfp4", four_bit), ("nvfp4", four_bit))


# Its convolutions are left at the rate of products: ResNet-50 in float32 under XLA runs at 412 images a second on one
# card (NVIDIA/DeepLearningExamples), and comes out at 388 here (`benchmarks.ledger`).
V100 = _gpu(
    "V100-SXM2-16GB",
    _Peaks(half=125.0, single=15.7, double=7.8, bfloat16=False),
    _Memory(gb=16, gb_per_s=900.0),
    _UNMEASURED,
    _PCIE3,
    source="NVIDIA V100 data sheet",
)
A100_40GB = _ampere(
    "A100-SXM4-40GB", memory_gb=40, memory_gb_per_s=1555.0, source="NVIDIA A100 data sheet; openxla a100_sxm_40"
)
A100_80GB = _ampere(
    "A100-SXM4-80GB", memory_gb=80, memory_gb_per_s=2039.0, source="NVIDIA A100 data sheet; openxla a100_sxm_80"
)
H100 = _hopper("H100-SXM5-80GB", memory_gb=80, memory_gb_per_s=3352.0, source="scaling-book gpus.md; openxla h100_sxm")
H200 = _hopper("H200-SXM-141GB", memory_gb=141, memory_gb_per_s=4800.0, source="NVIDIA H200 data sheet; openxla h200")
B200 = _blackwell(
    _gpu(
        "B200",
        _Peaks(
            half=2250.0, single=1125.0, double=37.0, full=75.0, eight_bit=4500.0,
            block_scaled=_nvidia_scaled(4500.0, 9000.0),
        ),
        _Memory(gb=180, gb_per_s=7672.0),
        _B200_PRODUCTS,
        _PCIE5,
        source="scaling-book gpus.md; openxla b200; float4: NVIDIA HGX B200 data sheet",
    ),
    _BLACKWELL_ATTENTION,
)  # fmt: skip
# NVIDIA's data sheets of HGX B300 (36 Pflop/s of 16 bits for eight cards with sparsity) and GB300 NVL72 (360 for 72);
# int8 and float64 run at a thirtieth of B200's. Products are taken to reach B200's shares, those of blocks of eight and
# four bits too. Without sparsity 105 Pflop/s of float4 for eight B300, 1,080 for 72 GB300.
B300 = _blackwell(
    _gpu(
        "B300",
        _Peaks(
            half=2250.0, single=1125.0, double=1.25, full=75.0, eight_bit=4500.0, int8=150.0,
            block_scaled=_nvidia_scaled(4500.0, 13_125.0),
        ),
        _Memory(gb=270, gb_per_s=8000.0),
        _B200_PRODUCTS,
        _PCIE5,
        source="NVIDIA HGX B300 data sheet; 270 of 288 GB to be used: verda.com, GB300 NVL72 architecture",
    ),
    _BLACKWELL_ULTRA_ATTENTION,
)  # fmt: skip
_GB300 = _blackwell(
    _gpu(
        "GB300",
        _Peaks(
            half=2500.0, single=1250.0, double=1.3, full=80.0, eight_bit=5000.0, int8=165.0,
            block_scaled=_nvidia_scaled(5000.0, 15_000.0),
        ),
        _Memory(gb=279, gb_per_s=8000.0),
        _B200_PRODUCTS,
        _C2C_GB200,
        source="NVIDIA GB300 NVL72 data sheet; 279 of 288 GB to be used: verda.com, GB300 NVL72 architecture",
    ),
    _BLACKWELL_ULTRA_ATTENTION,
    _GB300_SUSTAINED,
)  # fmt: skip
# Preliminary figures of one GPU of a Vera Rubin NVL72, without sparsity; float4 at the rate for training. Nobody has
# published what products, attention or long runs reach: taken to be the shares of B200 and GB300.
RUBIN = _blackwell(
    _gpu(
        "Rubin",
        _Peaks(
            half=4000.0, single=2000.0, double=33.0, full=130.0, eight_bit=17_500.0, int8=250.0,
            block_scaled=_nvidia_scaled(17_500.0, 35_000.0),
        ),
        _Memory(gb=288, gb_per_s=22_000.0),
        _B200_PRODUCTS,
        _C2C_RUBIN,
        source="NVIDIA, Vera Rubin NVL72, specifications (preliminary)",
    ),
    _BLACKWELL_ULTRA_ATTENTION,
)  # fmt: skip
# The same beside a Grace processor.
GH200, GB200, GB300 = _C2C_GH200.of(H200), _C2C_GB200.of(B200), _GB300
# MI355X: XLA's measured table (gfx950): least time, and 1240 and 132 Tflop/s of products of 4096 a side in bfloat16 and
# float32. MI300X in bfloat16: 708 of 1307 Tflop/s, AMD's "Measuring Max-Achievable FLOPs", part 2; float32 as MI355X's.
_CDNA3_PRODUCTS = _Products(launch_us=7.0, half=0.54, single=0.84)
_CDNA4_PRODUCTS = _Products(launch_us=5.0, half=0.49, single=0.84)
MI300X = _gpu(
    "MI300X",
    _Peaks(half=1307.4, single=163.4, double=163.4, eight_bit=2614.9),
    _Memory(gb=192, gb_per_s=5300.0),
    _CDNA3_PRODUCTS,
    _PCIE5,
    source="AMD Instinct MI300X data sheet",
)
MI355X = _gpu(
    "MI355X",
    _Peaks(
        half=2516.6, single=157.3, double=78.6, eight_bit=5033.2, block_scaled=(("mxfp8", 5033.2), ("mxfp4", 10_066.3))
    ),
    _Memory(gb=288, gb_per_s=8000.0),
    _CDNA4_PRODUCTS,
    _PCIE5,
    source="AMD Instinct MI355X data sheet; its matrix units have no NVFP4",
)
TPU_V4 = _TPU_HOST.of(_tpu("TPU v4", half=275.0, int8=275.0, memory_gb=32, memory_gb_per_s=1200.0))
TPU_V5E = _TPU_HOST.of(_tpu("TPU v5e", half=197.0, int8=394.0, memory_gb=16, memory_gb_per_s=819.0, vector_mib=112))
# libtpu 0.0.42.1 and 0.0.50.1 make all-reduces of gathers over all chips of 4x4x4, 4x4x8 and 4x8x8; over part of them,
# on 2x2x2 to 2x4x4, and on v4's 4x4x4 they stay what they are.
TPU_V5P = dataclasses.replace(
    _TPU_HOST.of(_tpu("TPU v5p", half=459.0, int8=918.0, memory_gb=95, memory_gb_per_s=2765.0, vector_mib=48)),
    gathers_by_all_reduce=True,
)
# What is left of libtpu's rates in a run (`benchmarks.calibrate`: of AI-Hypercomputer's tpu-recipes Llama 8B on 8 and
# 70B on 32 of v6e, 70B on 64 and 405B on 256 chips of TPU7x in 16 bits).
_V6E_SUSTAINED, _TPU7X_SUSTAINED = 0.80, 0.864
TPU_V6E = dataclasses.replace(
    _V6E_HOST.of(
        _tpu("TPU v6e", half=918.0, int8=1836.0, memory_gb=32, memory_gb_per_s=1638.0, matrix_unit=256, vector_mib=96)
    ),
    sustained_share=_V6E_SUSTAINED,
)
# jax makes two devices of a chip, its two chiplets: each half of the chip's 2307 and 4614 Tflop/s, 192 GiB and 7380
# GB/s (Google Cloud's page on TPU7x). It lists no rate of int8, and no link to the host.
TPU7X = dataclasses.replace(
    _TPU7X_HOST.of(
        _tpu("TPU7x", half=2307.0 / 2, float8=4614.0 / 2, memory_gb=103.0, memory_gb_per_s=7380.0 / 2, matrix_unit=256)
    ),
    sustained_share=_TPU7X_SUSTAINED,
)

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
    ("NVIDIA B300", B300),
    ("NVIDIA GB300", GB300),
    ("TPU v4", TPU_V4),
    ("TPU v5 lite", TPU_V5E),
    ("TPU v5e", TPU_V5E),
    ("TPU v5", TPU_V5P),
    ("TPU v6", TPU_V6E),
    ("TPU7x", TPU7X),
    ("AMD Instinct MI300X", MI300X),
    ("AMD Instinct MI355X", MI355X),
)
# The data-centre card of each compute capability, for NVIDIA cards of a name that is not in the table.
BY_COMPUTE_CAPABILITY: dict[str, DeviceKind] = {
    "7.0": V100, "8.0": A100_40GB, "9.0": H100, "10.0": B200, "10.3": B300,
    "10.7": RUBIN,
}  # fmt: skip


def _link(
    overhead_us: float,
    latency_us: float,
    gb_per_s: float,
    source: str,
    fabric: Fabric = Fabric.SWITCHED,
    detail: SwitchDetail | None = None,
    devices_per_card: int = 1,
) -> Link:
    return Link(
        overhead_s=overhead_us * _MICRO,
        latency_s=latency_us * _MICRO,
        bytes_per_s=gb_per_s * _GIGA,
        source=source,
        fabric=fabric,
        detail=detail,
        devices_per_card=devices_per_card,
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


# `fit.fit_link` of XLA's measured tables of collectives (openxla/xla, collective performance table: medians of 0.5
# MB to 2 GB over 2, 4 and 8 devices, GB200 to 32 GB over 4 to 72), of which `tests/hardware` has some. From 1 MB on the
# median error is 10 % on H100, 6 % on B200 and GB200. H100's switch adds up over eight devices only in that table, at
# 230 GB/s of the array, and over four a ring does 200; NVIDIA's own tests reach 275 over eight (NVIDIA/nccl-tests 212).
# 225 is within 20 % of all three.
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
NVLINK6_NVL72 = _link(
    16.2, 1.18, 1342.0, "twice the rates of NVLink 5 (NVIDIA, Vera Rubin NVL72: 3.6 TB/s a GPU both ways), its latency",
    detail=_detail(kept_gb_per_s=3840.0, switch_gb_per_s=850.0, tree_us=4.15, pair_gb_per_s=47.4, pair_ramp_us=433.0),
)  # fmt: skip
# NCCL's own tuning constants (ring, Simple protocol: base 8.4 us, NVLink hop 3.4 us, network hop 14 us), as read in
# meta-pytorch/autoparallel, cost_models/nccl_cost_model.py; rates from reports in NVIDIA/nccl-tests.
_NCCL = "latency: NCCL's tuning table"
NVLINK3 = _link(8.4, 3.4, 200.0, f"{_NCCL}; rate: bus bandwidth of 8 A100, NVIDIA/nccl-tests 149")
NVLINK2 = _link(8.4, 3.4, 110.0, f"{_NCCL}; rate: openxla's model, 6 lanes x 20 GB/s x 0.92")
NDR400 = _link(8.4, 14.0, 47.0, f"{_NCCL}; rate: 46-48 GB/s a NIC, one NIC a GPU, NVIDIA/nccl-tests 290")
XDR800 = _link(8.4, 14.0, 94.0, f"{_NCCL}; rate: the share of 100 GB/s a NIC (ConnectX-8) that NDR reaches of its 50")
XDR1600 = _link(8.4, 14.0, 188.0, f"{_NCCL}; rate: that share of 200 GB/s a GPU (ConnectX-9, Vera Rubin NVL72)")
HDR200 = _link(8.4, 14.0, 24.0, f"{_NCCL}; rate: 96 % of 25 GB/s a NIC, one NIC a GPU, NVIDIA/nccl-tests 119")
ETHERNET_25G = _link(
    8.4, 14.0, 3.1 / 8, f"{_NCCL}; rate: 25 Gbit/s a host for 8 GPUs (Alpa, OSDI 2022, section 8)", devices_per_card=8
)
# One wire, one way, of those that join each card with each other of its host (Infinity Fabric, seven of 64 GB/s on
# MI300X and of 76.8 on MI355X, AMD's data sheets); the share of that which NVLink4's fit reaches (350 of 450).
XGMI4 = _link(8.4, 3.4, 50.0, f"{_NCCL}; rate: 78 % of 64 GB/s a wire (AMD MI300X data sheet)", Fabric.DIRECT)
XGMI5 = _link(8.4, 3.4, 60.0, f"{_NCCL}; rate: 78 % of 76.8 GB/s a wire (AMD MI355X data sheet)", Fabric.DIRECT)
# One wire, one way; `autopar.hardware.mesh_links` knows how many of them an axis has. Latency of one hop: scaling-book,
# sharding.md.
TPU_ICI = {
    TPU_V4.name: _link(0.0, 1.0, 45.0, "scaling-book tpus.md, sharding.md", Fabric.TORUS),
    TPU_V5E.name: _link(0.0, 1.0, 45.0, "scaling-book tpus.md, sharding.md", Fabric.TORUS),
    TPU_V5P.name: _link(0.0, 1.0, 90.0, "scaling-book tpus.md, sharding.md", Fabric.TORUS),
    TPU_V6E.name: _link(0.0, 1.0, 90.0, "scaling-book tpus.md, sharding.md", Fabric.TORUS),
    # Of a chip, whose two devices share it: 1200 GB/s a chip both ways, as v5p has (Google Cloud's pages on both).
    TPU7X.name: _link(0.0, 1.0, 90.0, "as v5p's, of the same nominal rate (Google Cloud)", Fabric.TORUS),
}
TPU7X_CHIP = _link(0.0, 1.0, 6 * 90.0, "six times a wire's rate (Google Cloud, TPU7x, dual-chiplet architecture)")
# Between slices: 25 GB/s a host of 4 chips (scaling-book tpus.md). Latency of a step: the network hop of NCCL's table,
# for want of a published figure.
TPU_DCN = _link(
    0.0, 14.0, 25.0 / 4, "rate: 25 GB/s a host of 4 chips, scaling-book tpus.md; latency: as NCCL's", devices_per_card=4
)

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
        flops_efficiency=(("float32", 1.0),),
        memory_bytes=host_bytes // num_devices,
        peak_memory_bytes_per_s=_CPU_MEMORY_BYTES_PER_S_PER_HOST / num_devices,
        memory_efficiency=1.0,
        launch_overhead_s=_CPU_LAUNCH_S,
        # The device's memory is the host's: a copy reads it and writes it.
        host_link_bytes_per_s=_CPU_MEMORY_BYTES_PER_S_PER_HOST / num_devices / 2,
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


# The shapes of TPU slices on offer.
#
# Source: Google Cloud's pages on TPU v5e, v6e and v5p, and on TPU types and topologies (v4). Of two axes they list all;
# of three, parts of a cube of 4x4x4 and whole cubes, AxBxC with A <= B <= C, the largest of them 16x16x24 (v5p, 6144
# chips).

_OF_TWO_AXES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS_OF_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_MOST_CHIPS, _LONGEST = 6144, 24
NEAREST_SHOWN = 3


def is_offered(shape: tuple[int, ...]) -> bool:
    """Whether there are slices of this shape."""
    return shape in _offered(len(shape))


def nearest(shape: tuple[int, ...]) -> list[str]:
    """The slices of about as many chips, and then of axes most like these."""

    def distance(other: tuple[int, ...]) -> tuple[float, float]:
        chips = abs(math.log2(math.prod(shape) / math.prod(other)))
        return chips, sum(abs(math.log2(a / b)) for a, b in zip(sorted(shape), sorted(other), strict=True))

    return ["x".join(map(str, other)) for other in sorted(_offered(len(shape)), key=distance)[:NEAREST_SHOWN]]


def _offered(rank: int) -> tuple[tuple[int, ...], ...]:
    if rank == 2:
        return _OF_TWO_AXES
    cubes = itertools.combinations_with_replacement(range(4, _LONGEST + 1, 4), 3)
    return (*_PARTS_OF_A_CUBE, *(shape for shape in cubes if math.prod(shape) <= _MOST_CHIPS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuHost:
    """As in `autopar.hardware.cluster.Cluster`."""

    device: DeviceKind
    inside: Link
    between: Link
    devices_per_host: int = 8
    hosts_per_domain: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """`axes`: of the torus of chips. `chip_devices`: how many devices jax has of a chip, joined by `inside_chip`."""

    device: DeviceKind
    axes: int
    chip_devices: int = 1
    inside_chip: Link | None = None


# Of an NVL72 rack (GB200, GB300, Vera Rubin, which was announced as NVL144) 18 hosts of four cards, which one NVLink
# domain joins: NVIDIA's data sheets.
_NVL72_HOSTS, _NVL72_HOST_CARDS = 18, 4

GPU_HOSTS: dict[str, GpuHost] = {
    "p3.16xlarge": GpuHost(device=V100, inside=NVLINK2, between=ETHERNET_25G),
    "dgx-a100-40g": GpuHost(device=A100_40GB, inside=NVLINK3, between=HDR200),
    "dgx-a100-80g": GpuHost(device=A100_80GB, inside=NVLINK3, between=HDR200),
    "dgx-h100": GpuHost(device=H100, inside=NVLINK4, between=NDR400),
    "dgx-h200": GpuHost(device=H200, inside=NVLINK4, between=NDR400),
    "dgx-b200": GpuHost(device=B200, inside=NVLINK5, between=NDR400),
    "dgx-b300": GpuHost(device=B300, inside=NVLINK5, between=XDR800),
    "gb200-nvl72": GpuHost(
        device=GB200, inside=NVLINK5_NVL72, between=NDR400, devices_per_host=_NVL72_HOST_CARDS,
        hosts_per_domain=_NVL72_HOSTS,
    ),
    "gb300-nvl72": GpuHost(
        device=GB300, inside=NVLINK5_NVL72, between=XDR800, devices_per_host=_NVL72_HOST_CARDS,
        hosts_per_domain=_NVL72_HOSTS,
    ),
    "vr200-nvl72": GpuHost(
        device=RUBIN, inside=NVLINK6_NVL72, between=XDR1600, devices_per_host=_NVL72_HOST_CARDS,
        hosts_per_domain=_NVL72_HOSTS,
    ),
    "mi300x": GpuHost(device=MI300X, inside=XGMI4, between=NDR400),
    "mi355x": GpuHost(device=MI355X, inside=XGMI5, between=NDR400),
}  # fmt: skip
# GPU -> (link inside a host, link between hosts) of the machine that it usually comes in, the first one above.
GPU_LINKS: dict[str, tuple[Link, Link]] = {h.device.name: (h.inside, h.between) for h in reversed(GPU_HOSTS.values())}
TPUS: dict[str, Tpu] = {
    "tpu-v4": Tpu(device=TPU_V4, axes=3),
    "tpu-v5e": Tpu(device=TPU_V5E, axes=2),
    "tpu-v5p": Tpu(device=TPU_V5P, axes=3),
    "tpu-v6e": Tpu(device=TPU_V6E, axes=2),
    "tpu7x": Tpu(device=TPU7X, axes=3, chip_devices=2, inside_chip=TPU7X_CHIP),
}


def meant(text: str) -> str:
    """The cluster that a text is likely to mean, such as `dgx-h100x8` for `h100x8`; empty for none."""
    found = re.fullmatch(r"(.+?)(?:[x:](\d+))?", text.lower())
    named = found[1] if found else ""
    near = [name for name in GPU_HOSTS if len(named) > 2 and named in name]
    near = near or difflib.get_close_matches(named, GPU_HOSTS, 1)
    if not near or found is None:
        return ""
    return near[0] if found[2] is None else _of_hosts_or_devices(near[0], int(found[2]))


def _of_hosts_or_devices(name: str, number: int) -> str:
    """Clusters with a number of hosts, or of devices where they make up hosts."""
    each = GPU_HOSTS[name].devices_per_host * GPU_HOSTS[name].hosts_per_domain
    hosts, rest = divmod(number, each)
    of_hosts = f"{name}x{number} ({number * each} devices)"
    return of_hosts if rest or not hosts else f"{name}x{hosts} ({number} devices) or {of_hosts}"


def cards(name: str, number: int) -> int:
    """So many cards of a host. Raises: InvalidArgumentError for a number that does not divide the host's."""
    whole = GPU_HOSTS[name].devices_per_host
    parts = [str(n) for n in range(1, whole + 1) if whole % n == 0]
    if str(number) not in parts:
        raise InvalidArgumentError(
            where="cluster",
            expected=f"{', '.join(parts[:-1])} or {parts[-1]} cards of a host behind {name}:",
            got=f"'{name}:{number}'",
            hint=f"'{name}' is one host with all of its {whole} cards; more are {_of_hosts_or_devices(name, number)}",
        )
    return number


def tpu_shape(name: str, topology: str | None) -> tuple[int, ...]:
    """The torus of a slice: its chips, and as a last axis the devices of a chip where these are several.

    Raises: InvalidArgumentError for a topology that is none, or that there is not.
    """
    tpu = TPUS[name]
    if topology is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", topology) or topology.count("x") != tpu.axes - 1:
        raise InvalidArgumentError(
            where=f"Cluster.preset({name!r})",
            expected=f"a topology of {tpu.axes} axes, such as topology={'x'.join(['4'] * tpu.axes)!r}",
            got=f"topology={topology!r}",
            hint="give the shape of the slice, as Google Cloud names it",
        )
    chips = tuple(map(int, topology.split("x")))
    if not is_offered(chips):
        raise InvalidArgumentError(
            where=f"Cluster.preset({name!r}, topology={topology!r})",
            expected=f"a topology that there is; nearest: {', '.join(nearest(chips))}",
            got=topology,
            hint="axes stand in ascending order, as Google Cloud names slices, and beyond 4x4x4 are multiples of 4; "
            "for other hardware make a Cluster(...) with its constants",
        )
    return chips if tpu.chip_devices == 1 else (*chips, tpu.chip_devices)
