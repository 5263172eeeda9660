"""The timeline of a plan in few bytes: names once, times in whole parts of the step, events by row."""

from __future__ import annotations

import dataclasses

from autopar.common.trace_events import DEVICES, Timeline, TraceEvent
from autopar.plan.plan_timeline import timeline_of
from autopar.plan.schema import PlanRecord

# A step in this many parts: events are drawn to a hundredth of a pixel on a screen of 10,000.
PARTS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """A row of the timeline. `events` are (name, start, duration) in numbers of the tables and parts of the step;
    `busy` is the part of the step in which something runs.
    """

    name: str
    is_link: bool
    events: tuple[tuple[int, int, int], ...]
    busy: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimelineData:
    """`names` of events with their `categories`, which have colours."""

    step_s: float
    names: tuple[str, ...]
    categories: tuple[str, ...]
    rows: tuple[TimelineRow, ...]


def timeline_data(record: PlanRecord) -> TimelineData:
    """The timeline of a record. Events without a length are left out."""
    timeline, step_s = timeline_of(record), record.predicted.step_time_s
    numbers: dict[tuple[str, str], int] = {}
    by_row: dict[tuple[bool, int], list[TraceEvent]] = {}
    for event in timeline.events:
        if event.end_s > event.start_s:
            by_row.setdefault((event.process != DEVICES, event.row), []).append(event)
            numbers.setdefault((event.name, event.category), len(numbers))
    rows = []
    for (is_link, row), events in sorted(by_row.items()):
        placed = tuple(_placed(event, numbers[event.name, event.category], step_s) for event in events)
        busy = sum(event.end_s - event.start_s for event in events) / step_s if step_s else 0.0
        rows.append(TimelineRow(name=_row_name(timeline, is_link, row), is_link=is_link, events=placed, busy=busy))
    names, categories = tuple(name for name, _ in numbers), tuple(category for _, category in numbers)
    return TimelineData(step_s=step_s, names=names, categories=categories, rows=tuple(rows))


def _row_name(timeline: Timeline, is_link: bool, row: int) -> str:
    return timeline.links[row] if is_link else timeline.rows[row]


def _placed(event: TraceEvent, name: int, step_s: float) -> tuple[int, int, int]:
    start = round(event.start_s / step_s * PARTS) if step_s else 0
    stop = round(event.end_s / step_s * PARTS) if step_s else 0
    return name, start, stop - start
