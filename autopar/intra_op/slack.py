"""The slack of each resharding: the seconds of computation between the producer of its value and the first reader.

Computation continues during a send whose value was produced long enough before its first reader: the update reads a
gradient after the rest of the backward pass; a parameter is there before the step begins. An operand of the next
product has none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar import solver
from autopar.cost.roofline import is_fusible
from autopar.intra_op.choice_graph import ChoiceGraph, Reshard
from autopar.intra_op.formulation import SolverInput
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Section, read_by
from autopar.ir.value_state import ALL

NO_VALUES: frozenset[int] = frozenset()


def slacks_s(graph: OpGraph, choices: ChoiceGraph, compute_s: Callable[[Op], float]) -> tuple[float, ...]:
    """For each resharding, the seconds of computation between the operation that makes its value and the first
    operation that waits for it, over all runs in a step.

    `compute_s` gives the seconds of an operation without its blocks. An operation that takes next to no time does not
    delay its readers: the slack ends at the first operation that waits for the result. Arguments have unlimited slack,
    since they can be sent ahead. In a step of micro-batches, nothing is sent beside the computation of another section;
    a value from another stage is there when the section begins; a value gathered once is gathered before any
    computation.
    """
    return _Slacks(graph, choices, compute_s).run()


class _Slacks:
    def __init__(self, graph: OpGraph, choices: ChoiceGraph, compute_s: Callable[[Op], float]) -> None:
        self.graph, self.choices, self.compute_s = graph, choices, compute_s
        self.is_cut = graph.is_cut  # asked for every resharding; the graph looks through all of its operations
        # Seconds from the start of a block: of operations, when somebody waits for them; of values, when they are made.
        self.waited_for_s: dict[int, float] = {}
        self.made_s: dict[int, float] = {}
        self.made_in: dict[int, Section] = {}
        self.readers: dict[int, list[Op]] = {}
        self.left_s: dict[int, float] = {}  # of values that a block hands on: its end
        self.section_s: dict[Section, float] = {}  # where sections begin
        self.of_copy = {home.node: readers for (_, readers), home in choices.copies.items()}
        # What a loop reads lies as its block takes it, in a node that no strategy of an operation is behind.
        self.loop_of = {
            choices.unreduced[v].node: op.id
            for op in graph.ops()
            for block in op.blocks
            for v in block.inputs
            if v in choices.unreduced
        }

    def run(self) -> tuple[float, ...]:
        end_s = self.block(self.graph.block)
        for position, v in enumerate(self.graph.block.inputs):
            if position not in self.graph.repeating:
                self.made_s[v] = -math.inf
        once = self.graph.once() if self.is_cut else NO_VALUES
        return tuple(self.slack_s(reshard, once, end_s) for reshard in self.choices.reshards)

    def block(self, block: Block) -> float:
        """Places the operations of a block in time; returns the duration of the block."""
        now_s = 0.0
        ends_s: dict[Section, float] = {}
        begins_s: list[float] = []
        for v in block.inputs:
            self.made_s[v] = 0.0
        for op in block.ops:
            begins_s.append(now_s)
            self.section_s.setdefault(op.section, now_s)
            inside_s = [self.block(inner) for inner in op.blocks]
            now_s += self.compute_s(op) + (max(inside_s) if op.kind is OpKind.COND else sum(inside_s))
            ends_s[op.section] = now_s
            for v in op.outputs:
                self.made_s[v], self.made_in[v] = now_s, op.section
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
        if value in once and self.of_copy.get(reshard.target.node) == ALL:
            return 0.0
        if target.kind == "argument":
            readers: list[Op] = []  # the next step's state
        else:
            readers = self.readers.get(value, [])
            members = {op.id for op, _ in target.members} | {self.loop_of.get(reshard.target.node)}
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


def _is_light(op: Op) -> bool:
    return op.kind in (OpKind.ACCUMULATE, OpKind.BARRIER) or (op.kind is OpKind.EQUATION and is_fusible(op.primitive))


def discount_overlap(solver_input: SolverInput, slack_s: Sequence[float], exposed_fraction: float) -> SolverInput:
    """The problem in which `exposed_fraction` is charged of the seconds of each resharding that its slack can hide.
    Edges of prices are unchanged.
    """
    edges, num_sends = solver_input.problem.edges, len(solver_input.reshard_of_edge)
    discounted: list[solver.Edge] = []
    discounted_cost: dict[tuple[int, float], np.ndarray] = {}  # one matrix for equal ones, as `solver.tie` wants them
    for edge, number in zip(edges[:num_sends], solver_input.reshard_of_edge, strict=True):
        cost, slack = edge.cost, slack_s[number]
        if not slack:
            discounted.append(edge)
            continue
        if (id(cost), slack) not in discounted_cost:
            hidden = np.minimum(cost, slack, where=np.isfinite(cost), out=np.zeros_like(cost))
            discounted_cost[id(cost), slack] = cost - (1 - exposed_fraction) * hidden
        discounted.append(solver.Edge(source=edge.source, target=edge.target, cost=discounted_cost[id(cost), slack]))
    problem = dataclasses.replace(solver_input.problem, edges=(*discounted, *edges[num_sends:]))
    return dataclasses.replace(solver_input, problem=problem)
