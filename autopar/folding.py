"""Repetition: which nodes of an assembly look alike, so that one decision serves all of them.

Nodes get a colour from what they are (their operations, strategies and layouts) and then, round by round, from the
colours around them. After a few rounds the same node of every repeated layer has the same colour, because it sees
the same surroundings; nodes near the ends of the stack keep colours of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.assembly import Assembly

ROUNDS = 6  # how far a node looks: about half a transformer layer in each direction
SMALL = 150  # nodes up to which nothing is folded: such problems are solved whole


def fold(assembly: Assembly, kinds: Sequence[int], edge_kinds: Sequence[int]) -> tuple[int, ...]:
    """A class for each node; nodes of one class share their decision.

    `kinds[n]` numbers what a node is (equal numbers: equal strategies and costs), `edge_kinds[e]` the cost matrix of
    each reshard.
    """
    n = len(assembly.nodes)
    if n <= SMALL:
        return tuple(range(n))
    around: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
    for reshard, kind in zip(assembly.reshards, edge_kinds, strict=True):
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
