"""Random problems for the tests, small enough to try every choice, and a chain shaped like the planner's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.solver import Edge, Problem
from benchmarks.iopddl.memory import Limited, Use


def random_problem(
    seed: int, *, nodes: int = 6, most: int = 4, forbidden: float = 0.15, follows: bool = True
) -> Problem:
    """A problem of up to `nodes` nodes with forbidden pairs, parallel edges, self edges."""
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
        if follows and sizes[a] == sizes[b] and rng.random() < 0.2:  # a follower: one strategy for each of the other's
            cost = np.full((int(sizes[a]), int(sizes[b])), math.inf)
            cost[np.arange(sizes[a]), rng.permutation(int(sizes[b]))] = rng.integers(0, 9, sizes[a])
        else:
            cost = costs((int(sizes[a]), int(sizes[b])), forbidden)
        edges.append(Edge(source=a, target=b, cost=cost))
    return Problem(
        node_cost=tuple(costs((int(size),), forbidden / 2) for size in sizes),
        edges=tuple(edges),
    )


def random_limited(seed: int, *, nodes: int = 6, forbidden: float = 0.15) -> Limited:
    """A random problem with several uses of memory a node."""
    problem, rng = random_problem(seed, nodes=nodes, forbidden=forbidden), np.random.default_rng(seed + 1)
    uses = []
    for _ in range(int(rng.integers(0, 2 * len(problem.node_cost) + 1))):
        node = int(rng.integers(0, len(problem.node_cost)))
        count, start = len(problem.node_cost[node]), int(rng.integers(0, 8))
        size = rng.integers(0, 10, count) if rng.random() < 0.8 else np.full(count, rng.integers(0, 10))
        uses.append(Use(node=node, start=start, stop=start + int(rng.integers(0, 5)), bytes=size.astype(np.int64)))
    return Limited(problem=problem, uses=tuple(uses), limit_bytes=int(rng.integers(5, 30)))


def relabelled(limited: Limited, seed: int) -> Limited:
    """The same problem with its nodes, strategies and edges in another order."""
    rng = np.random.default_rng(seed)
    problem = limited.problem
    order = rng.permutation(len(problem.node_cost))
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
    uses = (replace(u, node=int(place[u.node]), bytes=u.bytes[turns[u.node]]) for u in limited.uses)
    turned = Problem(node_cost=tuple(problem.node_cost[node][turns[node]] for node in order), edges=tuple(edges))
    return replace(limited, problem=turned, uses=tuple(uses))


def layered_problem(layers: int, *, width: int, strategies: int, seed: int) -> Problem:
    """Layers of operations with a residual path, edges that pay where ends differ."""
    rng = np.random.default_rng(seed)
    count = layers * width
    node_cost = [rng.integers(1, 100, strategies).astype(np.float64) for _ in range(count)]
    pairs = [(v - 1, v) for v in range(1, count)] + [(v - width, v) for v in range(width, count, width)]
    reshard = rng.integers(1, 60, (strategies, strategies)).astype(np.float64)
    np.fill_diagonal(reshard, 0.0)
    edges = tuple(Edge(source=a, target=b, cost=reshard * float(rng.integers(1, 4))) for a, b in pairs)
    return Problem(node_cost=tuple(node_cost), edges=edges)


def layered_limited(layers: int, *, width: int, strategies: int, seed: int, tight: float | None) -> Limited:
    """The same in limited memory, of so many times the least peak (None = not limited)."""
    problem, rng = layered_problem(layers, width=width, strategies=strategies, seed=seed), np.random.default_rng(seed)
    count = len(problem.node_cost)
    uses = tuple(
        Use(node=v, start=v, stop=v + int(rng.integers(2, 3 * width)), bytes=rng.integers(1, 1000, strategies))
        for v in range(count)
    )
    peak = max(sum(int(u.bytes.min()) for u in uses if u.start <= t < u.stop) for t in range(count))
    return Limited(problem=problem, uses=uses, limit_bytes=None if tight is None else int(peak * tight))
