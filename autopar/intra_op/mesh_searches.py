"""Source of candidates: one SPMD program over all devices on each logical mesh, and the manual plans of one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopar.cost.cost_model import cost_model
from autopar.errors import InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.intra_op.memory_refusals import cannot_fit, fits_unfused
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.intra_op.spmd_search import (
    LONG_STEP,
    SOURCE,
    logical_meshes,
    not_tried,
    search_mesh,
    worth_trying,
)
from autopar.ir.graph import OpGraph
from autopar.ir.layout import Layout, LogicalMesh
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import WORTHWHILE, Effort, PlanRequest
from autopar.plan.rivals import BASELINES, DATA_PARALLEL, TENSOR_PARALLEL, tensor_group
from autopar.sharding.binding import Binding, with_groups
from autopar.sharding.parallelisms import data_axis, replica_axis, tensor_axis

# Source of candidates: manual plans of one program, namely data and tensor parallelism and the stages of ZeRO.


# Stages of ZeRO, 0 for plain data parallelism, that are tried beside what the search finds by itself: such plans send
# parameters and gradients only, all of which may hide, and an objective that adds up what is sent thinks less of them.
ZERO_STAGES = (0, 1, 3)
MOST_AXES = 2  # of the meshes of these plans
ALONG_LARGEST = "FSDP along the largest dimensions"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A manual plan by its name: its mesh, and the request that binds it. `is_told`: evaluated however slow it is, for
    the plan says what it would cost.
    """

    name: str
    mesh: LogicalMesh
    request: PlanRequest
    is_told: bool = False


def baseline_candidates(context: PlanningContext) -> Iterator[SpmdCandidate | Rejection]:
    """Every manual plan, each as one constrained program that is priced like what the search finds by itself."""
    if not context.request.leaves_layouts_free or context.cluster.num_devices == 1:
        return
    if not context.may_gain:
        yield Rejection(source=BASELINES, text="data parallelism and ZeRO", why=f"not tried: {context.why_no_gain}")
        return
    for baseline in _baselines(context):
        found = baseline if isinstance(baseline, Rejection) else _searched(context, baseline)
        yield found
        context = context.after([found])  # the next ones are of use where they are faster than this too


def _searched(context: PlanningContext, baseline: Baseline) -> SpmdCandidate | Rejection:
    name, deadline = baseline.name, context.deadline
    if deadline.passed:
        return Rejection(source=BASELINES, text=name, why=f"not tried: {deadline.text}")
    tolerance = math.inf if baseline.is_told else context.keep_tolerance
    bound = dataclasses.replace(context, request=baseline.request, keep_tolerance=tolerance)
    with context.progress.pass_(TENSOR_PARALLEL if baseline.is_told else DATA_PARALLEL):
        model = cost_model(context.cluster, baseline.mesh)
        found = search_mesh(bound, model, folds=True, time_limit_s=deadline.solve_s())
    if isinstance(found, Rejection):
        return dataclasses.replace(found, source=BASELINES, text=name)
    context.weighed(found.step_time_s, found.peak_bytes)
    return dataclasses.replace(found, source=BASELINES, name=name)


def _baselines(context: PlanningContext) -> Iterator[Baseline | Rejection]:
    """The state split along its largest dimensions as FSDP does, data parallelism and ZeRO, on a mesh of one axis; ZeRO
    inside of each host alone, on a mesh of two; and tensor parallelism. Once a program fits, a quick search has those
    on one axis alone.
    """
    cluster, request = context.cluster, context.request
    is_quick = request.effort is Effort.QUICK and context.fastest_s < math.inf
    row = LogicalMesh(axis_sizes=(cluster.num_devices,))
    if along_largest := state_along_largest(context.graph, row):
        fixed = dataclasses.replace(request, fixed=along_largest)
        yield Baseline(name=ALONG_LARGEST, mesh=row, request=fixed)
    for name, binding in baseline_bindings(cluster):
        if is_quick and len(binding.axes) > 1:
            continue
        binding = with_groups(binding, context.views.annotated, cluster.num_devices)
        mesh, _ = binding.on(cluster.num_devices)
        yield Baseline(name=name, mesh=mesh, request=dataclasses.replace(request, binding=binding))
    if not is_quick:
        yield _tensor_parallelism(context)


def _tensor_parallelism(context: PlanningContext) -> Baseline | Rejection:
    """Tensor parallelism inside of each host, data parallelism between them."""
    cluster, size = context.cluster, tensor_group(context.cluster)
    name = f"{TENSOR_PARALLEL} over {size}"
    graph, binding = context.views.annotated, Binding(axes=(data_axis(), tensor_axis()), sizes=(None, size))
    try:
        binding.check(graph, cluster.num_devices)
    except InvalidArgumentError as error:
        return Rejection(source=BASELINES, text=name, why=f"not tried: {error.got}")
    binding = with_groups(binding, graph, cluster.num_devices)
    mesh, _ = binding.on(cluster.num_devices)
    request = dataclasses.replace(context.request, binding=binding)
    return Baseline(name=name, mesh=mesh, request=request, is_told=True)


def baseline_bindings(cluster: Cluster) -> list[tuple[str, Binding]]:
    """Data parallelism and the stages of ZeRO that are tried, by name; of several hosts also over each host alone; none
    on one device, which shares nothing.
    """
    if cluster.num_devices == 1:
        return []
    found = [
        (f"ZeRO-{zero}" if zero else DATA_PARALLEL, Binding(axes=(data_axis(zero),), sizes=(None,)))
        for zero in ZERO_STAGES
    ]
    inside = cluster.domain_devices
    if cluster.num_domains > 1 and inside > 1:
        found += [
            (
                f"ZeRO-{zero} in groups of {inside}",
                Binding(axes=(replica_axis(), data_axis(zero)), sizes=(None, inside)),
            )
            for zero in ZERO_STAGES
            if zero
        ]
    return found


def state_along_largest(graph: OpGraph, mesh: LogicalMesh) -> tuple[tuple[int, Layout], ...]:
    """Each array of the state, by its number among the arguments, split over a mesh of one axis along the largest
    dimension that divides.
    """
    found = []
    for position in sorted(graph.donated):
        shape = graph.values[graph.block.inputs[position]].shape
        for d in sorted(range(len(shape)), key=lambda d: -shape[d]):
            layout = Layout(tuple((0,) if e == d else () for e in range(len(shape))))
            if layout.fits(shape, mesh):
                found.append((position - len(graph.constants), layout))
                break
    return tuple(found)


def mesh_candidates(context: PlanningContext) -> Iterator[SpmdCandidate | Rejection]:
    """The best plan on each logical mesh, or the reason for which there is none, and the baselines.

    Baselines come in front of the meshes of three axes, where a program fits already: they are on one axis or two and
    take little time, and tell whether a third axis may pay (`worth_trying`). A rejection with a MemoryLimitError ends
    the search: no mesh can have a plan that fits.
    """
    deadline = context.deadline
    may_fit = not context.request.leaves_layouts_free or context.cluster.num_devices == 1
    meshes = logical_meshes(context)
    baselines: list[SpmdCandidate | Rejection] | None = None
    for number, (mesh, pins) in enumerate(meshes):
        candidates = [c for c in context.candidates if isinstance(c, SpmdCandidate)]
        fits = any(c.peak_bytes <= context.limit_bytes for c in candidates)
        if baselines is None and fits and len(mesh.axis_sizes) > MOST_AXES:
            baselines = list(baseline_candidates(context))
            yield from baselines
            context = context.after(baselines)
        if deadline.passed and fits:
            outcome: SpmdCandidate | Rejection = not_tried(mesh, deadline.text)
        elif fits and not context.may_gain:
            outcome = not_tried(mesh, context.why_no_gain)
        elif not worth_trying(mesh, context):
            outcome = not_tried(mesh, f"the axis before it gained less than {WORTHWHILE:.0%}")
        else:
            # Where nothing can fit, a search for what does takes minutes: it is asked first whether anything can, for a
            # long step at once, for others when nothing fits on the first mesh.
            slow = number > 0 or len(context.graph.block.ops) > LONG_STEP
            if slow and not may_fit and not fits and not fits_unfused(context):
                with context.progress.pass_("least memory"):
                    refusal = cannot_fit(context)
                if refusal is not None:
                    yield Rejection(source=SOURCE, why=refusal.got, error=refusal)
                    return
                may_fit = True
            time_s, folds = deadline.solve_s(len(meshes) - number), context.request.leaves_layouts_free
            with context.progress.pass_(f"mesh {mesh}"):
                model = cost_model(context.cluster, mesh)
                outcome = search_mesh(context, model, pins, folds=folds, time_limit_s=time_s)
        if isinstance(outcome, SpmdCandidate):
            context.weighed(outcome.step_time_s, outcome.peak_bytes)
        yield outcome
        context = context.after([outcome])
    if baselines is None:
        yield from baseline_candidates(context)
