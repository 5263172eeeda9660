"""State that modules taken per micro-batch update in the forward pass: running statistics, histories, counters.

A user's own loop hands such state from micro-batch to micro-batch (each call of `optax.MultiSteps`'s inner step does,
with Flax's `batch_stats`), so it is updated once for each, in order. What an update reads of its micro-batch, a mean
over examples say, leaves the loop stacked; the updates run one behind the other after it.

Not ordered so, but averaged over the micro-batches: state updated inside of a scan over layers, and state whose new
value the forward pass itself reads. What reads the old value has that of the step's beginning in every micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.ir.graph import Atom, Constant, Op, OpGraph, OpKind, Section, Value, read_by
from autopar.ir.rules import equation_key


def one_equation(
    function: Callable[[Any], Any], value: Value, source: Atom, target: int, like: Op, section: Section
) -> Op:
    """An operation of one equation on a value; its rule is not known yet."""
    aval = jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type)
    (eqn,) = jax_compat.open_jaxpr(jax.make_jaxpr(function)(aval)).eqns
    inputs = tuple(Constant(v) if isinstance(v, jax_compat.Literal) else source for v in eqn.invars)
    return Op(
        id=0, kind=OpKind.EQUATION, primitive=eqn.primitive.name, eqn=eqn, inputs=inputs, outputs=(target,), rule=None,
        role=like.role, module=like.module, count=1.0, key=equation_key(eqn), section=section,
    )  # fmt: skip


def scaling(source: Atom, target: int, value: Value, weight: float, like: Op, section: Section = Section.AFTER) -> Op:
    """The operation that multiplies a value; by default a sum of all micro-batches, behind the loop."""
    return one_equation(lambda x: x * weight, value, source, target, like, section)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateUpdates:
    """`ops`: the operations of the updates, by id. `results`: the new value of each state, by the value of the old."""

    ops: frozenset[int] = frozenset()
    results: Mapping[int, int] = dataclasses.field(default_factory=dict)


def state_updates(whole: OpGraph, part: OpGraph, permits: Callable[[Op], bool]) -> StateUpdates:
    """The operations between state and its new value in modules taken per micro-batch, which nothing else reads."""
    block, role = whole.block, whole.forward_role
    inputs, outputs = block.inputs, block.outputs

    def is_alike(op: Op) -> bool:
        return all(whole.values[v].shape == part.values[v].shape for v in (*read_by(op), *op.outputs))

    allowed = {
        op.id: op for op in block.ops
        if op.kind is OpKind.EQUATION and op.role is role and permits(op) and is_alike(op)
    }  # fmt: skip
    results = {inputs[i]: outputs[o] for i, o in whole.tied}
    while True:
        made_by = {v: op for op in allowed.values() for v in op.outputs}
        wanted = {v for v in results.values() if isinstance(v, int) and v in made_by}
        old = {v for v, new in results.items() if new in wanted}
        reads_old = set(old)
        for op in block.ops:
            if op.id in allowed and not reads_old.isdisjoint(read_by(op)):
                reads_old |= set(op.outputs)
        needed = set(wanted)
        for op in reversed(block.ops):
            if op.id in allowed and not needed.isdisjoint(op.outputs):
                needed |= set(read_by(op))
        chain = {op.id for op in allowed.values() if any(v in needed and v in reads_old for v in op.outputs)}
        others = {v for op in block.ops if op.id not in chain for v in read_by(op)}
        kept = {i: allowed[i] for i in chain if others.isdisjoint(allowed[i].outputs)}
        if kept.keys() == allowed.keys():
            break
        allowed = kept
    made = {v for op in allowed.values() for v in op.outputs}
    return StateUpdates(
        ops=frozenset(allowed), results={v: new for v, new in results.items() if isinstance(new, int) and new in made}
    )


def check_updates(whole: OpGraph, updates: StateUpdates, permits: Callable[[Op], bool]) -> None:
    """Raises: UnsupportedError for state whose new value would be another than that of a loop over micro-batches, and
    no mean either: overwritten without its old value, updated behind a branch, or the old value of such state.
    """
    block, forward = whole.block, whole.forward_role
    made_by = {v: op for op in block.ops for v in op.outputs}
    for i, o in whole.tied:
        old, new = block.inputs[i], block.outputs[o]
        if not isinstance(new, int) or new == old or updates.results.get(old) == new:
            continue
        name, maker = whole.values[old].name, made_by.get(new)
        if maker is None and new in updates.results:
            raise _no_loop(
                name, f"the old value of {whole.values[new].name}, of which each micro-batch makes a new one"
            )
        if maker is None or maker.role is not forward or not permits(maker):
            continue
        if maker.kind in (OpKind.COND, OpKind.WHILE):
            raise _no_loop(name, f"a new value behind a branch or a loop ({maker.primitive} in {maker.module})")
        if not _depends(block.ops, old, new):
            raise _no_loop(name, f"what {maker.module} makes of its examples alone, as a loop keeps of its last one")


def _depends(ops: Sequence[Op], old: int, new: int) -> bool:
    """Whether a value is made of another one."""
    reached = {old}
    for op in ops:
        if not reached.isdisjoint(read_by(op)):
            reached |= set(op.outputs)
    return new in reached


def _no_loop(name: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        where=f"{name}, per_microbatch",
        expected="state that modules taken per micro-batch update from its old value, by operations without branches",
        got=got,
        hint="return it as a metric, write jnp.where for the branch, or use num_microbatches=1",
    )


class UpdateWriter:
    """Writes the updates of state behind the loop, once for each micro-batch, in order."""

    def __init__(self, updates: StateUpdates, values: list[Value], num_microbatches: int) -> None:
        self._updates, self._values, self._num_microbatches = updates, values, num_microbatches
        self._stacked: dict[int, int] = {}  # what all micro-batches made of a value that an update reads

    def stack(self, v: int, micro: int, maker: Op) -> list[Op]:
        """The operations by which the micro-batches' values of v leave the loop, behind one another."""
        value = self._values[micro]
        row = self._new(value, (1, *value.shape))
        rows = self._new(value, (self._num_microbatches, *value.shape))
        self._stacked[v] = rows
        expand = one_equation(lambda x: jax.lax.expand_dims(x, (0,)), value, micro, row, maker, maker.section)
        leave = Op(
            id=0, kind=OpKind.STACK, primitive="stack_batch", eqn=None, inputs=(row,), outputs=(rows,), rule=None,
            role=maker.role, module=maker.module, count=1.0, section=Section.AFTER, dim=0,
        )  # fmt: skip
        return [replace(expand, count=maker.count), leave]

    def write(self, ops: Iterable[Op]) -> list[Op]:
        """The updates of all micro-batches, of the operations of one."""
        ops = list(ops)
        made: dict[int, int] = {}
        written: list[Op] = []
        for i in range(self._num_microbatches):
            rows = {v: self._row(rows, i, ops[0], written) for v, rows in self._stacked.items()}
            state = {v: made.get(new, v) for v, new in self._updates.results.items()}
            is_last = i == self._num_microbatches - 1
            made = {}
            for op in ops:
                named = rows | state | made
                inputs = tuple(named.get(a, a) if isinstance(a, int) else a for a in op.inputs)
                outs = op.outputs if is_last else tuple(self._new(self._values[v]) for v in op.outputs)
                made.update(zip(op.outputs, outs, strict=True))
                written.append(replace(op, inputs=inputs, outputs=outs, section=Section.AFTER))
        return written

    def _row(self, rows: int, i: int, like: Op, written: list[Op]) -> int:
        value = self._values[rows]
        one = self._new(value, (1, *value.shape[1:]))
        row = self._new(value, value.shape[1:])
        written += [
            one_equation(lambda x: jax.lax.slice_in_dim(x, i, i + 1), value, rows, one, like, Section.AFTER),
            one_equation(lambda x: jax.lax.squeeze(x, (0,)), self._values[one], one, row, like, Section.AFTER),
        ]
        return row

    def _new(self, like: Value, shape: tuple[int, ...] | None = None) -> int:
        shape = like.shape if shape is None else shape
        self._values.append(replace(like, id=len(self._values), name="", shape=shape))
        return len(self._values) - 1
