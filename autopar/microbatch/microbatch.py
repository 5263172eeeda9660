"""The graph of a training step over micro-batches, with the results of the whole batch.

The step is traced on the whole batch and on one micro-batch. Each value of the whole step is, in terms of the
micro-batches, the same in all of them, the concatenation of their values, or the sum of their values
(`microbatch_analysis`). Literals are those of the whole batch, so no sum needs a factor. Each operation then runs
before the loop over micro-batches, in it, or after it. A step whose examples depend on one another is refused.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax

from autopar.common import jax_compat
from autopar.errors import BatchMismatchError, InvalidArgumentError, MixedExamplesError, UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Role, Section, Value, free_values
from autopar.ir.rewrite import renumbered
from autopar.ir.traced_step import TracedStep
from autopar.microbatch.alignment import with_literals_of
from autopar.microbatch.extrapolation import extrapolated
from autopar.microbatch.microbatch_analysis import Follower, Form, Mixes, State, is_number, state_of
from autopar.sharding.rules import RuleBook

_LOOPS = (OpKind.SCAN, OpKind.WHILE, OpKind.COND)
# What is not worth doing for the whole batch outside of the loop.
_HEAVY = frozenset({"dot_general", "conv_general_dilated", "triangular_solve", "cholesky", "lu", "qr", "eigh", "svd"})


def micro_batched(traced: TracedStep, num_microbatches: int, rules: RuleBook, whole: OpGraph | None = None) -> OpGraph:
    """The graph of a step that makes `num_microbatches` of its batch.

    `whole` is the graph of the whole batch, where it is there already. Inputs and outputs are those of the whole
    step. SPLIT, ACCUMULATE and STACK operations say what enters and leaves the loop; operations stand in the order of
    their sections.
    Raises: InvalidArgumentError for a number below one; BatchMismatchError when it does not divide the batch;
    MixedExamplesError when what is computed of an example depends on the others; UnsupportedError when the two traces
    differ in more than shapes.
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
        return _Cutting(traced, whole, whole, 1).graph()
    smaller = smaller_step(traced, examples // num_microbatches)
    jaxpr = with_literals_of(traced.jaxpr, smaller.jaxpr, traced.name)
    constants = tuple(a if a.shape == b.shape else b for a, b in zip(traced.constants, smaller.constants, strict=True))
    part = build_graph(dataclasses.replace(smaller, jaxpr=jaxpr, constants=constants), rules)
    return _Cutting(traced, whole, part, num_microbatches).graph()


def num_examples(traced: TracedStep) -> int:
    """The leading size that most leaves of the batch share (of several, the first)."""
    sizes = collections.Counter(traced.in_avals[i].shape[0] for i in sorted(traced.batch) if traced.in_avals[i].shape)
    if not sizes:
        raise BatchMismatchError(
            where=traced.name,
            expected="a batch with arrays whose first dimension counts examples",
            got="none",
            hint="name the argument that holds the batch in batch_argnums",
        )
    ((examples, _),) = sizes.most_common(1)
    if not examples:
        raise BatchMismatchError(
            where=traced.name,
            expected="a batch with examples, to be cut into micro-batches or to go through stages",
            got="an empty one",
            hint="skip empty batches, or run them as one program: plan=autopar.recipes.data_parallel()",
        )
    return examples


def example_leaves(traced: TracedStep) -> frozenset[int]:
    """The leaves of the batch that carry examples in their first dimension."""
    examples = num_examples(traced)
    return frozenset(i for i in traced.batch if traced.in_avals[i].shape[:1] == (examples,))


def smaller_step(traced: TracedStep, examples: int) -> TracedStep:
    """The step traced on fewer examples. The program of one follows from those of two and of three.

    Raises: UnsupportedError.
    """
    if examples > 1:
        return traced_at(traced, cut_avals(traced, examples))
    two, three = (traced_at(traced, cut_avals(traced, n)) for n in (2, 3))
    jaxpr = extrapolated(two.jaxpr, three.jaxpr, traced.name)
    out_avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars)
    return dataclasses.replace(two, jaxpr=jaxpr, in_avals=cut_avals(traced, 1), out_avals=out_avals)


def cut_avals(traced: TracedStep, examples: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the arguments with so many examples in place of the batch."""
    leaves = example_leaves(traced)
    return tuple(
        jax.ShapeDtypeStruct((examples, *a.shape[1:]), a.dtype, weak_type=a.weak_type) if i in leaves else a
        for i, a in enumerate(traced.in_avals)
    )


def traced_at(traced: TracedStep, in_avals: Sequence[jax.ShapeDtypeStruct]) -> TracedStep:
    """The step traced on other shapes.

    Raises: UnsupportedError when it cannot be.
    """
    try:
        closed = traced.retrace(in_avals)
    except Exception as error:  # the user's function may raise anything
        text = str(error).strip().split("\n")[0]
        line = jax_compat.line_of_error(error)
        raise UnsupportedError(
            where=f"{traced.name} at {line}" if line else traced.name,
            expected="a step that can be traced on fewer examples",
            got=f"{type(error).__name__}: {text}",
            hint="take sizes from the arrays rather than writing them into the step",
        ) from error
    jaxpr = jax_compat.open_jaxpr(closed)
    return dataclasses.replace(
        traced,
        jaxpr=jaxpr,
        constants=tuple(jax_compat.jaxpr_consts(closed)),
        in_avals=tuple(in_avals),
        out_avals=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars),
    )


class _Cutting:
    """Decides for each operation of the step where it runs, and writes the graph.

    `whole` and `part` are the graphs of the whole batch and of a micro-batch. A value has a whole, under its number in
    `whole`, and one for each micro-batch, under a new number unless it is the same.
    """

    def __init__(self, traced: TracedStep, whole: OpGraph, part: OpGraph, num_microbatches: int) -> None:
        self.traced, self.whole, self.part, self.m = traced, whole, part, num_microbatches
        self.follower = Follower(whole, part, num_microbatches)
        self._check_same_operations(whole.block, part.block)
        self.values: list[Value] = list(whole.values)
        self.states: dict[int, State] = {}
        self.passes: dict[int, int] = {}  # what a barrier lets through, and where it comes from
        self.whole_operands: dict[
            int, frozenset[int]
        ] = {}  # operands that a repeated operation reads as spmd_candidates
        self.before: set[int] = set()
        self.each: set[int] = set()
        self.after: set[int] = set()
        self.micro: dict[int, int] = {}

    def graph(self) -> OpGraph:
        self._find_states()
        self._find_needs()
        ops = self._write()
        outputs = tuple(self._through(a) for a in self.whole.block.outputs)
        block = dataclasses.replace(self.whole.block, ops=ops, outputs=outputs)
        cut = dataclasses.replace(
            self.whole,
            values=tuple(self.values),
            block=block,
            num_microbatches=self.m,
            runs_of_examples=self.follower.runs,
        )
        return renumbered(cut)

    def _check_same_operations(self, one: Block, other: Block) -> None:
        same = (one.inputs, _numbers(one.outputs), len(one.ops)) == (
            other.inputs, _numbers(other.outputs), len(other.ops)
        )  # fmt: skip
        for a, b in zip(one.ops, other.ops, strict=False):
            same = same and (a.kind, a.primitive, a.outputs) == (b.kind, b.primitive, b.outputs)
            same = same and _numbers(a.inputs) == _numbers(b.inputs)
            for x, y in zip(a.blocks, b.blocks, strict=False):
                self._check_same_operations(x, y)
        if not same:
            raise UnsupportedError(
                where=self.traced.name,
                expected="the same operations for a micro-batch as for the whole batch",
                got="others",
                hint="do not let Python branch on the number of examples",
            )

    # 1. What each value of a micro-batch is to that of the whole batch

    def _find_states(self) -> None:
        offset = len(self.whole.block.inputs) - len(self.traced.in_avals)
        carrying = {offset + i for i in example_leaves(self.traced)}
        for position, v in enumerate(self.whole.block.inputs):
            if position in carrying:
                self.states[v] = State(form=Form.SPLIT, early=True, cut=True)
            else:
                self.states[v] = self.follower.by_shape(v)
        for op, part in zip(self.whole.block.ops, self.part.block.ops, strict=True):
            states = [state_of(a, self.states) for a in op.inputs]
            results = self._barrier(op, states) if op.kind is OpKind.BARRIER else self._results(op, part, states)
            self.states.update(zip(op.outputs, results, strict=True))

    def _barrier(self, op: Op, states: Sequence[State]) -> list[State]:
        """Only what streams is held back by a barrier; the rest is computed elsewhere, once."""
        for atom, out in zip(op.inputs, op.outputs, strict=True):
            assert isinstance(atom, int), "a barrier lets values through, no literals"
            self.passes[out] = atom
        return [dataclasses.replace(s, cut=False) if s.streams else s for s in states]

    def _results(self, op: Op, part: Op, states: list[State]) -> list[State]:
        if all(_is_known(s) for s in states):
            return self._known(op, part, states)
        late = [s for s in states if s.form is Form.UNAVAILABLE and not s.early]
        if any(s.form is Form.SPLIT and s.streams for s in states) and not late:
            return self._of_examples(op, part, states)
        return self._of_sums(op, part, states, bool(late))

    def _known(self, op: Op, part: Op, states: list[State]) -> list[State]:
        """All operands are known before the first micro-batch."""
        if op.kind is OpKind.EQUATION and op.primitive not in _HEAVY and not any(s.cut for s in states):
            try:
                results = self.follower.follow(op, part, states, self.states)
                return [dataclasses.replace(s, early=True, streams=False) for s in results]
            except Mixes:
                pass
        zero = all(s.zero for s in states) and op.primitive in ("convert_element_type", "broadcast_in_dim", "reshape")
        return [dataclasses.replace(self.follower.by_shape(v), zero=zero) for v in op.outputs]

    def _of_examples(self, op: Op, part: Op, states: list[State]) -> list[State]:
        """Some operands hold examples."""
        early = all(s.early for s in states) and _is_light(op)
        try:
            return self._followed(op, part, states, early, promote=True)
        except Mixes as mixes:
            if early:
                return [self.follower.by_shape(v) for v in op.outputs]
            if self.m == 1:
                return self._single(op, states)
            return self._mixed(op, states, mixes)

    def _of_sums(self, op: Op, part: Op, states: list[State], late: bool) -> list[State]:
        """Some operands are sums over examples, or known after the last micro-batch only."""
        early = all(s.early for s in states) and _is_light(op)
        updates = op.role is Role.UPDATE and any(s.form is not Form.INVARIANT for s in states)
        mixes = Mixes(op, "it is not linear in a sum over examples")
        if not late and not updates:
            try:
                return self._followed(op, part, states, early, promote=False)
            except Mixes as why:
                mixes = why
            if op.role is Role.BACKWARD and not early:
                try:
                    return self._followed(op, part, states, early, promote=True)
                except Mixes:
                    pass
        if early:
            return [self.follower.by_shape(v) for v in op.outputs]
        if self.m == 1 and not late and not updates:
            return self._single(op, states)
        return self._mixed(op, states, mixes)

    def _followed(self, op: Op, part: Op, states: list[State], early: bool, promote: bool) -> list[State]:
        """Runs in the loop. `promote`: sums that are known before it are read as such."""
        spmd_candidates = frozenset(
            i
            for i, (a, s) in enumerate(zip(op.inputs, states, strict=True))
            if promote and s.early and s.form is Form.PARTIAL_SUM and isinstance(a, int)
        )
        read = [State(form=Form.INVARIANT) if i in spmd_candidates else s for i, s in enumerate(states)]
        results = self.follower.follow(op, part, read, self.states)
        self.whole_operands[op.id] = spmd_candidates
        return [dataclasses.replace(s, early=early, streams=True, cut=False) for s in results]

    def _single(self, op: Op, states: list[State]) -> list[State]:
        """With one micro-batch nothing is mixed: a result is the only part, or the only summand."""
        cause = _cause(Mixes(op, "it combines examples"), states)

        def state(v: int) -> State:
            if is_number(self.whole.values[v].dtype):
                return State(form=Form.PARTIAL_SUM, cause=cause)
            if self.whole.values[v].shape:
                return State(form=Form.SPLIT)
            return State(form=Form.UNAVAILABLE, streams=False, cause=cause)

        return [state(v) for v in op.outputs]

    def _mixed(self, op: Op, states: list[State], mixes: Mixes) -> list[State]:
        """Runs after the loop, where it is neither work on all examples nor something that gradients go through.

        Raises: MixedExamplesError.
        """
        cause = _cause(mixes, states)
        values = [a for a in (*op.inputs, *op.outputs) if isinstance(a, int)]
        of_examples = any(not self.follower.same_shape(v) for v in values)
        if self.m > 1 and of_examples and (not _is_light(op) or op.role is Role.BACKWARD):
            beside = "" if cause is mixes else f", and {_place(op)} needs the result for each of them"
            raise MixedExamplesError(
                where=_place(cause.op),
                expected="a step that works on each example alone until it sums over them",
                got=f"{cause.op.primitive} mixes the examples of the batch ({cause.why}){beside}",
                hint="use num_microbatches=1, or take what it needs of all examples from the state or the batch",
            )
        return [State(form=Form.UNAVAILABLE, streams=False, cause=cause) for _ in op.outputs]

    # 2. Which values are needed before the loop, in it, and after it

    def _find_needs(self) -> None:
        for atom in self.whole.block.outputs:
            self._need(atom, self.after)
        for op in reversed(self.whole.block.ops):
            if op.kind is OpKind.BARRIER:
                for v in op.outputs:
                    for needs in (self.before, self.after, self.each):
                        if v in needs:
                            self._need(self.passes[v], needs)
                continue
            for v in op.outputs:
                self._settle(v)
            if self._once(op) is Section.BEFORE:
                for atom in op.inputs:
                    self._need(atom, self.before)
            elif self._once(op) is Section.AFTER:
                for atom in op.inputs:
                    self._need(atom, self.after)
            if self._repeats(op):
                for i, atom in enumerate(op.inputs):
                    self._need(atom, self.before if i in self.whole_operands.get(op.id, ()) else self.each)
                self.each |= {v for block in op.blocks for v in free_values(block)}
        for v in self.whole.block.inputs:
            self._settle(v)

    def _need(self, atom: Atom, needs: set[int]) -> None:
        if isinstance(atom, int):
            needs.add(atom)

    def _settle(self, v: int) -> None:
        """What else must be there for a value to be where it is needed."""
        s = self.states[v]
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
                    where=self.traced.name,
                    expected="results that are sums over examples or have one row for each",
                    got=f"one of shape {self.whole.values[v].shape} {inside}",
                    hint="return it in another shape, or use num_microbatches=1",
                )
            self.each.add(v)

    def _once(self, op: Op) -> Section | None:
        """When an operation runs on the whole batch, if it does."""
        if not self.before.isdisjoint(op.outputs):
            return Section.BEFORE
        return Section.AFTER if any(v in self.after and not self.states[v].streams for v in op.outputs) else None

    def _repeats(self, op: Op) -> bool:
        return any(self._is_made_in_loop(v) for v in op.outputs)

    def _is_made_in_loop(self, v: int) -> bool:
        """Whether a value of each micro-batch is needed and comes from an operation in the loop."""
        s = self.states[v]
        if v not in self.each or s.cut or s.form is Form.UNAVAILABLE:
            return False
        return s.form is not Form.INVARIANT or not s.early

    # 3. The operations, section by section

    def _write(self) -> tuple[Op, ...]:
        by_section: dict[Section, list[Op]] = {section: [] for section in Section}
        made_in: dict[int, Section] = {}
        for v in self.whole.block.inputs:
            if v in self.each and self.states[v].cut:
                by_section[Section.BEFORE].append(self._split(v))
        for op, part in zip(self.whole.block.ops, self.part.block.ops, strict=True):
            if op.kind is not OpKind.BARRIER and (section := self._once(op)) is not None:
                inputs = tuple(self._through(a) for a in op.inputs)
                by_section[section].append(dataclasses.replace(op, inputs=inputs, section=section))
                cut = [v for v in op.outputs if v in self.each and self.states[v].cut]
                by_section[Section.BEFORE] += [self._split(v) for v in cut]
            if not self._repeats(op):
                continue
            repeated = self._repeated(op, part, made_in)
            by_section[repeated.section].append(repeated)
            made_in.update(dict.fromkeys(repeated.outputs, repeated.section))
            if op.kind is OpKind.BARRIER:
                continue
            for v in op.outputs:
                if v in self.after and v not in self.before and self.states[v].streams:
                    crossing = self._leave(v, repeated)
                    by_section[crossing.section].append(crossing)
        return tuple(op for section in Section for op in by_section[section])

    def _through(self, atom: Atom) -> Atom:
        """The whole of a value: barriers are in the loop only."""
        while isinstance(atom, int) and atom in self.passes:
            atom = self.passes[atom]
        return atom

    def _in_loop(self, atom: Atom) -> Atom:
        """A value as one micro-batch reads it."""
        if not isinstance(atom, int):
            return atom
        if atom in self.micro:
            return self.micro[atom]
        if atom in self.passes:
            return self._in_loop(self.passes[atom])
        assert self.states[atom].form is Form.INVARIANT, f"value {atom} is not there for a micro-batch"
        return atom

    def _new(self, v: int) -> int:
        """The number of what one micro-batch has of a value."""
        self.values.append(dataclasses.replace(self.part.values[v], id=len(self.values), name=""))
        self.micro[v] = len(self.values) - 1
        return self.micro[v]

    def _split(self, v: int) -> Op:
        self.follower.cuts(v, self.states[v])
        return Op(
            id=0, kind=OpKind.SPLIT, primitive="split_batch", eqn=None, inputs=(v,), outputs=(self._new(v),), rule=None,
            role=Role.FORWARD, module="", count=1.0, section=Section.BEFORE, dim=self.states[v].dim,
        )  # fmt: skip

    def _leave(self, v: int, maker: Op) -> Op:
        """A value leaves the loop: as a sum, or joined."""
        s = self.states[v]
        sums = s.form is Form.PARTIAL_SUM
        if not sums:
            self.follower.cuts(v, s)
        return Op(
            id=0, kind=OpKind.ACCUMULATE if sums else OpKind.STACK, primitive="accumulate" if sums else "stack_batch",
            eqn=None, inputs=(self.micro[v],), outputs=(v,), rule=None, role=maker.role, module=maker.module,
            count=maker.count if sums else 1.0, section=maker.section if sums else Section.AFTER, dim=s.dim,
        )  # fmt: skip

    def _repeated(self, op: Op, part: Op, made_in: dict[int, Section]) -> Op:
        """An operation as each micro-batch runs it."""
        spmd_candidates = self.whole_operands.get(op.id, frozenset())
        pairs = list(zip(part.inputs, part.outputs, strict=True)) if op.kind is OpKind.BARRIER else []
        if pairs:  # what does not stream goes around it
            pairs = [(a, v) for a, v in pairs if self._is_made_in_loop(v) and self.states[v].streams]
            part = dataclasses.replace(part, inputs=tuple(a for a, _ in pairs), outputs=tuple(v for _, v in pairs))
        inputs = tuple(
            self._through(a) if i in spmd_candidates else self._in_loop(a) for i, a in enumerate(part.inputs)
        )
        late = any(isinstance(a, int) and made_in.get(a) is Section.BACKWARD for a in inputs)
        return dataclasses.replace(
            part,
            inputs=inputs,
            outputs=tuple(self._new(v) for v in part.outputs),
            blocks=tuple(self._repeated_block(b) for b in part.blocks),
            count=op.count * self.m,
            section=Section.BACKWARD if late or op.role is Role.BACKWARD else Section.FORWARD,
        )

    def _repeated_block(self, block: Block) -> Block:
        """A block with values of its own, so that the whole batch's operation may stand beside the micro-batches'."""
        inputs = tuple(self._new(v) for v in block.inputs)
        ops = []
        for op in block.ops:
            blocks = tuple(self._repeated_block(b) for b in op.blocks)
            ins = tuple(self._in_loop(a) for a in op.inputs)
            outs = tuple(self._new(v) for v in op.outputs)
            ops.append(dataclasses.replace(op, inputs=ins, outputs=outs, blocks=blocks, count=op.count * self.m))
        return Block(inputs=inputs, outputs=tuple(self._in_loop(a) for a in block.outputs), ops=tuple(ops))


def _is_known(state: State) -> bool:
    """Whether a value is there before the first micro-batch, and not as examples that the loop goes over."""
    return state.early and (not state.streams or state.form is Form.INVARIANT)


def _is_light(op: Op) -> bool:
    return op.kind is OpKind.EQUATION and op.primitive not in _HEAVY


def _cause(mixes: Mixes, states: Sequence[State]) -> Mixes:
    """What first brought examples together, on the way to what does so here."""
    return next((s.cause for s in states if s.cause is not None and not s.early), mixes)


def _place(op: Op) -> str:
    line = jax_compat.source_line(op.eqn)
    return f"{op.module or op.primitive} at {line}" if line else op.module or op.primitive


def _numbers(atoms: Sequence[Atom]) -> tuple[int | None, ...]:
    return tuple(a if isinstance(a, int) else None for a in atoms)
