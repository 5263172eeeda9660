"""Splits the graph of a step into one graph for each stage, joined by sent values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from autopar.ir.graph import Block, Op, OpGraph, OpKind, Role, Section, read_by

_ORDER = {section: i for i, section in enumerate(Section)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """One stage. Values and operations have their numbers in the whole graph.

    Attributes:
        graph: The stage's operations. Inputs are its constants and arguments, then what it receives.
        arguments: For each of the first inputs, its position in the inputs of the whole graph.
        received: For each input behind them, the stage that makes it.
        results: For each output, its position in the results of the step.
        sends: For each SEND operation, the stage that takes its operand.
        level_of: Operations of the sections BEFORE and AFTER run level by level: what is sent on one level is read on
            a later one. Other operations have level 0.
        arrival: For each value that is received once a step, the section in which it is sent and the first level on
            which it is there.
    """

    graph: OpGraph
    arguments: tuple[int, ...]
    received: tuple[int, ...]
    results: tuple[int, ...]
    sends: dict[int, int]
    level_of: dict[int, int]
    arrival: dict[int, tuple[Section, int]]


def split_stages(
    graph: OpGraph, stage_of: Mapping[int, int], homes: Mapping[int, int], num_stages: int
) -> list[StageGraph]:
    """The graphs of all stages.

    `stage_of[op.id]` is the stage of each operation of the top block, `homes[position]` that of each input that is
    replaced by the step. Other inputs (batches, constants) are there on every stage that reads them.
    """
    return _StageSplitter(graph, stage_of, homes, num_stages).run()


class _StageSplitter:
    def __init__(self, graph: OpGraph, stage_of: Mapping[int, int], homes: Mapping[int, int], num_stages: int) -> None:
        self.graph, self.stage_of, self.num_stages = graph, dict(stage_of), num_stages
        self.position = {v: i for i, v in enumerate(graph.block.inputs)}
        self.home = {v: homes[i] for i, v in enumerate(graph.block.inputs) if i in homes}
        self.made_by = {v: op for op in graph.block.ops for v in op.outputs}
        self.level_of: dict[int, int] = {}
        self.next_op = max((op.id for op in graph.ops()), default=-1) + 1

    def run(self) -> list[StageGraph]:
        self.find_levels()
        readers = self.readers()
        results = self.results(readers)
        sends: list[dict[int, int]] = [{} for _ in range(self.num_stages)]
        ops: list[list[Op]] = [[] for _ in range(self.num_stages)]
        received: list[dict[int, int]] = [{} for _ in range(self.num_stages)]
        for op in self.graph.block.ops:
            ops[self.stage_of[op.id]].append(op)
        for value, stages in readers.items():
            source = self.source(value)
            for target in sorted(stages):
                if source is None or target == source:
                    continue
                send = self.send(value, target)
                ops[source].append(send)
                sends[source][send.id] = target
                received[target][value] = source
        return [self.stage(s, ops[s], sends[s], received[s], readers, results[s]) for s in range(self.num_stages)]

    def source(self, value: int) -> int | None:
        """The stage that computes a value; None for values of every stage."""
        if value in self.made_by:
            return self.stage_of[self.made_by[value].id]
        return self.home.get(value)

    def section(self, value: int) -> Section:
        """The section in which a value is there for the first time."""
        op = self.made_by.get(value)
        if op is None:
            return Section.BEFORE
        if op.kind is OpKind.ACCUMULATE:
            return Section.AFTER
        return Section.FORWARD if op.kind is OpKind.SPLIT else op.section

    def find_levels(self) -> None:
        """A value that crosses stages before or after the loop is read one level after its operation."""
        for op in self.graph.block.ops:
            level = 0
            for value in read_by(op):
                if self.section(value) is not op.section or op.section.repeats:
                    continue
                source = self.source(value)
                before = self.level(value)
                level = max(level, before + (source is not None and source != self.stage_of[op.id]))
            self.level_of[op.id] = level
        # Then as late as its readers allow, so that little is kept between levels.
        latest: dict[int, int] = {}
        for op in reversed(self.graph.block.ops):
            if op.section.repeats:
                continue
            here = min((latest[v] for v in op.outputs if v in latest), default=self.level_of[op.id])
            self.level_of[op.id] = level = max(here, self.level_of[op.id])
            for value in read_by(op):
                if self.section(value) is op.section:
                    source = self.source(value)
                    away = source is not None and source != self.stage_of[op.id]
                    latest[value] = min(latest.get(value, level), level - away)

    def level(self, value: int) -> int:
        op = self.made_by.get(value)
        return 0 if op is None or op.section.repeats else self.level_of[op.id]

    def readers(self) -> dict[int, set[int]]:
        """The stages that read each value, in the order of the program."""
        stages_reading: dict[int, set[int]] = {}
        for op in self.graph.block.ops:
            for value in read_by(op):
                stages_reading.setdefault(value, set()).add(self.stage_of[op.id])
        return stages_reading

    def results(self, readers: dict[int, set[int]]) -> list[list[int]]:
        """The step's results by stage; a result that replaces an argument is on the argument's stage."""
        of_stage: list[list[int]] = [[] for _ in range(self.num_stages)]
        tied = {result: self.graph.block.inputs[argument] for argument, result in self.graph.tied}
        for position, atom in enumerate(self.graph.block.outputs):
            stage = self.source(atom) if isinstance(atom, int) else None
            home = self.home.get(tied[position]) if position in tied else None
            at = home if home is not None else stage or 0
            if isinstance(atom, int):
                readers.setdefault(atom, set()).add(at)
            of_stage[at].append(position)
        return of_stage

    def send(self, value: int, target: int) -> Op:
        op = self.made_by.get(value)
        section = self.section(value)
        self.next_op += 1
        sent = Op(
            id=self.next_op - 1, kind=OpKind.SEND, primitive="send", eqn=None, inputs=(value,), outputs=(), rule=None,
            role=op.role if op is not None else Role.FORWARD, module=op.module if op is not None else "",
            count=self.graph.num_microbatches if section.repeats else 1.0, section=section,
        )  # fmt: skip
        # A sum that is sent before it is read is sent from the level that reduces it.
        self.level_of[sent.id] = self.level(value)
        self.stage_of[sent.id] = target
        return sent

    def stage(
        self,
        number: int,
        ops: list[Op],
        sends: dict[int, int],
        received: dict[int, int],
        readers: dict[int, set[int]],
        results: Sequence[int],
    ) -> StageGraph:
        whole = self.graph
        # Stable: within a section and level, operations keep the order of the program, sends behind them.
        ops = sorted(ops, key=lambda op: (_ORDER[op.section], self.level_of[op.id]))
        taken = [
            p
            for p, v in enumerate(whole.block.inputs)
            if self.home.get(v, number if number in readers.get(v, ()) else None) == number
        ]
        place = {p: i for i, p in enumerate(taken)}
        num_constants = sum(p < len(whole.constants) for p in taken)
        out = {p: i for i, p in enumerate(results)}
        repeating = {len(taken) + i for i, v in enumerate(received) if self.section(v).repeats}
        graph = OpGraph(
            values=whole.values,
            block=Block(
                inputs=(*(whole.block.inputs[p] for p in taken), *received),
                outputs=tuple(whole.block.outputs[p] for p in results),
                ops=tuple(ops),
            ),
            constants=tuple(whole.constants[p] for p in taken[:num_constants]),
            tied=tuple((place[i], out[o]) for i, o in whole.tied if i in place and o in out),
            donated=frozenset(place[i] for i in whole.donated if i in place),
            batch=frozenset(place[i] for i in whole.batch if i in place),
            num_microbatches=whole.num_microbatches,
            repeating=frozenset(repeating),
            runs_of_examples=whole.runs_of_examples,
            saved_in_host=whole.saved_in_host.intersection(v for op in ops for v in op.outputs),
        )
        return StageGraph(
            graph=graph,
            arguments=tuple(taken),
            received=tuple(received.values()),
            results=tuple(results),
            sends=sends,
            level_of={op.id: self.level_of[op.id] for op in ops},
            arrival={v: (self.section(v), self.level(v) + 1) for v in received if not self.section(v).repeats},
        )


def split_backward(stage: StageGraph) -> StageGraph:
    """Moves operations that no other stage waits for out of the backward section: mostly gradients of weights.

    Source: zero bubble pipeline parallelism (Qi et al., arXiv:2401.10241, section 2).
    """
    ops = stage.graph.block.ops
    awaited: set[int] = set()
    for op in reversed(ops):
        if op.section is Section.BACKWARD and (op.kind is OpKind.SEND or not awaited.isdisjoint(op.outputs)):
            awaited.update(read_by(op))
    moved = [
        replace(op, section=Section.WEIGHT)
        if op.section is Section.BACKWARD and op.kind is not OpKind.SEND and awaited.isdisjoint(op.outputs)
        else op
        for op in ops
    ]
    moved.sort(key=lambda op: (_ORDER[op.section], stage.level_of[op.id]))
    block = replace(stage.graph.block, ops=tuple(moved))
    return dataclasses.replace(stage, graph=dataclasses.replace(stage.graph, block=block))
