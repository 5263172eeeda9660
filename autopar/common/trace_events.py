"""The timeline of a predicted step, and its export as a trace for Perfetto and chrome://tracing.

The trace is in the Trace Event Format of Chrome: a row for each group of devices with its tasks, a row for each link
with what it carries, and for each group a track with the bytes on one of its devices and one with what is in flight.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

DEVICES, LINKS = 0, 1
_NS, _NS_PER_US = 1e9, 1e3
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


def chrome_trace(timeline: Timeline, first_process: int = 1) -> dict[str, Any]:
    """The trace as the value to be written as JSON; times in microseconds, of whole nanoseconds.

    Viewers drop an event that begins during another one of its row and ends after it: events that overlap stand in
    further rows of the same name. Numbers of rows begin at 1, as number 0 means the main thread of a process, which is
    the one whose number is the process's.
    """
    lanes = _lanes(timeline.events)
    names: list[dict[str, Any]] = []
    threads: dict[tuple[int, int, int], int] = {}
    for process, title, rows in ((DEVICES, "devices", timeline.rows), (LINKS, "links", timeline.links)):
        pid = first_process + process
        names += _metadata("process", pid, 0, title)
        keys = {(process, row, 0) for row in range(len(rows))} | {key for key in lanes if key[0] == process}
        for tid, key in enumerate(sorted(keys), start=1):
            threads[key] = tid
            name = rows[key[1]] if key[2] == 0 else f"{rows[key[1]]} ({key[2] + 1})"
            names += _metadata("thread", pid, tid, name)
    events = [_event(event, first_process + key[0], threads[key]) for key, within in lanes.items() for event in within]
    counters = [
        {
            "name": f"{track}, {timeline.rows[row]}",
            "ph": "C",
            "pid": first_process + DEVICES,
            "ts": _ns(when_s) / _NS_PER_US,
            "args": {track: value},
        }
        for track, per_row in timeline.tracks.items()
        for row, steps in enumerate(per_row)
        for when_s, value in steps
    ]
    return {"traceEvents": [*names, *events, *counters], "displayTimeUnit": "ms"}


def write_trace(path: str | Path, timeline: Timeline) -> None:
    """Writes the trace to a file, to be opened at https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)))


def _lanes(events: Sequence[TraceEvent]) -> dict[tuple[int, int, int], list[TraceEvent]]:
    """The events by process, row and lane, each in the first lane of its row that is free then."""
    found: dict[tuple[int, int, int], list[TraceEvent]] = {}
    ends: dict[tuple[int, int], list[int]] = {}
    for event in sorted(events, key=lambda e: (_ns(e.start_s), _ns(e.end_s))):
        busy = ends.setdefault((event.process, event.row), [])
        lane = next((lane for lane, end in enumerate(busy) if end <= _ns(event.start_s)), len(busy))
        busy[lane : lane + 1] = [_ns(event.end_s)]
        found.setdefault((event.process, event.row, lane), []).append(event)
    return found


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _event(event: TraceEvent, pid: int, tid: int) -> dict[str, Any]:
    args = {"bytes": event.nbytes} if event.process == LINKS else {"stage": event.stage}
    entry = {
        "name": event.name,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": event.category,
        "ts": _ns(event.start_s) / _NS_PER_US,
        "dur": (_ns(event.end_s) - _ns(event.start_s)) / _NS_PER_US,
        "args": args,
    }
    if event.category in _COLOURS:
        entry["cname"] = _COLOURS[event.category]
    return entry


def _metadata(kind: str, pid: int, tid: int, name: str) -> list[dict[str, Any]]:
    """The name of a process or a thread, and that it stands in the order of its number."""
    at = {"ph": "M", "pid": pid, "tid": tid}
    order = tid if kind == "thread" else pid
    return [
        {"name": f"{kind}_name", **at, "args": {"name": name}},
        {"name": f"{kind}_sort_index", **at, "args": {"sort_index": order}},
    ]
