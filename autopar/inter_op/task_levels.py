"""The levels of a stage's sections before and after the loop on which its values are made and read."""

from __future__ import annotations

import functools

from autopar.ir.graph import Section, read_by
from autopar.ir.rewrite import makers
from autopar.lowering.instructions import HostCopy
from autopar.passes.stage_graph import StageGraph


class Levels:
    """The levels of the values of one stage."""

    def __init__(self, stage: StageGraph) -> None:
        self.stage = stage
        self.made_by = makers(stage.graph.block.ops)

    @functools.cached_property
    def first_read(self) -> dict[tuple[int, Section], int]:
        """The first level of each section on which a value is read."""
        first: dict[tuple[int, Section], int] = {}
        for op in self.stage.graph.block.ops:
            level = self.stage.level_of[op.id]
            for v in read_by(op):
                first[v, op.section] = min(level, first.get((v, op.section), level))
        return first

    def of_copy(self, copy: HostCopy) -> int:
        """The level that makes the value of a copy to the host, or the first one that reads that of a copy from it."""
        if copy.section.repeats:
            return 0
        if copy.to_host:
            return self.first(copy.value, copy.section)
        return self.first_read.get((copy.value, copy.section), 0)

    def first(self, value: int, section: Section) -> int:
        """The first level of a section on which a value exists."""
        if value in self.stage.arrival:
            sent, level = self.stage.arrival[value]
            return level if sent is section else 0
        producer = self.made_by.get(value)
        return self.stage.level_of[producer.id] if producer is not None and producer.section is section else 0
