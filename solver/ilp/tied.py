"""Formula (3): nodes that must choose alike share one variable (state in and state out, repeated layers)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from autopar.solver.ilp.problem import Edge, Problem, Use

Undo = Callable[[Sequence[int]], tuple[int, ...]]


def tie(problem: Problem, classes: Sequence[int]) -> tuple[Problem, Undo]:
    """Formula (3): give the nodes of a class one shared choice; undo(choice) spreads a choice back to the nodes.

    classes: a number a node; the new nodes are the classes in rising order. Node costs add, uses follow their node,
    edges of the same two classes add up, and edges inside a class become node cost by their diagonal.

    Raises: ValueError when the nodes of a class differ in their number of strategies.
    """
    if len(classes) != len(problem.node_cost):
        raise ValueError(f"expected a class for each of {len(problem.node_cost)} nodes, got {len(classes)}")
    labels, numbers = np.unique(np.asarray(classes, dtype=np.int64), return_inverse=True)
    of_node: list[int] = numbers.tolist()
    first: dict[int, int] = {}
    for node, group in enumerate(of_node):
        lead = first.setdefault(group, node)
        if len(problem.node_cost[node]) != len(problem.node_cost[lead]):
            raise ValueError(
                f"class {labels[group]}: node {node} has {len(problem.node_cost[node])} strategies, "
                f"node {lead} has {len(problem.node_cost[lead])}; tied nodes must have the same"
            )
    node_cost = [np.zeros(len(problem.node_cost[first[group]])) for group in range(len(labels))]
    for node, group in enumerate(of_node):
        node_cost[group] = node_cost[group] + problem.node_cost[node]

    # Edges of one pair of classes mostly share a few matrices: count each matrix once and multiply.
    counts: dict[tuple[int, int], dict[tuple[int, bool], int]] = defaultdict(lambda: defaultdict(int))
    matrices: dict[int, np.ndarray] = {}
    for edge in problem.edges:
        a, b = of_node[edge.source], of_node[edge.target]
        matrices[id(edge.cost)] = edge.cost
        counts[(a, b) if a <= b else (b, a)][id(edge.cost), a > b] += 1
    edges: list[Edge] = []
    sums: dict[tuple[tuple[tuple[int, bool], int], ...], np.ndarray] = {}  # equal ones are one array
    for (a, b), terms in counts.items():
        added = tuple(terms.items())
        if added not in sums:
            parts = [
                oriented if count == 1 else oriented * float(count)
                for (key, turned), count in added
                for oriented in (matrices[key].T if turned else matrices[key],)
            ]
            sums[added] = sum(parts[1:], start=parts[0])
        total = sums[added]
        if a == b:
            node_cost[a] = node_cost[a] + np.diagonal(total)
        else:
            edges.append(Edge(source=a, target=b, cost=total))
    names = problem.node_names
    tied = Problem(
        node_cost=tuple(node_cost),
        edges=tuple(edges),
        uses=tuple(Use(node=of_node[u.node], start=u.start, stop=u.stop, bytes=u.bytes) for u in problem.uses),
        limit_bytes=problem.limit_bytes,
        node_names=tuple(names[first[group]] for group in range(len(labels))) if names is not None else None,
    )

    def undo(choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(choice[group] for group in of_node)

    return tied, undo
