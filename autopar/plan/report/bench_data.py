"""The values of the page of `autopar.bench`: ways to run a step beside each other, on one cluster or several."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence

from autopar.plan import summary
from autopar.plan.bench_row import BenchRow, limits, sent
from autopar.plan.bench_text import error_text, speed
from autopar.plan.report.drawing import BETWEEN, INSIDE
from autopar.plan.rivals import advice_and_notes
from autopar.plan.summary import Share


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WayRow:
    """One way that fits. `width`: its step over the longest; `shares` are of the step."""

    name: str
    setting: str
    sentence: str
    step_time_s: float
    interval: str
    measured_s: float | None
    width: float
    shares: tuple[Share, ...]
    speed: str
    mfu: float
    peak_bytes: int
    limit_bytes: int
    inside_bytes: float
    between_bytes: float
    difference: float | None
    loses: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRows:
    """The ways on one cluster: those that fit, the fastest first, and (name, why) of the others. `hosts`: its devices,
    `memory`: which part of theirs is available. `advice`: limits of the fastest, possible changes. `error`: of the
    ranking.
    """

    name: str
    hosts: str
    memory: str
    num_parameters: int
    examples: int
    tokens: int
    ways: tuple[WayRow, ...]
    others: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchData:
    """The page, and the day of its making. `names` are the parts of steps in the order of their colours."""

    step: str
    clusters: tuple[ClusterRows, ...]
    names: tuple[str, ...]
    is_measured: bool
    inside: str
    between: str
    made_on: str


def bench_data(step: str, rows: Sequence[BenchRow]) -> BenchData:
    """The values of the page of ranked rows."""
    clusters = dict.fromkeys(row.cluster for row in rows)
    made = tuple(_cluster([row for row in rows if row.cluster == name]) for name in clusters)
    return BenchData(
        step=step,
        clusters=made,
        names=tuple(dict.fromkeys(s.name for c in made for way in c.ways for s in way.shares)),
        is_measured=any(row.measured_s is not None for row in rows),
        inside=INSIDE,
        between=BETWEEN,
        made_on=datetime.date.today().isoformat(),
    )


def _cluster(rows: Sequence[BenchRow]) -> ClusterRows:
    longest_s, best = max((row.step_time_s or 0.0 for row in rows), default=0.0), rows[0].record
    return ClusterRows(
        name=rows[0].cluster,
        hosts="" if best is None else summary.devices_text(best.cluster),
        memory="" if best is None else summary.memory_text(best),
        num_parameters=0 if best is None else summary.num_parameters(best),
        examples=rows[0].examples,
        tokens=rows[0].tokens,
        ways=tuple(_way(row, rows[0], longest_s) for row in rows if row.fits),
        others=tuple((f"{r.name}, {r.setting}" if r.setting else r.name, r.why_none) for r in rows if not r.fits),
        advice=() if best is None else (limits(best), *advice_and_notes(best)),
        error=error_text(rows[0]),
    )


def _way(row: BenchRow, best: BenchRow, longest_s: float) -> WayRow:
    record, step_s = row.record, row.step_time_s
    assert record is not None, "what fits has a plan"
    assert step_s is not None, "a plan has a step time"
    sizes = sent(record)
    return WayRow(
        name=row.name,
        setting=row.setting,
        sentence=summary.sentence(record),
        step_time_s=step_s,
        interval=row.interval,
        measured_s=row.measured_s,
        width=step_s / longest_s if longest_s else 0.0,
        shares=summary.shares(record),
        speed=speed(row),
        mfu=record.predicted.mfu,
        peak_bytes=row.peak_bytes or 0,
        limit_bytes=row.limit_bytes or 0,
        inside_bytes=sizes.get(INSIDE, 0.0),
        between_bytes=sizes.get(BETWEEN, 0.0),
        difference=row.difference,
        loses=row.beside(best),
    )
