"""Rows of `autopar.fit`, and their charts: the time of an example and the memory of a device over batch sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.common.text import text_of_s

# In units of the drawing: what the axes enclose, and the room for their numbers at the left, at the right and below.
# Drawn about as large as they are on a telephone, so that numbers can be read there.
WIDTH, HEIGHT, LEFT, RIGHT, BELOW = 360, 190, 64, 44, 44
# Of a decade of a logarithmic axis, most to fewest ticks; the first that leaves the numbers room is taken.
TICKS = ((1, 2, 5), (1, 3), (1,))
# Of a number on an axis, in its largest print: the width of a character, and the height.
CHARACTER, LINE = 8.5, 18


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """A batch size on a cluster. Where it does not fit it has no step time, and `peak_bytes` are those of the plan that
    comes nearest. `step_interval_s`: as of its plan. `price`: of a million examples, where the cluster has one.
    """

    cluster: str
    batch: int
    fits: bool
    peak_bytes: int
    limit_bytes: int
    step_time_s: float | None = None
    step_interval_s: tuple[float, float] | None = None
    price: float | None = None

    @property
    def example_s(self) -> float | None:
        """Seconds of an example."""
        return None if self.step_time_s is None else self.step_time_s / self.batch


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
    """Lines over batch sizes, whose axis is logarithmic; ticks are (place, text). `summary` says what they show."""

    title: str
    summary: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    below: int = BELOW


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedCluster:
    """A cluster: its largest batch, None where none fits, the number that sizes are multiples of, and all its sizes."""

    name: str
    multiple: int
    largest: FitRow | None
    rows: tuple[FitRow, ...]

    @property
    def is_least(self) -> bool:
        """Whether larger batches may fit: the next one was not tried."""
        return is_least(self.rows)


def is_least(rows: Sequence[FitRow]) -> bool:
    """Whether larger batches than those of a cluster may fit: the largest that was tried does."""
    return max(rows, key=lambda row: row.batch).fits


def fit_values(step: str, rows: Sequence[FitRow], multiples: Mapping[str, int]) -> dict[str, Any]:
    """The values of the page of `autopar.fit` by the names that its template has for them: all rows, and charts."""
    fitting = [row for row in rows if row.example_s is not None]
    clusters = []
    for name, multiple in multiples.items():
        own = [row for row in fitting if row.cluster == name]
        largest = max(own, key=lambda row: row.batch, default=None)
        every = tuple(sorted((row for row in rows if row.cluster == name), key=lambda row: row.batch))
        clusters.append(FittedCluster(name=name, multiple=multiple, largest=largest, rows=every))
    charts: tuple[Chart, ...] = ()
    if fitting:
        times = [row.example_s or 0.0 for row in fitting]
        places, ticks = _log_axis(times, lambda v: HEIGHT * (1 - v), text_of_s, lambda text: LINE / HEIGHT)
        seconds_of = (lambda row: places(row.example_s or 0.0)), _time_text
        time = _chart("seconds of an example", multiples, fitting, seconds_of, ticks)
        shares = tuple((HEIGHT * (1 - share), f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0))
        memory = _chart(
            "memory of the fullest device, of what it has",
            multiples,
            fitting,
            (lambda row: HEIGHT * (1 - row.peak_bytes / row.limit_bytes), _share_text),
            shares,
        )
        charts = (time, memory)
    priced = any(row.price is not None for row in rows)
    return {"step": step, "clusters": clusters, "charts": charts, "is_priced": priced}


def _chart(
    title: str,
    names: Mapping[str, int],
    rows: Sequence[FitRow],
    y: tuple[Callable[[FitRow], float], Callable[[FitRow], str]],
    y_ticks: tuple[tuple[float, str], ...],
) -> Chart:
    """A chart of what `y` gives for a row, as a place and as text."""
    y_of, text_of = y
    x_of, x_ticks = _log_axis([row.batch for row in rows], lambda v: WIDTH * v, _count_text, _width)
    lines, told = [], []
    for name in names:
        own = sorted((row for row in rows if row.cluster == name), key=lambda row: row.batch)
        marks = [
            Mark(
                x=x_of(row.batch),
                y=y_of(row),
                text=f"{name}, {row.batch:,} examples: {_time_text(row)} each, {_share_text(row)} of the memory",
            )
            for row in own
        ]
        lines.append(Line(cluster=name, marks=tuple(marks)))
        if own:
            ends = [f"{text_of(row)} at {row.batch:,}" for row in dict.fromkeys((own[0], own[-1]))]
            told.append(f"{name} {' to '.join(ends)}")
    return Chart(title=title, summary="; ".join(told), lines=tuple(lines), x_ticks=x_ticks, y_ticks=y_ticks)


def _log_axis(
    values: Sequence[float],
    place: Callable[[float], float],
    text_of: Callable[[float], str],
    room_of: Callable[[str], float],
) -> tuple[Callable[[float], float], tuple[tuple[float, str], ...]]:
    """Where a value lies on a logarithmic axis, of which `place` takes 0 to 1; ticks at its ends and at round numbers,
    as many as have room: `room_of` gives the part of the axis that a text needs.
    """
    low, high = math.log10(min(values)), math.log10(max(values))
    span = high - low or 1.0

    def part(value: float) -> float:
        return (math.log10(value) - low) / span

    def has_room(ticks: Sequence[float]) -> bool:
        placed = [(part(value), room_of(text_of(value))) for value in ticks]
        return all(b - a >= (room + more) / 2 for (a, room), (b, more) in itertools.pairwise(placed))

    ends = sorted({min(values), max(values)})
    ticks = ends
    for digits in TICKS:
        rounds = [d * 10.0**n for n in range(math.floor(low), math.ceil(high) + 1) for d in digits]
        inside = [v for v in rounds if ends[0] < v < ends[-1] and has_room([ends[0], v]) and has_room([v, ends[-1]])]
        if has_room([ends[0], *inside, ends[-1]]):
            ticks = sorted({*ends, *inside})
            break
    return lambda value: place(part(value)), tuple((place(part(value)), text_of(value)) for value in ticks)


def _count_text(batch: float) -> str:
    return f"{batch:,.0f}"


def _width(text: str) -> float:
    return CHARACTER * (len(text) + 1) / WIDTH


def _time_text(row: FitRow) -> str:
    return text_of_s(row.example_s or 0.0)


def _share_text(row: FitRow) -> str:
    return f"{row.peak_bytes / row.limit_bytes:.0%}"
