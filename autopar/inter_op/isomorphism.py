"""Isomorphic graphs, equal except for the numbers of operations and values, share their decisions."""

from __future__ import annotations

import dataclasses

from autopar.ir.canonical_form import CanonicalForm
from autopar.ir.graph import OpGraph
from autopar.lowering.lower import ShardingPlan
from autopar.sharding.partial_sums import find_partials


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalGraph:
    """A graph's structure without numbers. The `ops` and `values` of graphs with equal `key`s correspond in order."""

    key: tuple
    ops: tuple[int, ...]
    values: tuple[int, ...]


def canonical_graph(graph: OpGraph) -> CanonicalGraph:
    form = CanonicalForm(graph, lambda op: (op.role, op.count))
    top = form.block_key(graph.block)
    key = (top, graph.tied, graph.donated, graph.batch, graph.num_microbatches, graph.repeating)
    return CanonicalGraph(key=key, ops=tuple(form.ops), values=form.values)


def carried_over(plan: ShardingPlan, source: CanonicalGraph, target: CanonicalGraph, graph: OpGraph) -> ShardingPlan:
    """The decisions of one graph for another of equal key."""
    op = dict(zip(source.ops, target.ops, strict=True))
    value = dict(zip(source.values, target.values, strict=True))
    return dataclasses.replace(
        plan,
        strategy={op[o]: s for o, s in plan.strategy.items()},
        partials=find_partials(graph),
        unreduced={value[v]: layout for v, layout in plan.unreduced.items()},
        reduced={value[v]: layout for v, layout in plan.reduced.items()},
        copies={(value[v], readers): layout for (v, readers), layout in plan.copies.items()},
        transfer_layouts={op[o]: layout for o, layout in plan.transfer_layouts.items()},
        in_host=frozenset(value[v] for v in plan.in_host),
        saved_in_host=frozenset(value[v] for v in plan.saved_in_host),
    )
