"""The graph of a training step over micro-batches, with the results of the whole batch.

The graph of a micro-batch is cut out of that of the whole batch (`cut_graph`); where it cannot be, the step is traced
on a micro-batch. Each value of the whole step is, in terms of the micro-batches, the same in all of them, the
concatenation of their values, or the sum of their values (`value_states`). Literals are those of the whole batch, so no
sum needs a factor. Each operation then runs before the loop over micro-batches, in it, or after it (`loop_sections`). A
step whose examples depend on one another is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

from autopar.attention.score_kernels import mark_score_kernels
from autopar.common.records import replaced
from autopar.errors import BatchMismatchError, InvalidArgumentError, MixedExamplesError, UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Role, Section, Value, read_by
from autopar.ir.rewrite import renumbered
from autopar.ir.traced_step import TracedStep
from autopar.microbatch.accumulation import AccumulatingFollower, check_patterns
from autopar.microbatch.alignment import with_literals_of
from autopar.microbatch.cut_graph import cut_graph
from autopar.microbatch.forms import Form, State
from autopar.microbatch.hoist_draws import hoist_draws
from autopar.microbatch.island_states import body_states
from autopar.microbatch.known_results import split_known_results
from autopar.microbatch.loop_sections import LoopSections
from autopar.microbatch.microbatch_analysis import Follower, is_heavy
from autopar.microbatch.running_state import UpdateWriter
from autopar.microbatch.smaller_step import example_leaves, num_examples, smaller_step
from autopar.microbatch.value_states import ValueStates, find_states
from autopar.microbatch.written_operations import one_equation, scaling
from autopar.sharding.rules import RuleBook, with_rules

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


def micro_batched(
    traced: TracedStep,
    num_microbatches: int,
    rules: RuleBook,
    whole: OpGraph | None = None,
    on_fewer: Callable[[TracedStep, int], TracedStep] = smaller_step,
) -> OpGraph:
    """The graph of a step whose batch is split into `num_microbatches`.

    `whole` is the graph of the whole batch, if it is built already; `on_fewer` gives the step on a number of examples,
    as `SmallerSteps` does for several numbers. Inputs and outputs are those of the whole step.
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
    if traced.per_microbatch:
        return _per_microbatch(traced, whole, num_microbatches, rules)
    cut_error: UnsupportedError
    try:
        part = _cut(traced, whole, num_microbatches, rules)
    except UnsupportedError as error:
        cut_error, is_cut = error, False
    else:
        try:
            found = _of_both(traced, whole, part, num_microbatches, rules)
            return _with_all_in_loop(found, traced, whole, rules, on_fewer)
        except UnsupportedError as error:  # by a trace, other dimensions may be those of the examples
            cut_error, is_cut = error, True
    try:
        _, part = _traced_part(traced, num_microbatches, rules, on_fewer)
    except UnsupportedError as unlike:
        raise (cut_error if is_cut else _neither(unlike, cut_error)) from None
    return _of_both(traced, whole, part, num_microbatches, rules)


def _with_all_in_loop(
    found: OpGraph,
    traced: TracedStep,
    whole: OpGraph,
    rules: RuleBook,
    on_fewer: Callable[[TracedStep, int], TracedStep],
) -> OpGraph:
    """The graph that was found, or that of a trace on a micro-batch where that leaves no work on all examples out of
    the loop: what indices of random rows read has the size of the whole batch where it is cut.
    """
    examples, first = num_examples(traced), len(found.block.inputs) - len(traced.in_avals)
    batch = [first + i for i in example_leaves(traced)]
    if not works_on_all_at_once(found, examples, batch):
        return found
    try:
        _, part = _traced_part(traced, found.num_microbatches, rules, on_fewer)
        by_trace = _of_both(traced, whole, part, found.num_microbatches, rules)
    except UnsupportedError:
        return found
    return found if works_on_all_at_once(by_trace, examples, batch) else by_trace


def _cut(traced: TracedStep, whole: OpGraph, num_microbatches: int, rules: RuleBook) -> OpGraph:
    """The graph of a micro-batch, cut out of that of the whole batch. Raises: UnsupportedError."""
    first = len(whole.block.inputs) - len(traced.in_avals)
    inputs = {first + i: dim for i, dim in example_leaves(traced).items()}
    part = cut_graph(whole, inputs, num_microbatches, rules, traced.name)
    return part if traced.blockwise_attention else mark_score_kernels(part)


def _traced_part(
    traced: TracedStep,
    num_microbatches: int,
    rules: RuleBook,
    on_fewer: Callable[[TracedStep, int], TracedStep],
) -> tuple[TracedStep, OpGraph]:
    """The trace of a micro-batch, and its graph with the literals of the whole batch.

    Raises: UnsupportedError where it is not like that of the whole batch.
    """
    smaller = on_fewer(traced, num_examples(traced) // num_microbatches)
    jaxpr = with_literals_of(traced.jaxpr, smaller.jaxpr, traced.name)
    constants = tuple(a if a.shape == b.shape else b for a, b in zip(traced.constants, smaller.constants, strict=True))
    return smaller, build_graph(dataclasses.replace(smaller, jaxpr=jaxpr, constants=constants), rules)


def _neither(unlike: UnsupportedError, cut_error: UnsupportedError) -> UnsupportedError:
    """The error of a step that is neither like its trace on a micro-batch nor can be cut."""
    return UnsupportedError(
        where=unlike.where, expected=unlike.expected, got=unlike.got,
        hint=f"{unlike.hint} (nor can the whole batch's operations be cut: {cut_error.where}: {cut_error.got})",
    )  # fmt: skip


def _of_both(traced: TracedStep, whole: OpGraph, part: OpGraph, num_microbatches: int, rules: RuleBook) -> OpGraph:
    """The graph over micro-batches, of those of the whole batch and of a micro-batch. Raises: UnsupportedError."""
    whole, part = split_known_results(*hoist_draws(whole, part))
    follower = Follower(whole, part, num_microbatches, body_states=body_states)
    try:
        return _over_micro_batches(traced, whole, follower, rules)
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


def _per_microbatch(traced: TracedStep, whole: OpGraph, num_microbatches: int, rules: RuleBook) -> OpGraph:
    """The graph of a step with named modules that may mix the examples of a micro-batch."""
    unlike: UnsupportedError | None = None
    try:
        smaller, part = _traced_part(traced, num_microbatches, rules, smaller_step)
    except UnsupportedError as error:
        if not traced.is_pure():  # what the whole batch's trace holds may have been meant for its examples alone
            raise
        unlike = error
        try:
            part = _cut(traced, whole, num_microbatches, rules)
        except UnsupportedError as cut_error:
            raise _neither(error, cut_error) from cut_error
    try:
        return _of_both(traced, whole, part, num_microbatches, rules)
    except MixedExamplesError:
        if unlike is not None:  # the literals of a micro-batch are those of its trace
            raise unlike from None
    return _accumulated(traced, smaller, whole, num_microbatches, rules)


def _accumulated(
    traced: TracedStep, smaller: TracedStep, whole: OpGraph, num_microbatches: int, rules: RuleBook
) -> OpGraph:
    """The graph of a step whose named modules are taken per micro-batch, with the literals of a micro-batch."""
    check_patterns(traced, whole)
    whole, part = split_known_results(*hoist_draws(whole, build_graph(smaller, rules)))
    follower = AccumulatingFollower(
        whole=whole,
        part=part,
        num_microbatches=num_microbatches,
        body_states=body_states,
        patterns=traced.per_microbatch,
    )
    graph = _over_micro_batches(traced, whole, follower, rules)
    # Which examples share a micro-batch matters: those that stand beside one another, as in a user's own loop.
    return dataclasses.replace(graph, per_microbatch=tuple(sorted(follower.mixing)), runs_of_examples=1)


def _over_micro_batches(traced: TracedStep, whole: OpGraph, follower: Follower, rules: RuleBook) -> OpGraph:
    """The graph over micro-batches, of the graphs of the whole batch and of one micro-batch."""
    num_microbatches = follower.num_microbatches
    _check_same_operations(traced.name, whole.block, follower.part.block)
    num_constants = len(whole.block.inputs) - len(traced.in_avals)
    examples = {num_constants + i: dim for i, dim in example_leaves(traced).items()}
    states = find_states(whole, follower.part, follower, examples)
    whole, part = states.whole, states.part
    sections = LoopSections(traced.name, whole, states, follower.num_microbatches)
    writer = LoopWriter(whole, part, follower, states, sections)
    outputs = tuple(writer.through(a) for a in whole.block.outputs)
    block = with_rules(dataclasses.replace(whole.block, ops=writer.ops(), outputs=outputs), rules)
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
            hint="do not let Python branch on the number of examples",
        )


def _numbers(atoms: Sequence[Atom]) -> tuple[int | None, ...]:
    return tuple(a if isinstance(a, int) else None for a in atoms)
