"""Symmetry: classes of equal nodes of a choice graph (repeated layers), which share one decision.

Nodes get a colour from their operations, strategies and layouts, and then, round by round, from the colours of their
neighbours (colour refinement). After a few rounds, corresponding nodes of repeated layers have equal colours, as they
have equal neighbourhoods; nodes near the ends of the stack keep their own colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from scipy.cluster.hierarchy import DisjointSet

from autopar.intra_op.choice_graph import ChoiceGraph, LayoutSite
from autopar.ir.graph import Op

ROUNDS = 6  # how far a node looks: about half a transformer layer in each direction
SMALL = 150  # nodes up to which nothing is folded: such problems are solved whole


def fold(choices: ChoiceGraph, kinds: Sequence[int], edge_kinds: Sequence[int]) -> tuple[int, ...]:
    """A class for each node; nodes of one class share their decision.

    `kinds[n]` numbers what a node is (equal numbers: equal strategies and costs), `edge_kinds[e]` the cost matrix of
    each reshard.
    """
    n = len(choices.nodes)
    if n <= SMALL:
        return tuple(range(n))
    around: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
    for reshard, kind in zip(choices.reshards, edge_kinds, strict=True):
        source, target = reshard.source.node, reshard.target.node
        around[source].append((kind, 0, target))
        around[target].append((kind, 1, source))
    colours = list(kinds)
    for _ in range(ROUNDS):
        number: dict[tuple, int] = {}
        colours = [
            number.setdefault(
                (colours[i], tuple(sorted((kind, way, colours[j]) for kind, way, j in around[i]))), len(number)
            )
            for i in range(n)
        ]
    return tuple(colours)


def whole_nodes(choices: ChoiceGraph, copies: Mapping[int, float]) -> float:
    """About how many nodes a choice graph would have if the repeated layers of its graph were not folded.

    `copies` of a value: for how many values of the whole graph it stands.
    """
    weights: dict[int, list[float]] = {}
    homes = (*choices.unreduced.items(), *choices.reduced.items(), *((v, at) for (v, _), at in choices.copies.items()))
    for value, home in homes:
        weights.setdefault(home.node, []).append(copies.get(value, 1.0))
    return sum(fmean(weights.get(node, (1.0,))) for node in range(len(choices.nodes)))


def joined(choices: ChoiceGraph, classes: Sequence[int], paired_ops: Iterable[tuple[Op, Op]]) -> tuple[int, ...]:
    """The classes, with the classes of paired operations merged: of the operations, their results and their outside
    arguments, wherever both choose among the same strategies or layouts.
    """
    merged = DisjointSet(classes)
    label = {c: c for c in classes}  # of the set that a root leads; the order of the labels is that of the ILP's nodes

    def merge(class_a: int, class_b: int) -> None:
        root = merged[class_a]
        merged.merge(class_a, class_b)
        label[merged[class_a]] = label[root]

    def join(first: LayoutSite | None, second: LayoutSite | None) -> None:
        if first is not None and second is not None and first.layouts == second.layouts:
            nodes = choices.nodes[first.node], choices.nodes[second.node]
            if nodes[0].layouts and nodes[0].layouts == nodes[1].layouts:
                merge(classes[first.node], classes[second.node])

    produced = {v for pair in paired_ops for op in pair for v in op.outputs}
    readers: dict[int, list[str]] = {}
    for v, reader in choices.copies:
        readers.setdefault(v, []).append(reader)
    for a, b in paired_ops:
        if a.id in choices.of_op and b.id in choices.of_op:
            (first, strategies), (second, other_strategies) = choices.of_op[a.id], choices.of_op[b.id]
            if strategies == other_strategies:
                merge(classes[first], classes[second])
        inputs = [(x, y) for x, y in zip(a.inputs, b.inputs, strict=True) if isinstance(x, int) and isinstance(y, int)]
        outside = [(x, y) for x, y in inputs if x not in produced and y not in produced]
        for x, y in (*zip(a.outputs, b.outputs, strict=True), *outside):
            join(choices.unreduced.get(x), choices.unreduced.get(y))
            join(choices.reduced.get(x), choices.reduced.get(y))
            for reader in readers.get(x, ()):
                join(choices.copies.get((x, reader)), choices.copies.get((y, reader)))
    return tuple(label[merged[c]] for c in classes)
