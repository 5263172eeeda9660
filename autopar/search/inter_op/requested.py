"""Pipelines by request: the step in the stages and micro-batches that a recipe names, or that another plan has."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from autopar.errors import BatchMismatchError, SolverError, UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.callbacks import refuse_callbacks
from autopar.hardware.cluster import Cluster
from autopar.ir.binding import Binding
from autopar.ir.graph import OpGraph, Role, read_by
from autopar.ir.layout import LogicalMesh
from autopar.ir.pins import PinsOnMesh, on_meshes
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.ops.attention.checks import check_attention
from autopar.passes.assign_stages import balanced, more_layers
from autopar.passes.remat import policies_of
from autopar.passes.remat_cheap import copied_bytes, copies_state
from autopar.passes.saved_arrays import check_passes_apart, check_saved_arrays
from autopar.passes.split_scan import SplitStep, split_scans
from autopar.plan.context import PlanningContext, Rejection, StepGraphs
from autopar.plan.options import FollowedStages, PlanRequest
from autopar.runtime.schedule import V_SHAPED, mesh_of_stages
from autopar.search.inter_op.build_stages import (
    MicrobatchedStep,
    build,
    cut_layers,
    layers_of_pieces,
)
from autopar.search.inter_op.decide_stages import BuildLimits, StageChoice
from autopar.search.inter_op.evaluate import PEAK_ERROR
from autopar.search.inter_op.pipeline_candidate import PipelineCandidate, PipelineEstimate, retry_without_hoisted_casts
from autopar.search.inter_op.search_space import few_bubbles, is_long, meshes_inside, microbatch_numbers, submesh_sizes
from autopar.search.inter_op.staged import default_chunks, part_of
from autopar.search.inter_op.truncated_model import TruncatedModel, estimate, short_step


def schedule_beside(followed: FollowedStages, graph: OpGraph) -> str:
    """Forward passes alone where the step has no backward pass, on the same groups; else the schedule of the other."""
    if any(op.role is Role.BACKWARD for op in graph.ops()):
        return followed.schedule
    return "inference-v" if followed.schedule in V_SHAPED else "inference"


def followed_choice(
    microbatched: MicrobatchedStep, followed: FollowedStages, schedule: str, chunks: int
) -> StageChoice:
    """The stages of a followed plan for this step: each begins at the first layer that reads state of its own.

    Raises: UnsupportedError where the layers read the state in another order than that of the stages.
    """
    meshes = tuple(LogicalMesh(axis_sizes=sizes) for sizes in followed.group_axis_sizes)
    return StageChoice(
        schedule=schedule,
        chunks=chunks,
        first_layers=_first_layers(microbatched, followed, chunks),
        group_meshes=meshes,
        policies=("nothing",) * len(microbatched.layers),
    )


def _first_layers(microbatched: MicrobatchedStep, followed: FollowedStages, chunks: int) -> tuple[int, ...]:
    num_stages, stages_at = len(followed.group_axis_sizes) * chunks, _stages_at(microbatched, followed)
    if microbatched.step.parts > 1:  # cut at the parts of a scan
        first_layers = layers_of_pieces(microbatched)
        for layer, wanted in stages_at.items():
            reached = bisect.bisect_right(first_layers, layer) - 1
            for stage, path in wanted:
                if stage != reached:
                    raise _out_of_order(microbatched, path, stage, reached)
        return first_layers
    found = [0]
    for layer in sorted(stages_at):
        for stage, path in sorted(stages_at[layer]):
            reached = len(found) - 1
            if stage not in (reached, reached + 1) or (stage > reached and layer == found[-1]):
                raise _out_of_order(microbatched, path, stage, reached)
            if stage > reached:
                found.append(layer)
    if len(found) < num_stages:
        raise _out_of_order(microbatched, "state", num_stages - 1, len(found) - 1)
    return tuple(found)


def _stages_at(microbatched: MicrobatchedStep, followed: FollowedStages) -> dict[int, list[tuple[int, str]]]:
    """By layer: (stage, path) of each followed leaf, or slice of one, that the step reads and that lies there first."""
    graph, place = microbatched.graph, dict(followed.leaves)
    first, homes = len(graph.constants), microbatched.assignment.homes
    read = {v for op in graph.block.ops for v in read_by(op)}
    stages_at: dict[int, list[tuple[int, str]]] = {}
    for i, piece in enumerate(microbatched.step.arguments):
        if piece.leaf in place and graph.block.inputs[first + i] in read:
            value = place[piece.leaf]
            stage = value.stages[piece.part] if piece.parts > 1 else value.stage
            stages_at.setdefault(homes[first + i], []).append((stage, value.path))
    return stages_at


def _out_of_order(microbatched: MicrobatchedStep, what: str, stage: int, reached: int) -> UnsupportedError:
    name = microbatched.step.traced.name
    return UnsupportedError(
        where=f"{name}, plan",
        expected="layers that read the state in the order of the stages that it lies on",
        got=f"{what} on stage {stage}, read at stage {reached}",
        hint=f"leave plan out: {name} then plans for itself, and its calls move the state",
    )


# Steps with their scans over layers in parts, and what is made of them: once for all plans of a step.


def split_step(
    traced: TracedStep,
    parts: int,
    rules: RuleBook,
    graphs: StepGraphs,
    groups: Sequence[int] = (),
    sliced: frozenset[int] = frozenset(),
) -> SplitStep:
    """`split_scans`, the same object for the same parts; and the step is traced once on a number of examples, for all
    parts. Raises: as `split_scans`.
    """
    groups = tuple(groups or range(parts))

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        shapes = tuple((a.shape, a.dtype, a.weak_type) for a in avals)
        return graphs.of(traced, ("traced on", shapes), lambda: traced.retrace(avals))

    def split() -> SplitStep:
        return split_scans(dataclasses.replace(traced, retrace=retrace), parts, rules, sliced, groups)

    return graphs.of(traced, ("split", parts, groups, sliced), split)


def whole_batch(step: SplitStep, rules: RuleBook, graphs: StepGraphs) -> OpGraph:
    """The graph of the whole batch of a step in parts."""
    return graphs.of(step.traced, "in parts", lambda: build_graph(step.traced, rules))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestedStep:
    """The step in the micro-batches that a request names, with its schedule and its number of stages."""

    microbatched: MicrobatchedStep
    schedule: str
    chunks: int
    num_stages: int
    binding: Binding | None


def requested_step(context: PlanningContext, hoist_casts: bool, keeps: bool = True) -> RequestedStep:
    """The step in the micro-batches of a request, which is kept for other plans of the step unless it says so.

    Raises: errors of the split; InvalidArgumentError.
    """
    request, cluster, traced, rules = context.request, context.cluster, context.traced, context.rules
    binding, followed = request.binding, request.followed_stages
    name = request.schedule or ("1f1b" if followed is None else schedule_beside(followed, context.graph))
    chunks = request.chunks or default_chunks(name)
    num_stages = (request.num_stages or 1) * chunks
    sliced = followed.sliced if followed is not None else frozenset()
    groups = mesh_of_stages(name, num_stages // chunks, chunks)
    step = split_step(traced, num_stages, rules, context.graphs, groups, sliced)
    parts = binding.example_parts(cluster.num_devices * chunks // num_stages) if binding is not None else 1
    num_microbatches = request.num_microbatches or few_bubbles(traced, num_stages, parts)
    whole = context.graph if step.parts == 1 else whole_batch(step, rules, context.graphs)

    def cut() -> MicrobatchedStep:
        return cut_layers(step, num_microbatches, rules, whole, hoist_casts=hoist_casts)

    key = "micro-batches", step.scopes, step.part_of_argument, num_microbatches, hoist_casts
    microbatched = context.graphs.of(traced, key, cut) if keeps else cut()
    return RequestedStep(
        microbatched=microbatched, schedule=name, chunks=chunks, num_stages=num_stages, binding=binding
    )


def check_binding(context: PlanningContext, microbatched: MicrobatchedStep, asked: RequestedStep) -> None:
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
    first_layers = (
        layers_of_pieces(microbatched)
        if microbatched.step.parts > 1
        else balanced(microbatched.layers, num_stages, more_layers(microbatched.graph))
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
        )
        for mesh in meshes
    ]


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

    `keeps`: the whole graph in micro-batches is kept, to be built, and the stages of the short one.

    Raises: as `estimated_one_stage`.
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
        time_limit_s, to_beat_s = context.deadline.solve_s(), context.to_beat_s
        limits = BuildLimits(limit_bytes=context.limit_bytes, time_limit_s=time_limit_s, to_beat_s=to_beat_s)
        constraints = binding.on(cluster.num_devices)[1] if binding is not None else None
        for each in one.choices:
            choice = dataclasses.replace(each, policies=policies_of(request.recompute, len(each.policies)))
            known = estimate(one.short, choice, cluster, limits, constraints)
            if known is None:
                break
            found.append(
                PipelineEstimate(
                    num_microbatches=m, choice=choice, step_time_s=known.step_time_s, peak_bytes=known.peak_bytes[0],
                    to_beat_s=math.inf, binding=binding, rounds=known.rounds, least_s=known.least_s,
                )
            )  # fmt: skip
        if not keeps:
            one.short.forget_stages()
        return min(found, key=lambda at: _rank(at, context)) if len(found) == len(one.choices) else None

    with context.progress.pass_("estimate stages"):
        within = context.limit_bytes, context.to_beat_s
        found = graphs.of(traced, ("estimate", *at, request.recompute, *within), estimated)
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
    best = dataclasses.replace(best, weighed=tuple(candidate.record for candidate in built))
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
