"""The state of each value of a step in micro-batches, determined operation by operation.

Operations that depend on no examples run before the loop. Operations that keep examples independent, or are linear in
sums, run in the loop. Operations that combine examples otherwise run after the loop, or the step is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, MutableMapping, Sequence

from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.common.paths import without_scan_parts
from autopar.errors import MixedExamplesError
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Role, read_by
from autopar.ir.rewrite import Fresh, clone, reading, scan_equation
from autopar.ir.rules import has_code
from autopar.passes.accumulation import shortest_name
from autopar.passes.forms import CombinesExamples, Form, State, of_stack, with_weights_of
from autopar.passes.hoist_draws import part_of_results
from autopar.passes.microbatch_analysis import Follower, is_heavy, is_number, is_work_on_examples, state_of

# A scan of the step as two: in the loop over micro-batches what works on examples, behind it what reads whole sums.
#
# Outside of scans, an operation that reads a sum over examples and is not linear in it runs behind the loop, on the sum
# of all micro-batches: the cast of a parameter's gradient to a narrower type, the root of a mean square that is
# returned. So does a metric that mixes examples otherwise, such as the largest activation. In the body of a scan over
# layers such operations become a scan of their own, the tail. The sums and the rows of examples that it reads are
# results of each trip of the scan that remains, so that their micro-batches are put together as those of any other
# result.


def apart(op: Op, late: Mapping[int, Mapping[int, State]], fresh: Fresh) -> tuple[Op, ...]:
    """The scan that remains, where something does, and its tail, which makes the results that are made of whole sums.

    Args:
        late: Of this scan, and of those in its body with a tail, the states of the values in the body, as
            `Follower.late` has them.
        fresh: Takes the new values.

    Raises: CombinesExamples where the tail would read examples, or what cannot be taken apart.
    """
    return _apart(op, late, fresh)[0]


def _apart(op: Op, late: Mapping[int, Mapping[int, State]], fresh: Fresh) -> tuple[tuple[Op, ...], dict[int, State]]:
    """The scans, and the stacks that the first one hands to the second, with their states."""
    states = dict(late[op.outputs[0]])
    op = _with_inner_tails(op, late, states, fresh)
    (body,), k, carried = op.blocks, op.num_consts, op.num_carry
    results = [*body.inputs[k : k + carried], *body.outputs[carried:]]
    waiting = [_is_late(atom, states) for atom in results]
    late_results = {v for v, waits in zip(op.outputs, waiting, strict=True) if waits}
    read = [a for a, waits in zip(body.outputs, waiting, strict=True) if waits]
    for inner in body.ops:
        if inner.kind is not OpKind.BARRIER and any(_is_late(v, states) for v in inner.outputs):
            read += inner.inputs
    outer = {*body.inputs[:k], *body.inputs[k + carried :]}  # the tail reads these itself
    of_micro_batches = [
        a
        for a in read
        if isinstance(a, int)
        and (states[a].form is Form.PARTIAL_SUM or (states[a].form is Form.SPLIT and a not in outer))
    ]
    sums = tuple(dict.fromkeys(of_micro_batches))
    stacks = tuple(fresh.value((op.trips, *v.shape), v.dtype, v.itemsize) for v in [fresh.values[s] for s in sums])
    stacked = [jax_compat.variable_of(v.shape, v.dtype, v.weak_type) for v in (fresh.values[s] for s in stacks)]
    summing = replace(
        op, eqn=op.eqn.replace(outvars=[*op.eqn.outvars, *stacked]), outputs=(*op.outputs, *stacks),
        blocks=(replace(body, outputs=(*body.outputs, *sums)),),
    )  # fmt: skip
    kept = {*op.outputs, *stacks} - late_results
    head = part_of_results(summing, kept)
    tail = part_of_results(_reading_sums(op, sums, stacks, fresh), late_results)
    if head is None or tail is None or _makes_examples(tail, states):
        causes = (s.cause for s in states.values() if s.form is Form.UNAVAILABLE and s.cause is not None)
        raise next(causes).plain()
    tail = replace(clone(tail, {}, fresh), outputs=tail.outputs)  # with values of its own but for the results
    stacked_states = {stack: of_stack(states[s]) for stack, s in zip(stacks, sums, strict=True)}
    return ((head, tail) if kept else (tail,)), stacked_states


def _with_inner_tails(
    op: Op, late: Mapping[int, Mapping[int, State]], states: MutableMapping[int, State], fresh: Fresh
) -> Op:
    """The scan with those scans of its body apart that have a tail themselves."""
    (body,), ops = op.blocks, list[Op]()
    for inner in body.ops:
        if inner.kind is OpKind.SCAN and inner.outputs[0] in late:
            scans, stacks = _apart(inner, late, fresh)
            states.update(stacks)
            ops += scans
        else:
            ops.append(inner)
    return replace(op, blocks=(replace(body, ops=tuple(ops)),))


def _is_late(atom: Atom, states: Mapping[int, State]) -> bool:
    """Whether a value is made of whole sums over examples."""
    return isinstance(atom, int) and states[atom].form is Form.UNAVAILABLE


def _reading_sums(op: Op, sums: tuple[int, ...], stacks: tuple[int, ...], fresh: Fresh) -> Op:
    """The scan that takes the sums over all micro-batches as slices, in the place of those that its body makes."""
    (body,) = op.blocks
    names = {s: fresh.copy_of(s) for s in sums}
    ops = tuple(reading(inner, names) for inner in body.ops)
    outputs = tuple(names.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return replace(
        op,
        id=fresh.op_id(),
        eqn=scan_equation(op, range(len(op.inputs)), [fresh.values[s] for s in sums]),
        inputs=(*op.inputs, *stacks),
        blocks=(Block(inputs=(*body.inputs, *names.values()), outputs=outputs, ops=ops),),
    )


def _makes_examples(tail: Op, states: Mapping[int, State]) -> bool:
    """Whether the body of the tail makes rows of examples, or carries them."""
    (body,) = tail.blocks
    carry = body.inputs[tail.num_consts : tail.num_consts + tail.num_carry]
    values = [*carry, *(v for op in body.ops for v in op.outputs)]
    return any(states[v].form in (Form.SPLIT, Form.OWN) for v in values if v in states)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueStates:
    """`of[v]` is the state of a value of the whole batch's graph. In `whole` and `part`, the graphs of the whole batch
    and of a micro-batch, a scan with a tail is two (see above).

    `passes[v]` is the value in front of the barrier behind which v is; `whole_operands[op]` are the positions of the
    operands that an operation in the loop reads of the whole batch.

    `different` are the positions of the operations of the top block of which no earlier one computes the same in the
    whole batch and in a micro-batch, of operands in the same states: such an earlier one has results in the same
    states. Where these hold in another number of micro-batches, so do all. Empty where that does not follow: scans with
    a tail, and examples in blocks, whose states depend on what other operations read.
    """

    whole: OpGraph
    part: OpGraph
    of: Mapping[int, State]
    passes: Mapping[int, int]
    whole_operands: Mapping[int, frozenset[int]]
    num_microbatches: int
    different: tuple[int, ...] = ()

    def in_other_number(self, whole: OpGraph, part: OpGraph, follower: Follower) -> ValueStates | None:
        """The same states, if they are those of another number of micro-batches too, whose `whole` and `part` have the
        same operations and the same dimensions cut.
        """
        of = with_weights_of(self.of, self.num_microbatches, follower.num_microbatches) if self.different else None
        if of is None:
            return None
        finder = _StateFinder(whole, part, follower)
        finder.states = dict(of)
        for position in self.different:
            op, of_part = whole.block.ops[position], part.block.ops[position]
            try:
                found = finder.results(op, of_part, finder.operands(op), may_defer=op.kind is OpKind.SCAN)
            except MixedExamplesError:
                return None
            if follower.late or found != [of[v] for v in op.outputs]:
                return None
        return dataclasses.replace(self, whole=whole, part=part, of=of, num_microbatches=follower.num_microbatches)


def find_states(
    whole: OpGraph, part: OpGraph, follower: Follower, inputs_with_examples: Mapping[int, int]
) -> ValueStates:
    """The states of all values. `inputs_with_examples` are positions of inputs, and the dimensions that count examples.

    Raises: MixedExamplesError when the result of one example depends on the others.
    """
    return _StateFinder(whole, part, follower).run(inputs_with_examples)


class _StateFinder:
    def __init__(self, whole: OpGraph, part: OpGraph, follower: Follower) -> None:
        self.whole, self.part, self.follower = whole, part, follower
        self.num_microbatches = follower.num_microbatches
        self.ops: tuple[list[Op], list[Op]] = ([], [])
        self.states: dict[int, State] = {}
        self.passes: dict[int, int] = {}
        self.tails: set[int] = set()  # scans of what was found to run behind the loop
        self.whole_operands: dict[int, frozenset[int]] = {}
        self.read_in_loop: set[int] = set()  # values that operations in the loop read, cut as their states say
        self.different: dict[Hashable, int] = {}  # of `ValueStates`, by what the states of results depend on

    @functools.cached_property
    def fresh(self) -> tuple[Fresh, Fresh]:
        """The values of both graphs."""
        return Fresh(self.whole), Fresh(self.part)

    def run(self, inputs_with_examples: Mapping[int, int]) -> ValueStates:
        for position, v in enumerate(self.whole.block.inputs):
            if position in inputs_with_examples:
                dim, outer = inputs_with_examples[position], self.follower.blocks
                self.states[v] = State(form=Form.SPLIT, dim=dim, outer=outer, early=True, cut=True)
            else:
                self.states[v] = self.follower.by_shape(v)
        for position, (op, part_op) in enumerate(zip(self.whole.block.ops, self.part.block.ops, strict=True)):
            states = self.operands(op)
            if op.kind is not OpKind.BARRIER:
                self.different.setdefault(self._class_of(op, part_op, states), position)
            self._add(op, part_op, states, may_defer=op.kind is OpKind.SCAN and self.num_microbatches > 1)
        whole, part = (
            dataclasses.replace(graph, block=replace(graph.block, ops=tuple(ops)))
            for graph, ops in zip((self.whole, self.part), self.ops, strict=True)
        )
        follows = not self.tails and all(s.outer == 1 for s in self.states.values())
        return ValueStates(
            whole=whole, part=part, of=self.states, passes=self.passes, whole_operands=self.whole_operands,
            num_microbatches=self.num_microbatches, different=tuple(self.different.values()) if follows else (),
        )  # fmt: skip

    def _class_of(self, op: Op, part: Op, states: Sequence[State]) -> Hashable:
        """Equal for equations whose results are in the same states."""
        if op.kind is not OpKind.EQUATION or op.id in self.follower.updates.ops:
            return op.id, *op.outputs
        code = id(op.eqn) if has_code(op.eqn) else None
        permission = self.follower.permission(op)
        return op.key, part.key, code, _arguments(op), _arguments(part), op.role, permission, *states

    def operands(self, op: Op) -> list[State]:
        return [state_of(a, self.states) for a in op.inputs]

    def results(self, op: Op, part: Op, states: list[State], may_defer: bool) -> list[State]:
        """The states of the results of an operation that is no barrier."""
        is_early = all(s.early for s in states) and not is_heavy(op)  # and made in front of the loop as it is
        self.follower.deferring, self.follower.late = may_defer and not is_early, {}
        return self._results(op, part, states)

    def _add(self, op: Op, part: Op, states: list[State], may_defer: bool = False) -> None:
        """Adds an operation of both graphs, or a scan and its tail, and the states of its results."""
        results = self._barrier(op, states) if op.kind is OpKind.BARRIER else self.results(op, part, states, may_defer)
        if op.outputs and op.outputs[0] in self.follower.late:
            late = self.follower.late
            try:
                pairs = [apart(scan, late, fresh) for scan, fresh in zip((op, part), self.fresh, strict=True)]
            except CombinesExamples as mixes:
                results = self._mixed(op, states, mixes)
            else:
                self._set_values()
                self.tails.add(pairs[0][-1].id)
                for scan, of_part in zip(*pairs, strict=True):
                    self._add(scan, of_part, self.operands(scan))
                return
        self.states.update(zip(op.outputs, results, strict=True))
        for added, ops in zip((op, part), self.ops, strict=True):
            ops.append(added)

    def _set_values(self) -> None:
        """Shows the follower the values that were added."""
        self.whole, self.part = (
            dataclasses.replace(graph, values=tuple(fresh.values))
            for graph, fresh in zip((self.whole, self.part), self.fresh, strict=True)
        )
        self.follower.whole, self.follower.part = self.whole, self.part

    def _barrier(self, op: Op, states: Sequence[State]) -> list[State]:
        """A barrier holds back only streamed values; the others are computed once, outside of the loop."""
        for atom, out in zip(op.inputs, op.outputs, strict=True):
            assert isinstance(atom, int), "a barrier lets values through, no literals"
            self.passes[out] = atom
            self.read_in_loop |= {atom, out}
        return [replace(s, cut=False) if s.streams else s for s in states]

    def _results(self, op: Op, part: Op, states: list[State]) -> list[State]:
        if op.id in self.follower.updates.ops:
            cause = CombinesExamples(op, "it updates state once for each micro-batch")
            return [State(form=Form.UNAVAILABLE, streams=False, cause=cause) for _ in op.outputs]
        if self.follower.stays_in_loop(op, part, states):
            if all(s.form is Form.INVARIANT for s in states):
                return self._of_own_literals(op, part, states)
            states = [replace(s, early=False, streams=True) for s in states]
        elif all(_is_known(s) for s in states):
            return self._known(op, part, states)
        states = self._in_blocks_of_others(op, states)
        late = [s for s in states if s.form is Form.UNAVAILABLE and not s.early]
        may_wait = self.follower.deferring or not late  # what reads late results in a scan can be deferred
        if any(s.form is Form.SPLIT and s.streams for s in states) and may_wait:
            return self._of_examples(op, part, states)
        return self._of_sums(op, part, states, bool(late))

    def _in_blocks_of_others(self, op: Op, states: list[State]) -> list[State]:
        """Cuts values that are known before the loop, such as masks that are drawn, into the blocks of the examples
        that an equation reads them beside, if nothing in the loop reads them otherwise.
        """
        wanted = {(s.dim, s.outer) for s in states if s.form is Form.SPLIT and s.streams and not s.uniform}
        if op.kind is not OpKind.EQUATION or len(wanted) != 1:
            return states
        ((dim, outer),) = wanted
        found = list(states)
        for i, (atom, s) in enumerate(zip(op.inputs, states, strict=True)):
            if not isinstance(atom, int) or s.form is not Form.SPLIT or not s.cut or s.streams or s.uniform:
                continue
            if s.outer != 1 or s.dim != dim or atom in self.read_in_loop:
                continue
            if self.whole.values[atom].shape[dim] % (outer * self.num_microbatches) == 0:
                found[i] = self.states[atom] = replace(s, outer=outer)
        return found

    def _known(self, op: Op, part: Op, states: list[State]) -> list[State]:
        """All operands are known before the first micro-batch."""
        if not is_heavy(op) and not any(s.cut for s in states):
            try:
                results = self.follower.follow(op, part, states, self.states)
                has_rows = any(s.of_batch for s in states) or (self.num_microbatches == 1 and _draws_rows(op))
                return [replace(s, early=True, of_batch=has_rows, streams=False) for s in results]
            except CombinesExamples:
                pass
        elif is_heavy(op) and any(s.form is Form.SPLIT or s.of_batch for s in states):  # for the examples of each
            split = State(form=Form.SPLIT)
            streamed = [replace(s, early=False, streams=True) if s.form is Form.SPLIT else s for s in states]
            return self._of_examples(op, part, [split if s.of_batch else s for s in streamed])
        zero = all(s.zero for s in states) and op.primitive in ("convert_element_type", "broadcast_in_dim", "reshape")
        known = self._of_batch(op) if any(s.of_batch for s in states) else map(self.follower.by_shape, op.outputs)
        return [replace(s, zero=zero) for s in known]

    def _of_batch(self, op: Op) -> list[State]:
        """Results that mix examples of the batch alone: made before the loop."""
        states = [self.follower.by_shape(v) for v in op.outputs]
        if self.num_microbatches > 1:
            return states
        has_rows = [bool(self.whole.values[v].shape) for v in op.outputs]
        return [replace(s, of_batch=rows) for s, rows in zip(states, has_rows, strict=True)]

    def _of_own_literals(self, op: Op, part: Op, states: list[State]) -> list[State]:
        """The literals of a micro-batch's program are read, where it is known how they follow the examples."""
        try:
            return self._followed(op, part, states, early=False, promote=False)
        except CombinesExamples:
            return self._known(op, part, states)

    def _of_examples(self, op: Op, part: Op, states: list[State]) -> list[State]:
        """Some operands hold examples."""
        early = all(s.early for s in states) and not is_heavy(op)
        try:
            return self._followed(op, part, states, early, promote=True)
        except CombinesExamples as mixes:
            if early:
                return self._of_batch(op)
            if self.num_microbatches == 1:
                return self._single(op, states)
            return self._mixed(op, states, mixes)

    def _of_sums(self, op: Op, part: Op, states: list[State], late: bool) -> list[State]:
        """Some operands are sums over examples, or known after the last micro-batch only."""
        early = all(s.early for s in states) and not is_heavy(op)
        updates = op.role is Role.UPDATE and any(s.form is not Form.INVARIANT for s in states)
        mixes = CombinesExamples(op, "it is not linear in a sum over examples")
        if not late and not updates:
            try:
                return self._followed(op, part, states, early, promote=False)
            except CombinesExamples as why:
                mixes = why
            if op.role is Role.BACKWARD and not early:
                try:
                    return self._followed(op, part, states, early, promote=True)
                except CombinesExamples:
                    pass
        if early:
            return [self.follower.by_shape(v) for v in op.outputs]
        if self.num_microbatches == 1 and not late and not updates:
            return self._single(op, states)
        return self._mixed(op, states, mixes)

    def _followed(self, op: Op, part: Op, states: list[State], early: bool, promote: bool) -> list[State]:
        """The results of an operation in the loop. `promote`: sums known before the loop are read as invariant."""
        read_whole = frozenset(
            i
            for i, (a, s) in enumerate(zip(op.inputs, states, strict=True))
            if promote and s.early and s.form is Form.PARTIAL_SUM and isinstance(a, int)
        )
        read = [State(form=Form.INVARIANT) if i in read_whole else s for i, s in enumerate(states)]
        self.follower.sharing = self.follower.may_share(read)
        results = self.follower.follow(op, part, read, self.states)
        self.whole_operands[op.id] = read_whole
        self.read_in_loop.update(read_by(op))
        return [replace(s, early=early, streams=True, cut=False) for s in results]

    def _single(self, op: Op, states: list[State]) -> list[State]:
        """With one micro-batch nothing is mixed: a result is the only part, or the only summand."""
        cause = _cause(CombinesExamples(op, "it combines examples"), states)
        forms = {a: s.form for a, s in zip(op.inputs, states, strict=True) if isinstance(a, int)}

        def state(v: int) -> State:
            if is_number(self.whole.values[v].dtype):
                return State(form=Form.PARTIAL_SUM, cause=cause)
            if self.whole.values[v].shape:
                return State(form=Form.SPLIT)
            maker = part_of_results(op, [v]) if op.kind is OpKind.SCAN else None
            if maker is not None and all(forms.get(a, Form.INVARIANT) is Form.INVARIANT for a in read_by(maker)):
                return State(form=Form.INVARIANT)  # such as a key that layers hand on
            return State(form=Form.UNAVAILABLE, streams=False, cause=cause)

        return [state(v) for v in op.outputs]

    def _mixed(self, op: Op, states: list[State], mixes: CombinesExamples) -> list[State]:
        """Runs after the loop, where it is neither work on all examples nor something that gradients go through.

        Raises: MixedExamplesError.
        """
        cause = _cause(mixes, states)
        values = [a for a in (*op.inputs, *op.outputs) if isinstance(a, int)]
        of_examples = any(not self.follower.same_shape(v) for v in values)
        is_work = is_heavy(op) if op.id in self.tails else is_work_on_examples(op)
        if self.num_microbatches > 1 and of_examples and is_work:
            beside = "" if cause.op is mixes.op else f", and {_place(op)} needs the result for each of them"
            raise MixedExamplesError(
                where=_place(cause.op),
                expected="a step that works on each example alone until it sums over them",
                got=f"{cause.op.primitive} mixes the examples of the batch ({cause.why}){beside}",
                hint=f"{_rule_of(cause.op)}use num_microbatches=1, or take what it needs of all examples from "
                f"the state or the batch{'' if op.role is Role.BACKWARD else _permission(cause.op)}",
            )
        return [State(form=Form.UNAVAILABLE, streams=False, cause=cause) for _ in op.outputs]


def _arguments(op: Op) -> tuple[Hashable, ...]:
    """The literals that an equation of a called function is given, which its key does not have."""
    return tuple(
        a.content
        for a, v in zip(op.inputs, op.eqn.invars, strict=True)
        if not isinstance(a, int) and not isinstance(v, jax_compat.Literal)
    )


def _is_known(state: State) -> bool:
    """Whether a value is known before the first micro-batch and is not split over the loop."""
    return state.early and (not state.streams or state.form is Form.INVARIANT)


def _draws_rows(op: Op) -> bool:
    """Whether a step makes examples of its own: random numbers, or rows of an array such as a replay buffer."""
    if op.primitive in ("gather", "dynamic_slice"):
        return any(isinstance(a, int) for a in op.inputs[1:])
    return op.primitive in ("random_bits", "random_gamma")


def _cause(mixes: CombinesExamples, states: Sequence[State]) -> CombinesExamples:
    """The first operation that combined examples, among those that this one depends on."""
    return next((s.cause for s in states if s.cause is not None and not s.early), mixes.plain())


def _place(op: Op) -> str:
    line = jax_compat.source_line(op.eqn)
    return f"{op.module or op.primitive} at {line}" if line else op.module or op.primitive


def _rule_of(op: Op) -> str:
    """What to do where an unknown kernel is only thought to mix examples."""
    if op.primitive not in ("pallas_call", "ffi_call"):
        return ""
    return 'give the kernel a rule that says which factor counts examples, autopar.kernel(fun, "b [d] -> b [d]"), or '


def _permission(op: Op) -> str:
    """What a user writes so that an operation before the loss may mix the examples of a micro-batch. For one that only
    gradients need this would be the mean of the micro-batches' means, which nobody means by a sum over a count.
    """
    module = without_scan_parts(op.module)
    named = f"search=autopar.Search(per_microbatch=({shortest_name(module)!r},))" if module else (
        "jax.named_scope('mixing') around it, and search=autopar.Search(per_microbatch=('mixing',))"
    )  # fmt: skip
    return f"; if statistics of each micro-batch are meant, which give other numbers than the whole batch's: {named}"
