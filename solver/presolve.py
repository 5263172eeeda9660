"""Reductions that keep the best cost, each `reduce(problem) -> Reduction`: the smaller problem and the way back.

    drop_forbidden   strategies that no neighbour allows (arc consistency; Mackworth 1977)
    merge_parallel   edges of the same two nodes add up; a node's edge to itself is a node cost
    drop_dominated   strategies that another one always beats (dead-end elimination; Desmet et al. 1992, Goldstein 1994)
    fold_forced      a node with one strategy: its edges become costs of its neighbours
    merge_followers  nodes that a neighbour settles
    eliminate        nodes of few neighbours, by min-plus (Bertele and Brioschi 1972; R1 and R2 of Scholz and Eckstein
    2002)

Whoever has more to respect than costs says which nodes stay (`eliminate`) and which strategies may beat which others
(`drop_dominated`), and follows the strategies of each node by `lead` and `follow` of each reduction.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from autopar.solver.elimination import MOST_WORK, least_of_sum
from autopar.solver.problem import Edge, Problem

Choice = tuple[int, ...]
Undo = Callable[[Sequence[int]], Choice]
Beats = Mapping[int, np.ndarray]
NOTHING_ELSE: Beats = MappingProxyType({})


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


# Which strategies no other of the same node always beats.
#
# Goldstein's criterion for strategies s and t of a node: c[t] - c[s] + the sum over edges of the maximum over u of
# (e[t, u] - e[s, u]) <= 0, of the strategies u that the neighbour still has. Where an edge excludes s with u, t is no
# worse. One node at a time, those of few strategies first, so that two equal strategies do not remove each other.


def undominated(
    problem: Problem, near: Sequence[Sequence[int]], most_work: int, may_beat: Beats = NOTHING_ELSE
) -> list[np.ndarray]:
    """The numbers of the strategies of each node that stay; `near`: the numbers of its edges. Nodes are passed over
    once there would be more than `most_work` comparisons. `may_beat`: of some nodes, whether their strategy t may beat
    their strategy s, [t, s].

    By compiled loops where their compiler is loaded anyway, for other parts of a larger problem: for small ones loading
    it takes longer than arrays do. Both give the same.
    """
    return (by_loops if "numba" in sys.modules else by_arrays)(problem, near, most_work, may_beat)


def by_arrays(
    problem: Problem, near: Sequence[Sequence[int]], most_work: int, may_beat: Beats = NOTHING_ELSE
) -> list[np.ndarray]:
    """`undominated` in arrays, a node and an edge at a time."""
    strategies = [np.arange(len(cost)) for cost in problem.node_cost]
    worst_of: dict[tuple[int, bool], np.ndarray] = {}  # of matrices that edges share, by the side of their node
    work = 0
    for node in sorted(range(len(strategies)), key=lambda node: len(strategies[node])):
        count = len(strategies[node])
        if count == 1:
            continue
        edges = [problem.edges[number] for number in near[node]]
        others = [edge.target if edge.source == node else edge.source for edge in edges]
        work += count * count * (1 + sum(len(strategies[other]) for other in others))
        if work > most_work:
            break
        cost = problem.node_cost[node]
        with np.errstate(invalid="ignore"):  # where both are infinite: not a number, and not below zero either
            worst = cost[:, None] - cost[None, :]  # [t, s]: how much dearer t can be than s, at worst
            for edge, other in zip(edges, others, strict=True):
                if len(strategies[other]) < len(problem.node_cost[other]):
                    worst = worst + _worst(_side(edge, node)[:, strategies[other]])
                    continue
                key = id(edge.cost), edge.source == node
                if key not in worst_of:
                    worst_of[key] = _worst(_side(edge, node))
                worst = worst + worst_of[key]
        beats = worst <= 0
        if node in may_beat:
            beats &= may_beat[node]
        np.fill_diagonal(beats, False)
        beaten = np.flatnonzero(beats.any(axis=0)).tolist()
        alive = np.ones(count, dtype=bool)
        for s in beaten:
            alive[s] = not (beats[:, s] & alive).any()
        strategies[node] = np.flatnonzero(alive)
    return strategies


def _side(edge: Edge, node: int) -> np.ndarray:
    """The edge's costs with this node's strategies first."""
    return edge.cost if edge.source == node else edge.cost.T


def _worst(side: np.ndarray) -> np.ndarray:
    """[t, s]: how much dearer strategy t can be on an edge than s, whatever the other node chooses among what it may
    choose with s: where that excludes s, t is no worse.
    """
    turned = np.ascontiguousarray(side.T)  # the maximum over the first axis is taken along whole rows at a time
    dearer: np.ndarray = turned[:, :, None] - turned[:, None, :]
    return np.asarray(np.fmax.reduce(dearer, axis=0, keepdims=True, initial=-math.inf)[0])


def by_loops(
    problem: Problem, near: Sequence[Sequence[int]], most_work: int, may_beat: Beats = NOTHING_ELSE
) -> list[np.ndarray]:
    """`undominated` in compiled loops."""
    from autopar.solver import dominance_loops

    loops: Any = dominance_loops  # numba's types do not know the arguments of what it compiles
    sizes = np.array([len(cost) for cost in problem.node_cost], dtype=np.int64)
    first = _starts(problem.node_cost)
    beats = [may_beat[node].ravel() if node in may_beat else np.zeros(0, dtype=bool) for node in range(len(sizes))]
    numbers: dict[int, int] = {}
    matrices: list[np.ndarray] = []
    for edge in problem.edges:
        if numbers.setdefault(id(edge.cost), len(matrices)) == len(matrices):
            matrices.append(edge.cost.ravel())
    kept = loops.undominated(
        first,
        np.concatenate([np.zeros(0), *problem.node_cost]),
        np.array([(e.source, e.target, numbers[id(e.cost)]) for e in problem.edges], dtype=np.int64).reshape(-1, 3),
        _starts(matrices)[:-1],
        np.concatenate([np.zeros(0), *matrices]),
        _starts(near),
        np.array([number for numbers_near in near for number in numbers_near], dtype=np.int64),
        np.argsort(sizes, kind="stable"),
        _starts(beats),
        np.concatenate([np.zeros(0, dtype=bool), *beats]),
        most_work,
    )
    return [np.flatnonzero(kept[a:b]) for a, b in itertools.pairwise(first.tolist())]


def _starts(parts: Sequence[Sized]) -> np.ndarray:
    """Where each of some parts begins that stand one behind the other, and where the last one ends."""
    return np.array([0, *itertools.accumulate(map(len, parts))], dtype=np.int64)


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
        for step in (merge_parallel, drop_forbidden, fold_forced, *merging, eliminate, drop_dominated):
            before = total.problem
            if settled.get(step) is before:
                continue
            total = chain(total, step(before))
            # What is dominated may be so by what a pass dropped after it: only a pass that drops nothing is the last.
            if step is not drop_dominated or total.problem is before:
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


def drop_dominated(problem: Problem, may_beat: Beats = NOTHING_ELSE) -> Reduction:
    """Remove strategies that another of the same node beats whatever its neighbours choose (`undominated`)."""
    return keep_strategies(problem, undominated(problem, neighbours(problem), MOST_WORK, may_beat))


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
    """A choice that is allowed, cheap strategies of nodes tried first; None at the deadline, on time.perf_counter.

    Each strategy tried drops those that it excludes; nodes of few strategies come first.

    Raises: ConflictError when no choice is allowed.
    """
    waiting = [(Reduction(problem=problem, undo=tuple), 0, np.arange(len(problem.node_cost[0])))]
    while waiting:
        total, node, tried = waiting.pop()
        if time.perf_counter() > deadline:
            return None
        strategies = [np.arange(len(cost)) for cost in total.problem.node_cost]
        strategies[node] = tried
        try:
            kept = keep_strategies(total.problem, strategies)
            total = chain(total, chain(kept, drop_forbidden(kept.problem)))
        except ConflictError:
            continue
        costs = total.problem.node_cost
        undecided = [node for node, cost in enumerate(costs) if len(cost) > 1]
        if not undecided:
            return total.undo([0] * len(costs))
        node = min(undecided, key=lambda each: len(costs[each]))
        waiting += [(total, node, np.array([s])) for s in np.argsort(-costs[node], kind="stable").tolist()]
    raise ConflictError("the strategies left exclude each other")


def neighbours(problem: Problem) -> list[list[int]]:
    """The numbers of each node's edges."""
    near: list[list[int]] = [[] for _ in problem.node_cost]
    for number, edge in enumerate(problem.edges):
        near[edge.source].append(number)
        if edge.target != edge.source:
            near[edge.target].append(number)
    return near
