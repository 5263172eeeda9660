"""Decisions for a folded graph, unfolded to those for the whole one."""

from __future__ import annotations

import dataclasses

from autopar.ir.graph import OpGraph, Role, values_of
from autopar.ir.value_state import ALL
from autopar.lowering.decisions import ShardingPlan
from autopar.passes.fold_step import FoldedStep
from autopar.sharding.partial_sums import Partials

_READERS = (ALL, *(role.value for role in Role))


def unfold(plan: ShardingPlan, partials: Partials, graph: OpGraph, step: FoldedStep) -> ShardingPlan:
    """The decisions for the whole graph: everything is decided as its counterpart in the folded one.

    This also holds for the layouts of an operation's own operands and results: its counterpart has the same structure,
    and its results lie as those of its counterpart do. `partials` are those of the whole graph.
    """
    values = list(values_of(graph.block))
    like = step.value_of
    return dataclasses.replace(
        plan,
        partials=partials,
        strategy={op.id: plan.strategy[step.op_of[op.id]] for op in graph.ops() if step.op_of[op.id] in plan.strategy},
        unreduced={v: plan.unreduced[like[v]] for v in values if like[v] in plan.unreduced},
        reduced={v: plan.reduced[like[v]] for v in values if like[v] in plan.reduced},
        copies={
            (v, readers): plan.copies[like[v], readers]
            for v in values
            for readers in _READERS
            if (like[v], readers) in plan.copies
        },
        in_host=frozenset(v for v in graph.block.inputs if like[v] in plan.in_host),
        saved_in_host=frozenset(v for v in values if like[v] in plan.saved_in_host),
    )
