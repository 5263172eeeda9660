"""Rematerialisation inside of scans over layers: the backward pass computes values again instead of reading them.

A scan over layers stacks what the scan that goes back over it reads. A policy keeps some of it, as
`jax.checkpoint(layer, policy=...)` round the body does: the layer's input and what the policy names are stacked, the
rest is computed again from them in the turn that reads it. Source: Chen et al., "Training deep nets with sublinear
memory cost", arXiv:1604.06174.
"""

from __future__ import annotations

import dataclasses
import enum

from autopar.common.records import replaced
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Role, has_effects, read_by, walk
from autopar.ir.primitives import ATTENTION_PASSES, MATRIX_PRODUCTS
from autopar.ir.rewrite import Fresh, clone, reading, remove_dead, renumbered
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
    """The graph with recomputation in the bodies of its scans, the same one where nothing is computed again.

    Values come out the same again: random numbers are functions of their key.
    """
    fresh = Fresh(graph)
    block = _in_block(graph.block, policy, fresh)
    if len(fresh.values) == len(graph.values):
        return graph
    return renumbered(dataclasses.replace(graph, values=tuple(fresh.values), block=remove_dead(block)))


def _in_block(block: Block, policy: Recompute, fresh: Fresh) -> Block:
    ops = [
        replaced(op, blocks=tuple(_in_block(b, policy, fresh) for b in op.blocks)) if op.blocks else op
        for op in block.ops
    ]

    def rewrite(first: Op, second: Op, joined: JoinedBodies) -> JoinedBodies | None:
        return _recomputed(joined, policy, fresh)

    return with_joined_scans(dataclasses.replace(block, ops=tuple(ops)), fresh, rewrite)


def _recomputed(joined: JoinedBodies, policy: Recompute, fresh: Fresh) -> JoinedBodies | None:
    """The bodies with clones of forward operations before those of the second."""
    block = joined.block
    forward = [op for op in block.ops if op.id in joined.first]
    backward = [op for op in block.ops if op.id not in joined.first]
    kept = {op.id for op in forward if has_effects(op) or op.kind is OpKind.BARRIER}
    if policy is not Recompute.ALL:
        kept.update(op.id for op in forward if is_kept(op))
    if policy is Recompute.HALF:
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
        replaced(clone(op, names, fresh), role=Role.BACKWARD, recomputes=True) for op in forward if op.id in needed
    ]
    starts = block.outputs[: len(block.outputs) - joined.num_ends]
    again = tuple(names.get(a, a) if isinstance(a, int) else a for a in ends)
    ops = (*forward, *clones, *(reading(op, names) for op in backward))
    return dataclasses.replace(joined, block=dataclasses.replace(block, ops=ops, outputs=(*starts, *again)))
