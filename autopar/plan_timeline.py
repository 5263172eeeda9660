"""The timeline of a plan's predicted step."""

from __future__ import annotations

from autopar.record import PlanRecord
from autopar.timeline import DEVICES, LINKS, Event, Timeline


def timeline_of(record: PlanRecord) -> Timeline:
    """The simulated pipeline, or the modules one after the other where the step is one program."""
    if record.pipeline is not None:
        return record.pipeline.timeline
    events, now_s = [], 0.0
    for row in record.modules:
        name = row.module or "(no module)"
        if row.compute_time_s:
            end_s = now_s + row.compute_time_s
            events.append(Event(DEVICES, 0, name, "compute", now_s, end_s))
            now_s = end_s
        for c in row.collectives:
            end_s = now_s + c.time_s
            what = f"{c.count:g} {c.kind} over {'*'.join(c.axes)}, {name}"
            events.append(Event(LINKS, 0, what, "send", now_s, end_s, 0, int(c.sent_bytes)))
            now_s = end_s
    return Timeline(rows=("every device",), links=("collectives",), events=tuple(events))
