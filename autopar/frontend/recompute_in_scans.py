"""Rematerialisation inside of scans over layers: the backward pass computes values again instead of reading them.

A scan over layers stacks what the scan that goes back over it reads. Some of it is saved, as
`jax.checkpoint(layer, policy=...)` round the body does, on the devices or in the memory of the hosts: the layer's input
and what is named are stacked, the rest is computed again from them in the turn that reads it. What the code computes
again for a policy of its own is found by its equations, and is kept where this one keeps it. Source: Chen et al.,
"Training deep nets with sublinear memory cost", arXiv:1604.06174.
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.errors import PlanMismatchError, UnsupportedError
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Role, Value, has_effects, read_by, walk
from autopar.ir.primitives import ATTENTION_PASSES, MATRIX_PRODUCTS
from autopar.ir.rewrite import Fresh, clone, missing, named, reading, remove_dead, renumbered
from autopar.ir.rules import equation_key
from autopar.ir.scan_pairs import JoinedBodies, with_joined_scans
from autopar.ops.kernels.local import runs_locally


class Recompute(enum.StrEnum):
    """The forward operations that the backward pass of a layer recomputes."""

    NOTHING = "nothing"  # all that the backward pass reads is kept
    CHEAP = "matmuls"  # results of matrix products are kept, the rest is computed again
    HALF = "half matmuls"  # as CHEAP, but of the layer's products with weights each second one is computed again too
    ALL = "input"  # only what enters the layer is kept


def is_product(op: Op) -> bool:
    """Whether it is a matrix product or a convolution, or a loop with one inside."""
    return op.primitive in MATRIX_PRODUCTS or any(is_product(inner) for block in op.blocks for inner in walk(block))


def is_kept(op: Op) -> bool:
    """Whether results are kept where only cheap ones are computed again: of products, of kernels, and of attention,
    whose result is a product's and which has no scores to keep.
    """
    return is_product(op) or op.primitive in ATTENTION_PASSES or runs_locally(op.eqn)


def is_plain_product(op: Op) -> bool:
    """Whether it is a product of two matrices, of which none comes in a batch."""
    if op.primitive != "dot_general":
        return op.primitive in MATRIX_PRODUCTS and op.primitive != "ragged_dot_general"
    _, (batch, _) = op.eqn.params["dimension_numbers"]
    return not batch


@dataclasses.dataclass(frozen=True, slots=True)
class SavedValues:
    """The values of a layer's forward pass that its backward pass reads: `kept` on the devices, or `in_host`, in the
    memory of their hosts. The others that it needs are computed again. All inputs of the layer are kept that are not in
    the memory of the hosts.
    """

    kept: frozenset[int] = frozenset()
    in_host: frozenset[int] = frozenset()


# The bodies of two scans, of which nothing is computed again, and all values -> what is saved; None: all that is read.
Choice = Callable[[JoinedBodies, Sequence[Value]], SavedValues | None]
BY_VALUE = "values "  # what a text begins with that names values
IN_HOST = "host"  # stands in front of values in the memory of the hosts


def by_policy(policy: Recompute) -> Choice:
    """What a policy saves of each layer."""

    def saved(joined: JoinedBodies, _: Sequence[Value]) -> SavedValues | None:
        if policy in (Recompute.NOTHING, Recompute.ALL):
            return None if policy is Recompute.NOTHING else SavedValues()
        kept = [op for op in joined.forward if is_kept(op)]
        again = [op.id for op in joined.forward if is_plain_product(op)][1::2] if policy is Recompute.HALF else []
        return SavedValues(kept=frozenset(v for op in kept if op.id not in again for v in op.outputs))

    return saved


def places_of(joined: JoinedBodies) -> dict[str, int]:
    """The values of a layer's forward pass, by their places in it: `input0` of what is carried, `12.1` the second
    result of its operation 12.
    """
    results = {f"{i}.{k}": v for i, op in enumerate(joined.forward) for k, v in enumerate(op.outputs)}
    return {f"input{i}": v for i, v in enumerate(joined.carried)} | results


def name_of(joined: JoinedBodies) -> str:
    """A short name of what the forward pass of a layer computes, whatever its sizes: that of layers whose places mean
    the same, as of the parts of one scan.
    """
    return f"{zlib.crc32(' '.join(op.primitive for op in joined.forward).encode()):x}"


def text_of_saved(saved: Mapping[str, tuple[Iterable[str], Iterable[str]]]) -> str:
    """What layers save, by their names: the places kept on the devices, and those in the memory of the hosts. As plans
    have it: `values 5f3a: input0 12.0 host 14.1; 90bc: input0 host`.
    """
    return BY_VALUE + "; ".join(f"{name}: {' '.join([*kept, IN_HOST, *host])}" for name, (kept, host) in saved.items())


def is_by_value(text: str) -> bool:
    """Whether a policy, or a text, names values."""
    return f"{text} ".startswith(BY_VALUE)


def saves_inputs_alone(text: str) -> bool:
    """Whether a text, or a policy, saves of each layer nothing but what enters it, on the devices or elsewhere."""
    return text == Recompute.ALL.value or (text.startswith(BY_VALUE) and "." not in text)


def choice_of(text: str) -> Choice:
    """The choice of a text of `text_of_saved`, or of a policy.

    Raises: PlanMismatchError for a text that is none. The choice raises UnsupportedError for a layer that it does not
    name, such as one of a micro-batch that is traced and then has other operations.
    """
    if not text.startswith(BY_VALUE):
        known = [policy.value for policy in Recompute]
        if text not in known:
            raise PlanMismatchError(
                where=_WHERE, expected=" or ".join(map(repr, [*known, BY_VALUE + "..."])), got=repr(text), hint=_HINT
            )
        return by_policy(Recompute(text))
    layers = dict(layer.partition(": ")[::2] for layer in text.removeprefix(BY_VALUE).split("; "))

    def saved(joined: JoinedBodies, _values: Sequence[Value]) -> SavedValues:
        value_at, name = places_of(joined), name_of(joined)
        kept, _, in_host = layers.get(name, "").partition(IN_HOST)
        unknown = [place for place in (*kept.split(), *in_host.split()) if place not in value_at]
        if unknown or name not in layers:
            got = ", ".join(unknown) or f"layers {', '.join(layers)}"
            raise UnsupportedError(
                where=_WHERE, expected=f"places of values of the layer {name} of a scan", got=got, hint=_HINT
            )
        return SavedValues(*(frozenset(value_at[place] for place in places.split()) for places in (kept, in_host)))

    return saved


_WHERE, _HINT = "$.plan.scan_recompute", "plan anew: the step is another one, or its micro-batches are"


def recompute_in_scans(graph: OpGraph, choose: Choice, *, all_kept: bool = False) -> OpGraph:
    """The graph with what `choose` saves of the bodies of its scans, in place of what the code saves; the same graph
    where nothing changes.

    `all_kept` takes recomputation out of the rest of the step too. The same equations are run on the same operands:
    random numbers are functions of their key. Values in the memory of the hosts are named by equations without a rule.
    """
    rewriter = _Rewriter(choose, Fresh(graph), all_kept)
    block = rewriter.in_block(graph.block, _Equal({}, {}))
    if not rewriter.has_changed:
        return graph
    values = tuple(rewriter.fresh.values)
    return renumbered(dataclasses.replace(graph, values=values, block=remove_dead(block)))


class _Rewriter:
    """Rewrites blocks by a choice. `has_changed`: whether any was."""

    def __init__(self, choose: Choice, fresh: Fresh, all_kept: bool) -> None:
        self.choose, self.fresh, self.all_kept, self.has_changed = choose, fresh, all_kept, False

    def in_block(self, block: Block, around: _Equal) -> Block:
        """A block, of whose inputs `around` knows those that are values around it."""
        here = around.copy()
        for op in block.ops:
            here.enter(op)
        ops = [
            replace(op, blocks=tuple(self.in_block(body, here.inside(op, body)) for body in op.blocks))
            if op.blocks
            else op
            for op in block.ops
        ]

        def in_scans(first: Op, second: Op, joined: JoinedBodies) -> JoinedBodies | None:
            if (first.role, second.role) != (Role.FORWARD, Role.BACKWARD):
                return None  # of two forward passes, or of an update, nothing is saved for gradients
            known = here.inside(second, second.blocks[0])
            known.numbers.update(here.inside(first, first.blocks[0]).numbers)
            return self.in_scans(joined, known)

        block = with_joined_scans(replace(block, ops=tuple(ops)), self.fresh, in_scans)
        if not self.all_kept:
            return block
        kept = _with_all_kept(block, around.copy())
        self.has_changed |= kept is not block
        return kept

    def in_scans(self, joined: JoinedBodies, known: _Equal) -> JoinedBodies | None:
        """The bodies of two scans: all that the code computes again is kept, but for what is chosen otherwise."""
        kept = dataclasses.replace(joined, block=_with_all_kept(joined.block, known))
        saved = self.choose(kept, self.fresh.values)
        again = self.saving(kept, saved) if saved is not None else None
        if again is None and kept.block is joined.block:
            return None
        self.has_changed = True
        return again or kept

    def saving(self, joined: JoinedBodies, saved: SavedValues) -> JoinedBodies | None:
        """The bodies with clones of forward operations where the second reads them, and what goes to the hosts after
        the operation that makes it.
        """
        ends = joined.block.outputs[len(joined.block.outputs) - joined.num_ends :]
        backward = [op for op in joined.block.ops if op.id not in joined.first]
        there = saved.kept | saved.in_host
        makers = {v: op for op in joined.forward if not is_never_again(op) for v in op.outputs if v not in there}
        sent = {v: self.fresh.copy_of(v) for v in saved.in_host}
        first = [self.sent(v, joined.forward[0], sent[v]) for v in joined.carried if v in sent]
        for op in joined.forward:
            first += [op, *(self.sent(v, op, sent[v]) for v in op.outputs if v in sent)]
        names, second = dict(sent), list[Op]()

        def make(value: int) -> None:
            for op in missing(value, makers, names):
                made: dict[int, int] = dict(names)
                second.append(replace(clone(op, made, self.fresh), role=Role.BACKWARD, recomputes=True))
                names.update({v: made[v] for v in op.outputs if v not in there})

        for op in backward:
            for v in sorted(read_by(op)):
                make(v)
            second.append(reading(op, names))
        for a in ends:
            if isinstance(a, int):
                make(a)
        if not names:
            return None
        starts = joined.block.outputs[: len(joined.block.outputs) - joined.num_ends]
        block = replace(joined.block, ops=(*first, *second), outputs=(*starts, *named(ends, names)))
        return dataclasses.replace(joined, block=block, first=frozenset(op.id for op in first))

    def sent(self, value: int, like: Op, name: int) -> Op:
        """The operation that names a value of the memory of the host, of the layer of another operation."""
        known = self.fresh.values[value]
        variables = (jax_compat.variable_of(known.shape, known.dtype, known.weak_type) for _ in range(2))
        eqn = jax_compat.in_host_memory(like.eqn, *variables)
        return Op(
            id=self.fresh.op_id(), kind=OpKind.EQUATION, primitive=eqn.primitive.name, eqn=eqn, inputs=(value,),
            outputs=(name,), rule=None, role=Role.FORWARD, module=like.module, count=like.count,
            key=equation_key(eqn), section=like.section, parameters=like.parameters,
        )  # fmt: skip


def is_never_again(op: Op) -> bool:
    """Whether an operation runs once: it has effects, or holds back those after it."""
    return has_effects(op) or op.kind is OpKind.BARRIER


@dataclasses.dataclass(frozen=True, slots=True)
class _Equal:
    """Values that equal equations make of equal operands: `numbers` of those that have an earlier equal, or are one of
    a block around theirs; `made`: results by equation and operands.
    """

    numbers: dict[int, int]
    made: dict[tuple[object, ...], tuple[int, ...]]

    def copy(self) -> _Equal:
        return _Equal(dict(self.numbers), dict(self.made))

    def of(self, value: int) -> int:
        return self.numbers.get(value, value)

    def inside(self, op: Op, body: Block) -> _Equal:
        """With the constants of a scan as its body has them."""
        found = self.copy()
        if op.kind is OpKind.SCAN:
            constants = zip(op.inputs[: op.num_consts], body.inputs, strict=False)
            found.numbers.update({inner: self.of(outer) for outer, inner in constants if isinstance(outer, int)})
        return found

    def enter(self, op: Op) -> tuple[int, ...] | None:
        """Enters an operation; returns what its results are equal to, where that is there."""
        if op.kind is OpKind.BARRIER:
            pairs = zip(op.inputs, op.outputs, strict=True)
            self.numbers.update({b: self.of(a) for a, b in pairs if isinstance(a, int)})
        elif op.kind is OpKind.EQUATION and op.key:
            operands = (self.of(a) if isinstance(a, int) else a.content for a in op.inputs)
            earlier = self.made.setdefault((op.key, *operands), op.outputs)
            if earlier is not op.outputs:
                self.numbers.update(zip(op.outputs, earlier, strict=True))
                return earlier
        return None


def _with_all_kept(block: Block, known: _Equal) -> Block:
    """The block without operations that compute again, for `jax.checkpoint`, what is there."""
    there = {known.of(v): v for v in reversed(block.inputs)}
    same: dict[int, int] = {}  # what is computed again: the value that it is
    ops: list[Op] = []
    for each in block.ops:
        op = reading(each, same)
        equal = known.enter(op)
        if equal is not None and op.recomputes and all(v in there for v in equal):
            same.update({out: there[v] for out, v in zip(op.outputs, equal, strict=True)})
            continue
        for v in op.outputs:
            there.setdefault(known.of(v), v)
        ops.append(op)
    if not same:
        return block
    return replace(block, ops=tuple(ops), outputs=named(block.outputs, same))
