"""Memory in the integer program: the values that can fill it, a price on their bytes, the search for the price."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from autopar import solver
from autopar.ir.graph import ALL, REDUCED, UNREDUCED, OpGraph, OpKind, Role, Section, read_by
from autopar.passes.saved_arrays import waiting_in_host
from autopar.search.intra_op.choice_graph import ChoiceGraph, LayoutSite, Reshard
from autopar.search.intra_op.formulation import SolverInput, shards


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrices:
    """The price of a byte on one device, in seconds, and the values (with their states) that it applies to.

    `copies`: the number of layers for which a value stands.
    """

    s_per_byte: float
    values: frozenset[tuple[int, str]]
    copies: Mapping[int, float] = dataclasses.field(default_factory=dict)


def held_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """The values in memory through the whole step in any plan: state, and sums over micro-batches, unreduced."""
    arguments = {v for i, v in enumerate(graph.block.inputs) if i not in graph.batch | graph.repeating}
    sums = {v for op in graph.block.ops if op.kind is OpKind.ACCUMULATE for v in op.outputs}
    return frozenset((v, UNREDUCED) for v in arguments | sums)


def state_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """Values that may occupy memory through the whole step: state, sums over micro-batches, copies for all readers."""
    hoisted = (op for op in graph.block.ops if op.section is Section.BEFORE and op.kind is not OpKind.SPLIT)
    values = {v for v, _ in held_values(graph)}.union(*(op.outputs for op in hoisted))
    return frozenset((v, state) for v in values for state in (UNREDUCED, ALL))


def priced_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """The values that memory is priced for where it is short: what may occupy it through the whole step, and what loops
    read or make turn by turn, such as the parameters and the gradients of scanned layers. All of that is there as long
    as the loop runs, in whichever copies it reads.
    """
    loops = [op for op in graph.block.ops if op.kind is OpKind.SCAN and op.section.repeats]
    read = {v for op in loops for v in op.inputs[op.num_consts + op.num_carry :] if isinstance(v, int)}
    stacks = read.union(*(op.outputs[op.num_carry :] for op in loops))
    states = (UNREDUCED, REDUCED, ALL, *(role.value for role in Role))
    return state_values(graph) | {(v, state) for v in stacks for state in states}


def saved_values(graph: OpGraph, offloaded: frozenset[int] = frozenset()) -> frozenset[tuple[int, str]]:
    """The values that occupy memory of a device from the forward pass of a micro-batch to its backward pass: without
    those that are `offloaded`.
    """
    forward_values = {v for op in graph.block.ops if op.section is Section.FORWARD for v in op.outputs}
    forward_values -= waiting_in_host(graph, offloaded)
    backward_ops = (op for op in graph.block.ops if op.section.is_backward)
    return frozenset(
        (v, state) for op in backward_ops for v in read_by(op) if v in forward_values for state in (REDUCED, ALL)
    )


def price_memory(solver_input: SolverInput, graph: OpGraph, prices: MemoryPrices) -> SolverInput:
    """The problem with the bytes of `prices.values` added to its costs.

    A value at its site costs its bytes under each strategy of the node; a copy, or what a loop reads, costs only where
    it differs from its source, so its price goes to an edge between the two, behind all other edges.
    """
    choices, problem = solver_input.choices, solver_input.problem
    site_bytes: dict[LayoutSite, float] = {}
    copy_bytes: dict[int, float] = {}
    read_bytes: dict[int, float] = {}  # of values that loops read with no copy between, by the value
    for value, state in sorted(prices.values):  # sums of floats, in an order that no hash seed changes
        nbytes = graph.values[value].nbytes * prices.copies.get(value, 1.0)
        site = _site(choices, value, state)
        if site is None:
            if state not in (UNREDUCED, REDUCED, ALL):
                read_bytes[value] = nbytes
        elif state in (UNREDUCED, REDUCED):
            site_bytes[site] = site_bytes.get(site, 0) + nbytes
        else:
            copy_bytes[site.node] = copy_bytes.get(site.node, 0) + nbytes
    node_cost = list(problem.node_cost)
    for site, nbytes in site_bytes.items():
        node_cost[site.node] = node_cost[site.node] + prices.s_per_byte * nbytes / shards(site.layouts, choices.mesh)
    edges = list(problem.edges)
    for edge, number in zip(problem.edges, solver_input.reshard_of_edge, strict=True):
        reshard = choices.reshards[number]
        kind = choices.nodes[reshard.target.node].kind
        nbytes = copy_bytes.get(reshard.target.node, 0.0) if kind == "copy" else 0.0
        if kind == "boundary":
            nbytes = read_bytes.get(reshard.value, 0.0)
        if nbytes:
            matrix = prices.s_per_byte * nbytes * _copied_share(choices, reshard)
            edges.append(dataclasses.replace(edge, cost=matrix))
    priced = dataclasses.replace(problem, node_cost=tuple(node_cost), edges=tuple(edges))
    return dataclasses.replace(solver_input, problem=priced)


def priced_bytes(solver_input: SolverInput, graph: OpGraph, prices: MemoryPrices, choice: tuple[int, ...]) -> float:
    """Bytes on one device that have a price, under a choice."""
    priced = price_memory(solver_input, graph, prices).problem
    return (solver.evaluate(priced, choice) - solver.evaluate(solver_input.problem, choice)) / prices.s_per_byte


def least_bytes(solver_input: SolverInput, graph: OpGraph, values: frozenset[tuple[int, str]]) -> float:
    """Bytes of values at their sites that a device holds at least, under whatever choice is allowed."""
    problem = solver_input.problem
    priced = price_memory(solver_input, graph, MemoryPrices(s_per_byte=1.0, values=values)).problem
    total = 0.0
    for seconds, with_bytes in zip(problem.node_cost, priced.node_cost, strict=True):
        allowed = np.isfinite(seconds)
        if with_bytes is not seconds and allowed.any():
            total += float((with_bytes[allowed] - seconds[allowed]).min())
    return total


# Where memory is short: how many prices of a byte are tried, the first one (as a part of the seconds divided by the
# bytes of what is decided), and the ratio of neighbouring ones.
MOST_PRICES, FIRST_PRICE, PRICE_RISE = 6, 0.02, 4.0


def search_price(attempt: Callable[[float], bool | None], seconds_per_byte: float, *, goes_on: bool = False) -> None:
    """Searches for a price of a byte under which the memory suffices (the Lagrangian relaxation of formula (4)).

    Args:
        attempt: Plans under a price, and returns whether the plan fits; None ends the search.
        seconds_per_byte: Of what is decided; the prices are parts and multiples of it, rising until a plan fits.
        goes_on: Whether the search goes on when a plan fits: the interval between the highest price that was too low
            and the lowest that fits is then halved on a logarithmic scale.
    """
    too_low, fits_at, s_per_byte = 0.0, None, FIRST_PRICE * seconds_per_byte
    for _ in range(MOST_PRICES):
        fits = attempt(s_per_byte)
        if fits is None or (fits and not goes_on):
            return
        if fits:
            fits_at = s_per_byte
        else:
            too_low = s_per_byte
        if fits_at is None:
            s_per_byte *= PRICE_RISE
        else:
            s_per_byte = (fits_at * max(too_low, fits_at / PRICE_RISE)) ** 0.5
            if s_per_byte > 0.8 * fits_at:
                return


def _copied_share(choices: ChoiceGraph, reshard: Reshard) -> np.ndarray:
    """The share of a value that a copy holds on each device: zero where the copy is the source itself."""
    source, target = reshard.source.layouts, reshard.target.layouts
    differs = np.array([[a != b for b in target] for a in source], np.float64)
    return differs / shards(target, choices.mesh)[None, :]


def _site(choices: ChoiceGraph, value: int, state: str) -> LayoutSite | None:
    """The site that decides the size of a value in a state; None where there is no decision."""
    if state == UNREDUCED:
        return choices.unreduced.get(value)
    if state == REDUCED:
        return choices.reduced.get(value)
    return choices.copies.get((value, state))
