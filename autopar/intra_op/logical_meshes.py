"""The logical meshes on which one SPMD program is planned."""

from __future__ import annotations

from autopar.hardware.cluster import Cluster
from autopar.ir.mesh import LogicalMesh, factorisations, orderings
from autopar.plan.context import PlanningContext
from autopar.plan.options import Effort
from autopar.sharding.pins import PinsOnMesh, on_meshes


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
