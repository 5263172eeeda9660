"""Reductions that keep the best cost, each `reduce(problem) -> Reduction`: the smaller problem and the way back.

    drop_forbidden   strategies that no neighbour allows (arc consistency; Mackworth 1977)
    merge_parallel   edges of the same two nodes add up; a node's edge to itself is a node cost
    drop_dominated   strategies that another one always beats (dead-end elimination; Desmet et al. 1992, Goldstein 1994)
    fold_forced      a node with one strategy: its edges become costs of its neighbours
    merge_followers  nodes that a neighbour settles (in followers.py)
    eliminate        nodes of few neighbours, by min-plus (Bertele and Brioschi 1972; R1 and R2 of Scholz and Eckstein
    2002)

Uses are respected throughout: a node that holds memory, where that depends on its choice, is not eliminated, and a
strategy is dominated only by one that holds no more at any time. Callers that may ignore memory pass a problem without
uses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from autopar.solver.ilp.problem import Edge, Infeasibility, Problem, Use
from autopar.solver.presolve.dominance import undominated
from autopar.solver.presolve.followers import merge_followers
from autopar.solver.presolve.reduction import Choice, ConflictError, Reduction, chain, size

DOMINANCE_WORK = 40_000_000  # comparisons that one pass of drop_dominated may cost: about a tenth of a second
SETTLED = 0.97  # of the strategies left by a turn of all reductions: another turn would cost more than it saves
TABLE_ENTRIES = 4_000_000  # the largest min-plus table that elimination forms: 32 MB


Step = Callable[[Problem], Reduction]


def reduce_all(problem: Problem) -> Reduction:
    """Every reduction in turn until a turn changes nothing, or only a few strategies of a large problem.

    Raises: ConflictError when the strategies left exclude each other.
    """
    total = Reduction(problem=problem, undo=tuple)
    settled: dict[Step, Problem] = {}  # what each step left, which it need not look at again
    while True:
        size_before = size(total.problem)
        # Merging followers can close a circle of rules that excludes strategies, or all of them: what is forbidden is
        # dropped again before elimination, which takes for granted that every strategy left is allowed.
        merging = (merge_followers, merge_parallel, drop_forbidden)
        for step in (merge_parallel, drop_forbidden, fold_forced, *merging, eliminate, drop_dominated):
            before = total.problem
            if settled.get(step) is before:
                continue
            try:
                total = chain(total, step(before))
            except ConflictError as conflict:
                raise _translated(conflict, total) from None
            # What is dominated may be so by what a pass dropped after it: only a pass that drops nothing is the last.
            if step is not drop_dominated or total.problem is before:
                settled[step] = total.problem
        size_after = size(total.problem)
        if size_after[:2] == size_before[:2] and size_after[2] > SETTLED * size_before[2] - 1:
            return total


def _translated(conflict: ConflictError, total: Reduction) -> ConflictError:
    """The same conflict by the numbers of the nodes that the reductions began with."""
    if total.origin is None:
        return conflict
    return ConflictError(replace(conflict.why, nodes=tuple(total.origin[node] for node in conflict.why.nodes)))


def merge_parallel(problem: Problem) -> Reduction:
    """Add up the edges of the same two nodes, and turn an edge from a node to itself into node cost."""
    node_cost = list(problem.node_cost)
    merged: dict[tuple[int, int], Edge] = {}
    turned: dict[int, np.ndarray] = {}  # by the ids of what was turned or added up, so that equal ones are one array
    sums: dict[tuple[int, int], np.ndarray] = {}
    for edge in problem.edges:
        a, b = edge.source, edge.target
        if a == b:
            node_cost[a] = node_cost[a] + np.diagonal(edge.cost)
            continue
        if a > b:
            a, b = b, a
            edge = Edge(source=a, target=b, cost=turned.setdefault(id(edge.cost), edge.cost.T))
        before = merged.get((a, b))
        if before is not None:
            both = id(before.cost), id(edge.cost)
            if both not in sums:
                sums[both] = before.cost + edge.cost
            edge = Edge(source=a, target=b, cost=sums[both])
        merged[a, b] = edge
    matrices = {id(edge.cost): edge.cost for edge in merged.values()}
    is_zero = dict(zip(matrices, _each(np.equal, list(matrices.values()), 0.0), strict=True))
    edges = tuple(edge for edge in merged.values() if not is_zero[id(edge.cost)])
    if edges == problem.edges:  # none was merged, turned or left out
        return Reduction(problem=problem, undo=tuple)
    return Reduction(problem=replace(problem, node_cost=tuple(node_cost), edges=edges), undo=tuple)


def drop_forbidden(problem: Problem) -> Reduction:
    """Remove strategies of infinite cost and those left without any partner on an edge, until all have one.

    Raises: ConflictError naming a node that keeps no strategy, and its neighbours.
    """
    allowed = [np.isfinite(cost) for cost in problem.node_cost]
    matrices = {id(edge.cost): edge.cost for edge in problem.edges}
    complete: dict[int, bool] = {}  # every strategy has a partner
    for key, all_finite in zip(matrices, _each(np.isfinite, list(matrices.values())), strict=True):
        complete[key] = all_finite
        if not all_finite:
            pairs = np.isfinite(matrices[key])
            complete[key] = bool(pairs.any(axis=1).all() and pairs.any(axis=0).all())
    all_finite_costs = _each(np.isfinite, problem.node_cost)
    pending = [
        number
        for number, edge in enumerate(problem.edges)
        if not (complete[id(edge.cost)] and all_finite_costs[edge.source] and all_finite_costs[edge.target])
    ]
    if not pending and all(all_finite_costs):
        return Reduction(problem=problem, undo=tuple)
    near = neighbours(problem)
    waiting = set(pending)
    while pending:
        number = pending.pop()
        waiting.discard(number)
        edge = problem.edges[number]
        a, b = edge.source, edge.target
        pairs = np.isfinite(edge.cost) & allowed[a][:, None] & allowed[b][None, :]
        for node, partner in ((a, pairs.any(axis=1)), (b, pairs.any(axis=0))):
            if not partner[allowed[node]].all():
                allowed[node] = allowed[node] & partner
                for edge_number in near[node]:
                    if edge_number not in waiting:
                        waiting.add(edge_number)
                        pending.append(edge_number)
    for node, keep in enumerate(allowed):
        if not keep.any():
            around = {
                end for number in near[node] for end in (problem.edges[number].source, problem.edges[number].target)
            }
            reason = (
                "the strategies of these nodes exclude each other"
                if near[node]
                else "no strategy of this node is allowed"
            )
            nodes = (node, *sorted(around - {node}))
            raise ConflictError(Infeasibility(times=(), nodes=nodes, bytes_over=0, reason=reason))
    return keep_strategies(problem, [np.flatnonzero(keep) for keep in allowed])


def _each(test: Callable[..., np.ndarray], arrays: Sequence[np.ndarray], *arguments: float) -> list[bool]:
    """Whether all entries pass a test, of each of some arrays, none of them empty: all looked at in one go."""
    if not arrays:
        return []
    ends = np.cumsum([array.size for array in arrays])
    passed = test(np.concatenate([array.ravel() for array in arrays]), *arguments)
    return np.logical_and.reduceat(passed, np.concatenate(([0], ends[:-1]))).tolist()


def keep_strategies(problem: Problem, strategies: Sequence[np.ndarray]) -> Reduction:
    """Restrict every node to some of its strategies, given by their numbers."""
    if all(len(keep) == len(cost) for keep, cost in zip(strategies, problem.node_cost, strict=True)):
        return Reduction(problem=problem, undo=tuple)
    unchanged = [len(keep) == len(cost) for keep, cost in zip(strategies, problem.node_cost, strict=True)]
    kept = [keep.tobytes() for keep in strategies]
    parts: dict[tuple[int, bytes, bytes], np.ndarray] = {}  # equal ones are one array

    def part_of(e: Edge) -> Edge:
        if unchanged[e.source] and unchanged[e.target]:
            return e
        key = id(e.cost), kept[e.source], kept[e.target]
        if key not in parts:
            parts[key] = e.cost[strategies[e.source][:, None], strategies[e.target]]
        return Edge(source=e.source, target=e.target, cost=parts[key])

    smaller = replace(
        problem,
        node_cost=tuple(cost[keep] for cost, keep in zip(problem.node_cost, strategies, strict=True)),
        edges=tuple(part_of(e) for e in problem.edges),
        uses=tuple(replace(u, bytes=u.bytes[strategies[u.node]]) for u in problem.uses),
    )

    def undo(choice: Sequence[int]) -> Choice:
        return tuple(int(keep[strategy]) for keep, strategy in zip(strategies, choice, strict=True))

    return Reduction(problem=smaller, undo=undo)


def drop_dominated(problem: Problem) -> Reduction:
    """Remove strategies that another of the same node beats whatever its neighbours choose, with no more memory
    (`dominance`).
    """
    return keep_strategies(problem, undominated(problem, neighbours(problem), DOMINANCE_WORK))


def fold_forced(problem: Problem) -> Reduction:
    """Turn the edges of nodes with one strategy into costs of their neighbours; the nodes stay, for their memory."""
    single = [len(cost) == 1 for cost in problem.node_cost]
    if not any(single[edge.source] or single[edge.target] for edge in problem.edges):
        return Reduction(problem=problem, undo=tuple)
    node_cost = list(problem.node_cost)
    edges: list[Edge] = []
    for edge in problem.edges:
        if single[edge.source]:
            node_cost[edge.target] = node_cost[edge.target] + edge.cost[0]
        elif single[edge.target]:
            node_cost[edge.source] = node_cost[edge.source] + edge.cost[:, 0]
        else:
            edges.append(edge)
    return Reduction(problem=replace(problem, node_cost=tuple(node_cost), edges=tuple(edges)), undo=tuple)


def eliminate(problem: Problem) -> Reduction:
    """Remove nodes of at most two neighbours, whose memory does not depend on their choice, by min-plus.

    A node v with neighbours a and b leaves the edge min over s of (c[s] + e_a[s, t] + e_b[s, u]) between them; the way
    back looks up its best strategy for the strategies they chose. Constant memory of eliminated nodes is moved to a
    node kept, or keeps a node of one strategy alive for it.
    """
    bound = {use.node for use in problem.uses if use.start < use.stop and (use.bytes != use.bytes[0]).any()}
    resident = {use.node for use in problem.uses if use.start < use.stop}
    table: list[dict[int, np.ndarray]] = [
        {} for _ in problem.node_cost
    ]  # both directions; the node's own strategies first
    merged = merge_parallel(problem).problem
    for edge in merged.edges:
        table[edge.source][edge.target] = edge.cost
        table[edge.target][edge.source] = edge.cost.T
    cost = list(merged.node_cost)
    rules: list[_Rule] = []
    removed: set[int] = set()
    offset = 0.0
    queue = [node for node in range(len(cost)) if len(table[node]) <= 2]
    while queue:
        node = queue.pop()
        around = tuple(table[node])
        settled = len(cost[node]) == 1 and node in resident and not around
        if node in removed or node in bound or len(around) > 2 or settled:
            continue
        if len(cost[node]) * math.prod(table[node][peer].shape[1] for peer in around) > TABLE_ENTRIES:
            continue
        reach, sides = cost[node], tuple(table[node].values())
        for axis, side in enumerate(sides):
            reach = reach[..., None] + side.reshape(side.shape[:1] + (1,) * axis + side.shape[1:])
        value = reach.min(axis=0)
        rules.append(_Rule(node=node, around=around, cost=cost[node], sides=sides))
        if node in resident:  # its memory is constant: it stays, alone, with its first strategy and no cost
            cost[node] = np.zeros(1)
            bound.add(node)
        else:
            removed.add(node)
        for peer in around:
            del table[peer][node]
        table[node] = {}
        if not around:
            offset += float(value)
        elif len(around) == 1:
            cost[around[0]] = cost[around[0]] + value
        else:
            a, b = around
            sum_so_far = table[a].get(b)
            table[a][b] = value if sum_so_far is None else sum_so_far + value
            table[b][a] = table[a][b].T
        queue.extend(peer for peer in around if len(table[peer]) <= 2)
    if not rules:
        return Reduction(problem=problem, undo=tuple)

    shrunk = {rule.node for rule in rules} - removed
    return _without(
        problem, _Eliminated(cost=cost, table=table, rules=rules, gone=removed, shrunk=shrunk, offset=offset)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A node eliminated: its cost, its neighbours, and its edges to them, its own strategies first."""

    node: int
    around: tuple[int, ...]
    cost: np.ndarray
    sides: tuple[np.ndarray, ...]

    def best(self, choice: Sequence[int]) -> int:
        """Its best strategy for what its neighbours chose: by the sums of which elimination took the least."""
        reach = self.cost
        for peer, side in zip(self.around, self.sides, strict=True):
            reach = reach + side[:, choice[peer]]
        return int(np.argmin(reach))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Eliminated:
    """What elimination leaves: costs of nodes and of edges in both directions; `rules` of the nodes eliminated, in
    order; nodes `gone`, and those `shrunk` to one strategy for their memory.
    """

    cost: list[np.ndarray]
    table: list[dict[int, np.ndarray]]
    rules: list[_Rule]
    gone: set[int]
    shrunk: set[int]
    offset: float


def _without(problem: Problem, eliminated: _Eliminated) -> Reduction:
    """The problem without the nodes that are gone, and the way back."""
    cost, table, removed, shrunk = eliminated.cost, eliminated.table, eliminated.gone, eliminated.shrunk
    stays = [node for node in range(len(cost)) if node not in removed]
    number = {node: position for position, node in enumerate(stays)}
    names = problem.node_names
    smaller = Problem(
        node_cost=tuple(cost[node] for node in stays),
        edges=tuple(
            Edge(source=number[a], target=number[b], cost=side) for a in stays for b, side in table[a].items() if a < b
        ),
        uses=tuple(
            Use(node=number[u.node], start=u.start, stop=u.stop, bytes=u.bytes[:1] if u.node in shrunk else u.bytes)
            for u in problem.uses
            if u.node not in removed
        ),
        limit_bytes=problem.limit_bytes,
        node_names=tuple(names[node] for node in stays) if names is not None else None,
    )

    def undo(choice: Sequence[int]) -> Choice:
        full = [0] * len(cost)
        for node, strategy in zip(stays, choice, strict=True):
            full[node] = strategy
        for rule in reversed(eliminated.rules):
            full[rule.node] = rule.best(full)
        return tuple(full)

    return Reduction(problem=smaller, undo=undo, offset=eliminated.offset, origin=tuple(stays))


def components(problem: Problem) -> Iterator[tuple[Problem, list[int]]]:
    """The parts of a problem without uses that share no edge, with their nodes."""
    part_of = DisjointSet(range(len(problem.node_cost)))
    for edge in problem.edges:
        part_of.merge(edge.source, edge.target)
    members: dict[int, list[int]] = defaultdict(list)
    for node in part_of:
        members[part_of[node]].append(node)
    edges: dict[int, list[Edge]] = defaultdict(list)
    place = {node: at for group in members.values() for at, node in enumerate(group)}
    for edge in problem.edges:
        edges[part_of[edge.source]].append(replace(edge, source=place[edge.source], target=place[edge.target]))
    for root, group in members.items():
        yield Problem(node_cost=tuple(problem.node_cost[node] for node in group), edges=tuple(edges[root])), group


def neighbours(problem: Problem) -> list[list[int]]:
    """The numbers of each node's edges."""
    near: list[list[int]] = [[] for _ in problem.node_cost]
    for number, edge in enumerate(problem.edges):
        near[edge.source].append(number)
        if edge.target != edge.source:
            near[edge.target].append(number)
    return near
