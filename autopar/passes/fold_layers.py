"""Folding of repeated layers: of each run of equal layers, the first and the last stay, and one between them if asked
for.

The decisions for one of forty equal layers serve all of them, so the search needs no others. The layers that stay count
for the whole run.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Mapping, Sequence

from msgspec.structs import replace
from scipy.cluster.hierarchy import DisjointSet

from autopar.ir.graph import Block, Op, OpGraph, OpKind, Section, read_by
from autopar.ir.partial_sums import Partials, find_partials
from autopar.ir.rewrite import makers, reading
from autopar.passes.assign_layers import LayerAssignment
from autopar.passes.layers import structure

# Equal layers, compared in an order of operations that does not depend on the names of state.
#
# A tree of parameters is sorted by name, and "layer10" precedes "layer9". Gradients are summed and parameters updated
# in the order of the tree, so two equal layers need not do this in the same order.


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedGraph:
    """A smaller graph with the numbers of the whole one.

    `layer_of[op.id]` of the operations that stay (None as in `LayerAssignment`, but only where several layers read what
    is made); `stands_for[l]` is the layer that layer l is like, itself where it stays; `weight[l]` how many layers one
    that stays counts for; `home_of[i]` the layer of the i-th input; `paired_ops` the operations of each layer of a run
    that stays with those of the next one that is decided like it; `members[l]` the operations of layer l of the whole
    graph, in an order in which those of equal layers correspond.
    """

    graph: OpGraph
    layer_of: dict[int, int | None]
    stands_for: tuple[int, ...]
    weight: dict[int, float]
    home_of: tuple[int, ...]
    paired_ops: tuple[tuple[Op, Op], ...]
    members: Mapping[int, Sequence[Op]] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def partials(self) -> Partials:
        """Which values may stay partial sums, on whatever mesh."""
        return find_partials(self.graph)

    def weight_of(self, op: Op) -> float:
        """For how many operations of the whole graph one of the smaller graph counts."""
        layer = self.layer_of[op.id]
        return 1.0 if layer is None else self.weight[layer]

    def copies(self) -> dict[int, float]:
        """For each value of the smaller graph, for how many of the whole one it counts, where that is not one."""
        counts = {v: self.weight.get(home, 1.0) for v, home in zip(self.graph.block.inputs, self.home_of, strict=True)}
        for op in self.graph.block.ops:
            counts.update(dict.fromkeys(op.outputs, self.weight_of(op)))
        return {v: n for v, n in counts.items() if n != 1.0}


def fold_layers(
    graph: OpGraph, assignment: LayerAssignment, num_layers: int, *, ends_apart: bool = False
) -> FoldedGraph:
    """Drops the inner layers of every run of three or more equal ones.

    The first and last layer of a run stay. Each is weighted by half of the run's length. With `ends_apart` they count
    for themselves, and the second one stays for all between: then what is sent between neighbours counts as often as
    the whole graph sends it, from the layer in front of the run to its first, within the run, and from its last to the
    layer behind.

    Readers of a dropped layer read its counterpart in a layer that stays: later operations that of the layer that ran
    first, so that every value is computed before it is read. A run without such counterparts (a layer reads a value of
    a layer beyond its neighbour) stays whole.
    """
    members = members_of(graph, assignment)
    kinds = layer_kinds(graph, members, num_layers)
    equal = [list(run) for _, run in itertools.groupby(range(num_layers), key=lambda layer: kinds[layer])]
    runs = [_Run(layers=tuple(run), ends_apart=ends_apart) for run in equal]
    runs = [run for run in runs if len(run.staying) < len(run.layers)]
    layer_of = dict(zip((op.id for op in graph.block.ops), assignment.layer_of, strict=True))
    while True:
        folded = _drop_inner_layers(runs, graph, assignment, layer_of, members, num_layers)
        if isinstance(folded, FoldedGraph):
            return folded
        runs = [run for run in runs if folded not in run.layers]


def runs_of_layers(graph: OpGraph, assignment: LayerAssignment, num_layers: int) -> list[list[int]]:
    """The layers in runs of neighbours of equal structure."""
    kinds = layer_kinds(graph, members_of(graph, assignment), num_layers)
    return [list(run) for _, run in itertools.groupby(range(num_layers), key=lambda layer: kinds[layer])]


def drop_layers(
    graph: OpGraph, assignment: LayerAssignment, num_layers: int, runs: Mapping[tuple[int, ...], int]
) -> FoldedGraph | None:
    """A step of fewer layers: of each run of equal ones the first and the last stay, as many as are given for it, and
    count for themselves. None where a run cannot be made shorter.
    """
    members = members_of(graph, assignment)
    shorter = [_Run(layers=layers, ends_apart=True, stay=stay) for layers, stay in runs.items()]
    layer_of = dict(zip((op.id for op in graph.block.ops), assignment.layer_of, strict=True))
    folded = _drop_inner_layers(shorter, graph, assignment, layer_of, members, num_layers)
    return folded if isinstance(folded, FoldedGraph) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Neighbouring layers of equal structure. `ends_apart` as in `fold_layers`; `stay`: how many stay, each for itself
    (0: those that stand for the run).
    """

    layers: tuple[int, ...]
    ends_apart: bool
    stay: int = 0

    @property
    def staying(self) -> tuple[int, ...]:
        """The layers that stay, in order."""
        first, last = self.layers[0], self.layers[-1]
        if self.stay:
            return (*self.layers[: self.stay - 1], last)
        return tuple(sorted({first, first + 1, last} if self.ends_apart and last > first else {first, last}))

    @property
    def stand_ins(self) -> tuple[int, int]:
        """The two layers that stand for those that are dropped: for readers behind them, and in front of them."""
        return self.staying[-2], self.staying[-1]

    def weights(self) -> dict[int, float]:
        if self.stay:
            return dict.fromkeys(self.staying, 1.0)
        if self.ends_apart:
            first, inner, last = self.staying
            return {first: 1.0, inner: float(len(self.layers) - 2), last: 1.0}
        return dict.fromkeys(self.staying, len(self.layers) / 2)

    def stands_for(self) -> dict[int, int]:
        if self.ends_apart:
            return {layer: layer if layer in self.staying else self.stand_ins[0] for layer in self.layers}
        first, last = self.staying
        half = (first + last + 1) // 2
        return {layer: first if layer < half else last for layer in self.layers}


def _drop_inner_layers(
    runs: Sequence[_Run],
    graph: OpGraph,
    assignment: LayerAssignment,
    layer_of: dict[int, int | None],
    members: dict[int, list[Op]],
    num_layers: int,
) -> FoldedGraph | int:
    """The graph without the inner layers of the runs, or a layer that cannot be dropped."""
    dropped = {layer: run.stand_ins for run in runs for layer in run.layers if layer not in run.staying}
    kept = _rewired(dropped, graph, layer_of, members)
    if isinstance(kept, int):
        return kept
    kept, alone = _live_ops(kept, graph, layer_of)
    layer_of = {**layer_of, **alone}
    weight = {layer: 1.0 for layer in range(num_layers) if layer not in dropped}
    stands_for = {layer: layer for layer in range(num_layers)}
    for run in runs:
        weight |= run.weights()
        stands_for |= run.stands_for()
    op_weight = {op.id: weight[its] for op in kept if (its := layer_of[op.id]) is not None}
    counted = tuple(_with_count(op, n) if (n := op_weight.get(op.id, 1.0)) != 1.0 else op for op in kept)
    used = {v for op in counted for v in read_by(op)}
    inputs = [i for i, v in enumerate(graph.block.inputs) if assignment.homes[i] not in dropped or v in used]
    stays = {op.id: op for op in counted}
    return FoldedGraph(
        graph=_smaller(graph, counted, inputs),
        paired_ops=tuple(
            (stays[a.id], stays[b.id])
            for run in runs
            for one, other in itertools.pairwise(run.staying)
            for a, b in zip(members[one], members[other], strict=True)
        ),
        layer_of={op.id: layer_of[op.id] for op in counted},
        stands_for=tuple(stands_for[layer] for layer in range(num_layers)),
        weight=weight,
        home_of=tuple(assignment.homes[i] for i in inputs),
        members=members,
    )


def _rewired(
    dropped: Mapping[int, tuple[int, int]],
    graph: OpGraph,
    layer_of: Mapping[int, int | None],
    members: Mapping[int, Sequence[Op]],
) -> list[Op] | int:
    """The operations of the layers that stay; they read those that stand for dropped layers in the place of these.

    `dropped[l]` are the two layers that stand for it. A layer that cannot be dropped instead, where an operation would
    read a value before it is made.
    """
    # Each value of a dropped layer -> its counterparts in the two layers that stand for it.
    counterparts: dict[int, tuple[int, int]] = {}
    for layer, (first, last) in dropped.items():
        for op, a, b in zip(members[layer], members[first], members[last], strict=True):
            for v, in_first, in_last in zip(op.outputs, a.outputs, b.outputs, strict=True):
                counterparts[v] = (in_first, in_last)
    computed: set[int] = set(graph.block.inputs)
    layer_making = {v: layer_of[op.id] for op in graph.block.ops for v in op.outputs}
    kept: list[Op] = []
    for op in graph.block.ops:
        here = layer_of[op.id]
        if here in dropped:
            continue
        names: dict[int, int] = {}
        for v in read_by(op):
            if v in counterparts:
                available = [c for c in counterparts[v] if c in computed]
                if not available:
                    stuck = layer_making[v]
                    assert stuck is not None, "a dropped operation has a layer"
                    return stuck
                names[v] = available[-1] if layer_making[available[-1]] != here else available[0]
        kept.append(reading(op, names) if names else op)
        computed.update(op.outputs)
    return kept


def _smaller(graph: OpGraph, ops: tuple[Op, ...], inputs: Sequence[int]) -> OpGraph:
    """The graph with some of its operations and inputs (positions), and the outputs that these make."""
    available = {*graph.block.inputs, *(v for op in ops for v in op.outputs)}
    outputs = [o for o, atom in enumerate(graph.block.outputs) if not isinstance(atom, int) or atom in available]
    at = {i: n for n, i in enumerate(inputs)}
    out = {o: n for n, o in enumerate(outputs)}
    return dataclasses.replace(
        graph,
        block=Block(
            inputs=tuple(graph.block.inputs[i] for i in inputs),
            outputs=tuple(graph.block.outputs[o] for o in outputs),
            ops=ops,
        ),
        constants=tuple(c for i, c in enumerate(graph.constants) if i in at),
        tied=tuple((at[i], out[o]) for i, o in graph.tied if i in at and o in out),
        donated=frozenset(at[i] for i in graph.donated if i in at),
        batch=frozenset(at[i] for i in graph.batch if i in at),
    )


def _live_ops(ops: Sequence[Op], graph: OpGraph, layer_of: Mapping[int, int | None]) -> tuple[list[Op], dict[int, int]]:
    """(operations without those that only dropped layers read, layers of operations that only one layer reads)."""
    live = {atom for atom in graph.block.outputs if isinstance(atom, int)}
    readers: dict[int, set[int | None]] = {v: {None} for v in live}
    kept: list[Op] = []
    alone: dict[int, int] = {}
    for op in reversed(ops):
        layer = layer_of[op.id]
        if layer is None and live.isdisjoint(op.outputs):
            continue
        if layer is None and op.kind is OpKind.EQUATION:
            layers = set().union(*(readers.get(v, ()) for v in op.outputs))
            if len(layers) == 1 and (only := next(iter(layers))) is not None:
                layer = alone[op.id] = only
        for v in read_by(op):
            readers.setdefault(v, set()).add(layer)
        live.update(read_by(op))
        kept.append(op)
    return kept[::-1], alone


def _with_count(op: Op, times: float) -> Op:
    """The operation, and those inside of it, with `times` their count."""
    blocks = tuple(replace(b, ops=tuple(_with_count(inner, times) for inner in b.ops)) for b in op.blocks)
    return replace(op, count=op.count * times, blocks=blocks)
