"""The graph of a step on its whole batch as one program, built once for all that plan it."""

from __future__ import annotations

import dataclasses

from autopar.cost.roofline import flops_of
from autopar.frontend.build_graph import graph_as_written, saving_in_scans
from autopar.ir.graph import OpGraph
from autopar.ir.traced_step import TracedStep
from autopar.passes.graph_views import GraphViews
from autopar.passes.round_examples import round_examples
from autopar.passes.stack_updates import stack_updates
from autopar.plan.context import StepGraphs
from autopar.sharding.rules import RuleBook


def program_graph(traced: TracedStep, rules: RuleBook, graphs: StepGraphs | None = None) -> OpGraph:
    """The step's graph, with equal matrices of its update stacked, and its examples rounded up, where the step says so.
    `graphs` keeps the graph as it is written.

    Raises: as `build_graph`.
    """
    written = dataclasses.replace(traced, scan_recompute="", stacked_over=0, uneven_over=0)
    graph = (graphs or StepGraphs()).of(written, "as written", lambda: graph_as_written(written, rules))
    graph = saving_in_scans(graph, traced.scan_recompute, rules)
    if traced.stacked_over:
        graph = stack_updates(graph, traced.stacked_over, flops_of, rules)
    return _rounded(graph, traced)


def _rounded(graph: OpGraph, traced: TracedStep) -> OpGraph:
    return round_examples(graph, traced.uneven_over) if traced.uneven_over else graph


def whole_graph(traced: TracedStep, rules: RuleBook, graphs: StepGraphs) -> GraphViews:
    """The views of the step's graph, kept in `graphs`. Raises: UnsupportedError as `build_graph`."""
    return graphs.of(traced, "whole", lambda: GraphViews(program_graph(traced, rules, graphs), flops_of))


def stacked_step(traced: TracedStep, num_devices: int, rules: RuleBook, graphs: StepGraphs) -> TracedStep:
    """The step with equal matrices of its update stacked for so many devices, where it has any."""
    if num_devices == 1:
        return traced
    plain, stacked = whole_graph(traced, rules, graphs), dataclasses.replace(traced, stacked_over=num_devices)
    even = plain
    if traced.uneven_over:
        even = whole_graph(dataclasses.replace(traced, uneven_over=0), rules, graphs)

    def views() -> GraphViews:
        graph = stack_updates(even.graph, num_devices, flops_of, rules)
        return plain if graph is even.graph else GraphViews(_rounded(graph, traced), flops_of)

    return traced if graphs.of(stacked, "whole", views) is plain else stacked
