"""Memory in the integer program: the values that can fill it, and a price on each of their bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from autopar import solver
from autopar.intra_op.choice_graph import ChoiceGraph, LayoutSite, Reshard
from autopar.intra_op.formulation import SolverInput, shards
from autopar.ir.graph import OpGraph, OpKind, Section, read_by
from autopar.ir.value_state import ALL, REDUCED, UNREDUCED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrices:
    """What a byte on one device costs, in seconds, for the values (with their states) that crowd the memory.

    `copies` of a value count where it stands for the same value of several layers.
    """

    s_per_byte: float
    values: frozenset[tuple[int, str]]
    copies: Mapping[int, float] = dataclasses.field(default_factory=dict)


def held_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """What lies in memory through the whole step in any case: state and sums over micro-batches, at home."""
    arguments = {v for i, v in enumerate(graph.block.inputs) if i not in graph.batch | graph.repeating}
    sums = {v for op in graph.block.ops if op.kind is OpKind.ACCUMULATE for v in op.outputs}
    return frozenset((v, UNREDUCED) for v in arguments | sums)


def state_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """What may lie in memory through the whole step: state, sums over micro-batches, copies for all readers."""
    before = (op for op in graph.block.ops if op.section is Section.BEFORE and op.kind is not OpKind.SPLIT)
    values = {v for v, _ in held_values(graph)}.union(*(op.outputs for op in before))
    return frozenset((v, state) for v in values for state in (UNREDUCED, ALL))


def saved_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """What lies in memory from the forward pass of a micro-batch to its backward pass."""
    made = {v for op in graph.block.ops if op.section is Section.FORWARD for v in op.outputs}
    behind = (op for op in graph.block.ops if op.section.is_backward)
    return frozenset((v, state) for op in behind for v in read_by(op) if v in made for state in (REDUCED, ALL))


def price_memory(given: SolverInput, graph: OpGraph, prices: MemoryPrices) -> SolverInput:
    """The problem with the bytes of `prices.values` added to its costs.

    A value at its site costs its bytes under each strategy of the node; a copy costs only where it differs from its
    source, so its price goes to an edge between the two, behind all other edges.
    """
    choices, problem = given.choices, given.problem
    site_bytes: dict[LayoutSite, float] = {}
    copy_bytes: dict[int, float] = {}
    for value, state in sorted(prices.values):  # sums of floats, in an order that no hash seed changes
        nbytes = graph.values[value].nbytes * prices.copies.get(value, 1.0)
        site = _site(choices, value, state)
        if site is None:
            continue
        if state in (UNREDUCED, REDUCED):
            site_bytes[site] = site_bytes.get(site, 0) + nbytes
        else:
            copy_bytes[site.node] = copy_bytes.get(site.node, 0) + nbytes
    node_cost = list(problem.node_cost)
    for site, nbytes in site_bytes.items():
        node_cost[site.node] = node_cost[site.node] + prices.s_per_byte * nbytes / shards(site.layouts, choices.mesh)
    edges = list(problem.edges)
    for edge, number in zip(problem.edges, given.reshard_of_edge, strict=True):
        reshard = choices.reshards[number]
        nbytes = copy_bytes.get(reshard.target.node, 0)
        if nbytes and choices.nodes[reshard.target.node].kind == "copy":
            matrix = prices.s_per_byte * nbytes * _copied_share(choices, reshard)
            edges.append(dataclasses.replace(edge, cost=matrix))
    priced = dataclasses.replace(problem, node_cost=tuple(node_cost), edges=tuple(edges))
    return dataclasses.replace(given, problem=priced)


def priced_bytes(given: SolverInput, graph: OpGraph, prices: MemoryPrices, choice: tuple[int, ...]) -> float:
    """Bytes on one device that have a price, under a choice."""
    priced = price_memory(given, graph, prices).problem
    return (solver.evaluate(priced, choice)[0] - solver.evaluate(given.problem, choice)[0]) / prices.s_per_byte


def _copied_share(choices: ChoiceGraph, reshard: Reshard) -> np.ndarray:
    """Which part of a value a copy holds on each device: nothing where it is its source under another name."""
    source, target = reshard.source.layouts, reshard.target.layouts
    differs = np.array([[a != b for b in target] for a in source], np.float64)
    return differs / shards(target, choices.mesh)[None, :]


def _site(choices: ChoiceGraph, value: int, state: str) -> LayoutSite | None:
    """The site that decides the size of a value in a state; None where nothing is to be decided."""
    if state == UNREDUCED:
        return choices.unreduced.get(value)
    if state == REDUCED:
        return choices.reduced.get(value)
    return choices.copies.get((value, state))
