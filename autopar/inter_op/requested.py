"""Source of candidates: a requested pipeline, of equal stages on equal submeshes, under a recipe or pins."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from autopar.attention.checks import check_attention
from autopar.cost.product_rate import main_dtype
from autopar.errors import BatchMismatchError, SolverError, UnsupportedError
from autopar.frontend.callbacks import refuse_callbacks
from autopar.hardware.cluster import Cluster
from autopar.hardware.cluster_parts import WHOLE, part_number
from autopar.inter_op.build_stages import (
    MicrobatchedStep,
    build,
    cut_layers,
    layers_of_pieces,
)
from autopar.inter_op.evaluate import PEAK_ERROR
from autopar.inter_op.fit_stages import BuildLimits
from autopar.inter_op.followed_stages import followed_choice, schedule_beside
from autopar.inter_op.pipeline_candidate import PipelineCandidate, PipelineEstimate, retry_without_hoisted_casts
from autopar.inter_op.search_space import few_bubbles, is_long, meshes_inside, microbatch_numbers, submesh_sizes
from autopar.inter_op.short_steps import estimate, short_step
from autopar.inter_op.stage_choice import StageChoice
from autopar.inter_op.staged import default_chunks
from autopar.inter_op.submeshes import part_of
from autopar.ir.mesh import LogicalMesh
from autopar.passes.assign_stages import balanced
from autopar.passes.remat_cheap import copied_bytes, copies_state
from autopar.passes.remat_policy import policies_of
from autopar.passes.saved_arrays import check_passes_apart, check_saved_arrays
from autopar.passes.split_scan import one_part_a_group, split_scans, trips_of
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import PlanRequest
from autopar.sharding.binding import Binding
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskedStep:
    """The step in the micro-batches that a request names, with its schedule and its number of stages."""

    microbatched: MicrobatchedStep
    schedule: str
    chunks: int
    num_stages: int
    binding: Binding | None


def asked_step(context: PlanningContext, hoist_casts: bool) -> AskedStep:
    """The step in the micro-batches of a request. Raises: errors of the split; InvalidArgumentError."""
    request, cluster, traced, rules = context.request, context.cluster, context.traced, context.rules
    binding, followed = request.binding, request.followed_stages
    name = request.schedule or ("1f1b" if followed is None else schedule_beside(followed, context.graph))
    chunks = request.chunks or default_chunks(name)
    num_stages = (request.num_stages or 1) * chunks
    sliced = followed.sliced if followed is not None else frozenset()
    if chunks > 1 and (trips := trips_of(traced, rules, sliced)):  # whatever their number
        raise one_part_a_group(traced.name, trips, name, chunks)
    step = split_scans(traced, num_stages, rules, sliced)
    parts = binding.example_parts(cluster.num_devices * chunks // num_stages) if binding is not None else 1
    num_microbatches = request.num_microbatches or few_bubbles(traced, num_stages, parts)
    whole = context.graph if step.parts == 1 else None
    microbatched = context.graphs.of(
        traced,
        ("micro-batches", step.parts, num_microbatches, hoist_casts),
        lambda: cut_layers(step, num_microbatches, rules, whole, hoist_casts=hoist_casts),
    )
    return AskedStep(microbatched=microbatched, schedule=name, chunks=chunks, num_stages=num_stages, binding=binding)


def estimated_one_stage(context: PlanningContext) -> PipelineEstimate | None:
    """What one stage on all devices comes to under a recipe, in the micro-batches of the request, by an estimate on
    fewer of its equal layers; None where the step has no such form. Where it does not fit, each micro-batch makes its
    own copies of the state, as in `requested_pipelines`.

    Raises: as `requested_pipelines`; SolverError where there is no solution in time.
    """
    found: PipelineEstimate | None = None
    for hoist_casts in (True, False):
        with context.progress.pass_("micro-batches"):
            asked = asked_step(context, hoist_casts)
        again = _estimated(context, asked)
        if again is None or (found is not None and again.peak_bytes >= found.peak_bytes):
            break
        found, peak_bytes, limit_bytes = again, again.peak_bytes, context.limit_bytes
        if peak_bytes <= limit_bytes or not may_fit_without_hoisted_casts(asked.microbatched, peak_bytes, limit_bytes):
            break
    return found


def _estimated(context: PlanningContext, asked: AskedStep) -> PipelineEstimate | None:
    request, cluster, microbatched, binding = context.request, context.cluster, asked.microbatched, asked.binding
    if binding is None or asked.num_stages > 1:
        return None
    of = context.graphs, context.traced
    cut = microbatched.graph.num_microbatches, microbatched.hoist_casts, cluster

    def estimated() -> PipelineEstimate | None:
        short = of[0].of(of[1], ("short step", *cut), lambda: short_step(microbatched, cluster, context.least_s))
        if short is None:
            return None
        _check_binding(context, short.microbatched.annotated, asked)
        (choice,) = equal_choice(microbatched, cluster, asked.schedule, 1, 1, binding, request.recompute)
        limits = BuildLimits(limit_bytes=context.limit_bytes, time_limit_s=context.deadline.solve_s())
        found = estimate(short, choice, cluster, limits, binding.on(cluster.num_devices)[1])
        if found is None:
            return None
        return PipelineEstimate(
            num_microbatches=microbatched.graph.num_microbatches, choice=choice, step_time_s=found.step_time_s,
            peak_bytes=found.peak_bytes[0], to_beat_s=math.inf, binding=binding, rounds=found.rounds,
        )  # fmt: skip

    with context.progress.pass_("estimate stages"):
        return of[0].of(of[1], ("estimate", *cut, binding, request.recompute, context.limit_bytes), estimated)


def _check_binding(context: PlanningContext, microbatched: MicrobatchedStep, asked: AskedStep) -> None:
    """Raises: InvalidArgumentError or UnsupportedError for a step, with its semantics, that a recipe cannot bind."""
    binding, cluster, name = asked.binding, context.cluster, context.traced.name
    if binding is None:
        return
    binding.check(microbatched.graph, cluster.num_devices * asked.chunks // asked.num_stages)
    if binding.shares_sequences:
        check_attention(microbatched.graph)
    if binding.offloads_activations:
        check_saved_arrays(microbatched.graph, name)
        check_passes_apart(name, cluster.device.platform, asked.num_stages)


def _built(
    context: PlanningContext, hoist_casts: bool
) -> tuple[tuple[PipelineCandidate, ...] | tuple[Rejection], bool]:
    """(the best of the logical meshes; whether the copies of the state could be made in each micro-batch instead).

    One stage of many equal layers is estimated first: it is built with the weights that fit by the estimate, and not at
    all where it can only fit without hoisted copies.
    """
    request, cluster, traced = context.request, context.cluster, context.traced
    binding, followed = request.binding, request.followed_stages
    with context.progress.pass_("micro-batches"):
        asked = asked_step(context, hoist_casts)
    expected, limit_bytes = _estimated_in_time(context, asked), context.limit_bytes
    may_fit = expected is None or expected.peak_bytes <= (1 + PEAK_ERROR) * limit_bytes
    if expected is not None and not may_fit and hoist_casts:
        least_bytes = int(expected.peak_bytes / (1 + PEAK_ERROR))
        if may_fit_without_hoisted_casts(asked.microbatched, least_bytes, limit_bytes):
            return (Rejection(source=SOURCE, why="does not fit with copies of the state for all micro-batches"),), True
    with context.progress.pass_("micro-batches"):
        microbatched, name, chunks, num_stages = asked.microbatched, asked.schedule, asked.chunks, asked.num_stages
        if binding is not None:
            microbatched = microbatched.annotated
            _check_binding(context, microbatched, asked)
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
        with context.progress.pass_("build stages"):
            limits = BuildLimits(
                limit_bytes=limit_bytes, time_limit_s=context.deadline.solve_s(), decides_again=may_fit
            )
            first = expected.first_to_build(limit_bytes, PEAK_ERROR) if expected is not None else None
            terms = first.terms if first is not None else ()
            staged = build(microbatched, choice, cluster, limits, constraints, pins, layouts, terms)
        built.append(
            PipelineCandidate(
                staged=staged, choice=choice, weighed=(), hoist_casts=hoist_casts, pins=pins, source=SOURCE
            )
        )
    best = min(built, key=lambda candidate: candidate.rank(context.limit_bytes))
    best = dataclasses.replace(best, weighed=tuple(candidate.trial for candidate in built))
    return (best,), may_fit_without_hoisted_casts(microbatched, best.peak_bytes, context.limit_bytes)


def _estimated_in_time(context: PlanningContext, asked: AskedStep) -> PipelineEstimate | None:
    if context.request.pins is not None or context.request.followed_stages is not None:
        return None
    try:
        return _estimated(context, asked)
    except SolverError:
        return None


def may_fit_without_hoisted_casts(microbatched: MicrobatchedStep, peak_bytes: int, limit_bytes: int) -> bool:
    """Whether what needs this peak may fit if copies of the state are made in each micro-batch."""
    graph = microbatched.graph
    return copies_state(graph) and peak_bytes - copied_bytes(graph) <= limit_bytes


def equal_choice(
    microbatched: MicrobatchedStep,
    cluster: Cluster,
    schedule: str,
    num_stages: int,
    chunks: int,
    binding: Binding | None = None,
    recompute: str = "nothing",
    meshes: Sequence[LogicalMesh] | None = None,
) -> list[StageChoice]:
    """Stages of about equal arithmetic, or of one part of a scan each, on equal submeshes, for every mesh that a
    binding allows, or for the given meshes.

    Raises: InvalidArgumentError for more stages than layers, or a number of groups that does not divide the devices.
    """
    (size,) = submesh_sizes(cluster, PlanRequest(num_stages=num_stages // chunks), len(microbatched.layers))
    parts, rates = parts_in_turn(microbatched, cluster, num_stages // chunks)
    first_layers = (
        layers_of_pieces(microbatched)
        if microbatched.step.parts > 1
        else balanced(microbatched.layers, num_stages, rates * chunks)
    )
    if meshes is None:
        meshes = meshes_inside(part_of(cluster, size)) if binding is None else [binding.on(size)[0]]
    return [
        StageChoice(
            schedule=schedule,
            chunks=chunks,
            first_layers=first_layers,
            group_meshes=(mesh,) * (num_stages // chunks),
            policies=policies_of(recompute, len(microbatched.layers)),
            group_parts=parts,
        )
        for mesh in meshes
    ]


def parts_in_turn(
    microbatched: MicrobatchedStep, cluster: Cluster, num_groups: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(the part of the cluster that each of equal groups of devices is in, in the order of the devices; the rate of
    matrix products of its devices). Empty on a cluster of one kind.

    Raises: InvalidArgumentError for a group with devices of several kinds.
    """
    if not cluster.parts or num_groups == 1:
        return (), ()
    size = cluster.num_devices // num_groups
    numbers = tuple(part_number(cluster, group * size, size) for group in range(num_groups))
    dtype = main_dtype(microbatched.graph)
    return numbers, tuple(cluster.parts[number].device.flops_per_s(dtype) for number in numbers)


def _pins_on_parts(cluster: Cluster, name: str) -> UnsupportedError:
    return UnsupportedError(
        where=f"constrain on stages of {name}",
        expected="devices of one kind",
        got=f"cluster {cluster.name}, of {len(cluster.parts)} parts",
        hint="leave out the pins, or the stages",
    )
