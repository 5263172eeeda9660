"""Which stages, on which devices, with how many micro-batches, on which schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from autopar.cluster import Cluster
from autopar.errors import InvalidArgumentError
from autopar.graph import OpGraph
from autopar.intra_op import CostModel, ShardingPlan
from autopar.layers import Layers
from autopar.mesh import LogicalMesh, factorisations
from autopar.pipelining import (
    Staged,
    Submesh,
    cut_stages,
    model_of,
    part_of,
    schedule_of,
    solve_stage,
    stage_program,
    wires_of,
)
from autopar.runtime.schedules import Schedule
from autopar.stage_assignment import balanced
from autopar.stage_graphs import StageGraph

Costs = Callable[[Cluster, LogicalMesh], CostModel]


def equal_stages(
    graph: OpGraph,
    layers: Layers,
    cluster: Cluster,
    num_stages: int,
    schedule_name: str,
    chunks: int,
    cost_model: Costs,
    limit_bytes: int,
    time_limit_s: float,
) -> Staged:
    """Stages of about equal arithmetic on equal submeshes; the logical mesh that is fastest and fits.

    Raises: InvalidArgumentError for more stages than layers, or a number of groups that does not cut the devices.
    """
    groups = num_stages // chunks
    if cluster.num_devices % groups:
        raise InvalidArgumentError(
            where="pipeline",
            expected=f"a number of stages that divides {cluster.num_devices} devices",
            got=f"{groups} stages",
            hint="ask for a number of stages that divides the devices",
        )
    size = cluster.num_devices // groups
    first_layers = balanced(layers, num_stages)
    schedule = schedule_of(schedule_name, num_stages, graph.num_microbatches, chunks)
    stages = cut_stages(graph, layers, first_layers, schedule.splits_backward, num_stages)
    found: list[Staged] = []
    for mesh in factorisations(size, 2):
        part_of(cluster, size)
        found.append(
            with_meshes(
                graph, layers, first_layers, stages, [mesh] * groups, schedule, cluster, cost_model, time_limit_s
            )
        )
    fitting = [s for s in found if max(s.simulation.peak_bytes) <= limit_bytes]
    return min(fitting or found, key=lambda s: s.simulation.step_time_s)


def with_meshes(
    graph: OpGraph,
    layers: Layers,
    first_layers: Sequence[int],
    stages: Sequence[StageGraph],
    group_meshes: Sequence[LogicalMesh],
    schedule: Schedule,
    cluster: Cluster,
    cost_model: Costs,
    time_limit_s: float,
) -> Staged:
    """Decides each stage on its mesh, and puts the stages together."""
    firsts = [0, *itertools.accumulate(mesh.num_devices for mesh in group_meshes)]
    groups = [Submesh(first_device=first, mesh=mesh) for first, mesh in zip(firsts, group_meshes, strict=False)]
    submeshes = [groups[g] for g in schedule.mesh_of_stage]
    models = [model_of(cluster, cost_model, s.mesh) for s in submeshes]
    wires = wires_of(stages, [s.mesh for s in submeshes])
    shardings: list[ShardingPlan] = [
        solve_stage(stage, model, wire, time_limit_s) for stage, model, wire in zip(stages, models, wires, strict=True)
    ]
    return stage_program(graph, layers, first_layers, stages, models, shardings, submeshes, schedule, cluster)
