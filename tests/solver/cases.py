"""Random problems for the tests, small enough to try every choice, and a chain shaped like the planner's."""

from __future__ import annotations

import math

import numpy as np

from autopar.solver import Edge, Problem, Use


def random_problem(seed: int, *, limited: bool, nodes: int = 6, most: int = 4, forbidden: float = 0.15) -> Problem:
    """A problem of up to `nodes` nodes with forbidden pairs, parallel edges, self edges, several uses a node."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, most + 1, count)

    def costs(shape: tuple[int, ...], part: float) -> np.ndarray:
        values = rng.integers(-3, 20, shape).astype(np.float64)
        values[rng.random(shape) < part] = math.inf
        return values

    edges = []
    for _ in range(int(rng.integers(0, 2 * count + 1))):
        a, b = (int(x) for x in rng.integers(0, count, 2))
        if sizes[a] == sizes[b] and rng.random() < 0.2:  # a follower: one strategy for each of the other's
            cost = np.full((int(sizes[a]), int(sizes[b])), math.inf)
            cost[np.arange(sizes[a]), rng.permutation(int(sizes[b]))] = rng.integers(0, 9, sizes[a])
        else:
            cost = costs((int(sizes[a]), int(sizes[b])), forbidden)
        edges.append(Edge(source=a, target=b, cost=cost))
    uses = []
    for _ in range(int(rng.integers(0, 2 * count + 1))):
        node = int(rng.integers(0, count))
        start = int(rng.integers(0, 8))
        size = rng.integers(0, 10, sizes[node]) if rng.random() < 0.8 else np.full(sizes[node], rng.integers(0, 10))
        uses.append(Use(node=node, start=start, stop=start + int(rng.integers(0, 5)), bytes=size.astype(np.int64)))
    return Problem(
        node_cost=tuple(costs((int(size),), forbidden / 2) for size in sizes),
        edges=tuple(edges),
        uses=tuple(uses),
        limit_bytes=int(rng.integers(5, 30)) if limited else None,
    )


def relabelled(problem: Problem, seed: int) -> Problem:
    """The same problem with its nodes, strategies and edges in another order."""
    rng = np.random.default_rng(seed)
    count = len(problem.node_cost)
    order = rng.permutation(count)
    place = np.argsort(order)
    turns = [rng.permutation(len(cost)) for cost in problem.node_cost]
    edges = [
        Edge(
            source=int(place[e.source]),
            target=int(place[e.target]),
            cost=e.cost[np.ix_(turns[e.source], turns[e.target])],
        )
        for e in problem.edges
    ]
    rng.shuffle(edges)
    return Problem(
        node_cost=tuple(problem.node_cost[node][turns[node]] for node in order),
        edges=tuple(edges),
        uses=tuple(
            Use(node=int(place[u.node]), start=u.start, stop=u.stop, bytes=u.bytes[turns[u.node]]) for u in problem.uses
        ),
        limit_bytes=problem.limit_bytes,
    )


def layered_problem(layers: int, *, width: int, strategies: int, seed: int, tight: float | None = None) -> Problem:
    """Layers of operations with a residual path, edges that pay where ends differ; tight: limit by the least peak."""
    rng = np.random.default_rng(seed)
    count = layers * width
    node_cost = [rng.integers(1, 100, strategies).astype(np.float64) for _ in range(count)]
    pairs = [(v - 1, v) for v in range(1, count)] + [(v - width, v) for v in range(width, count, width)]
    reshard = rng.integers(1, 60, (strategies, strategies)).astype(np.float64)
    np.fill_diagonal(reshard, 0.0)
    edges = tuple(Edge(source=a, target=b, cost=reshard * float(rng.integers(1, 4))) for a, b in pairs)
    uses = tuple(
        Use(node=v, start=v, stop=v + int(rng.integers(2, 3 * width)), bytes=rng.integers(1, 1000, strategies))
        for v in range(count)
    )
    limit = None
    if tight is not None:
        peak = max(sum(int(u.bytes.min()) for u in uses if u.start <= t < u.stop) for t in range(count))
        limit = int(peak * tight)
    return Problem(node_cost=tuple(node_cost), edges=edges, uses=uses, limit_bytes=limit)
