"""Charts of `autopar.fit`: the time of an example and the memory of a device over batch sizes, a line for a cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from autopar.common.units import text_of_s
from autopar.plan.fit_row import FitRow

# In units of the drawing: what the axes enclose, and the room for their numbers at the left and below.
WIDTH, HEIGHT, LEFT, BELOW = 600, 220, 60, 22


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A batch size in a chart."""

    x: float
    y: float
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The batch sizes of a cluster that fit, by size."""

    cluster: str
    marks: tuple[Mark, ...]

    @property
    def points(self) -> str:
        return " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in self.marks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over batch sizes, whose axis is logarithmic; ticks are (place, text)."""

    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    below: int = BELOW


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedCluster:
    """A cluster: its largest batch, None where none fits, and the number that sizes are multiples of."""

    name: str
    multiple: int
    largest: FitRow | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitData:
    """What the page of `autopar.fit` shows."""

    step: str
    clusters: tuple[FittedCluster, ...]
    charts: tuple[Chart, ...]
    rows: tuple[FitRow, ...]
    is_priced: bool


def fit_data(step: str, rows: Sequence[FitRow], multiples: Mapping[str, int]) -> FitData:
    """The rows of all clusters as charts."""
    fitting = [row for row in rows if row.example_s is not None]
    clusters = []
    for name, multiple in multiples.items():
        own = [row for row in fitting if row.cluster == name]
        largest = max(own, key=lambda row: row.batch, default=None)
        clusters.append(FittedCluster(name=name, multiple=multiple, largest=largest))
    charts: tuple[Chart, ...] = ()
    if fitting:
        times = [row.example_s or 0.0 for row in fitting]
        places, ticks = _log_axis(times, lambda v: HEIGHT * (1 - v), text_of_s)
        time = _chart("seconds of an example", multiples, fitting, lambda row: places(row.example_s or 0.0), ticks)
        shares = tuple((HEIGHT * (1 - share), f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0))
        memory = _chart(
            "memory of the fullest device, of what it has",
            multiples,
            fitting,
            lambda row: HEIGHT * (1 - row.peak_bytes / row.limit_bytes),
            shares,
        )
        charts = (time, memory)
    priced = any(row.price is not None for row in rows)
    return FitData(step=step, clusters=tuple(clusters), charts=charts, rows=tuple(rows), is_priced=priced)


def _chart(
    title: str,
    names: Mapping[str, int],
    rows: Sequence[FitRow],
    y_of: Callable[[FitRow], float],
    y_ticks: tuple[tuple[float, str], ...],
) -> Chart:
    x_of, x_ticks = _log_axis([row.batch for row in rows], lambda v: WIDTH * v, lambda batch: f"{batch:,.0f}")
    lines = []
    for name in names:
        own = sorted((row for row in rows if row.cluster == name), key=lambda row: row.batch)
        marks = [
            Mark(
                x=x_of(row.batch),
                y=y_of(row),
                text=f"{name}, {row.batch:,} examples: {text_of_s(row.example_s or 0.0)} each, "
                f"{row.peak_bytes / row.limit_bytes:.0%} of the memory",
            )
            for row in own
        ]
        lines.append(Line(cluster=name, marks=tuple(marks)))
    return Chart(title=title, lines=tuple(lines), x_ticks=x_ticks, y_ticks=y_ticks)


def _log_axis(
    values: Sequence[float], place: Callable[[float], float], text: Callable[[float], str]
) -> tuple[Callable[[float], float], tuple[tuple[float, str], ...]]:
    """Where a value lies on a logarithmic axis, of which `place` takes 0 to 1; ticks at its ends and powers of ten."""
    low, high = math.log10(min(values)), math.log10(max(values))
    span = high - low or 1.0

    def at(value: float) -> float:
        return place((math.log10(value) - low) / span)

    ends = {min(values), max(values)}
    # A power of ten nearer to an end than a tenth of the axis would be written over it.
    powers = [10.0**n for n in range(math.ceil(low), math.floor(high) + 1) if low + span / 10 < n < high - span / 10]
    return at, tuple((at(value), text(value)) for value in sorted({*ends, *powers}))
