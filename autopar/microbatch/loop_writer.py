"""The operations of a graph over micro-batches: those of the whole batch and of one micro-batch, section by section."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.common.records import replaced
from autopar.errors import UnsupportedError
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Role, Section, Value, read_by
from autopar.microbatch.forms import Form, State
from autopar.microbatch.loop_sections import LoopSections
from autopar.microbatch.microbatch_analysis import Follower
from autopar.microbatch.running_state import UpdateWriter
from autopar.microbatch.value_states import ValueStates
from autopar.microbatch.written_operations import one_equation, scaling


class LoopWriter:
    """Writes the operations section by section.

    A value of the whole batch keeps its number in `whole`; its counterpart in each micro-batch has a new number
    (`micro`) unless it is the same value.
    """

    def __init__(
        self, whole: OpGraph, part: OpGraph, follower: Follower, states: ValueStates, sections: LoopSections
    ) -> None:
        self.whole, self.part, self.follower, self.states, self.sections = whole, part, follower, states, sections
        self.values: list[Value] = list(whole.values)
        self.micro: dict[int, int] = {}
        self.update_writer = UpdateWriter(follower.updates, self.values, follower.num_microbatches)
        by_updates = [op.id in follower.updates.ops for op in whole.block.ops]
        readers = list(zip(by_updates, whole.block.ops, strict=True))
        self.read_by_updates = {v for updates, op in readers if updates for v in read_by(op)}
        self.read_otherwise = {v for updates, op in readers if not updates for v in self._read_after(op)}
        self.read_otherwise |= {a for a in map(self.through, whole.block.outputs) if isinstance(a, int)}

    def ops(self) -> tuple[Op, ...]:
        by_section: dict[Section, list[Op]] = {section: [] for section in Section}
        updates, parts_of_updates = self.follower.updates, []
        made_in: dict[int, Section] = {}
        for v in self.whole.block.inputs:
            if v in self.sections.each and self.states.of[v].cut:
                for written in self._split(v):
                    by_section[written.section].append(written)
        for op, part in zip(self.whole.block.ops, self.part.block.ops, strict=True):
            if op.id in updates.ops:
                inputs = tuple(self.through(a) for a in part.inputs)
                parts_of_updates.append(dataclasses.replace(part, inputs=inputs))
                continue
            if (apart := self.sections.apart.get(op.outputs[0] if op.outputs else -1)) is not None:
                inputs = tuple(self.through(a) for a in apart.inputs)
                by_section[Section.AFTER].append(replaced(apart, inputs=inputs, section=Section.AFTER))
            if op.kind is not OpKind.BARRIER and (section := self.sections.run_once(op)) is not None:
                inputs = tuple(self.through(a) for a in op.inputs)
                by_section[section].append(replaced(op, inputs=inputs, section=section))
                for v in op.outputs:
                    if v in self.sections.each and self.states.of[v].cut:
                        for written in self._split(v):
                            by_section[written.section].append(written)
            if not self.sections.repeats(op):
                continue
            *shares, repeated = self._repeated(op, part, made_in)
            by_section[repeated.section] += [*shares, repeated]
            made_in.update(dict.fromkeys(repeated.outputs, repeated.section))
            if op.kind is OpKind.BARRIER:
                continue
            for v in op.outputs:
                if v in self.sections.leaving and v not in self.sections.before and self.states.of[v].streams:
                    ways = self.update_writer.stack(v, self.micro[v], repeated) if v in self.read_by_updates else []
                    if not ways or v in self.read_otherwise:
                        ways += self._leave(v, repeated)
                    for crossing in ways:
                        by_section[crossing.section].append(crossing)
        if parts_of_updates:
            by_section[Section.AFTER] += self.update_writer.write(parts_of_updates)
        return tuple(op for section in Section for op in by_section[section])

    def _read_after(self, op: Op) -> Sequence[int]:
        """The values that an operation behind the loop reads."""
        is_after = op.kind is not OpKind.BARRIER and self.sections.run_once(op) is Section.AFTER
        return [a for a in map(self.through, read_by(op)) if isinstance(a, int)] if is_after else []

    def through(self, atom: Atom) -> Atom:
        """The value of the whole batch behind barriers, which exist only in the loop."""
        while isinstance(atom, int) and atom in self.states.passes:
            atom = self.states.passes[atom]
        return atom

    def _in_loop(self, atom: Atom) -> Atom:
        """A value as one micro-batch reads it."""
        if not isinstance(atom, int):
            return atom
        if atom in self.micro:
            return self.micro[atom]
        if atom in self.states.passes:
            return self._in_loop(self.states.passes[atom])
        assert self.states.of[atom].form is Form.INVARIANT, f"value {atom} is not there for a micro-batch"
        return atom

    def _counterpart(self, v: int) -> int:
        """A new number for the micro-batch's counterpart of a value."""
        self.micro[v] = self._new_value(self.part.values[v])
        return self.micro[v]

    def _split(self, v: int) -> list[Op]:
        """What cuts a value of the whole batch; each of several blocks of examples for itself."""
        state, value = self.states.of[v], self.values[v]
        self.follower.cuts(v, state)
        dim, split, part = state.dim, v, self._counterpart(v)
        if state.outer > 1:
            dim, split = dim + 1, self._new_value(_in_blocks(value, state))
            part = self._new_value(_in_blocks(self.values[part], state))
        cut = Op(
            id=0, kind=OpKind.SPLIT, primitive="split_batch", eqn=None, inputs=(split,), outputs=(part,), rule=None,
            role=Role.FORWARD, module="", count=1.0, section=Section.BEFORE, dim=dim,
        )  # fmt: skip
        if state.outer == 1:
            return [cut]
        of_whole, of_part = self.values[split], self.values[part]
        apart = one_equation(lambda x: x.reshape(of_whole.shape), value, v, split, cut, Section.BEFORE)
        whole_shape = self.values[self.micro[v]].shape
        joined = one_equation(lambda x: x.reshape(whole_shape), of_part, part, self.micro[v], cut, Section.FORWARD)
        return [apart, cut, replaced(joined, count=float(self.follower.num_microbatches))]

    def _leave(self, v: int, maker: Op) -> list[Op]:
        """A value leaves the loop: as a sum, or joined; where its weight is not 1, it is scaled behind the loop."""
        s = self.states.of[v]
        sums = s.form is Form.PARTIAL_SUM
        if s.laid is not None and s.form is Form.SPLIT:
            raise UnsupportedError(
                where=f"shard_map in {maker.module or 'the step'}",
                expected="results of a shard_map that are split by example alone, where they leave a micro-batch",
                got=f"parts of devices side by side ({s.laid.spec})",
                hint="return from the shard_map what is whole along its other axes, or use num_microbatches=1",
            )
        weight = self.follower.leaving_weight(s, self.whole.values[v], maker)
        if not sums:
            self.follower.cuts(v, s)
        joined = v if weight == 1.0 else self._new_value(self.whole.values[v])
        crossing = Op(
            id=0, kind=OpKind.ACCUMULATE if sums else OpKind.STACK, primitive="accumulate" if sums else "stack_batch",
            eqn=None, inputs=(self.micro[v],), outputs=(joined,), rule=None, role=maker.role, module=maker.module,
            count=maker.count if sums else 1.0, section=maker.section if sums else Section.AFTER, dim=s.dim,
        )  # fmt: skip
        return [crossing] if joined == v else [crossing, scaling(joined, v, self.whole.values[v], weight, maker)]

    def _new_value(self, like: Value) -> int:
        self.values.append(replaced(like, id=len(self.values), name=""))
        return len(self.values) - 1

    def _repeated(self, op: Op, part: Op, made_in: dict[int, Section]) -> list[Op]:
        """An operation as each micro-batch runs it, behind those that make the shares that it reads."""
        read_whole = self.states.whole_operands.get(op.id, frozenset())
        pairs = list(zip(part.inputs, part.outputs, strict=True)) if op.kind is OpKind.BARRIER else []
        if pairs:  # what does not stream goes around it
            pairs = [(a, v) for a, v in pairs if self.sections.is_made_in_loop(v) and self.states.of[v].streams]
            part = dataclasses.replace(part, inputs=tuple(a for a, _ in pairs), outputs=tuple(v for _, v in pairs))
        inputs = tuple(self.through(a) if i in read_whole else self._in_loop(a) for i, a in enumerate(part.inputs))
        late = any(isinstance(a, int) and made_in.get(a) is Section.BACKWARD for a in inputs)
        repeated = dataclasses.replace(
            part,
            inputs=inputs,
            outputs=tuple(self._counterpart(v) for v in part.outputs),
            blocks=tuple(self._repeated_block(b) for b in part.blocks),
            count=op.count * self.follower.num_microbatches,
            section=Section.BACKWARD if late or op.role is Role.BACKWARD else Section.FORWARD,
        )
        return self._with_shares(op, repeated)

    def _with_shares(self, op: Op, repeated: Op) -> list[Op]:
        """An operation of a micro-batch, behind those that make the shares that it reads."""
        scalings, inputs = [], list(repeated.inputs)
        for i in sorted(self.follower.shares.get(op.outputs[0] if op.outputs else -1, ())):
            source, aval = inputs[i], repeated.eqn.invars[i].aval
            like = self.values[source] if isinstance(source, int) else Value(
                0, tuple(aval.shape), str(aval.dtype), aval.dtype.itemsize, weak_type=aval.weak_type
            )  # fmt: skip
            inputs[i] = share = self._new_value(like)
            made = scaling(source, share, like, 1.0 / self.follower.num_microbatches, repeated, repeated.section)
            scalings.append(dataclasses.replace(made, count=repeated.count))
        return [*scalings, replaced(repeated, inputs=tuple(inputs))] if scalings else [repeated]

    def _repeated_block(self, block: Block) -> Block:
        """A block with new values, so that the whole batch's operation may exist beside the micro-batch's."""
        inputs = tuple(self._counterpart(v) for v in block.inputs)
        ops, times = [], self.follower.num_microbatches
        for op in block.ops:
            blocks = tuple(self._repeated_block(b) for b in op.blocks)
            ins = tuple(self._in_loop(a) for a in op.inputs)
            outs = tuple(self._counterpart(v) for v in op.outputs)
            repeated = replaced(op, inputs=ins, outputs=outs, blocks=blocks, count=op.count * times)
            ops += self._with_shares(op, repeated)
        return Block(inputs=inputs, outputs=tuple(self._in_loop(a) for a in block.outputs), ops=tuple(ops))


def _in_blocks(value: Value, state: State) -> Value:
    """A value with its blocks of examples in a dimension of their own, in front of that of the examples."""
    before, size, behind = value.shape[: state.dim], value.shape[state.dim], value.shape[state.dim + 1 :]
    return replaced(value, shape=(*before, state.outer, size // state.outer, *behind))
