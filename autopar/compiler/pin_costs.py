"""The cost of pins: the predicted step time with them and without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.compiler.comparison import best_program
from autopar.errors import SolverError
from autopar.inter_op.pipeline_candidate import PipelineCandidate
from autopar.inter_op.requested import requested_pipelines
from autopar.intra_op.mesh_searches import mesh_candidates
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.intra_op.spmd_search import search_mesh
from autopar.plan.context import PlanningContext
from autopar.plan.schema import PinRecord, PinsRecord
from autopar.sharding.pins import Pin, PinsOnMesh

# So many pins are priced alone too: each takes another search on one mesh.
PRICED_ALONE = 4


def price_of_pins(context: PlanningContext, chosen: SpmdCandidate | PipelineCandidate) -> PinsRecord:
    """Searches again without pins, over all meshes; for one program also with each pin alone, on the plan's mesh."""
    pins = chosen.pins
    assert pins is not None, "a plan with pins knows their axes"
    fresh = dataclasses.replace(context, results=(), to_beat_s=float("inf"))
    without = dataclasses.replace(fresh.silent(), request=dataclasses.replace(context.request, pins=None))
    with context.progress.pass_("price of the pins"):
        if isinstance(chosen, PipelineCandidate):
            return _record(pins, chosen.step_time_s, _free_stages_s(without), {})
        free = best_program(without.after(mesh_candidates(without)))
        alone = _alone_s(fresh, chosen, pins)
    return _record(pins, chosen.step_time_s, free.step_time_s if free is not None else None, alone)


def _alone_s(context: PlanningContext, chosen: SpmdCandidate, pins: PinsOnMesh) -> dict[Pin, float]:
    """The step time with each pin alone, on the mesh of the plan, where that plan fits."""
    several = pins.pinned.pins.every
    if len(several) == 1:
        return {several[0]: chosen.step_time_s}
    alone = {}
    for pin in several if len(several) <= PRICED_ALONE else ():
        only = dataclasses.replace(pins, pinned=pins.pinned.only(pin))
        candidate = search_mesh(context, chosen.model, only, time_limit_s=context.deadline.solve_s())
        if isinstance(candidate, SpmdCandidate) and candidate.peak_bytes <= context.limit_bytes:
            alone[pin] = candidate.step_time_s
    return alone


def _free_stages_s(context: PlanningContext) -> float | None:
    """The step time of the same stages without pins; None where they do not fit, or have no plan."""
    try:
        (free,) = requested_pipelines(context)
    except SolverError:
        return None
    return free.step_time_s if free.fits(context.limit_bytes) else None


def _record(pins: PinsOnMesh, step_time_s: float, free_s: float | None, alone: Mapping[Pin, float]) -> PinsRecord:
    rows = []
    for pin in pins.pinned.pins.every:
        count, of = pins.pinned.num_named(pin)
        rows.append(PinRecord(pattern=pin.pattern, spec=pin.text, count=count, of=of, alone_s=alone.get(pin)))
    return PinsRecord(pins=tuple(rows), step_time_s=step_time_s, free_step_time_s=free_s)
