"""What papers publish of pipeline schedules: formulas of bubbles and of what is in flight, measured bubble rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.runtime.standard_schedules import PipelineSchedule, StageCosts, Times, make_schedule, place


class Model(NamedTuple):
    """What the paper's settings say of a model; layers with those that the first and the last stage lack."""

    layers: int
    heads: int
    hidden: int

    @property
    def deferred(self) -> float:
        """M_W / M_B of its Table 1, for 1024 positions: what a weight gradient holds of what its micro-batch held."""
        return 32 * self.hidden / (34 * self.hidden + 5 * self.heads * 1024)


MODELS = {
    "1.5B": Model(24, 24, 2304),
    "6.2B": Model(32, 32, 4096),
    "14.6B": Model(48, 40, 5120),
    "28.3B": Model(64, 48, 6144),
}


class Row(NamedTuple):
    """Measured milliseconds of a stage and of a transfer between neighbours, and published bubble rates."""

    model: str
    p: int
    m: int
    forward_ms: float
    backward_ms: float
    weight_ms: float
    transfer_ms: float
    rates: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.model}-p{self.p}-m{self.m}"

    def times(self, chunks: int = 1) -> Times:
        """In seconds, of one of so many stages on each group."""
        each_s = 1e-3 / chunks
        return Times(
            forward_s=self.forward_ms * each_s,
            backward_s=self.backward_ms * each_s,
            weight_s=self.weight_ms * each_s,
            transfer_s=self.transfer_ms / 1e3,
        )


TABLE_5 = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
TABLE_8 = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-V")


def _row(columns: Sequence[str], setting: tuple[str, int, int], times_ms: Sequence[float], *rates: float) -> Row:
    return Row(*setting, *times_ms, dict(zip(columns, rates, strict=True)))


# Zero Bubble Pipeline Parallelism, arXiv:2401.10241: Table 9 (times) and Table 5 (rates, "theoretical calculations").
_OF_TABLE_5 = (
    (("1.5B", 8, 24), (18.522, 18.086, 9.337, 0.601), 0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    (("1.5B", 8, 32), (18.513, 18.086, 9.331, 0.626), 0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    (("1.5B", 8, 64), (18.546, 18.097, 9.321, 0.762), 0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026),
    (("6.2B", 8, 24), (29.718, 29.444, 19.927, 0.527), 0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029),
    (("6.2B", 8, 32), (29.802, 29.428, 19.530, 0.577), 0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022),
    (("6.2B", 8, 64), (29.935, 29.621, 19.388, 0.535), 0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010),
    (("14.6B", 16, 48), (11.347, 11.248, 8.132, 0.377), 0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066),
    (("14.6B", 16, 64), (11.307, 11.254, 8.101, 0.379), 0.2082, 0.0852, 0.1088, 0.0516, 0.1088, 0.0054),
    (("14.6B", 16, 128), (11.325, 11.308, 8.109, 0.378), 0.1251, 0.0445, 0.0576, 0.0266, 0.0576, 0.0028),
    (("28.3B", 32, 96), (10.419, 10.207, 7.715, 0.408), 0.2646, 0.1493, 0.1421, 0.0641, 0.1421, 0.0038),
    (("28.3B", 32, 128), (10.408, 10.204, 7.703, 0.408), 0.2168, 0.1164, 0.1106, 0.0490, 0.1106, 0.0029),
    (("28.3B", 32, 256), (10.402, 10.248, 7.698, 0.460), 0.1352, 0.0624, 0.0594, 0.0257, 0.0594, 0.0018),
)
# Table 8 (rates). The paper leaves out the times behind them; its authors' repository has them, of half a stage:
# sail-sg/zero-bubble-pipeline-parallelism, megatron/core/pipeline_parallel/efficiency.py.
_OF_TABLE_8 = (
    (("6.2B", 16, 48), (28.814, 28.760, 19.352, 1.610), 0.2668, 0.1499, 0.1536, 0.0823, 0.0697),
    (("6.2B", 16, 64), (28.824, 28.786, 19.376, 1.621), 0.2206, 0.1169, 0.1198, 0.0630, 0.0533),
    (("6.2B", 16, 128), (28.632, 28.612, 19.278, 1.619), 0.1390, 0.0621, 0.0637, 0.0325, 0.0274),
    (("14.6B", 24, 72), (13.526, 13.938, 10.502, 0.755), 0.2699, 0.1519, 0.1439, 0.0628, 0.0638),
    (("14.6B", 24, 96), (13.566, 13.968, 10.518, 0.758), 0.2229, 0.1184, 0.1121, 0.0480, 0.0483),
    (("14.6B", 24, 192), (13.570, 13.980, 10.520, 0.770), 0.1403, 0.0630, 0.0595, 0.0247, 0.0250),
    (("28.3B", 32, 96), (18.916, 19.496, 14.576, 0.879), 0.2676, 0.1509, 0.1429, 0.0629, 0.0593),
    (("28.3B", 32, 128), (18.938, 19.488, 14.612, 0.892), 0.2204, 0.1177, 0.1111, 0.0478, 0.0451),
    (("28.3B", 32, 256), (18.894, 19.288, 14.386, 0.887), 0.1362, 0.0626, 0.0593, 0.0251, 0.0236),
)
ZERO_BUBBLE_ROWS = (*(_row(TABLE_5, *row) for row in _OF_TABLE_5), *(_row(TABLE_8, *row) for row in _OF_TABLE_8))


class Expected(NamedTuple):
    """What the formulas say of a schedule; in flight on the worst stage, in micro-batches."""

    name: str
    chunks: int
    bubble_s: float
    in_flight: float


def expectations(p: int, m: int, times: Times | None = None) -> Iterator[Expected]:
    """The schedules whose formulas hold for p stages and m >= p micro-batches, F >= W and B >= W, no transfer time.

    `times` are of a stage; several stages on a group count as one p-th of the model together.
    """
    f, b, w, _ = dataclasses.astuple(times or Times())
    full = (p - 1) * (f + b + w)
    yield Expected("gpipe", 1, full, m)
    yield Expected("1f1b", 1, full, p)
    yield Expected("eager-1f1b", 1, full, min(2 * p - 1, m))
    for v in range(1, 5):
        if m % p == 0:
            # The chunks take as long as stages do here, so that the group's share F is v times the chunk's.
            yield Expected("interleaved", v, full, min(p + (p - 1) / v, m))
    for name in ("zb-h1", "zb-1p"):  # equal where no times are given
        yield Expected(name, 1, (p - 1) * (f + b - w), p)
    if m >= 2 * p - 1:
        for name in ("zb-h2", "zb-2p"):
            yield Expected(name, 1, (p - 1) * (f + b - 2 * w), 2 * p - 1)
    if m >= 2 * p:
        yield Expected("zb-v", 2, 0.0, p)  # for F = B = W
        yield Expected("dualpipev", 2, (p - 1) * f, min(p + 0.5, m))  # the same
    yield Expected("inference", 1, 0.0, 0)
    yield Expected("inference-v", 2, 2 * (p - 1) * f, 0)


def zero_bubble_rate(name: str, row: Row) -> float:
    """(cost - m(F+B+W)) / cost of a column of the tables, cost the longest span of a stage; every transfer of a list in
    order is waited for.
    """
    schedule, costs = _simulated(name, row)
    return place(schedule, costs).bubble_rate


def rate_as_counted(name: str, row: Row) -> float:
    """The same with transfers as the authors count them in 1F1B-I (`get_interleave_schedule` of their efficiency.py):
    of every p micro-batches only the first one waits for its transfer from the last group back to the first, which
    takes p transfers less.
    """
    if name != "1F1B-I":
        return zero_bubble_rate(name, row)
    schedule, costs = _simulated(name, row)
    placement = place(schedule, costs)
    cost_s = placement.span_s - row.p * row.transfer_ms / 1e3
    return 1.0 - max(placement.busy_s) / cost_s


def _simulated(name: str, row: Row) -> tuple[PipelineSchedule, StageCosts]:
    """The schedule of a column; ZB-H1 and ZB-H2 as drawn, in 1F1B-I every layer is a stage."""
    chunks = {"ZB-V": 2, "1F1B-I": MODELS[row.model].layers // row.p}.get(name, 1)
    costs = StageCosts.alike(row.times(chunks), row.p * chunks, MODELS[row.model].deferred)
    called = "interleaved" if name == "1F1B-I" else name.lower()
    given = None if name in ("ZB-H1", "ZB-H2") else costs
    return make_schedule(called, row.p, row.m, chunks, given), costs
