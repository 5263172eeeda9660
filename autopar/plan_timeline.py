"""The timeline of a plan's predicted step."""

from __future__ import annotations

from autopar.record import PlanRecord
from autopar.timeline import Timeline


def timeline_of(record: PlanRecord) -> Timeline:
    """The simulated pipeline, or the instructions on two streams where the step is one program."""
    return record.pipeline.timeline if record.pipeline is not None else record.timeline
