"""Reductions that keep the best cost, each `reduce(problem) -> Reduction`: the smaller problem and the way back.

    drop_forbidden   strategies that no neighbour allows (arc consistency; Mackworth 1977)
    merge_parallel   edges of the same two nodes add up; a node's edge to itself is a node cost
    fold_forced      a node with one strategy: its edges become costs of its neighbours
    merge_followers  nodes that a neighbour settles
    eliminate        nodes of few neighbours, by min-plus (Bertele and Brioschi 1972; R1 and R2 of Scholz and Eckstein
    2002)

Whoever has more to respect than costs says which nodes stay (`eliminate`), and follows the strategies of each node by
`lead` and `follow` of each reduction.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from autopar.solver.problem import Edge, Problem

# Exact elimination of every node, by tables over its neighbours: for graphs of small width.
#
# Bucket elimination (Dechter, Artificial Intelligence 1999), the node of the smallest table first. The planner's graphs
# mostly are a residual path with short branches, and need tables over three to five nodes; integer programming takes
# seconds where this takes milliseconds.


# Entries of all tables together: a fifth of a second at most.
MOST_WORK = 40_000_000
PART = 1 << 16  # entries of a table that are worked out at a time: 512 KB, which second-level caches hold


def solve_by_tables(problem: Problem) -> tuple[int, ...] | None:
    """The cheapest choice, or None when the tables would be too large.

    The problem must have a choice that is allowed.
    """
    sizes = [len(cost) for cost in problem.node_cost]
    order = _order(problem, sizes)
    if order is None:
        return None
    factors: list[list[tuple[tuple[int, ...], np.ndarray]]] = [[] for _ in sizes]  # of each node, those it is in
    for edge in problem.edges:
        pair = ((edge.source, edge.target), edge.cost)
        factors[edge.source].append(pair)
        factors[edge.target].append(pair)
    lone: list[np.ndarray] = [np.asarray(cost, dtype=np.float64) for cost in problem.node_cost]
    for node in order:
        around = tuple(sorted({neighbour for scope, _ in factors[node] for neighbour in scope if neighbour != node}))
        scope = (node, *around)  # the node first: the least over it is then taken along whole rows at a time
        terms = [lone[node].reshape(-1, *(1 for _ in around))]
        terms += [_broadcast(cost, nodes, scope) for nodes, cost in factors[node]]
        value = least_of_sum(terms, tuple(sizes[neighbour] for neighbour in around))
        for neighbour in around:
            factors[neighbour] = [factor for factor in factors[neighbour] if node not in factor[0]]
        if len(around) == 1:
            lone[around[0]] = lone[around[0]] + value
        elif around:
            for neighbour in around:
                factors[neighbour].append((around, value))
    # The table of a node is worked out again for the one choice of its neighbours that counts.
    choice = [0] * len(sizes)
    for node in reversed(order):
        at = lone[node]
        for nodes, cost in factors[node]:
            at = at + cost[tuple(slice(None) if neighbour == node else choice[neighbour] for neighbour in nodes)]
        choice[node] = int(np.argmin(at))
    return tuple(choice)


def least_of_sum(terms: Sequence[np.ndarray], around: tuple[int, ...], part: int = PART) -> np.ndarray:
    """The least, over the first axis, of a sum of tables that broadcast to it and to axes of the sizes `around`.

    Where the sum has more than `part` entries it is worked out for one choice of the leading axes after the other, so
    that it stays in the processor's cache. The numbers added are the same, in the same order.
    """
    leading = 0
    while leading < len(around) and len(terms[0]) * math.prod(around[leading:]) > part:
        leading += 1
    value = np.empty(around)
    for at in np.ndindex(around[:leading]):
        total = _part(terms[0], at)
        for term in terms[1:]:
            total = total + _part(term, at)
        value[at] = total.min(axis=0)
    return value


def _part(term: np.ndarray, at: tuple[int, ...]) -> np.ndarray:
    """A table where the axes behind the first are at some positions; what does not depend on an axis has one there."""
    index: tuple[slice | int, ...] = (slice(None),)
    index += tuple(i if n > 1 else 0 for i, n in zip(at, term.shape[1:], strict=False))
    part: np.ndarray = term[index]
    return part


def _order(problem: Problem, sizes: list[int]) -> list[int] | None:
    """Nodes by the table that eliminating them takes, least first; None when they are too large."""
    near: list[set[int]] = [set() for _ in sizes]
    for edge in problem.edges:
        near[edge.source].add(edge.target)
        near[edge.target].add(edge.source)

    def table(node: int) -> int:
        return sizes[node] * math.prod(sizes[neighbour] for neighbour in near[node])

    weight = {node: table(node) for node in range(len(sizes))}
    least = [(size, node) for node, size in weight.items()]  # a heap, which keeps a node's earlier weights
    heapq.heapify(least)
    order: list[int] = []
    total = 0
    while weight:
        size, node = heapq.heappop(least)
        if weight.get(node) != size:
            continue
        total += size
        if total > MOST_WORK:
            return None
        order.append(node)
        del weight[node]
        for neighbour in near[node]:
            near[neighbour] |= near[node] - {neighbour}
            near[neighbour].discard(node)
        for neighbour in near[node]:
            weight[neighbour] = table(neighbour)
            heapq.heappush(least, (weight[neighbour], neighbour))
    return order


def _broadcast(cost: np.ndarray, nodes: tuple[int, ...], scope: tuple[int, ...]) -> np.ndarray:
    """A table over some nodes with an axis for each node of the scope."""
    axes = sorted(range(len(nodes)), key=lambda axis: scope.index(nodes[axis]))
    turned = cost.transpose(axes)
    present = {nodes[axis]: size for axis, size in zip(axes, turned.shape, strict=True)}
    return turned.reshape([present.get(node, 1) for node in scope])


Choice = tuple[int, ...]
Undo = Callable[[Sequence[int]], Choice]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """A smaller problem, the choice for the larger one that belongs to a choice of it, and the cost left out of it.

    lead: for each node of the larger problem the node of the smaller one that settles it, -1 = eliminated; follow: its
    strategy for each of that one's; None = the nodes, or their strategies, are the same. Of a single reduction only.
    """

    problem: Problem
    undo: Undo
    offset: float = 0.0
    lead: Sequence[int] | None = None
    follow: Sequence[np.ndarray] | None = None


class ConflictError(Exception):
    """No choice is allowed: the strategies of some nodes exclude each other."""


def chain(first: Reduction, second: Reduction) -> Reduction:
    """One reduction after another."""
    return Reduction(
        problem=second.problem,
        undo=lambda choice: first.undo(second.undo(choice)),
        offset=first.offset + second.offset,
    )


def size(problem: Problem) -> tuple[int, int, int]:
    """Nodes, edges and strategies: what reductions make smaller."""
    return len(problem.node_cost), len(problem.edges), sum(len(cost) for cost in problem.node_cost)


# Merging of followers: a node whose strategy a neighbour determines becomes part of that neighbour.
#
# Elementwise and layout operations mostly allow one strategy for each of their operand's: every row of the edge's
# matrix has one finite entry. Merging them removes 4 of 5 nodes of the contest's graphs.


class _Leads:
    """For each node the node that determines its strategy, and its own strategy for each of that one's."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.lead = list(range(len(problem.node_cost)))
        self.follow: list[np.ndarray] = [np.arange(len(cost)) for cost in problem.node_cost]

    def settle(self, node: int) -> None:
        """Point a node at the end of its chain of leads."""
        lead, follow = self.lead, self.follow
        chain = []
        while lead[node] != node:
            chain.append(node)
            node = lead[node]
        for member in reversed(chain[:-1]):
            above = lead[member]
            follow[member] = follow[member][follow[above]]
            lead[member] = lead[above]

    def join(self, leader: int, node: int, rule: np.ndarray) -> bool:
        """Let a node, and what it follows, follow a leader, if possible; `rule`: its strategy for
        each of the leader's.
        """
        self.settle(leader)
        self.settle(node)
        top, root = self.lead[leader], self.lead[node]
        if top == root:
            return False
        strategies = self.follow[node]
        if root != node and len(np.unique(strategies)) != len(self.problem.node_cost[root]):
            return False  # the node follows its root many to one: it does not settle the root
        inverse = np.empty(len(self.problem.node_cost[node]), dtype=np.int64)
        inverse[strategies] = np.arange(len(strategies))
        needed = rule[self.follow[leader]]
        if root != node and not np.isin(needed, strategies).all():
            return False
        self.lead[root] = top
        self.follow[root] = inverse[needed]
        return True


def merge_followers(problem: Problem) -> Reduction:
    """Merge every node that has, for each strategy of some neighbour, one strategy allowed.

    Expects drop_forbidden before: a one-to-one edge is then square. Edges inside a merged group become node cost.
    """
    leads = _Leads(problem)
    rules: dict[int, tuple[np.ndarray | None, np.ndarray | None]] = {}
    merged = False
    for edge in problem.edges:
        a, b = edge.source, edge.target
        if a == b or min(edge.cost.shape) == 1:
            continue
        if id(edge.cost) not in rules:
            rules[id(edge.cost)] = _rules(np.isfinite(edge.cost))
        forth, back = rules[id(edge.cost)]
        if (forth is not None and leads.join(a, b, forth)) or (back is not None and leads.join(b, a, back)):
            merged = True
    if not merged:
        return Reduction(problem=problem, undo=tuple)
    for node in range(len(leads.lead)):
        leads.settle(node)
    return _merged(problem, leads.lead, leads.follow)


def _rules(allowed: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The one partner of each strategy of either side, where each has one."""
    pairs, (rows, columns) = np.count_nonzero(allowed), allowed.shape
    forth = pairs == rows and bool((allowed.sum(axis=1) == 1).all())
    back = pairs == columns and bool((allowed.sum(axis=0) == 1).all())
    return allowed.argmax(axis=1) if forth else None, allowed.argmax(axis=0) if back else None


def _merged(problem: Problem, lead: Sequence[int], follow: Sequence[np.ndarray]) -> Reduction:
    """The problem without the nodes that follow others; every lead leads itself."""
    count = len(problem.node_cost)
    stays = [node for node in range(count) if lead[node] == node]
    number = {node: position for position, node in enumerate(stays)}
    node_cost = [problem.node_cost[node] for node in stays]
    for node in range(count):
        if lead[node] != node:
            node_cost[number[lead[node]]] = node_cost[number[lead[node]]] + problem.node_cost[node][follow[node]]
    edges: list[Edge] = []
    followed = [rule.tobytes() for rule in follow]
    spread: dict[tuple[int, bytes, bytes], np.ndarray] = {}  # equal ones are one array
    for edge in problem.edges:
        a, b = lead[edge.source], lead[edge.target]
        rows, columns = follow[edge.source], follow[edge.target]
        if a == b:
            node_cost[number[a]] = node_cost[number[a]] + edge.cost[rows, columns]
        elif a == edge.source and b == edge.target:
            edges.append(replace(edge, source=number[a], target=number[b]))
        else:
            key = id(edge.cost), followed[edge.source], followed[edge.target]
            if key not in spread:
                spread[key] = edge.cost[rows[:, None], columns[None, :]]
            edges.append(Edge(source=number[a], target=number[b], cost=spread[key]))
    smaller = Problem(node_cost=tuple(node_cost), edges=tuple(edges))

    def undo(choice: Sequence[int]) -> Choice:
        return tuple(int(follow[node][choice[number[lead[node]]]]) for node in range(count))

    return Reduction(problem=smaller, undo=undo, lead=[number[lead[node]] for node in range(count)], follow=follow)


Step = Callable[[Problem], Reduction]


def reduce_all(problem: Problem) -> Reduction:
    """Every reduction in turn until a turn changes nothing.

    Raises: ConflictError when the strategies left exclude each other.
    """
    total = Reduction(problem=problem, undo=tuple)
    settled: dict[Step, Problem] = {}  # what each step left, which it need not look at again
    while True:
        size_before = size(total.problem)
        # Merging followers can close a circle of rules that excludes strategies, or all of them: what is forbidden is
        # dropped again before elimination, which takes for granted that every strategy left is allowed.
        merging = (merge_followers, merge_parallel, drop_forbidden)
        for step in (merge_parallel, drop_forbidden, fold_forced, *merging, eliminate):
            if settled.get(step) is not total.problem:
                total = chain(total, step(total.problem))
                settled[step] = total.problem
        if size(total.problem) == size_before:
            return total


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

    Raises: ConflictError when a node keeps no strategy.
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
            raise ConflictError(f"no strategy of node {node} goes with one of each neighbour")
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
    )

    def undo(choice: Sequence[int]) -> Choice:
        return tuple(int(keep[strategy]) for keep, strategy in zip(strategies, choice, strict=True))

    return Reduction(problem=smaller, undo=undo, follow=strategies)


def fold_forced(problem: Problem) -> Reduction:
    """Turn the edges of nodes with one strategy into costs of their neighbours; the nodes stay."""
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


def eliminate(problem: Problem, staying: Collection[int] = ()) -> Reduction:
    """Remove nodes of at most two neighbours, those `staying` excepted, by min-plus.

    A node v with neighbours a and b leaves the edge min over s of (c[s] + e_a[s, t] + e_b[s, u]) between them; the way
    back looks up its best strategy for the strategies they chose.
    """
    # Both directions of each edge, the node's own strategies first.
    table: list[dict[int, np.ndarray]] = [{} for _ in problem.node_cost]
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
        if node in removed or node in staying or len(around) > 2:
            continue
        rule = _Rule(node=node, around=around, cost=cost[node], sides=tuple(table[node].values()))
        if len(cost[node]) * math.prod(rule.sizes) > MOST_WORK:
            continue
        value = rule.least()
        rules.append(rule)
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
    return _without(cost, table, rules, offset) if rules else Reduction(problem=problem, undo=tuple)


def _without(
    cost: Sequence[np.ndarray], table: Sequence[Mapping[int, np.ndarray]], rules: Sequence[_Rule], offset: float
) -> Reduction:
    """The problem without the nodes of some rules, in the order of their elimination."""
    removed = {rule.node for rule in rules}
    stays = [node for node in range(len(cost)) if node not in removed]
    number = {node: position for position, node in enumerate(stays)}
    smaller = Problem(
        node_cost=tuple(cost[node] for node in stays),
        edges=tuple(
            Edge(source=number[a], target=number[b], cost=side) for a in stays for b, side in table[a].items() if a < b
        ),
    )

    def undo(choice: Sequence[int]) -> Choice:
        full = [0] * len(cost)
        for node, strategy in zip(stays, choice, strict=True):
            full[node] = strategy
        for rule in reversed(rules):
            full[rule.node] = rule.best(full)
        return tuple(full)

    lead = [number.get(node, -1) for node in range(len(cost))]
    return Reduction(problem=smaller, undo=undo, offset=offset, lead=lead)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A node eliminated: its cost, its neighbours, and its edges to them, its own strategies first."""

    node: int
    around: tuple[int, ...]
    cost: np.ndarray
    sides: tuple[np.ndarray, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many strategies each neighbour has."""
        return tuple(side.shape[1] for side in self.sides)

    def least(self) -> np.ndarray:
        """The least cost for each choice of the neighbours, an axis for each of them."""
        axes = range(1, len(self.sides) + 1)
        spread = [np.expand_dims(s, [a for a in axes if a != at]) for at, s in zip(axes, self.sides, strict=True)]
        return least_of_sum([self.cost.reshape(-1, *(1 for _ in axes)), *spread], self.sizes)

    def best(self, choice: Sequence[int]) -> int:
        """Its best strategy for what its neighbours chose: by the sums of which elimination took the least."""
        reach = self.cost
        for peer, side in zip(self.around, self.sides, strict=True):
            reach = reach + side[:, choice[peer]]
        return int(np.argmin(reach))


def components(problem: Problem) -> Iterator[tuple[Problem, list[int]]]:
    """The parts of a problem that share no edge, with their nodes."""
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


def any_allowed(problem: Problem, deadline: float) -> Choice | None:
    """A choice that is allowed, cheap strategies of nodes tried first; None at the deadline, on time.perf_counter, or
    after `MOST_WORK` looks at a node.

    Each strategy tried drops those that it excludes (`_exclude`); nodes of few strategies come first.

    Raises: ConflictError when no choice is allowed.
    """
    near, costs = neighbours(problem), problem.node_cost
    waiting: list[tuple[list[np.ndarray], int, np.ndarray]] = [
        ([np.isfinite(cost) for cost in costs], 0, np.isfinite(costs[0]))
    ]
    is_first = True
    for _ in range(MOST_WORK // len(costs)):
        if not waiting:
            raise ConflictError("the strategies left exclude each other")
        if time.perf_counter() > deadline:
            return None
        left, node, tried = waiting.pop()
        left = [tried if each == node else strategies for each, strategies in enumerate(left)]
        if not _exclude(problem, near, left, range(len(costs)) if is_first else (node,)):
            continue
        is_first = False
        undecided = [node for node, strategies in enumerate(left) if strategies.sum() > 1]
        if not undecided:
            return tuple(int(strategies.argmax()) for strategies in left)
        node = min(undecided, key=lambda each: int(left[each].sum()))
        dearest_first = [s for s in np.argsort(-costs[node], kind="stable").tolist() if left[node][s]]
        waiting += [(left, node, np.arange(len(costs[node])) == s) for s in dearest_first]
    return None


def _exclude(problem: Problem, near: Sequence[Sequence[int]], left: list[np.ndarray], changed: Collection[int]) -> bool:
    """Drops from the strategies `left` of each node those that a neighbour no longer allows, from the changed nodes on;
    False where a node has none left (arc consistency).
    """
    waiting = set(changed)
    if not all(strategies.any() for strategies in left):
        return False
    while waiting:
        node = waiting.pop()
        for number in near[node]:
            edge = problem.edges[number]
            other = edge.target if edge.source == node else edge.source
            of_node = np.isfinite(edge.cost) if edge.source == node else np.isfinite(edge.cost).T
            allowed = left[other] & (np.diag(of_node) if other == node else of_node[left[node]].any(axis=0))
            if not allowed.any():
                return False
            if allowed.sum() < left[other].sum():
                left[other] = allowed
                waiting.add(other)
    return True


def neighbours(problem: Problem) -> list[list[int]]:
    """The numbers of each node's edges."""
    near: list[list[int]] = [[] for _ in problem.node_cost]
    for number, edge in enumerate(problem.edges):
        near[edge.source].append(number)
        if edge.target != edge.source:
            near[edge.target].append(number)
    return near
