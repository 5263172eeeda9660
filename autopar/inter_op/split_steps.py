"""Steps with their scans over layers in parts, and what is made of them: once for all plans of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from autopar.frontend.build_graph import build_graph
from autopar.ir.graph import OpGraph
from autopar.ir.traced_step import TracedStep
from autopar.passes.split_scan import SplitStep, split_scans
from autopar.plan.step_graphs import StepGraphs
from autopar.sharding.rules import RuleBook


def split_step(
    traced: TracedStep,
    parts: int,
    rules: RuleBook,
    graphs: StepGraphs,
    groups: Sequence[int] = (),
    sliced: frozenset[int] = frozenset(),
) -> SplitStep:
    """`split_scans`, the same object for the same parts; and the step is traced once on a number of examples, for all
    parts. Raises: as `split_scans`.
    """
    groups = tuple(groups or range(parts))

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        shapes = tuple((a.shape, a.dtype, a.weak_type) for a in avals)
        return graphs.of(traced, ("traced on", shapes), lambda: traced.retrace(avals))

    def split() -> SplitStep:
        return split_scans(dataclasses.replace(traced, retrace=retrace), parts, rules, sliced, groups)

    return graphs.of(traced, ("split", parts, groups, sliced), split)


def whole_batch(step: SplitStep, rules: RuleBook, graphs: StepGraphs) -> OpGraph:
    """The graph of the whole batch of a step in parts."""
    return graphs.of(step.traced, "in parts", lambda: build_graph(step.traced, rules))
