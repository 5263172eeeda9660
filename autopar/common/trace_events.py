"""The timeline of a predicted step, and its export as a trace for Perfetto and chrome://tracing.

The trace is in the Trace Event Format of Chrome: a row for each group of devices with its tasks, a row for each link
with what it carries, and for each group a track with the bytes on one of its devices and one with what is in flight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

DEVICES, LINKS = 0, 1
_US = 1e6
# Names of Chrome's palette, so that passes can be told apart at a glance.
_COLOURS = {
    "F": "thread_state_running",
    "B": "thread_state_runnable",
    "W": "thread_state_iowait",
    "before": "grey",
    "after": "grey",
}


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that takes a while on a row: `process` is DEVICES or LINKS, `row` counts from 0 in it."""

    process: int
    row: int
    name: str
    category: str
    start_s: float
    end_s: float
    stage: int = 0
    nbytes: int = 0


class Timeline(msgspec.Struct, frozen=True):
    """A step. `tracks[name][row]`: (seconds, value from then on) of a group of devices."""

    rows: tuple[str, ...]
    links: tuple[str, ...]
    events: tuple[TraceEvent, ...]
    tracks: dict[str, tuple[tuple[tuple[float, int], ...], ...]] = {}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as the value to be written as JSON; times in microseconds."""
    names = [_name("process_name", DEVICES, 0, "devices"), _name("process_name", LINKS, 0, "links")]
    names += [_name("thread_name", DEVICES, i, name) for i, name in enumerate(timeline.rows)]
    names += [_name("thread_name", LINKS, i, name) for i, name in enumerate(timeline.links)]
    events = [_event(e) for e in timeline.events]
    counters = [
        {"name": f"{track}, {timeline.rows[row]}", "ph": "C", "pid": DEVICES, "ts": when * _US, "args": {track: value}}
        for track, per_row in timeline.tracks.items()
        for row, steps in enumerate(per_row)
        for when, value in steps
    ]
    return {"traceEvents": [*names, *events, *counters], "displayTimeUnit": "ms"}


def write_trace(path: str | Path, timeline: Timeline) -> None:
    """Writes the trace to a file, to be opened at https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)))


def _event(event: TraceEvent) -> dict[str, Any]:
    args = {"bytes": event.nbytes} if event.process == LINKS else {"stage": event.stage}
    entry = {
        "name": event.name,
        "ph": "X",
        "pid": event.process,
        "tid": event.row,
        "cat": event.category,
        "ts": event.start_s * _US,
        "dur": (event.end_s - event.start_s) * _US,
        "args": args,
    }
    if event.category in _COLOURS:
        entry["cname"] = _COLOURS[event.category]
    return entry


def _name(metadata: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": metadata, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
