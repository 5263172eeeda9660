"""The section of each operation: before the loop over micro-batches, in it, or after it, by where values are needed."""

from __future__ import annotations

from autopar.errors import UnsupportedError
from autopar.ir.graph import Atom, Op, OpGraph, OpKind, Section, free_values
from autopar.microbatch.forms import Form
from autopar.microbatch.value_states import ValueStates


class LoopSections:
    """The values that are needed `before` the loop, in `each` micro-batch and `after` the loop.

    Raises: UnsupportedError for a result that neither adds up over micro-batches nor has one row for each example.
    """

    def __init__(self, step_name: str, whole: OpGraph, states: ValueStates) -> None:
        self.step_name, self.whole, self.states = step_name, whole, states
        self.before: set[int] = set()
        self.each: set[int] = set()
        self.after: set[int] = set()
        self._find()

    def _find(self) -> None:
        for atom in self.whole.block.outputs:
            self._need(atom, self.after)
        for op in reversed(self.whole.block.ops):
            if op.kind is OpKind.BARRIER:
                for v in op.outputs:
                    for needs in (self.before, self.after, self.each):
                        if v in needs:
                            self._need(self.states.passes[v], needs)
                continue
            for v in op.outputs:
                self._settle(v)
            if self.run_once(op) is Section.BEFORE:
                for atom in op.inputs:
                    self._need(atom, self.before)
            elif self.run_once(op) is Section.AFTER:
                for atom in op.inputs:
                    self._need(atom, self.after)
            if self.repeats(op):
                for i, atom in enumerate(op.inputs):
                    self._need(atom, self.before if i in self.states.whole_operands.get(op.id, ()) else self.each)
                self.each |= {v for block in op.blocks for v in free_values(block)}
        for v in self.whole.block.inputs:
            self._settle(v)

    def _need(self, atom: Atom, needs: set[int]) -> None:
        if isinstance(atom, int):
            needs.add(atom)

    def _settle(self, v: int) -> None:
        """Adds the needs that follow from those of a value."""
        s = self.states.of[v]
        if v in self.each and s.early and (s.form is Form.INVARIANT or s.cut):
            self.before.add(v)
        if v in self.after and s.early and s.form is Form.INVARIANT and self.whole.values[v].size == 1:
            self.before.add(v)  # step counts and rates: known at once, so that no stage waits for them at the end
        if v in self.after and s.streams and not s.cut and v not in self.before:
            if s.form is Form.INVARIANT or s.outer != 1:
                inside = (
                    "in which examples lie inside of a dimension" if s.outer != 1 else "that a loop makes beside them"
                )
                raise UnsupportedError(
                    where=self.step_name,
                    expected="results that are sums over examples or have one row for each",
                    got=f"one of shape {self.whole.values[v].shape} {inside}",
                    hint="return it in another shape, or use num_microbatches=1",
                )
            self.each.add(v)

    def run_once(self, op: Op) -> Section | None:
        """When an operation runs on the whole batch, if it does."""
        if not self.before.isdisjoint(op.outputs):
            return Section.BEFORE
        return Section.AFTER if any(v in self.after and not self.states.of[v].streams for v in op.outputs) else None

    def repeats(self, op: Op) -> bool:
        return any(self.is_made_in_loop(v) for v in op.outputs)

    def is_made_in_loop(self, v: int) -> bool:
        """Whether a value of each micro-batch is needed and comes from an operation in the loop."""
        s = self.states.of[v]
        if v not in self.each or s.cut or s.form is Form.UNAVAILABLE:
            return False
        return s.form is not Form.INVARIANT or not s.early
