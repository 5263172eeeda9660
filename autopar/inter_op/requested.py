"""Source of candidates: a requested pipeline, of equal stages on equal submeshes, under a recipe or pins."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from autopar.errors import BatchMismatchError, UnsupportedError
from autopar.frontend.callbacks import refuse_callbacks
from autopar.hardware.cluster import WHOLE, Cluster, part_number
from autopar.inter_op.build_stages import (
    MicrobatchedStep,
    build,
)
from autopar.inter_op.evaluate import PEAK_ERROR
from autopar.inter_op.fit_stages import BuildLimits
from autopar.inter_op.followed_stages import followed_choice
from autopar.inter_op.pipeline_candidate import PipelineCandidate, PipelineEstimate, retry_without_hoisted_casts
from autopar.inter_op.requested_estimate import estimated_in_time
from autopar.inter_op.requested_step import check_binding, equal_choice, requested_step
from autopar.inter_op.search_space import is_long, microbatch_numbers, submesh_sizes
from autopar.inter_op.submeshes import part_of
from autopar.passes.remat_cheap import copied_bytes, copies_state
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import PlanRequest
from autopar.sharding.pins import PinsOnMesh, on_meshes

SOURCE = "requested pipeline"


def requested_pipelines(context: PlanningContext) -> Iterator[PipelineCandidate]:
    """Stages of equal arithmetic on equal submeshes, as requested, on the fastest logical mesh that fits. Where none
    fits, each micro-batch makes its own copies of the state.

    Raises: UnsupportedError for a step that cannot be split into stages, such as one with callbacks.
    """
    refuse_callbacks(context.traced.jaxpr, context.traced.name)
    for candidate in retry_without_hoisted_casts(lambda hoist_casts: _built(context, hoist_casts), context.limit_bytes):
        assert isinstance(candidate, PipelineCandidate), "stages that were asked for are built whether they fit or not"
        yield candidate


def one_stage_candidates(context: PlanningContext) -> Iterator[PipelineCandidate | Rejection]:
    """One stage on all devices, in the largest allowed number of micro-batches: the nearest to fitting where no stages
    fit. A long step is rejected, since even this takes long.
    """
    source = "one stage in micro-batches"
    if is_long(context.traced):
        yield Rejection(source=source, why="not tried: the step is long")
        return
    largest = max(microbatch_numbers(context.traced, context.cluster, context.request))
    request = dataclasses.replace(context.request, num_stages=1, num_microbatches=largest, schedule=None, chunks=None)
    try:
        yield from requested_pipelines(dataclasses.replace(context, request=request))
    except (UnsupportedError, BatchMismatchError) as error:
        yield Rejection(source=source, why=f"{error.where}: {error.got}", error=error)


def _built(
    context: PlanningContext, hoist_casts: bool
) -> tuple[tuple[PipelineCandidate, ...] | tuple[Rejection], bool]:
    """(the best of the logical meshes; whether the copies of the state could be made in each micro-batch instead).

    One stage of many equal layers is estimated first: it is built with the weights that fit by the estimate, and not at
    all where it can only fit without hoisted copies.
    """
    request, cluster, traced = context.request, context.cluster, context.traced
    binding, followed = request.binding, request.followed_stages
    limit_bytes = context.limit_bytes
    expected, copied = estimated_in_time(context, hoist_casts)
    may_fit = expected is None or _may_fit(context, expected)
    if expected is not None and not may_fit and hoist_casts:
        least_bytes = int(expected.peak_bytes / (1 + PEAK_ERROR)) - copied
        if copied and least_bytes <= limit_bytes:
            return (Rejection(source=SOURCE, why="does not fit with copies of the state for all micro-batches"),), True
    with context.progress.pass_("micro-batches"):
        asked = requested_step(context, hoist_casts)
        microbatched, name, chunks, num_stages = asked.microbatched, asked.schedule, asked.chunks, asked.num_stages
        if binding is not None:
            microbatched = microbatched.annotated
            check_binding(context, microbatched, asked)
    pinned: list[PinsOnMesh] = []
    if request.pins is not None:
        (size,) = submesh_sizes(cluster, PlanRequest(num_stages=num_stages // chunks), len(microbatched.layers))
        resolved_pins = request.pins.found(traced, microbatched.graph)
        part = part_of(cluster, size)
        if part_number(cluster, 0, size) != WHOLE:
            raise _pins_on_parts(cluster, traced.name)
        pinned = on_meshes(resolved_pins, part, request.max_mesh_axes, binding, microbatched.graph, microbatched.leaves)
    meshes = [at.mesh for at in pinned] or None
    if followed is not None:
        choices = [followed_choice(microbatched, followed, name, chunks)]
    else:
        choices = equal_choice(microbatched, cluster, name, num_stages, chunks, binding, request.recompute, meshes)
    layouts = {leaf: value.layout for leaf, value in followed.leaves} if followed is not None else None
    built = []
    for choice, pins in itertools.zip_longest(choices, pinned):
        constraints = binding.on(choice.group_meshes[0].num_devices)[1] if binding is not None else None
        with context.progress.pass_("make programs of the stages"):
            limits = BuildLimits(
                limit_bytes=limit_bytes, time_limit_s=context.deadline.solve_s(), decides_again=may_fit
            )
            is_told = expected is not None and (expected.fits(limit_bytes) or not may_fit)
            first = expected.first_to_build(limit_bytes, PEAK_ERROR) if expected is not None and is_told else None
            terms = first.terms if first is not None else ()
            staged = build(microbatched, choice, cluster, limits, constraints, pins, layouts, terms)
        built.append(
            PipelineCandidate(
                staged=staged, choice=choice, weighed=(), hoist_casts=hoist_casts, pins=pins, source=SOURCE
            )
        )
    microbatched.stage_graphs.clear()  # no other request has these stages, and `microbatched` is kept
    best = min(built, key=lambda candidate: candidate.rank(context.limit_bytes))
    best = dataclasses.replace(best, weighed=tuple(candidate.trial for candidate in built))
    return (best,), may_fit_without_hoisted_casts(microbatched, best.peak_bytes, context.limit_bytes)


def _may_fit(context: PlanningContext, expected: PipelineEstimate) -> bool:
    """Whether what comes to an estimate may fit when it is built. Devices that share matrices may find decisions for
    all layers that need less than any for a few.
    """
    binding, num_devices = context.request.binding, context.cluster.num_devices
    shares_matrices = binding is not None and binding.example_parts(num_devices) < num_devices
    return shares_matrices or expected.peak_bytes <= (1 + PEAK_ERROR) * context.limit_bytes


def may_fit_without_hoisted_casts(microbatched: MicrobatchedStep, peak_bytes: int, limit_bytes: int) -> bool:
    """Whether what needs this peak may fit if copies of the state are made in each micro-batch."""
    graph = microbatched.graph
    return copies_state(graph) and peak_bytes - copied_bytes(graph) <= limit_bytes


def _pins_on_parts(cluster: Cluster, name: str) -> UnsupportedError:
    return UnsupportedError(
        where=f"constrain on stages of {name}",
        expected="devices of one kind",
        got=f"cluster {cluster.name}, of {len(cluster.parts)} parts",
        hint="leave out the pins, or the stages",
    )
