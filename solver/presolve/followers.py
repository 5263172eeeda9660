"""Merging of followers: a node whose strategy a neighbour determines becomes part of that neighbour, with its memory.

Elementwise and layout operations mostly allow one strategy for each of their operand's: every row of the edge's matrix
has one finite entry. Merging them is exact with or without a memory limit, and removes 4 of 5 nodes of the contest's
graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.solver.ilp.problem import Edge, Problem, Use
from autopar.solver.presolve.reduction import Choice, Reduction


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
    uses = tuple(
        Use(node=number[lead[u.node]], start=u.start, stop=u.stop, bytes=u.bytes[follow[u.node]]) for u in problem.uses
    )
    names = problem.node_names
    smaller = Problem(
        node_cost=tuple(node_cost),
        edges=tuple(edges),
        uses=uses,
        limit_bytes=problem.limit_bytes,
        node_names=tuple(names[node] for node in stays) if names is not None else None,
    )

    def undo(choice: Sequence[int]) -> Choice:
        return tuple(int(follow[node][choice[number[lead[node]]]]) for node in range(count))

    return Reduction(problem=smaller, undo=undo, origin=tuple(stays))
