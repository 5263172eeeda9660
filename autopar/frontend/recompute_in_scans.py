"""Rematerialisation inside of scans over layers: the backward pass computes values again instead of reading them.

A scan over layers stacks what the scan that goes back over it reads. A policy keeps some of it, as
`jax.checkpoint(layer, policy=...)` round the body does: the layer's input and what the policy names are stacked, the
rest is computed again from them in the turn that reads it. What the code computes again for such a policy of its own
is found by its equations, and is kept where this one keeps it. Source: Chen et al., "Training deep nets with sublinear
memory cost", arXiv:1604.06174.
"""

from __future__ import annotations

import dataclasses
import enum

from autopar.common.records import replaced
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Role, has_effects, read_by, walk
from autopar.ir.primitives import ATTENTION_PASSES, MATRIX_PRODUCTS
from autopar.ir.rewrite import Fresh, clone, named, reading, remove_dead, renumbered
from autopar.ir.scan_pairs import JoinedBodies, with_joined_scans
from autopar.kernels.local import runs_locally


class Recompute(enum.Enum):
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


def recompute_in_scans(graph: OpGraph, policy: Recompute) -> OpGraph:
    """The graph with recomputation by a policy in the bodies of its scans, in place of that of the code; the same graph
    where nothing changes.

    NOTHING takes recomputation out of the rest of the step too. The same equations are run on the same operands: random
    numbers are functions of their key.
    """
    rewriter = _Rewriter(policy, Fresh(graph))
    block = rewriter.in_block(graph.block, _Equal({}, {}))
    if not rewriter.has_changed:
        return graph
    values = tuple(rewriter.fresh.values)
    return renumbered(dataclasses.replace(graph, values=values, block=remove_dead(block)))


class _Rewriter:
    """Rewrites blocks by a policy. `has_changed`: whether any was."""

    def __init__(self, policy: Recompute, fresh: Fresh) -> None:
        self.policy, self.fresh, self.has_changed = policy, fresh, False

    def in_block(self, block: Block, around: _Equal) -> Block:
        """A block, of whose inputs `around` knows those that are values around it."""
        here = around.copy()
        for op in block.ops:
            here.enter(op)
        ops = [
            replaced(op, blocks=tuple(self.in_block(body, here.inside(op, body)) for body in op.blocks))
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

        block = with_joined_scans(dataclasses.replace(block, ops=tuple(ops)), self.fresh, in_scans)
        if self.policy is not Recompute.NOTHING:
            return block
        kept = _with_all_kept(block, around.copy())
        self.has_changed |= kept is not block
        return kept

    def in_scans(self, joined: JoinedBodies, known: _Equal) -> JoinedBodies | None:
        """The bodies of two scans: all that the code computes again is kept, but for what the policy computes again."""
        kept = dataclasses.replace(joined, block=_with_all_kept(joined.block, known))
        again = self.recomputed(kept) if self.policy is not Recompute.NOTHING else None
        if again is None and kept.block is joined.block:
            return None
        self.has_changed = True
        return again or kept

    def recomputed(self, joined: JoinedBodies) -> JoinedBodies | None:
        """The bodies with clones of forward operations before those of the second."""
        block = joined.block
        forward = [op for op in block.ops if op.id in joined.first]
        backward = [op for op in block.ops if op.id not in joined.first]
        kept = {op.id for op in forward if has_effects(op) or op.kind is OpKind.BARRIER}
        if self.policy is not Recompute.ALL:
            kept.update(op.id for op in forward if is_kept(op))
        if self.policy is Recompute.HALF:
            kept.difference_update([op.id for op in forward if is_plain_product(op)][1::2])
        makers = {v: op for op in forward if op.id not in kept for v in op.outputs}
        ends = block.outputs[len(block.outputs) - joined.num_ends :]
        read = {v for op in backward for v in read_by(op)} | {a for a in ends if isinstance(a, int)}
        needed: set[int] = set()
        stack = [v for v in read if v in makers]
        while stack:
            op = makers[stack.pop()]
            if op.id not in needed:
                needed.add(op.id)
                stack += [v for v in read_by(op) if v in makers]
        if not needed:
            return None
        names: dict[int, int] = {}
        clones = [
            replaced(clone(op, names, self.fresh), role=Role.BACKWARD, recomputes=True)
            for op in forward
            if op.id in needed
        ]
        starts = block.outputs[: len(block.outputs) - joined.num_ends]
        ops = (*forward, *clones, *(reading(op, names) for op in backward))
        outputs = (*starts, *named(ends, names))
        return dataclasses.replace(joined, block=dataclasses.replace(block, ops=ops, outputs=outputs))


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
    return dataclasses.replace(block, ops=tuple(ops), outputs=named(block.outputs, same))
