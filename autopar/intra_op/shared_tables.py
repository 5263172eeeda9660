"""What the integer programs of one graph on one mesh have in common, whatever is asked of each: built once."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.intra_op.build_choice_graph import build_choice_graph
from autopar.intra_op.formulation import Ilp, build
from autopar.ir.graph import OpGraph
from autopar.ir.layout import Layout
from autopar.passes.fold_step import Weights
from autopar.plan.context import PlanningContext
from autopar.sharding.constraints import Constraints
from autopar.sharding.partial_sums import Partials, find_partials


class SharedTables:
    """The seconds of operations, and the nodes and edges of a graph with their seconds, before constraints.

    The search on a mesh, the baselines on it and recipes differ in what they fix and forbid only. `graph` is with or
    without the semantics of its values, which tell nothing but the order in which axes split a dimension. `partials` of
    the graph, and `costs` of it on the mesh, where they are known.
    """

    def __init__(
        self, graph: OpGraph, model: CostModel, partials: Partials | None = None, costs: NodeCosts | None = None
    ) -> None:
        self.graph, self.model, self.costs = graph, model, costs or NodeCosts(graph, model)
        self.partials = find_partials(graph) if partials is None else partials
        # With the weights by whose ids they are known, so that the ids stay theirs.
        self._built: dict[tuple, tuple[Weights, Ilp]] = {}

    def built(
        self,
        graph: OpGraph,
        constraints: Constraints | None,
        weights: Weights,
        transfers: Mapping[int, Layout],
        arrivals: Mapping[int, Layout],
    ) -> Ilp:
        """The program before constraints, of which only the order counts in which axes split a dimension: where no axis
        is a minor one, that without constraints. `transfers` and `arrivals` of a stage are parts of its nodes, and make
        a program of their own. `graph`: the one of the tables, with the semantics of its values where constraints are
        given.
        """
        orders = constraints if constraints is not None and any(constraints.minors) else None
        key = orders.minors if orders is not None else None, id(weights)
        if transfers or arrivals or key not in self._built:
            order_of = orders.order_of if orders is not None else None
            mesh, partials = self.model.links.mesh, self.partials
            choices = build_choice_graph(graph, mesh, transfers, arrivals, order_of, weights, partials)
            ilp = build(graph, choices, self.model, self.costs, weights)
            if transfers or arrivals:
                return ilp
            self._built[key] = weights, ilp
        return self._built[key][1]


def tables_of(context: PlanningContext, graph: OpGraph, model: CostModel) -> SharedTables:
    """The tables of a graph on a mesh: the same ones for the search, the baselines and recipes on that mesh, whether
    they read the semantics of values or not. On three axes, where they are large, they go with the search.
    """
    mesh, partials = model.links.mesh, context.views.partials_of(graph)
    if len(mesh.axis_sizes) > 2:
        return SharedTables(graph, model, partials)
    # The tables keep the block, so that its id stays its own.
    what = "tables", id(graph.block), context.cluster, mesh
    return context.graphs.of(context.traced, what, lambda: SharedTables(graph, model, partials))
