"""Isomorphic graphs, equal up to the numbers of operations and values: the decisions of one serve the other."""

from __future__ import annotations

import dataclasses

from autopar.ir.graph import Atom, Block, Op, OpGraph
from autopar.lowering.decisions import ShardingPlan
from autopar.sharding.partial_sums import find_partials


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalGraph:
    """What a graph is but for its numbers: with equal `key`s, `ops` and `values` correspond one to one, in order."""

    key: tuple
    ops: tuple[int, ...]
    values: tuple[int, ...]


def shape_of(graph: OpGraph) -> CanonicalGraph:
    """The shape of a graph; operations that no rule covers are told apart by their primitives."""
    number: dict[int, int] = {}
    ops: list[int] = []

    def value(v: int) -> object:
        if v in number:
            return number[v]
        number[v] = len(number)
        at = graph.values[v]
        return number[v], at.shape, at.dtype

    def atom(a: Atom) -> object:
        return value(a) if isinstance(a, int) else ("literal", a.shape, repr(a.literal))

    def op_key(op: Op) -> tuple:
        ops.append(op.id)
        counts = (op.num_consts, op.num_carry, op.num_condition_consts, op.trips, op.dim, op.count)
        operands = tuple(map(atom, op.inputs))
        blocks = tuple(map(block_key, op.blocks))
        outputs = tuple(map(value, op.outputs))
        return op.kind, op.section, op.role, op.key or op.primitive, counts, operands, blocks, outputs

    def block_key(block: Block) -> tuple:
        inputs = tuple(map(value, block.inputs))
        return inputs, tuple(map(op_key, block.ops)), tuple(map(atom, block.outputs))

    top = block_key(graph.block)
    key = (top, graph.tied, graph.donated, graph.batch, graph.num_microbatches, graph.repeating)
    return CanonicalGraph(key=key, ops=tuple(ops), values=tuple(number))


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
    )
