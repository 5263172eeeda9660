"""The section of each operation: before the loop over micro-batches, in it, or after it, by where values are needed."""

from __future__ import annotations

from autopar.errors import UnsupportedError
from autopar.ir.graph import Atom, Op, OpGraph, OpKind, Section, free_values, read_by
from autopar.microbatch.forms import Form
from autopar.microbatch.microbatch_analysis import is_heavy
from autopar.microbatch.part_of_results import part_of_results
from autopar.microbatch.value_states import ValueStates


class LoopSections:
    """The values that are needed `before` the loop, in `each` micro-batch and `after` the loop.

    `apart[v]`, v being the first result of an operation in the loop, is what makes those of its results that are the
    same in every micro-batch, or that hold blocks of examples, on the whole batch: it runs after the loop. `leaving`
    are the values needed after it that are joined over the micro-batches, or computed there by what reads all examples.

    Raises: UnsupportedError for a result that neither adds up over micro-batches nor has one row for each example.
    """

    def __init__(self, step_name: str, whole: OpGraph, states: ValueStates, num_microbatches: int) -> None:
        self.step_name, self.whole, self.states = step_name, whole, states
        self.num_microbatches = num_microbatches
        self.before: set[int] = set()
        self.each: set[int] = set()
        self.after: set[int] = set()
        self.apart: dict[int, Op] = {}
        self._same: set[int] = set()  # needed after the loop, and the same in every micro-batch
        self._in_blocks: set[int] = set()  # needed after the loop, and of several blocks of examples
        self._find()
        self.leaving = self.after - self._same - self._in_blocks

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
            self._set_apart(op)
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
            if s.form is Form.INVARIANT:
                self._same.add(v)
                return
            if s.outer != 1 and self.num_microbatches > 1:
                self._in_blocks.add(v)
                return
            self.each.add(v)

    def _set_apart(self, op: Op) -> None:
        """Plans the work of an operation in the loop that makes results which are the same in every micro-batch."""
        blocks = self._in_blocks.intersection(op.outputs)
        if blocks and is_heavy(op):
            raise self._refusal(min(blocks), "in which examples lie inside of a dimension")
        same = self._same.intersection(op.outputs)
        if blocks:
            self.apart[op.outputs[0]] = op
            self.after.update(read_by(op))
        if blocks or not same:
            return
        apart = part_of_results(op, same)
        read = read_by(apart) if apart is not None else ()
        before = {v for v in read if self.states.of[v].early and self.states.of[v].form is Form.PARTIAL_SUM}
        if apart is None or any(self.states.of[v].form is not Form.INVARIANT for v in read if v not in before):
            raise self._refusal(min(same), f"that {op.primitive} makes beside them")
        self.apart[op.outputs[0]] = apart
        self.before |= before
        self.after |= set(read) - before

    def _refusal(self, v: int, how: str) -> UnsupportedError:
        return UnsupportedError(
            where=self.step_name,
            expected="results that are sums over examples or have one row for each",
            got=f"one of shape {self.whole.values[v].shape} {how}",
            hint="return it in another shape, or use num_microbatches=1",
        )

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
