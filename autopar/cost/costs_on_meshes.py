"""The costs of one graph's operations on each mesh, made once for all programs of the graph."""

from __future__ import annotations

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.ir.graph import OpGraph


class CostsOnMeshes:
    """`NodeCosts` of a graph by the model of a mesh. What programs of the graph have in common on a mesh, their lowered
    equations and work, is kept with these (`NodeCosts`).
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.known: dict[CostModel, NodeCosts] = {}

    def on(self, model: CostModel) -> NodeCosts:
        if model not in self.known:
            self.known[model] = NodeCosts(self.graph, model)
        return self.known[model]
