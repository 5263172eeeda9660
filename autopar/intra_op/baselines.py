"""Source of candidates: manual plans of one program, namely data parallelism and the stages of ZeRO."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopar.cost.cost_model import cost_model
from autopar.errors import InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.intra_op.spmd_search import search_mesh
from autopar.ir.graph import OpGraph
from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import Effort, PlanRequest
from autopar.plan.rivals import TENSOR_PARALLEL, tensor_group
from autopar.sharding.binding import Binding
from autopar.sharding.head_groups import splits_heads, with_heads
from autopar.sharding.parallelisms import data_axis, replica_axis, tensor_axis

SOURCE = "baselines"
# Stages of ZeRO, 0 for plain data parallelism, that are tried beside what the search finds by itself: such plans send
# parameters and gradients only, all of which may hide, and an objective that adds up what is sent thinks less of them.
ZERO_STAGES = (0, 1, 3)
ALONG_LARGEST = "state along its largest dimension"


def baseline_candidates(context: PlanningContext) -> Iterator[SpmdCandidate | Rejection]:
    """Data parallelism, ZeRO, and the state split along its largest dimensions as FSDP does, on a mesh of one axis; and
    ZeRO inside of each host alone, on a mesh of two. Then tensor parallelism, in time and memory even where it is slow.

    Only where some candidate sends what computing may hide; otherwise the search on meshes has them.
    """
    candidates = [c for c in context.candidates if isinstance(c, SpmdCandidate)]
    sends = any(c.model.overlap.kinds and c.sends for c in candidates)
    if not context.request.leaves_layouts_free or not sends or context.deadline.passed:
        return
    untried = why_not_tried(context)
    if untried:
        yield Rejection(source=SOURCE, text="data parallelism and ZeRO", why=f"not tried: {untried}")
        return
    row = LogicalMesh(axis_sizes=(context.cluster.num_devices,))
    along_largest = state_along_largest(context.graph, row)
    asked: list[tuple[str, LogicalMesh, PlanRequest]] = []
    if along_largest:
        asked.append((ALONG_LARGEST, row, dataclasses.replace(context.request, fixed=along_largest)))
    for name, binding in baseline_bindings(context.cluster):
        mesh, _ = binding.on(context.cluster.num_devices)
        asked.append((name, mesh, dataclasses.replace(context.request, binding=binding)))
    for name, mesh, request in asked:
        if context.deadline.passed and name != ALONG_LARGEST:
            why = f"not tried: {context.deadline.text}"
            yield Rejection(source=SOURCE, text=name, why=why)
            continue
        with context.progress.pass_("data parallelism"):
            model, time_s = cost_model(context.cluster, mesh), context.deadline.solve_s()
            bound = dataclasses.replace(context, request=request)
            found = search_mesh(bound, model, folds=True, time_limit_s=time_s)
        if isinstance(found, Rejection):
            yield dataclasses.replace(found, source=SOURCE, text=name)
        else:
            context.weighed(found.step_time_s, found.peak_bytes)
            candidate = dataclasses.replace(found, source=SOURCE, name=name)
            yield candidate
            context = context.after([candidate])  # the next ones are of use where they are faster than this too
    yield _tensor_parallelism(context)


def _tensor_parallelism(context: PlanningContext) -> SpmdCandidate | Rejection:
    """Tensor parallelism inside of each host, data parallelism between them, evaluated however slow: the plan says what
    it would cost.
    """
    size = tensor_group(context.cluster)
    name = f"{TENSOR_PARALLEL} over {size}"
    if context.deadline.passed:
        return Rejection(source=SOURCE, text=name, why=f"not tried: {context.deadline.text}")
    graph, binding = context.views.annotated, Binding(axes=(data_axis(), tensor_axis()), sizes=(None, size))
    try:
        binding.check(graph, context.cluster.num_devices)
    except InvalidArgumentError as error:
        return Rejection(source=SOURCE, text=name, why=f"not tried: {error.got}")
    if splits_heads(binding):
        binding = with_heads(binding, graph)
    mesh, _ = binding.on(context.cluster.num_devices)
    request = dataclasses.replace(context.request, binding=binding)
    asked = dataclasses.replace(context, request=request, keep_tolerance=math.inf)
    with context.progress.pass_("tensor parallelism"):
        model, time_s = cost_model(context.cluster, mesh), context.deadline.solve_s()
        found = search_mesh(asked, model, folds=True, time_limit_s=time_s)
    if isinstance(found, Rejection):
        return dataclasses.replace(found, source=SOURCE, text=name)
    context.weighed(found.step_time_s, found.peak_bytes)
    return dataclasses.replace(found, source=SOURCE, name=name)


def why_not_tried(context: PlanningContext) -> str:
    """Why nothing but the best program on each mesh is looked for; empty where there is more to find."""
    if not context.may_gain:
        return context.why_no_gain
    quick = context.request.effort is Effort.QUICK and context.fastest_s < math.inf
    return "effort='quick' takes the best program on a mesh of one axis or two" if quick else ""


def baseline_bindings(cluster: Cluster) -> list[tuple[str, Binding]]:
    """Data parallelism and the stages of ZeRO that are tried, by name; of several hosts also over each host alone."""
    found = [
        (f"ZeRO-{zero}" if zero else "data parallelism", Binding(axes=(data_axis(zero),), sizes=(None,)))
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
