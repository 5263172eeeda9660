"""The graph of a step on its whole batch, built once for all that plan it."""

from __future__ import annotations

from autopar.cost.roofline import flops_of
from autopar.frontend.build_graph import build_graph
from autopar.ir.traced_step import TracedStep
from autopar.passes.graph_views import GraphViews
from autopar.plan.step_graphs import StepGraphs
from autopar.sharding.rules import RuleBook


def whole_graph(traced: TracedStep, rules: RuleBook, graphs: StepGraphs) -> GraphViews:
    """The views of the step's graph, kept in `graphs`. Raises: UnsupportedError as `build_graph`."""
    return graphs.of(traced, "whole", lambda: GraphViews(build_graph(traced, rules), flops_of))
