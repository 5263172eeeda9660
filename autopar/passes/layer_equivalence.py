"""Equal layers, compared in an order of operations that does not depend on the names of state.

A tree of parameters is sorted by name, and "layer10" precedes "layer9". Gradients are summed and parameters updated in
the order of the tree, so two equal layers need not do this in the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from scipy.cluster.hierarchy import DisjointSet

from autopar.ir.graph import Op, OpGraph, OpKind, Section, read_by
from autopar.ir.rewrite import makers
from autopar.passes.assign_layers import LayerAssignment
from autopar.passes.layers import structure

_Anchor = tuple[int, int]  # position in the passes of the layer, and the number of an operand or result there
_NOWHERE: _Anchor = (1 << 60, 0)


def members_of(graph: OpGraph, assignment: LayerAssignment) -> dict[int, list[Op]]:
    """The operations of each layer, section after section.

    Those of the passes come in program order; what is done for each piece of state (casts before the loop, sums of
    gradients, updates) in the order in which the passes read it, or make what it is updated with.
    """
    members: dict[int, list[Op]] = {}
    for op, layer in zip(graph.block.ops, assignment.layer_of, strict=True):
        if layer is not None:
            members.setdefault(layer, []).append(op)
    return {layer: _in_order(graph, ops) for layer, ops in members.items()}


def layer_kinds(graph: OpGraph, members: dict[int, list[Op]], num_layers: int) -> tuple[int, ...]:
    """Equal numbers for layers whose forward, backward and update operations have equal structure."""
    number: dict[tuple, int] = {}
    return tuple(
        number.setdefault(structure(members.get(layer, []), graph), len(number)) for layer in range(num_layers)
    )


def _in_order(graph: OpGraph, ops: Sequence[Op]) -> list[Op]:
    """Operations of one layer in topological order, then by section, by anchor and in program order."""
    anchors = _anchors(graph, ops)
    section_rank = {section: i for i, section in enumerate(Section)}
    rank = {
        op.id: (section_rank[op.section], *((1, anchors[op.id]) if op.id in anchors else (0, _NOWHERE)), position)
        for position, op in enumerate(ops)
    }
    made_by = makers(ops)
    waits = {op.id: {made_by[v].id for v in read_by(op) if v in made_by} for op in ops}
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for maker in waits[op.id]:
            readers.setdefault(maker, []).append(op)
    ready = [(rank[op.id], op.id, op) for op in ops if not waits[op.id]]
    heapq.heapify(ready)
    ordered: list[Op] = []
    while ready:
        _, number, op = heapq.heappop(ready)
        ordered.append(op)
        for reader in readers.get(number, ()):
            waits[reader.id].discard(number)
            if not waits[reader.id]:
                heapq.heappush(ready, (rank[reader.id], reader.id, reader))
    assert len(ordered) == len(ops), "operations read what is made before them"
    return ordered


def _anchors(graph: OpGraph, ops: Sequence[Op]) -> dict[int, _Anchor]:
    """For each operation outside of the forward and backward pass, the first use of its state in them.

    Operations that share arrays concern the same state; scalars (steps, rates, norms) are shared by all.
    """
    touched: dict[int, _Anchor] = {}
    passing = [op for op in ops if op.section.repeats and op.kind is not OpKind.ACCUMULATE]
    for position, op in enumerate(passing):
        for at, v in enumerate((*read_by(op), *op.outputs)):
            touched.setdefault(v, (position, at))
    inside = {op.id for op in passing}
    others = {op.id: (*read_by(op), *op.outputs) for op in ops if op.id not in inside}
    connected = DisjointSet(v for values in others.values() for v in values)
    for values in others.values():
        arrays = [v for v in values if graph.values[v].size > 1]
        for v in arrays[1:]:
            connected.merge(arrays[0], v)
    first: dict[int, _Anchor] = {}
    for v in {v for values in others.values() for v in values if v in touched}:
        first[connected[v]] = min(first.get(connected[v], _NOWHERE), touched[v])
    return {
        op: min((first.get(connected[v], _NOWHERE) for v in values), default=_NOWHERE) for op, values in others.items()
    }
