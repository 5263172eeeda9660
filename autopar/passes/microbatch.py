"""The graph of a training step over micro-batches, with the results of the whole batch.

The graph of a micro-batch is cut out of that of the whole batch (`cut_graph`); where it cannot be, the step is traced
on a micro-batch. Each value of the whole step is, in terms of the micro-batches, the same in all of them, the
concatenation of their values, or the sum of their values (`value_states`). Literals are those of the whole batch, so no
sum needs a factor. Each operation then runs before the loop over micro-batches, in it, or after it (`LoopSections`). A
step whose examples depend on one another is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.errors import BatchMismatchError, InvalidArgumentError, MixedExamplesError, UnsupportedError
from autopar.frontend.build_graph import build_graph, graph_of_body
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Role, Section, Value, free_values, read_by
from autopar.ir.kept import KeptWithGraphs
from autopar.ir.rewrite import renumbered
from autopar.ir.rules import RuleBook, with_rules
from autopar.ir.traced_step import TracedStep
from autopar.ops.attention.score_kernels import mark_score_kernels
from autopar.ops.kernels.islands import TYPE_CHANGES, Spec, collective_axes, is_island, island_of
from autopar.passes.accumulation import AccumulatingFollower, check_patterns
from autopar.passes.cut_graph import CutDims, cut_along, cut_dims
from autopar.passes.example_rules import BY_POSITION, COMBINES, SEVERAL, UNKNOWN
from autopar.passes.forms import CombinesExamples, Form, IslandLayout, State, differs_by_trip
from autopar.passes.hoist_draws import hoist_draws, part_of_results, split_known_results
from autopar.passes.microbatch_analysis import Follower, is_heavy
from autopar.passes.own_literals import Powers, own_powers, with_own_literals
from autopar.passes.running_state import StateUpdates, UpdateWriter, one_equation, scaling
from autopar.passes.smaller_step import example_leaves, like_whole, num_examples, smaller_step
from autopar.passes.value_states import ValueStates, find_states

# The section of each operation: before the loop over micro-batches, in it, or after it, by where values are needed.


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


# What an island makes of the examples of a micro-batch, from its body on one part.
#
# Examples may lie on several devices of an island's axis. A collective over such an axis mixes them, but for a sum of
# sums over examples; what numbers the devices of the axis, or is not the same on all of them, tells examples by their
# position.

# Collectives that combine or send elements in their places.
_IN_PLACE = frozenset({"psum", "psum_invariant", "pmax", "pmin", "ppermute"})
_SUMS = frozenset({"psum", "psum_invariant"})


def body_states(op: Op, part: Op, states: Sequence[State], num_microbatches: int) -> list[State]:
    """The states of the results of an operation with a body. Raises: CombinesExamples where they have no form."""
    if is_island(op.eqn):
        return island_states(op, part, states, num_microbatches)
    whole, smaller = graph_of_body(op.eqn.params["call"]), graph_of_body(part.eqn.params["call"])
    follower = Follower(whole, smaller, num_microbatches, body_states=body_states)
    constants = [follower.by_shape(v) for v in whole.block.inputs[: len(whole.constants)]]
    inside = [replace(s, early=False, streams=True, cut=False) for s in states]
    try:
        return follower.block_states(whole.block, smaller.block, [*constants, *inside])
    except CombinesExamples as error:
        raise CombinesExamples(op, f"in its body, {error.op.primitive}: {error.why}") from None


def island_states(
    op: Op, part: Op, states: Sequence[State], num_microbatches: int, around: frozenset[str] = frozenset()
) -> list[State]:
    """The states of an island's results. Raises: CombinesExamples where they have no form.

    `around`: the axes that examples lie on, of the island in whose body this one is.
    """
    island = island_of(op.eqn)
    pairs = list(zip(island.operands, states, strict=True))
    axes = _example_axes(op, pairs)
    whole, smaller = graph_of_body(op.eqn.params["jaxpr"]), graph_of_body(part.eqn.params["jaxpr"])
    follower = _BodyFollower(whole, smaller, num_microbatches, island=op, axes=around | frozenset(axes))
    constants = [follower.by_shape(v) for v in whole.block.inputs[: len(whole.constants)]]
    inside = [replace(s, early=False, streams=True, cut=False, laid=s.laid and s.laid.inside) for s in states]
    try:
        made = follower.block_states(whole.block, smaller.block, [*constants, *inside])
    except CombinesExamples as error:
        raise CombinesExamples(op, f"in its body, {error.op.primitive}: {error.why}") from None
    return [_result(op, spec, s, axes) for spec, s in zip(island.results, made, strict=True)]


def _example_axes(op: Op, pairs: Sequence[tuple[Spec, State]]) -> tuple[str, ...]:
    """The axes that examples lie on, from the specs and states of the operands."""
    held = {
        s.laid.axes if s.laid is not None else spec[s.dim]
        for spec, s in pairs
        if s.form is Form.SPLIT or s.laid is not None
    }
    if len(held) > 1:
        raise CombinesExamples(op, SEVERAL)
    axes = held.pop() if held else ()
    for spec, s in pairs:
        is_laid = s.laid is not None and s.laid.spec == spec
        mixed = s.outer > 1 and bool(spec[s.dim]) if s.form is Form.SPLIT else not _names(spec).isdisjoint(axes)
        read_apart = s.laid is not None and (s.form is Form.SPLIT or s.laid.inside is not None)
        if not is_laid and (mixed or read_apart):
            raise CombinesExamples(op, BY_POSITION)
    return axes


def _names(spec: Spec) -> set[str]:
    return {name for names in spec for name in names}


def _result(op: Op, spec: Spec, s: State, axes: tuple[str, ...]) -> State:
    """The state of an island's result from that of its part on one device."""
    laid = IslandLayout(spec=spec, axes=axes, inside=s.laid) if s.laid is not None else None
    if s.form is Form.PARTIAL_SUM and not _names(spec).isdisjoint(axes):
        raise CombinesExamples(op, BY_POSITION)
    if s.form is Form.SPLIT and spec[s.dim] != axes:
        if not set(axes) <= set(spec[s.dim]):
            raise CombinesExamples(op, BY_POSITION)
        laid = IslandLayout(spec=spec, axes=axes, inside=s.laid)
    if s.form is Form.INVARIANT and not _names(spec).isdisjoint(axes):
        laid = IslandLayout(spec=spec, axes=axes, inside=s.laid)
    cause = CombinesExamples(op, "it sums over examples") if s.form is Form.PARTIAL_SUM else None
    return replace(s, cause=cause, laid=laid)


@dataclasses.dataclass(slots=True, kw_only=True)
class _BodyFollower(Follower):
    """Follows examples through the body of an island, whose `axes` they lie on."""

    island: Op
    axes: frozenset[str]

    def follow(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        if op.primitive in TYPE_CHANGES:
            return list(states)
        if is_island(op.eqn):
            return self._island_inside(op, part, states, around)
        names = collective_axes(op.eqn) if op.eqn is not None else ()
        if not names:
            return Follower.follow(self, op, part, states, around)
        forms = {s.form for s in states}
        if self.axes.isdisjoint(names):
            return self._beside(op, states) if states else [State(form=Form.INVARIANT) for _ in op.outputs]
        if op.primitive in _SUMS and forms <= {Form.PARTIAL_SUM, Form.INVARIANT}:
            return list(states)
        raise CombinesExamples(op, BY_POSITION if op.primitive == "axis_index" else COMBINES)

    def _island_inside(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        """Results of an island in the body of this one, whose collectives may be over the axes of both."""
        if not any(s.form is Form.RUNNING or differs_by_trip(s) for s in states):
            return self._checked(op, island_states(op, part, states, self.num_microbatches, self.axes))
        body = jax_compat.open_jaxpr(op.eqn.params["jaxpr"])
        if any(not self.axes.isdisjoint(collective_axes(e)) for e in jax_compat.equations_in(body)):
            raise CombinesExamples(op, COMBINES)
        return Follower.follow(self, op, part, states, around)

    def _beside(self, op: Op, states: Sequence[State]) -> list[State]:
        """Results of a collective between devices that have the same examples."""
        if op.primitive in _IN_PLACE:
            if op.primitive not in _SUMS and any(s.form is Form.PARTIAL_SUM for s in states):
                raise CombinesExamples(op, "it is not linear in a sum over examples")
            return list(states)
        (state,) = states
        params = op.eqn.params
        if state.form is not Form.SPLIT:
            return [state for _ in op.outputs]
        if op.primitive in ("all_gather", "all_gather_invariant"):
            at = params["all_gather_dimension"]
            if params["tiled"]:
                return [self._unless(op, state, {at})]
            return [replace(state, dim=state.dim + (at <= state.dim))]
        if op.primitive == "reduce_scatter":
            at = params["scatter_dimension"]
            kept = self._unless(op, state, {at})
            return [kept if params["tiled"] else replace(kept, dim=kept.dim - (at < kept.dim))]
        if op.primitive == "all_to_all" and params["tiled"]:
            return [self._unless(op, state, {params["split_axis"], params["concat_axis"]})]
        raise CombinesExamples(op, UNKNOWN)

    def _unless(self, op: Op, state: State, dims: set[int]) -> State:
        if state.dim in dims:
            raise CombinesExamples(op, COMBINES)
        return state


# The operations of a graph over micro-batches: those of the whole batch and of one micro-batch, section by section.


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
        self.scalings: dict[Hashable, Op] = {}  # by what they multiply, and with what
        self.update_writer = UpdateWriter(follower.updates, self.values, follower.num_microbatches)
        by_updates = [op.id in follower.updates.ops for op in whole.block.ops]
        readers = list(zip(by_updates, whole.block.ops, strict=True))
        self.read_by_updates = {v for updates, op in readers if updates for v in read_by(op)}
        self.read_otherwise: set[int] = set()
        if self.read_by_updates:
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
                parts_of_updates.append(replace(part, inputs=inputs))
                continue
            if (apart := self.sections.apart.get(op.outputs[0] if op.outputs else -1)) is not None:
                inputs = tuple(self.through(a) for a in apart.inputs)
                by_section[Section.AFTER].append(replace(apart, inputs=inputs, section=Section.AFTER))
            if op.kind is not OpKind.BARRIER and (section := self.sections.run_once(op)) is not None:
                inputs = tuple(self.through(a) for a in op.inputs)
                by_section[section].append(replace(op, inputs=inputs, section=section))
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
        return [apart, cut, replace(joined, count=float(self.follower.num_microbatches))]

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
        return [crossing] if joined == v else [crossing, self._scaling(joined, v, self.whole.values[v], weight, maker)]

    def _scaling(
        self, source: Atom, target: int, value: Value, weight: float, like: Op, section: Section = Section.AFTER
    ) -> Op:
        """`scaling`, of which equal values share the equation."""
        kind = value.shape, value.dtype, value.weak_type, weight
        if isinstance(source, int) and kind in self.scalings:
            inputs = tuple(source if isinstance(a, int) else a for a in self.scalings[kind].inputs)
            return replace(
                self.scalings[kind], inputs=inputs, outputs=(target,), role=like.role, module=like.module,
                section=section,
            )  # fmt: skip
        made = scaling(source, target, value, weight, like, section)
        if isinstance(source, int):
            self.scalings[kind] = made
        return made

    def _new_value(self, like: Value) -> int:
        self.values.append(replace(like, id=len(self.values), name=""))
        return len(self.values) - 1

    def _repeated(self, op: Op, part: Op, made_in: dict[int, Section]) -> list[Op]:
        """An operation as each micro-batch runs it, behind those that make the shares that it reads."""
        read_whole = self.states.whole_operands.get(op.id, frozenset())
        pairs = list(zip(part.inputs, part.outputs, strict=True)) if op.kind is OpKind.BARRIER else []
        if pairs:  # what does not stream goes around it
            pairs = [(a, v) for a, v in pairs if self.sections.is_made_in_loop(v) and self.states.of[v].streams]
            part = replace(part, inputs=tuple(a for a, _ in pairs), outputs=tuple(v for _, v in pairs))
        inputs = tuple(self.through(a) if i in read_whole else self._in_loop(a) for i, a in enumerate(part.inputs))
        late = any(isinstance(a, int) and made_in.get(a) is Section.BACKWARD for a in inputs)
        repeated = replace(
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
        if not self.follower.shares:
            return [repeated]
        scalings, inputs = [], list(repeated.inputs)
        for i in sorted(self.follower.shares.get(op.outputs[0] if op.outputs else -1, ())):
            source, aval = inputs[i], repeated.eqn.invars[i].aval
            like = self.values[source] if isinstance(source, int) else Value(
                0, tuple(aval.shape), str(aval.dtype), aval.dtype.itemsize, weak_type=aval.weak_type
            )  # fmt: skip
            inputs[i] = share = self._new_value(like)
            made = self._scaling(source, share, like, 1.0 / self.follower.num_microbatches, repeated, repeated.section)
            scalings.append(replace(made, count=repeated.count))
        return [*scalings, replace(repeated, inputs=tuple(inputs))] if scalings else [repeated]

    def _repeated_block(self, block: Block) -> Block:
        """A block with new values, so that the whole batch's operation may exist beside the micro-batch's."""
        inputs = tuple(self._counterpart(v) for v in block.inputs)
        ops, times = [], self.follower.num_microbatches
        for op in block.ops:
            blocks = tuple(self._repeated_block(b) for b in op.blocks)
            ins = tuple(self._in_loop(a) for a in op.inputs)
            outs = tuple(self._counterpart(v) for v in op.outputs)
            repeated = replace(op, inputs=ins, outputs=outs, blocks=blocks, count=op.count * times)
            ops += self._with_shares(op, repeated)
        return Block(inputs=inputs, outputs=tuple(self._in_loop(a) for a in block.outputs), ops=tuple(ops))


def _in_blocks(value: Value, state: State) -> Value:
    """A value with its blocks of examples in a dimension of their own, in front of that of the examples."""
    before, size, behind = value.shape[: state.dim], value.shape[state.dim], value.shape[state.dim + 1 :]
    return replace(value, shape=(*before, state.outer, size // state.outer, *behind))


# Whether a graph over micro-batches does the work on all examples outside of the loop.


def works_on_all_at_once(graph: OpGraph, examples: int, batch: Collection[int]) -> bool:
    """Whether products before or after the loop read the examples of the whole batch, as where these are shuffled.

    Args:
        examples: Their number: what has no such dimension is a few numbers of them all, as a mean is.
        batch: The inputs of the graph that hold them.
    """
    if graph.num_microbatches == 1:
        return False
    of_batch = {graph.block.inputs[i] for i in batch}
    for op in graph.block.ops:
        if op.section not in (Section.BEFORE, Section.AFTER) or op.kind is OpKind.SPLIT:
            continue
        read = of_batch.intersection(read_by(op))
        if not read:
            continue
        if is_heavy(op) and any(examples in graph.values[v].shape for v in read):
            return True
        of_batch.update(op.outputs)
    return False


def micro_batched(traced: TracedStep, num_microbatches: int, rules: RuleBook, whole: OpGraph | None = None) -> OpGraph:
    """The graph of a step whose batch is split into `num_microbatches`.

    `whole` is the graph of the whole batch, if it is built already. Inputs and outputs are those of the whole step.
    SPLIT, ACCUMULATE and STACK operations mark the values that enter and leave the loop; operations are ordered by
    section.

    Raises: InvalidArgumentError for a number below one; BatchMismatchError when it does not divide the batch;
    MixedExamplesError when the result of one example depends on the others; UnsupportedError for other differences of
    the traces.
    """
    if num_microbatches < 1:
        raise InvalidArgumentError(
            where="num_microbatches", expected="a positive number", got=str(num_microbatches), hint="1 cuts nothing"
        )
    examples = num_examples(traced)
    if examples % num_microbatches:
        raise BatchMismatchError(
            where=traced.name,
            expected=f"a batch that can be cut into {num_microbatches} equal micro-batches",
            got=f"{examples} examples",
            hint=f"choose num_microbatches from the divisors of {examples}, or another batch size",
        )
    whole = whole or build_graph(traced, rules)
    if num_microbatches == 1:
        return _over_micro_batches(traced, whole, Follower(whole, whole, 1, body_states=body_states), rules)
    cut_error: UnsupportedError | None = None
    is_cut = False
    # What is held by a trace that another one differs from may be meant for the examples of the whole batch alone.
    if not traced.per_microbatch or traced.is_pure():
        try:
            part, found = _cut(traced, whole, num_microbatches, rules)
            is_cut = True
            graph = _of_both(traced, whole, part, num_microbatches, rules, found)
            return _with_all_in_loop(graph, traced, whole, rules)
        except MixedExamplesError as error:
            cut_error, traced = error, _traced_once(traced)
            own = found.own_program(traced, part, num_microbatches, rules) if traced.per_microbatch else None
            if own is not None:
                return _accumulated(traced, own, whole, num_microbatches, rules, found)
        except UnsupportedError as error:  # by a trace, other dimensions may be those of the examples
            cut_error = error
    try:
        smaller, part = _traced_part(traced, num_microbatches, rules)
    except UnsupportedError as unlike:
        raise _of_neither(traced, unlike, cut_error, is_cut) from None
    try:
        return _of_both(traced, whole, part, num_microbatches, rules)
    except MixedExamplesError:
        if not traced.per_microbatch:
            raise
    examples = num_examples(traced) // num_microbatches
    if num_examples(smaller) != examples:  # its literals count
        smaller = smaller_step(traced, examples)
    return _accumulated(traced, build_graph(smaller, rules), whole, num_microbatches, rules)


def _traced_once(traced: TracedStep) -> TracedStep:
    """The step, which is traced once on the same shapes."""
    made: dict[Hashable, Any] = {}

    def retrace(avals: Sequence[Any]) -> Any:
        shapes = tuple((a.shape, a.dtype, a.weak_type) for a in avals)
        if shapes not in made:
            made[shapes] = traced.retrace(avals)
        return made[shapes]

    return dataclasses.replace(traced, retrace=retrace)


def _with_all_in_loop(found: OpGraph, traced: TracedStep, whole: OpGraph, rules: RuleBook) -> OpGraph:
    """The graph that was found, or that of a trace on a micro-batch where that leaves no work on all examples out of
    the loop: what indices of random rows read has the size of the whole batch where it is cut.
    """
    examples, first = num_examples(traced), len(found.block.inputs) - len(traced.in_avals)
    batch = [first + i for i in example_leaves(traced)]
    if not works_on_all_at_once(found, examples, batch):
        return found
    try:
        _, part = _traced_part(traced, found.num_microbatches, rules)
        by_trace = _of_both(traced, whole, part, found.num_microbatches, rules)
    except UnsupportedError:
        return found
    return found if works_on_all_at_once(by_trace, examples, batch) else by_trace


# What is found in one number of micro-batches and holds in others.
#
# A search asks for the graph in several numbers. Which dimensions are cut depends on the number by what it divides
# alone; the states of values, and with them the sections of operations, are the same where they are those of one
# operation of each kind. What remains of each number is to write its sizes.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """What following the examples found. `updates` and `mixing` are those of the follower."""

    states: ValueStates
    sections: LoopSections
    updates: StateUpdates
    mixing: frozenset[str]


@dataclasses.dataclass(slots=True)
class _Found:
    """Of the graph of a whole batch that is cut, in the number of micro-batches that was asked for first. `followed`:
    with the whole batch's literals (False), and with those of a micro-batch's own program, in gradient accumulation.
    `powers`: of the latter, in the divisors of `traced_in` micro-batches.
    """

    dims: CutDims | None = None
    followed: dict[bool, _Followed] = dataclasses.field(default_factory=dict)
    powers: Powers | None = None
    traced_in: int = 1

    def along(self, dims: CutDims) -> None:
        """Begins with other dimensions."""
        self.dims, self.followed, self.powers, self.traced_in = dims, {}, None, 1

    def keep(self, states: ValueStates, sections: LoopSections, follower: Follower) -> None:
        """Keeps what was found for other numbers, which have micro-batches of their own."""
        mixing = follower.mixing if isinstance(follower, AccumulatingFollower) else ()
        sections.states = states = dataclasses.replace(states, part=states.whole)
        self.followed[isinstance(follower, AccumulatingFollower)] = _Followed(
            states=states, sections=sections, updates=follower.updates, mixing=frozenset(mixing)
        )

    def followed_by(self, whole: OpGraph, follower: Follower) -> tuple[ValueStates, LoopSections] | None:
        """What was found with such a follower, where it holds in its number of micro-batches too."""
        known = self.followed.get(isinstance(follower, AccumulatingFollower))
        if known is None or known.updates != follower.updates:
            return None
        states = known.states.in_other_number(whole, follower.part, follower)
        if states is None:
            follower.begin_again()
            return None
        if isinstance(follower, AccumulatingFollower):
            follower.mixing.update(known.mixing)
        return states, known.sections

    def own_program(self, traced: TracedStep, cut: OpGraph, num_microbatches: int, rules: RuleBook) -> OpGraph | None:
        """The graph of a micro-batch's own program, where that is the one that is `cut` with its own literals."""
        if self.powers is not None and self.traced_in % num_microbatches == 0:
            return with_own_literals(cut, self.powers, num_microbatches)
        try:
            smaller = smaller_step(traced, num_examples(traced) // num_microbatches)
        except UnsupportedError:
            return None  # which is said where its trace is compared with that of the whole batch
        powers = own_powers(cut, build_graph(smaller, rules), num_microbatches)
        if powers is None or self.powers not in (None, powers):
            return None
        self.powers, self.traced_in = powers, max(self.traced_in, num_microbatches)
        return with_own_literals(cut, powers, num_microbatches)


_found: KeptWithGraphs[_Found] = KeptWithGraphs()


def _cut(traced: TracedStep, whole: OpGraph, num_microbatches: int, rules: RuleBook) -> tuple[OpGraph, _Found]:
    """The graph of a micro-batch, cut out of that of the whole batch, and what is known of it by other numbers.

    Raises: UnsupportedError.
    """
    first = len(whole.block.inputs) - len(traced.in_avals)
    inputs = {first + i: dim for i, dim in example_leaves(traced).items()}
    found = _found.of(whole, (tuple(inputs.items()), traced.per_microbatch), _Found)
    if found.dims is None or not found.dims.hold_in(num_microbatches):
        found.along(cut_dims(whole, inputs, num_microbatches, traced.name))
    assert found.dims is not None, "they are found"
    part = cut_along(whole, found.dims, num_microbatches, rules, traced.name)
    return mark_score_kernels(part), found


def _traced_part(traced: TracedStep, num_microbatches: int, rules: RuleBook) -> tuple[TracedStep, OpGraph]:
    """The trace of a micro-batch (on two or three examples for one), and its graph with the whole batch's literals.

    Raises: UnsupportedError where it is not like that of the whole batch.
    """
    part, smaller = like_whole(traced, num_examples(traced) // num_microbatches)
    return smaller, build_graph(part, rules)


def _of_neither(
    traced: TracedStep, unlike: UnsupportedError, cut_error: UnsupportedError | None, is_cut: bool
) -> UnsupportedError:
    """The error of a step that is unlike its trace on a micro-batch; `cut_error`: of the micro-batch that `is_cut`, or
    that cannot be cut.
    """
    if cut_error is None or (traced.per_microbatch and isinstance(cut_error, MixedExamplesError)):
        return unlike  # the literals of a micro-batch are those of its trace
    if is_cut:
        return cut_error
    return UnsupportedError(
        where=unlike.where, expected=unlike.expected, got=unlike.got,
        hint=f"{unlike.hint} (nor can the whole batch's operations be cut: {cut_error.where}: {cut_error.got})",
    )  # fmt: skip


def _of_both(
    traced: TracedStep,
    whole: OpGraph,
    part: OpGraph,
    num_microbatches: int,
    rules: RuleBook,
    found: _Found | None = None,
) -> OpGraph:
    """The graph over micro-batches, of those of the whole batch and of a micro-batch, where this one is cut by what was
    `found`. Raises: UnsupportedError.
    """
    whole, part = split_known_results(*hoist_draws(whole, part))
    follower = Follower(whole, part, num_microbatches, body_states=body_states)
    try:
        return _over_micro_batches(traced, whole, follower, rules, found)
    except MixedExamplesError as error:
        blocks = math.lcm(*follower.wanted_blocks)
        if blocks == 1 or num_examples(traced) % (blocks * num_microbatches):
            raise
        # A loss that is written out over chunks of the batch: a micro-batch has a part of each chunk.
        in_blocks = Follower(whole, part, num_microbatches, body_states=body_states, blocks=blocks)
        try:
            return _over_micro_batches(traced, whole, in_blocks, rules)
        except UnsupportedError:
            raise error from None


def _accumulated(
    traced: TracedStep,
    own: OpGraph,
    whole: OpGraph,
    num_microbatches: int,
    rules: RuleBook,
    found: _Found | None = None,
) -> OpGraph:
    """The graph of a step whose named modules are taken per micro-batch, from the micro-batch's own program, where this
    is the one that is cut by what was `found`, but for literals.
    """
    check_patterns(traced, whole)
    whole, part = split_known_results(*hoist_draws(whole, own))
    follower = AccumulatingFollower(
        whole=whole,
        part=part,
        num_microbatches=num_microbatches,
        body_states=body_states,
        patterns=traced.per_microbatch,
    )
    graph = _over_micro_batches(traced, whole, follower, rules, found)
    # Which examples share a micro-batch matters: those that stand beside one another, as in a user's own loop.
    return dataclasses.replace(graph, per_microbatch=tuple(sorted(follower.mixing)), runs_of_examples=1)


def _over_micro_batches(
    traced: TracedStep, whole: OpGraph, follower: Follower, rules: RuleBook, found: _Found | None = None
) -> OpGraph:
    """The graph over micro-batches, of the graphs of the whole batch and of one micro-batch, by what was `found` in
    another number of them where that holds.
    """
    if found is not None and (known := found.followed_by(whole, follower)) is not None:
        return _written(*known, follower, rules)
    if found is None:
        _check_same_operations(traced.name, whole.block, follower.part.block)
    num_constants = len(whole.block.inputs) - len(traced.in_avals)
    examples = {num_constants + i: dim for i, dim in example_leaves(traced).items()}
    states = find_states(whole, follower.part, follower, examples)
    sections = LoopSections(traced.name, states.whole, states, follower.num_microbatches)
    graph = _written(states, sections, follower, rules)
    if found is not None:
        found.keep(states, sections, follower)
    return graph


def _written(states: ValueStates, sections: LoopSections, follower: Follower, rules: RuleBook) -> OpGraph:
    whole, num_microbatches = states.whole, follower.num_microbatches
    writer = LoopWriter(whole, states.part, follower, states, sections)
    outputs = tuple(writer.through(a) for a in whole.block.outputs)
    block = with_rules(replace(whole.block, ops=writer.ops(), outputs=outputs), rules)
    micro_batched_graph = dataclasses.replace(
        whole,
        values=tuple(writer.values),
        block=block,
        num_microbatches=num_microbatches,
        runs_of_examples=follower.runs,
    )
    return renumbered(micro_batched_graph)


def _check_same_operations(step_name: str, block: Block, part: Block) -> None:
    """Raises: UnsupportedError."""
    is_same = (block.inputs, _numbers(block.outputs), len(block.ops)) == (
        part.inputs, _numbers(part.outputs), len(part.ops)
    )  # fmt: skip
    for a, b in zip(block.ops, part.ops, strict=False):
        is_same = is_same and (a.kind, a.primitive, a.outputs) == (b.kind, b.primitive, b.outputs)
        is_same = is_same and _numbers(a.inputs) == _numbers(b.inputs)
        for x, y in zip(a.blocks, b.blocks, strict=False):
            _check_same_operations(step_name, x, y)
    if not is_same:
        raise UnsupportedError(
            where=step_name,
            expected="the same operations for a micro-batch as for the whole batch",
            got="others",
            hint="do not let Python branch on the number of examples, or take micro-batches of two examples",
        )


def _numbers(atoms: Sequence[Atom]) -> tuple[int | None, ...]:
    return tuple(a if isinstance(a, int) else None for a in atoms)
