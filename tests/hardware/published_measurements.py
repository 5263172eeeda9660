"""Published measurements of accelerators (collectives, matrix products, rates of links), and what is predicted."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from autopar.cost.roofline import Work
from autopar.cost.roofline import time_s as operation_s
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import CollectiveKind, Link, sent_bytes, time_s
from autopar.hardware.fit import Timing
from autopar.hardware.kinds import DeviceKind

LINKS = {"sm_90": presets.NVLINK4, "sm_100_B200": presets.NVLINK5, "sm_100_GB200": presets.NVLINK5_NVL72}
DEVICES = {"sm_90": presets.H100, "sm_100_B200": presets.B200}

# openxla/xla, collective performance table: medians in us of arrays of 1 MiB, 16 MiB, 256 MiB and 2 GiB (the gathered
# array, the one that is scattered), by architecture, collective and number of devices.
MEDIAN_SIZES = (1 << 20, 1 << 24, 1 << 28, 1 << 31)
MEDIANS_US: dict[tuple[str, str, int], tuple[float, float, float, float]] = {
    ("sm_90", "all-reduce", 2): (21.0, 101.1, 1181.5, 8580.0),
    ("sm_90", "all-reduce", 4): (43.5, 152.8, 1419.6, 10654.0),
    ("sm_90", "all-reduce", 8): (51.9, 145.3, 1262.2, 9338.2),
    ("sm_90", "all-gather", 2): (17.5, 60.4, 549.3, 3904.8),
    ("sm_90", "all-gather", 4): (20.5, 70.0, 666.3, 4846.6),
    ("sm_90", "all-gather", 8): (31.1, 82.2, 729.3, 5343.4),
    ("sm_90", "reduce-scatter", 2): (15.7, 68.0, 772.7, 5232.3),
    ("sm_90", "reduce-scatter", 4): (29.1, 69.8, 774.1, 5604.3),
    ("sm_90", "reduce-scatter", 8): (20.4, 86.6, 771.1, 5710.0),
    ("sm_90", "all-to-all", 2): (36.2, 79.4, 517.1, 3341.5),
    ("sm_90", "all-to-all", 4): (34.2, 87.7, 670.7, 4581.6),
    ("sm_90", "all-to-all", 8): (54.9, 105.6, 759.0, 5532.7),
    ("sm_90", "collective-permute", 8): (32.3, 162.6, 1074.0, 7354.0),
    ("sm_100_B200", "all-reduce", 2): (30.7, 76.9, 649.2, 4484.9),
    ("sm_100_B200", "all-reduce", 4): (37.0, 94.2, 810.9, 5672.0),
    ("sm_100_B200", "all-reduce", 8): (49.1, 131.1, 842.9, 6122.5),
    ("sm_100_B200", "all-gather", 2): (23.4, 51.2, 358.3, 2430.0),
    ("sm_100_B200", "all-gather", 4): (23.5, 73.7, 423.9, 2836.3),
    ("sm_100_B200", "all-gather", 8): (35.8, 59.6, 433.2, 3048.3),
    ("sm_100_B200", "reduce-scatter", 2): (30.8, 50.7, 353.3, 2288.0),
    ("sm_100_B200", "reduce-scatter", 4): (41.9, 84.5, 418.0, 2668.2),
    ("sm_100_B200", "reduce-scatter", 8): (32.7, 61.4, 441.2, 2927.9),
    ("sm_100_B200", "all-to-all", 2): (38.9, 80.5, 453.2, 2530.8),
    ("sm_100_B200", "all-to-all", 4): (40.8, 77.8, 459.3, 2723.7),
    ("sm_100_B200", "all-to-all", 8): (42.8, 76.1, 458.9, 3195.9),
    ("sm_100_B200", "collective-permute", 8): (36.2, 147.4, 913.2, 4042.5),
    ("sm_100_GB200", "all-reduce", 4): (22.0, 81.4, 671.8, 4865.3),
    ("sm_100_GB200", "all-reduce", 8): (30.9, 107.6, 718.9, 4602.1),
    ("sm_100_GB200", "all-reduce", 16): (47.1, 118.1, 796.9, 5100.5),
    ("sm_100_GB200", "all-reduce", 64): (66.5, 150.9, 932.3, 5147.2),
    ("sm_100_GB200", "all-gather", 4): (22.3, 61.7, 375.7, 2652.8),
    ("sm_100_GB200", "all-gather", 8): (20.6, 49.6, 397.4, 2912.4),
    ("sm_100_GB200", "all-gather", 16): (31.8, 80.4, 405.4, 3077.9),
    ("sm_100_GB200", "all-gather", 64): (100.4, 122.3, 515.7, 3160.6),
    ("sm_100_GB200", "reduce-scatter", 4): (21.1, 59.6, 377.2, 2552.1),
    ("sm_100_GB200", "reduce-scatter", 8): (20.2, 51.1, 393.7, 2803.4),
    ("sm_100_GB200", "reduce-scatter", 16): (31.9, 86.8, 399.4, 2984.9),
    ("sm_100_GB200", "reduce-scatter", 64): (100.7, 141.1, 511.7, 3076.6),
    ("sm_100_GB200", "all-to-all", 4): (26.8, 50.1, 424.1, 2674.1),
    ("sm_100_GB200", "all-to-all", 8): (17.8, 53.0, 430.3, 3062.3),
    ("sm_100_GB200", "all-to-all", 16): (17.7, 54.0, 434.4, 3195.9),
    ("sm_100_GB200", "all-to-all", 64): (54.5, 122.2, 473.8, 3371.6),
    ("sm_100_GB200", "collective-permute", 64): (58.7, 750.0, 781.5, 3220.9),
}

# openxla/xla, matmul performance table: us of products of (batch, m, n, k).
PRODUCTS_US: dict[tuple[str, str, tuple[int, int, int, int]], float] = {
    ("sm_90", "bfloat16", (1, 256, 256, 256)): 4.99,
    ("sm_90", "bfloat16", (1, 512, 512, 512)): 6.16,
    ("sm_90", "bfloat16", (1, 1024, 1024, 1024)): 8.50,
    ("sm_90", "bfloat16", (1, 2048, 2048, 2048)): 26.80,
    ("sm_90", "bfloat16", (1, 4096, 4096, 4096)): 176.16,
    ("sm_90", "bfloat16", (4, 1024, 1024, 1024)): 17.20,
    ("sm_90", "bfloat16", (4, 4096, 4096, 4096)): 697.04,
    ("sm_90", "bfloat16", (1, 256, 4096, 4096)): 20.53,
    ("sm_90", "float32", (1, 256, 256, 256)): 5.57,
    ("sm_90", "float32", (1, 512, 512, 512)): 10.02,
    ("sm_90", "float32", (1, 1024, 1024, 1024)): 18.42,
    ("sm_90", "float32", (1, 2048, 2048, 2048)): 50.14,
    ("sm_90", "float32", (1, 4096, 4096, 4096)): 340.91,
    ("sm_90", "float32", (4, 1024, 1024, 1024)): 41.04,
    ("sm_90", "float32", (4, 4096, 4096, 4096)): 1590.72,
    ("sm_90", "float32", (1, 256, 4096, 4096)): 46.64,
    ("sm_100_B200", "bfloat16", (1, 256, 256, 256)): 4.96,
    ("sm_100_B200", "bfloat16", (1, 512, 512, 512)): 5.54,
    ("sm_100_B200", "bfloat16", (1, 1024, 1024, 1024)): 7.46,
    ("sm_100_B200", "bfloat16", (1, 2048, 2048, 2048)): 17.43,
    ("sm_100_B200", "bfloat16", (1, 4096, 4096, 4096)): 97.00,
    ("sm_100_B200", "bfloat16", (4, 1024, 1024, 1024)): 12.03,
    ("sm_100_B200", "bfloat16", (4, 4096, 4096, 4096)): 329.10,
    ("sm_100_B200", "bfloat16", (1, 256, 4096, 4096)): 13.19,
    ("sm_100_B200", "float32", (1, 256, 256, 256)): 6.62,
    ("sm_100_B200", "float32", (1, 512, 512, 512)): 7.83,
    ("sm_100_B200", "float32", (1, 1024, 1024, 1024)): 10.29,
    ("sm_100_B200", "float32", (1, 2048, 2048, 2048)): 30.88,
    ("sm_100_B200", "float32", (1, 4096, 4096, 4096)): 181.33,
    ("sm_100_B200", "float32", (4, 1024, 1024, 1024)): 20.35,
    ("sm_100_B200", "float32", (4, 4096, 4096, 4096)): 632.09,
    ("sm_100_B200", "float32", (1, 256, 4096, 4096)): 20.24,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A rate that others measured or model, as nccl-tests counts it: bytes that a device sends, in a second.

    `axes` is the mesh that runs the collective on its first axis.
    """

    what: str
    cluster: Cluster
    axes: tuple[int, ...]
    kind: CollectiveKind
    gb_per_s: float
    source: str
    nbytes: float = 8e9


AR, AG, A2A = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL
PERMUTE = CollectiveKind.COLLECTIVE_PERMUTE


def published() -> tuple[Published, ...]:
    def of(
        what: str, preset: str, axes: tuple[int, ...], kind: CollectiveKind, gb_per_s: float, source: str,
        hosts: int = 1, nbytes: float = 8e9,
    ) -> Published:  # fmt: skip
        cluster = Cluster.preset(preset, hosts=hosts)
        return Published(
            what=what, cluster=cluster, axes=axes, kind=kind, gb_per_s=gb_per_s, source=source, nbytes=nbytes
        )

    tests, port = "NVIDIA/nccl-tests", "meta-pytorch/autoparallel, cost_models/nccl_cost_model.py"
    tuner = f"{port} (NCCL's tuner)"
    four_cards = Cluster.preset("dgx-a100-80g", hosts=3)
    half = dataclasses.replace(four_cards.between_hosts, bytes_per_s=four_cards.between_hosts.bytes_per_s / 2)
    return (
        of("8 A100", "dgx-a100-80g", (8,), AR, 200, f"{tests} 149"),
        of("8 A100", "dgx-a100-80g", (8,), AR, 230, "commonly reported for a DGX A100"),
        of("2 A100", "dgx-a100-80g", (2,), PERMUTE, 195, "send and receive of a pair, as reported"),
        Published(
            what="24 A100, 4 HDR cards a host",
            cluster=dataclasses.replace(four_cards, between_hosts=half),
            axes=(24,),
            kind=AR,
            gb_per_s=96,
            source=f"{tests} 119",
        ),
        of("8 H100, NVLS", "dgx-h100", (8,), AR, 480, f"{tests} 212"),
        of("8 H100", "dgx-h100", (8,), AR, 476, f"{tests} 290"),
        of("8 H200", "dgx-h200", (8,), AR, 475, f"{tests} 272"),
        of("8 H100, ring", "dgx-h100", (8,), AG, 370, f"{tests} 212"),
        of("2 H100", "dgx-h100", (2,), AG, 537 / 2, port),
        of("4 H100", "dgx-h100", (4,), AG, 434 * 3 / 4, port),
        of("8 H100", "dgx-h100", (8,), AG, 394 * 7 / 8, port),
        of("2 H100", "dgx-h100", (2,), AR, 324, port),
        of("4 H100", "dgx-h100", (4,), AR, 236 * 3 / 2, port),
        of("8 H100", "dgx-h100", (8,), AR, 267 * 7 / 4, port),
        of("8 H100", "dgx-h100", (8,), A2A, 380 * 7 / 8, port),
        of("8 B200", "dgx-b200", (8,), A2A, 675 * 7 / 8, f"{port} (estimate)"),
        of("2 x 8 H100", "dgx-h100", (16,), AG, 409.6 * 15 / 16, tuner, hosts=2),
        of("8 x 8 H100", "dgx-h100", (64,), AG, 390.1 * 63 / 64, tuner, hosts=8),
        of("2 x 8 H100, ring", "dgx-h100", (16,), AR, 204.8 * 15 / 8, tuner, hosts=2),
        of("8 x 8 H100, ring", "dgx-h100", (64,), AR, 195 * 63 / 32, tuner, hosts=8),
        of("8 x 1 H100", "dgx-h100", (8, 8), AG, 54.9 * 7 / 8, tuner, hosts=8),
        of("a card of NDR", "dgx-h100", (2, 8), PERMUTE, 47, f"{tests} 290 (46 to 48)", hosts=2),
        of("2 GB200", "gb200-nvl72", (2,), PERMUTE, 770, "nvbandwidth, as reported"),
        of("a p3.16xlarge's network", "p3.16xlarge", (16,), PERMUTE, 3.1, "25 Gbit/s: Alpa, OSDI 2022", hosts=2),
    )


def rate_gb_per_s(point: Published) -> float:
    n = point.axes[0]
    result_bytes = point.nbytes / n if point.kind is CollectiveKind.REDUCE_SCATTER else point.nbytes
    link = point.cluster.axis_links(point.axes)[0]
    seconds = float(time_s(point.kind, result_bytes, n, link))
    return float(sent_bytes(point.kind, result_bytes, n)) / seconds / 1e9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    dtype: str
    sides: tuple[int, int, int, int]
    seconds: float

    @property
    def flops(self) -> float:
        b, m, n, k = self.sides
        return 2.0 * b * m * n * k

    def predicted_s(self, device: DeviceKind) -> float:
        """As `autopar.cost.roofline` has it, on one device, in runs as short as those of the table."""
        b, m, n, k = self.sides
        width = 2 if self.dtype == "bfloat16" else 4
        work = Work(
            flops=self.flops,
            dtype=self.dtype,
            operand_bytes=(width * b * m * k, width * b * k * n),
            result_bytes=(width * b * m * n,),
            fusible=False,
            multiplies=True,
        )
        in_short_runs = dataclasses.replace(device, sustained_share=1.0)
        return operation_s(work, 1, ((1, 1), (1,)), in_short_runs)


def collective_timings() -> dict[str, list[Timing]]:
    """Of each architecture."""
    timings = defaultdict(list)
    for (arch, opcode, n), times in MEDIANS_US.items():
        kind = CollectiveKind(opcode)
        parts = n if kind is CollectiveKind.REDUCE_SCATTER else 1
        for size, us in zip(MEDIAN_SIZES, times, strict=True):
            timings[arch].append(Timing(kind=kind, result_bytes=size / parts, n=n, seconds=us * 1e-6))
    return timings


def products(arch: str) -> list[Product]:
    return [
        Product(dtype=dtype, sides=sides, seconds=us * 1e-6)
        for (of, dtype, sides), us in PRODUCTS_US.items()
        if of == arch
    ]


def ratios(timings: Iterable[Timing], link: Link) -> np.ndarray:
    return np.array([float(time_s(t.kind, t.result_bytes, t.n, link)) / t.seconds for t in timings])
