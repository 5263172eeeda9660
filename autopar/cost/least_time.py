"""The least time of a step on a cluster, whatever its plan: computation alone, shared out evenly."""

from __future__ import annotations

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.ir.graph import OpGraph, OpKind


def least_step_time_s(graph: OpGraph, model: CostModel) -> float:
    """Seconds of all operations, each shared by all devices of the model's mesh, without communication, waiting or work
    done twice.
    """
    costs = NodeCosts(graph, model)
    ops = (op for op in graph.ops() if op.kind is OpKind.EQUATION and not op.blocks)
    return sum(costs.compute_s(op, None) for op in ops) / model.links.mesh.num_devices
