"""The least time of a step on a cluster, whatever its plan: computation alone, shared out evenly."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar.cost.cost_model import CostModel, NodeCosts, cost_model
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Op, OpGraph, OpKind
from autopar.ir.mesh import LogicalMesh


def least_time_s(graph: OpGraph, cluster: Cluster) -> float:
    """Seconds of all operations, shared by all devices of a cluster, of several kinds each as fast as it is."""
    parts = cluster.parts or (cluster,)
    models = [cost_model(part, LogicalMesh(axis_sizes=(part.num_devices,))) for part in parts]
    alone_s = [least_step_time_s(graph, model) for model in models]
    return 1.0 / sum(1.0 / s for s in alone_s) if min(alone_s) > 0 else 0.0


def least_step_time_s(graph: OpGraph, model: CostModel) -> float:
    """Seconds of all operations, each shared by all devices of the model's mesh, without communication, waiting or work
    done twice.
    """
    costs = NodeCosts(graph, model)
    return in_turn_s(graph.block.ops, lambda op: costs.compute_s(op, None)) / model.links.mesh.num_devices


def in_turn_s(ops: Iterable[Op], seconds_of: Callable[[Op], float]) -> float:
    """Seconds of operations and of those in their bodies, one after the other; of branches, the one that takes longest,
    as `compute_times_s` counts them.
    """
    total_s = 0.0
    for op in ops:
        if op.blocks:
            of_blocks = [in_turn_s(block.ops, seconds_of) for block in op.blocks]
            total_s += max(of_blocks) if op.kind is OpKind.COND else sum(of_blocks)
        elif op.kind is OpKind.EQUATION:
            total_s += seconds_of(op)
    return total_s
