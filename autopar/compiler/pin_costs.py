"""The cost of pins: the predicted step time with them and without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.common.progress import Progress
from autopar.errors import SolverError
from autopar.hardware.cluster import Cluster
from autopar.inter_op.evaluate import PipelineCandidate
from autopar.inter_op.requested import requested_pipeline
from autopar.intra_op.spmd_search import SpmdCandidate, search, search_spmd
from autopar.ir.graph import OpGraph
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import PlanOptions
from autopar.plan.schema import PinRecord, PinsRecord
from autopar.sharding.pins import Pin, PinsOnMesh
from autopar.sharding.rules import RuleBook

# So many pins are priced alone too: each takes another search on one mesh.
PRICED_ALONE = 4


def price_in_one_program(
    traced: TracedStep,
    graph: OpGraph,
    cluster: Cluster,
    limit_bytes: int,
    options: PlanOptions,
    best: SpmdCandidate,
    progress: Progress,
) -> PinsRecord:
    """Searches once more without pins, over all meshes, and with each pin alone on the mesh of the plan."""
    assert best.pins is not None, "a plan with pins knows their axes"
    pins = best.pins
    with progress.pass_("price of the pins"):
        free = search_spmd(
            traced, graph, cluster, limit_bytes, dataclasses.replace(options, pins=None), [], Progress("", show=False)
        )
        alone: dict[Pin, float] = {}
        several = pins.pinned.pins.pins
        if len(several) == 1:
            alone[several[0]] = best.step_time_s
        elif len(several) <= PRICED_ALONE:
            for pin in several:
                time_s = options.deadline.solve_s()
                one = dataclasses.replace(pins, pinned=pins.pinned.only(pin))
                found = search(graph, best.model, limit_bytes, options, pins=one, time_limit_s=time_s)
                if isinstance(found, SpmdCandidate) and found.estimate.peak_bytes <= limit_bytes:
                    alone[pin] = found.step_time_s
    free_s = free[0].step_time_s if isinstance(free, tuple) else None
    return _record(pins, best.step_time_s, free_s, alone)


def price_in_stages(
    traced: TracedStep,
    cluster: Cluster,
    options: PlanOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
    found: PipelineCandidate,
) -> PinsRecord:
    """Builds the stages that were asked for once more, without pins; no pin is priced alone."""
    assert found.pins is not None, "a plan with pins knows their axes"
    with progress.pass_("price of the pins"):
        free_s = None
        try:
            free = requested_pipeline(
                traced, cluster, dataclasses.replace(options, pins=None), limit_bytes, rules, Progress("", show=False)
            )
        except SolverError:
            pass  # pins may be what makes a step plannable: then there is nothing to hold its time against
        else:
            if free.fits(limit_bytes):
                free_s = free.step_time_s
    return _record(found.pins, found.staged.simulation.step_time_s, free_s, {})


def _record(pins: PinsOnMesh, step_time_s: float, free_s: float | None, alone: Mapping[Pin, float]) -> PinsRecord:
    rows = []
    for pin in pins.pinned.pins.pins:
        count, of = pins.pinned.num_named(pin)
        rows.append(PinRecord(pattern=pin.pattern, spec=pin.text, count=count, of=of, alone_s=alone.get(pin)))
    return PinsRecord(pins=tuple(rows), step_time_s=step_time_s, free_step_time_s=free_s)
