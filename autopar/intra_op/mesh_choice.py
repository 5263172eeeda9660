"""Which logical meshes are tried, and from which step time on a program on one is of no use."""

from __future__ import annotations

import math

from autopar.common.text import text_of_s
from autopar.cost.cost_model import CostModel
from autopar.hardware.cluster import Cluster
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.ir.mesh import LogicalMesh, factorisations, orderings
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import AS_FAST, NEARLY_EQUAL, WORTHWHILE, Effort
from autopar.sharding.pins import PinsOnMesh, on_meshes

# The logical meshes on which one SPMD program is planned.


def logical_meshes(context: PlanningContext) -> list[tuple[LogicalMesh, PinsOnMesh | None]]:
    """The meshes that the request names, else the distinct ones of the cluster; each with the pins on it.

    Raises: InvalidArgumentError for pins that name nothing, or that hold on no mesh.
    """
    request, cluster, graph = context.request, context.cluster, context.graph
    if request.pins is not None:
        resolved = request.pins.found(context.traced, graph)
        return [(at.mesh, at) for at in on_meshes(resolved, cluster, request.max_mesh_axes, request.binding, graph)]
    if request.binding is not None:
        return [(request.binding.on(cluster.num_devices)[0], None)]
    if request.axis_sizes is not None:
        return [(LogicalMesh(axis_sizes=request.axis_sizes), None)]
    most_axes = min(request.max_mesh_axes, 2) if request.effort is Effort.QUICK else request.max_mesh_axes
    return [(mesh, None) for mesh in distinct_meshes(cluster, most_axes)]


def distinct_meshes(cluster: Cluster, max_axes: int) -> tuple[LogicalMesh, ...]:
    """The factorisations of the device count; of axes on different links every order."""
    meshes: dict[LogicalMesh, None] = {}
    for mesh in factorisations(cluster.num_devices, max_axes):
        if not cluster.has_links_for(len(mesh.axis_sizes)):
            continue
        for ordered in orderings(mesh):
            if len(set(cluster.axis_links(ordered.axis_sizes))) > 1 or ordered == mesh:
                meshes[ordered] = None
    return tuple(meshes)


SOURCE = "logical meshes"


def not_tried(mesh: LogicalMesh, why: str) -> Rejection:
    return Rejection(source=SOURCE, text=f"mesh {mesh}", why=f"not tried: {why}", axis_sizes=mesh.axis_sizes)


def worth_trying(mesh: LogicalMesh, context: PlanningContext) -> bool:
    """Whether a mesh of three axes may pay: where two axes gained next to nothing over one, a third is not tried.

    The search on three axes costs more than all others together. Where no plan fits yet, every mesh is tried.
    """
    num_axes = len(mesh.axis_sizes)
    if num_axes < 3 or context.request.effort is Effort.THOROUGH:
        return True
    times_s: dict[int, float] = {}
    for outcome in context.results:
        if isinstance(outcome, SpmdCandidate) and outcome.peak_bytes <= context.limit_bytes:
            axes, time_s = len(outcome.model.links.mesh.axis_sizes), outcome.step_time_s
        elif isinstance(outcome, Rejection) and outcome.least_s is not None:
            axes, time_s = len(outcome.axis_sizes), outcome.least_s
        else:
            continue
        times_s[axes] = min(times_s.get(axes, math.inf), time_s)
    one_axis_less_s, most_axes_s = times_s.get(num_axes - 2, math.inf), times_s.get(num_axes - 1, math.inf)
    return math.isinf(one_axis_less_s) or math.isinf(most_axes_s) or most_axes_s < one_axis_less_s * (1 - WORTHWHILE)


def fastest_fitting(context: PlanningContext) -> SpmdCandidate | None:
    """The fastest program so far that fits."""
    fitting = (c for c in context.candidates if isinstance(c, SpmdCandidate) and c.peak_bytes <= context.limit_bytes)
    return min(fitting, key=lambda c: c.step_time_s, default=None)


def longest_s(context: PlanningContext, num_axes: int) -> float:
    """Step time from which on a program on so many mesh axes is neither the plan nor wanted beside it: of nearly equal
    ones that on the fewest axes is taken. Infinite as long as none fits.
    """
    best = fastest_fitting(context)
    if best is None:
        return math.inf
    if context.keep_tolerance > 1:
        return best.step_time_s * max(1 + NEARLY_EQUAL, context.keep_tolerance)
    has_more_axes = num_axes > len(best.sharding.mesh.axis_sizes)
    return best.step_time_s / (1 + NEARLY_EQUAL) if has_more_axes else best.step_time_s * (1 + NEARLY_EQUAL)


def extra_s_of(context: PlanningContext) -> float:
    """What the objective has beyond the step's time (the batch read in, layouts that two readers share), taken to be on
    every mesh what it is for the fastest program that fits.
    """
    best = fastest_fitting(context)
    return max(0.0, best.sharding.report.objective_s - best.step_time_s) if best is not None else 0.0


def slower(context: PlanningContext, model: CostModel, least_s: float, step_time_s: float | None = None) -> Rejection:
    """Of what takes longer than a candidate that fits, before its memory is computed, or its time (None)."""
    extra_s = least_s - context.fastest_s
    if extra_s <= 0:
        why = f"as fast to {NEARLY_EQUAL:.3%}, on a mesh of more axes"
    elif extra_s <= AS_FAST * context.fastest_s:
        why = "as fast" if step_time_s is not None else "a bound says that it is no faster"
    elif step_time_s is None:
        why = f"a bound says that it is slower by about {text_of_s(extra_s)} or more"
    else:
        why = f"slower by {text_of_s(extra_s)}"
    return Rejection(
        source=SOURCE,
        text=f"mesh {model.links.mesh}",
        why=why,
        axis_sizes=model.links.mesh.axis_sizes,
        step_time_s=step_time_s,
        least_s=least_s,
    )
