"""Communication beside computation: the slack of each resharding, and products that send while they run.

The slack is the seconds of computation between the producer of a value and its first reader. Computation continues
during a send whose value was produced long enough before that: the update reads a gradient after the rest of the
backward pass; a parameter is there before the step begins. An operand of the next product has none.

The integer program prices what is gathered and scattered whole. Whether it is faster in pieces ("collective matmul")
depends on what else is sent and computed meanwhile, which only the simulation tells.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from autopar import solver
from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.cost.roofline import is_fusible
from autopar.cost.usage import predicted_collectives, uses_of_pieces
from autopar.ir.graph import ALL, Block, Op, OpGraph, OpKind, Section, read_by
from autopar.lowering.collective_matmul import with_collective_matmuls
from autopar.lowering.instructions import Compute, Instruction, Loop, LoweredBlock, Move
from autopar.plan.options import WORTHWHILE
from autopar.search.intra_op.choice_graph import ChoiceGraph, Reshard
from autopar.search.intra_op.formulation import SolverInput
from autopar.search.intra_op.spmd_candidate import TimedSharding, timed_sharding


class Exposure(NamedTuple):
    """What an objective charges of a send that computing can hide, and whether what a loop reads can hide before it."""

    fraction: float
    before_loops: bool = True


ALL_EXPOSED = Exposure(1.0)
NO_VALUES: frozenset[int] = frozenset()


def slacks_s(
    graph: OpGraph, choices: ChoiceGraph, compute_s: Callable[[Op], float], *, before_loops: bool = True
) -> tuple[float, ...]:
    """For each resharding, the seconds of computation between the operation that makes its value and the first
    operation that waits for it, over all runs in a step.

    `compute_s` gives the seconds of an operation without its blocks. An operation that takes next to no time does not
    delay its readers: the slack ends at the first operation that waits for the result. Arguments have unlimited slack,
    since they can be sent ahead. What a loop reads is sent before it, beside what is not in a loop, since loops send
    themselves; all that is made outside of loops shares that time by its bytes, or has none (`before_loops`). In a step
    of micro-batches, nothing is sent beside the computation of another section; a value from another stage is there
    when the section begins; a value gathered once is gathered before any computation.
    """
    return _Slacks(graph, choices, compute_s, before_loops).run()


class _Slacks:
    def __init__(
        self, graph: OpGraph, choices: ChoiceGraph, compute_s: Callable[[Op], float], before_loops: bool
    ) -> None:
        self.graph, self.choices, self.compute_s, self.before_loops = graph, choices, compute_s, before_loops
        self.is_cut = graph.is_cut  # asked for every resharding; the graph looks through all of its operations
        # Seconds from the start of a block: of operations, when somebody waits for them; of values, when they are made.
        self.waited_for_s: dict[int, float] = {}
        self.made_s: dict[int, float] = {}
        self.made_in: dict[int, Section] = {}
        self.readers: dict[int, list[Op]] = {}
        self.left_s: dict[int, float] = {}  # of values that a block hands on: its end
        self.section_s: dict[Section, float] = {}  # where sections begin
        # Seconds from the start of a block to an operation, or to a value, that are not in a loop.
        self.plain_before_s: dict[int, float] = {}
        self.plain_made_s: dict[int, float] = {}
        self.of_copy = {home.node: readers for (_, readers), home in choices.copies.items()}
        # What a loop reads lies as its block takes it, in a node that no strategy of an operation is behind.
        self.loop_of = {
            choices.unreduced[v].node: op
            for op in graph.ops()
            for block in op.blocks
            for v in block.inputs
            if v in choices.unreduced
        }
        self.made_by_loops = {v for op in graph.ops() if op.blocks for v in op.outputs}

    def run(self) -> tuple[float, ...]:
        end_s = self.block(self.graph.block)
        for position, v in enumerate(self.graph.block.inputs):
            if position not in self.graph.repeating:
                self.made_s[v] = -math.inf
        once = self.graph.once() if self.is_cut else NO_VALUES
        return tuple(self.slack_s(reshard, once, end_s) for reshard in self.choices.reshards)

    def block(self, block: Block) -> float:
        """Places the operations of a block in time; returns the duration of the block."""
        now_s = plain_s = 0.0
        ends_s: dict[Section, float] = {}
        begins_s: list[float] = []
        for v in block.inputs:
            self.made_s[v] = 0.0
        for op in block.ops:
            begins_s.append(now_s)
            self.plain_before_s[op.id] = plain_s
            self.section_s.setdefault(op.section, now_s)
            inside_s = [self.block(inner) for inner in op.blocks]
            own_s = self.compute_s(op)
            now_s += own_s + (max(inside_s) if op.kind is OpKind.COND else sum(inside_s))
            plain_s += own_s
            ends_s[op.section] = now_s
            for v in op.outputs:
                self.made_s[v], self.made_in[v] = now_s, op.section
                self.plain_made_s[v] = plain_s
            for v in read_by(op):
                self.readers.setdefault(v, []).append(op)
        for atom in block.outputs:
            if isinstance(atom, int):
                self.left_s[atom] = now_s
        for op, begin_s in zip(reversed(block.ops), reversed(begins_s), strict=True):
            self.waited_for_s[op.id] = self.awaited_s(op, ends_s[op.section]) if _is_light(op) else begin_s
        return now_s

    def awaited_s(self, op: Op, section_end_s: float) -> float:
        """The time at which the first reader in its section waits for a result of an operation."""
        readers = (reader for v in op.outputs for reader in self.readers.get(v, ()))
        reads_s = (self.waited_for_s[reader.id] for reader in readers if reader.section is op.section)
        return min(reads_s, default=section_end_s)

    def slack_s(self, reshard: Reshard, once: frozenset[int], end_s: float) -> float:
        value, target = reshard.value, self.choices.nodes[reshard.target.node]
        loop = self.loop_of.get(reshard.target.node)
        if loop is not None and not self.is_cut and value in read_by(loop):
            return self.before_s(loop, value) if self.before_loops else 0.0
        if value in once and self.of_copy.get(reshard.target.node) == ALL:
            return 0.0
        if target.kind == "argument":
            readers: list[Op] = []  # the next step's state
        else:
            readers = self.readers.get(value, [])
            members = {op.id for op, _ in target.members}
            role = self.of_copy.get(reshard.target.node)
            own_readers = [op for op in readers if op.id in members or op.role.value == role]
            readers = own_readers or readers
        first = min(readers, key=lambda op: self.waited_for_s[op.id], default=None)
        read_s = self.waited_for_s[first.id] if first is not None else self.left_s.get(value, end_s)
        made_s = self.made_s.get(value, -math.inf)
        reads_in = first.section if first is not None else Section.WHOLE
        if self.is_cut and math.isfinite(made_s) and self.made_in.get(value, reads_in) is not reads_in:
            made_s = self.section_s.get(reads_in, made_s)
        return max(0.0, read_s - made_s)

    def before_s(self, loop: Op, value: int) -> float:
        """The share of a value in the time before a loop that reads it."""
        sent_bytes = {v: self.graph.values[v].nbytes for v in read_by(loop) if v not in self.made_by_loops}
        share = sent_bytes.get(value, 0) / max(sum(sent_bytes.values()), 1)
        return share * max(0.0, self.plain_before_s[loop.id] - self.plain_made_s.get(value, 0.0))


def _is_light(op: Op) -> bool:
    return op.kind in (OpKind.ACCUMULATE, OpKind.BARRIER) or (op.kind is OpKind.EQUATION and is_fusible(op.primitive))


def discount_overlap(solver_input: SolverInput, slack_s: Sequence[float], exposed_fraction: float) -> SolverInput:
    """The problem in which `exposed_fraction` is charged of the seconds of each resharding that its slack can hide.
    Edges of prices are unchanged.
    """
    edges, num_sends = solver_input.problem.edges, len(solver_input.reshard_of_edge)
    discounted: list[solver.Edge] = []
    discounted_cost: dict[tuple[int, float], np.ndarray] = {}  # one matrix for equal ones, as `solver.tie` wants them
    most_s: dict[int, float] = {}  # the dearest send of a matrix: a longer slack hides no more
    for edge, number in zip(edges[:num_sends], solver_input.reshard_of_edge, strict=True):
        cost, slack = edge.cost, slack_s[number]
        if not slack:
            discounted.append(edge)
            continue
        if id(cost) not in most_s:
            most_s[id(cost)] = float(np.max(cost, where=np.isfinite(cost), initial=0.0))
        slack = min(slack, most_s[id(cost)])
        if (id(cost), slack) not in discounted_cost:
            hidden = np.minimum(cost, slack, where=np.isfinite(cost), out=np.zeros_like(cost))
            discounted_cost[id(cost), slack] = cost - (1 - exposed_fraction) * hidden
        discounted.append(solver.Edge(source=edge.source, target=edge.target, cost=discounted_cost[id(cost), slack]))
    problem = dataclasses.replace(solver_input.problem, edges=(*discounted, *edges[num_sends:]))
    return dataclasses.replace(solver_input, problem=problem)


def with_overlapped_axes(graph: OpGraph, model: CostModel, found: TimedSharding) -> TimedSharding:
    """The decisions with products in pieces over the axes where that is fastest, on the clock; as they are where it
    gains next to nothing (`WORTHWHILE`), no product waits for what is sent, or a recipe has set the axes.
    """
    waits_s, least_s = found.ran.end_s - found.ran.compute_s, WORTHWHILE * found.ran.end_s
    if found.sharding.overlapped_axes or not model.overlap.kinds or waits_s < least_s:
        return found
    axes = range(len(model.links.mesh.axis_sizes))
    best = found
    for chosen in (chosen for n in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, n)):
        in_pieces = with_collective_matmuls(found.lowered, chosen)
        sent_whole_s = _sent_whole_s(graph, model, found.lowered, in_pieces)
        if sent_whole_s < least_s:
            continue
        more_to_compute_s, sent_in_pieces_s = _pieces_s(graph, in_pieces, found.costs)
        least_compute_s = found.ran.compute_s + more_to_compute_s
        least_send_s = found.ran.send_s - sent_whole_s + sent_in_pieces_s
        if max(least_compute_s, least_send_s) >= min(best.ran.end_s, found.ran.end_s - least_s):
            continue  # one of the streams alone takes too long
        sharding = dataclasses.replace(found.sharding, overlapped_axes=chosen)
        best = min(best, timed_sharding(graph, model, sharding, found.costs), key=lambda each: each.ran.end_s)
    return best if best.ran.end_s < found.ran.end_s - least_s else found


def _sent_whole_s(graph: OpGraph, model: CostModel, lowered: LoweredBlock, in_pieces: LoweredBlock) -> float:
    """Seconds of what is gathered or scattered whole and would be sent in pieces: no more is gained."""
    whole = _sent_in_pieces(lowered, in_pieces)
    uses = predicted_collectives(graph, dataclasses.replace(lowered, instructions=whole), model)
    return sum(use.time_s for use in uses)


def _pieces_s(graph: OpGraph, in_pieces: LoweredBlock, costs: NodeCosts) -> tuple[float, float]:
    """(seconds by which products take longer to compute in pieces than whole, seconds in which the pieces are sent);
    -inf where that depends on which branch takes longer.
    """
    more_s = sent_s = 0.0
    for instruction in in_pieces.instructions:
        if isinstance(instruction, Loop):
            of_blocks = [_pieces_s(graph, block, costs) for block in instruction.blocks]
            if instruction.op.kind is OpKind.COND and any(more or sent for more, sent in of_blocks):
                return -math.inf, -math.inf
            more_s += sum(more for more, _ in of_blocks)
            sent_s += sum(sent for _, sent in of_blocks)
        elif isinstance(instruction, Compute) and instruction.pieces is not None:
            strategy, n = instruction.strategy, costs.model.links.mesh.size(instruction.pieces.axes)
            assert strategy is not None, "products in pieces are split"
            pieces_s = n * costs.piece_s(instruction.op, strategy, instruction.pieces)
            more_s += pieces_s - costs.compute_s(instruction.op, strategy)
            sent_s += sum(use.time_s for use in uses_of_pieces(graph, instruction, costs.model))
    return more_s, sent_s


def _sent_in_pieces(lowered: LoweredBlock, in_pieces: LoweredBlock) -> tuple[Instruction, ...]:
    """The instructions of a block that send what products send in pieces in the other, whose products may stand in
    another order.
    """
    found: list[Instruction] = []
    pairs = [[i for i in block.instructions if isinstance(i, (Loop, Move))] for block in (lowered, in_pieces)]
    for whole, marked in zip(*pairs, strict=True):
        if isinstance(whole, Loop) and isinstance(marked, Loop):
            blocks = zip(whole.blocks, marked.blocks, strict=True)
            found += (each for block, other in blocks for each in _sent_in_pieces(block, other))
        elif isinstance(marked, Move) and marked.in_pieces:
            found.append(whole)
    return tuple(found)
