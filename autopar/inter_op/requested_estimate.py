"""What one stage that is requested comes to, by an estimate on fewer of its equal layers, before it is built."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.errors import SolverError
from autopar.inter_op.fit_stages import BuildLimits
from autopar.inter_op.pipeline_candidate import PipelineEstimate
from autopar.inter_op.requested_step import check_binding, equal_choice, requested_step
from autopar.inter_op.stage_choice import StageChoice
from autopar.inter_op.staged import default_chunks
from autopar.inter_op.truncated_model import TruncatedModel, estimate, short_step
from autopar.passes.remat_cheap import copied_bytes, copies_state
from autopar.passes.remat_policy import policies_of
from autopar.plan.context import PlanningContext


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ShortRequest:
    """One stage of a request with fewer of its equal layers, where it has such a form: whole graphs of many numbers of
    micro-batches would take much memory. `choices`: on each logical mesh that the request leaves; `copied_bytes`: of
    the state, that each micro-batch could make instead.
    """

    short: TruncatedModel | None
    choices: Sequence[StageChoice]
    copied_bytes: int


def estimated_one_stage(context: PlanningContext, *, keeps: bool = False) -> PipelineEstimate | None:
    """What one stage on all devices comes to in the micro-batches of the request, under its recipe, on the fastest
    logical mesh that fits, by an estimate on fewer of its equal layers; None where the step has no such form. Where it
    does not fit, each micro-batch makes its own copies of the state, as in `requested_pipelines`.

    `keeps`: as of `_estimated`. Raises: as `requested_pipelines`; SolverError where there is no solution in time.
    """
    found: PipelineEstimate | None = None
    for hoist_casts in (True, False):
        again, copied_bytes = _estimated(context, hoist_casts, keeps=keeps)
        if again is None or (found is not None and _rank(again, context) >= _rank(found, context)):
            break
        found = again
        if found.peak_bytes <= context.limit_bytes or not 0 < copied_bytes >= found.peak_bytes - context.limit_bytes:
            break
    return found


def _estimated(context: PlanningContext, hoist_casts: bool, *, keeps: bool) -> tuple[PipelineEstimate | None, int]:
    """(the estimate of one stage, with copies of the state for all micro-batches or not; what it may need less without)

    `keeps`: the whole graph in micro-batches is kept, to be built. Raises: as `estimated_one_stage`.
    """
    request, cluster, traced, graphs = context.request, context.cluster, context.traced, context.graphs
    binding, m = request.binding, request.num_microbatches or 1
    at = m, hoist_casts, cluster, binding, request.schedule
    with context.progress.pass_("micro-batches"):
        one = graphs.of(traced, ("short request", *at), lambda: _short_request(context, hoist_casts, keeps))

    def estimated() -> PipelineEstimate | None:
        if one.short is None:
            return None
        found: list[PipelineEstimate] = []
        limits = BuildLimits(limit_bytes=context.limit_bytes, time_limit_s=context.deadline.solve_s())
        constraints = binding.on(cluster.num_devices)[1] if binding is not None else None
        for each in one.choices:
            choice = dataclasses.replace(each, policies=policies_of(request.recompute, len(each.policies)))
            known = estimate(one.short, choice, cluster, limits, constraints)
            if known is None:
                break
            found.append(
                PipelineEstimate(
                    num_microbatches=m, choice=choice, step_time_s=known.step_time_s, peak_bytes=known.peak_bytes[0],
                    to_beat_s=math.inf, binding=binding, rounds=known.rounds,
                )
            )  # fmt: skip
        one.short.forget_stages()
        return min(found, key=lambda at: _rank(at, context)) if len(found) == len(one.choices) else None

    with context.progress.pass_("estimate stages"):
        found = graphs.of(traced, ("estimate", *at, request.recompute, context.limit_bytes), estimated)
    return found, one.copied_bytes


def _rank(estimate: PipelineEstimate, context: PlanningContext) -> tuple[bool, float]:
    """Smaller is better: what fits first, then what is faster; of what does not fit, the smaller."""
    fits = estimate.fits(context.limit_bytes)
    return not fits, estimate.step_time_s if fits else float(estimate.peak_bytes)


def _short_request(context: PlanningContext, hoist_casts: bool, keeps: bool) -> _ShortRequest:
    cluster, request = context.cluster, context.request
    asked = requested_step(context, hoist_casts, keeps)
    microbatched = asked.microbatched
    at = "short step", request.num_microbatches, hoist_casts, cluster, asked.schedule
    short = context.graphs.of(context.traced, at, lambda: short_step(microbatched, cluster, context.least_s))
    if short is not None:
        check_binding(context, short.microbatched.annotated, asked)
    choices = equal_choice(microbatched, cluster, asked.schedule, 1, 1, request.binding)
    copied = copied_bytes(microbatched.graph) if copies_state(microbatched.graph) else 0
    return _ShortRequest(short=short, choices=choices, copied_bytes=copied)


def estimated_in_time(context: PlanningContext, hoist_casts: bool) -> tuple[PipelineEstimate | None, int]:
    """As `_estimated`; (None, 0) for what is no single stage of a recipe, or not decided in time."""
    request = context.request
    is_one = request.num_stages in (None, 1) and (request.chunks or default_chunks(request.schedule or "1f1b")) == 1
    if request.binding is None or request.pins is not None or request.followed_stages is not None or not is_one:
        return None, 0
    try:
        return _estimated(context, hoist_casts, keeps=True)
    except SolverError:
        return None, 0
