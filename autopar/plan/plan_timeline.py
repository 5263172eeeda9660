"""The timeline of a plan's predicted step."""

from __future__ import annotations

import msgspec

from autopar.common.trace_events import Timeline
from autopar.plan import summary
from autopar.plan.schema import PlanRecord

LINK = " to "  # between the two ends of a link


def timeline_of(record: PlanRecord) -> Timeline:
    """The simulated pipeline, its rows by the stages that a group of devices has, or the instructions on two streams
    where the step is one program.
    """
    if record.pipeline is None:
        return record.timeline
    timeline, names = record.pipeline.timeline, summary.group_names(record)
    if len(names) != len(timeline.rows):  # in an edited file
        return timeline
    called = dict(zip(timeline.rows, names, strict=True))
    links = (LINK.join(called.get(end, end) for end in link.split(LINK)) for link in timeline.links)
    return msgspec.structs.replace(timeline, rows=tuple(names), links=tuple(links))
