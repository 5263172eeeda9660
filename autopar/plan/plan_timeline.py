"""The timeline of a plan's predicted step."""

from __future__ import annotations

from autopar.common.trace_events import Timeline
from autopar.plan.schema import PlanRecord


def timeline_of(record: PlanRecord) -> Timeline:
    """The simulated pipeline, or the instructions on two streams where the step is one program."""
    return record.pipeline.timeline if record.pipeline is not None else record.timeline
