"""Finds attention in a graph by its computation, and replaces each of its passes by one operation.

Equations are read as algebra (`symbolic`), so the spelling of attention, its masks and its softmax does not matter, nor
the form in which differentiation leaves them. With P the weights, G a product of the result's gradient and the values,
and D the sum of P G over a row, the matrix that multiplies the values must be P, and the matrix that multiplies the
keys must be s (P G - D P), s being the derivative of the scores by the product. The sum of P over a row is 1: no
gradient passes through the maximum.

Attention of other forms stays as it is, and a ring refuses it: dropout on the weights, weights that are returned, a
gradient of a bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autopar.attention import ring
from autopar.attention.checks import score_products
from autopar.attention.replace_passes import PassWriter
from autopar.attention.score_uses import Around
from autopar.attention.symbolic import Reader
from autopar.common import jax_compat
from autopar.common.records import replaced
from autopar.common.units import text_of_bytes
from autopar.errors import UnsupportedError
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, read_by, walk
from autopar.ir.rewrite import Fresh, reading, remove_dead, renumbered
from autopar.sharding.semantics import annotate_semantics


def blockwise(graph: OpGraph) -> OpGraph:
    """The graph with an operation for each pass of each attention that is found. Other attention stays as it is.

    Attention of which anything would be left (weights that something else reads, say) stays whole: replacing a part of
    it would compute scores twice.
    """
    named = annotate_semantics(graph)
    wanted = {op.id for op in score_products(named)}
    while wanted:
        fresh = Fresh(graph)
        block = _rewritten(graph.block, named, wanted, fresh, Around({}, {}))
        left = wanted & {op.id for op in walk(block)}
        if not left:
            values = tuple(replaced(v, dimensions=(), purpose=None) for v in fresh.values)
            return renumbered(dataclasses.replace(graph, values=values, block=remove_dead(block)))
        wanted -= left
    return graph


def attention_left(graph: OpGraph) -> tuple[str, ...]:
    """What a plan's notes say of the attention that a graph of `blockwise`, with its semantics, still has as it is
    written.
    """
    if not any(op.primitive in ring.PRIMITIVES for op in graph.ops()):
        return ("attention='blockwise': no attention was found that can be done in blocks",)
    left = [op for op in score_products(graph) if op.role is graph.forward_role]
    if not left:
        return ()
    places = ", ".join(dict.fromkeys(op.place or jax_compat.source_line(op.eqn) or "the step" for op in left[:3]))
    return (f"attention='blockwise': {len(left)} products of scores stay as they are written ({places})",)


def attention_as_written(graph: OpGraph) -> tuple[str, ...]:
    """What a plan's notes say of attention in a described graph without `blockwise`: scores that are larger than the
    queries and keys that they are made of cost more to write and to read than these.
    """

    def nbytes(*ids: Any) -> int:
        return sum(graph.values[i].nbytes for i in ids)

    found = [op for op in score_products(graph) if op.role is graph.forward_role]
    large = [op for op in found if nbytes(*op.outputs) > nbytes(*op.inputs)]
    if not large:
        return ()
    largest = text_of_bytes(max(nbytes(*op.outputs) for op in large))
    return (
        f"attention runs as it is written: its scores, up to {largest} over all devices, go through memory; "
        "parallelize(attention='blockwise') keeps none where it finds attention",
    )


def check_blockwise(graph: OpGraph) -> None:
    """Raises: UnsupportedError where a graph of `blockwise` has scores left, which no ring can have."""
    for op in score_products(annotate_semantics(graph)):
        raise UnsupportedError(
            where=f"{op.place or 'the step'} at {jax_compat.source_line(op.eqn)}",
            expected="attention as softmax(scale * q k^T + mask) v with weights that nothing else reads, and as many "
            "positions of queries as of keys",
            got=f"scores of shape {list(graph.values[op.outputs[0]].shape)} that are used in another way",
            hint="leave dropout out of the attention weights, put jax.checkpoint round the attention, or take "
            "recipes.sequence_parallel('ulysses')",
        )


def _rewritten(block: Block, named: OpGraph, wanted: set[int], fresh: Fresh, around: Around) -> Block:
    block = _with_joined_scans(block, named, wanted, fresh, around)
    ops: list[Op] = []
    for op in block.ops:
        inner = tuple(_rewritten(b, named, wanted, fresh, around.inside(block, op)) for b in op.blocks)
        ops.append(replaced(op, blocks=inner) if inner else op)
    block = dataclasses.replace(block, ops=tuple(ops))
    reader = Reader(block, named, wanted, around)
    reader.run()
    return PassWriter(block, reader, named, fresh).run()


def _with_joined_scans(block: Block, named: OpGraph, wanted: set[int], fresh: Fresh, around: Around) -> Block:
    """The block with what scans over layers save of scores for the scans that go back over them taken out."""
    ops = list(block.ops)
    for behind, op in enumerate(ops):
        if op.kind is not OpKind.SCAN:
            continue
        made_by = {
            v: i for i, earlier in enumerate(ops[:behind]) if earlier.kind is OpKind.SCAN for v in earlier.outputs
        }
        sources = [made_by[v] for v in op.inputs if isinstance(v, int) and v in made_by]
        for first in dict.fromkeys(i for i in sources if ops[i].trips == op.trips):
            elsewhere = {v for i, other in enumerate(ops) if i != behind for v in read_by(other)}
            elsewhere |= {a for a in block.outputs if isinstance(a, int)}
            inner = around.inside(block, ops[first], op)
            ops[first], ops[behind] = _joined_scans(ops[first], ops[behind], elsewhere, named, wanted, fresh, inner)
    return dataclasses.replace(block, ops=tuple(ops))


def _same_values(first: Op, second: Op, stacked: Mapping[int, Atom]) -> dict[int, int]:
    """Inputs of the second scan's body -> the values of the first one's that they are: slices of what the first stacks
    up (`stacked`: the array -> its slice), and constants of both.
    """
    (one,), (two,) = first.blocks, second.blocks
    fixed = second.num_consts + second.num_carry
    constants = {a: v for a, v in zip(first.inputs, one.inputs[: first.num_consts], strict=False) if isinstance(a, int)}
    in_first = {**stacked, **constants}
    slices = zip(second.inputs[fixed:], two.inputs[fixed:], strict=True)
    same: dict[int, int] = {}
    for outer, inner in (*slices, *zip(second.inputs, two.inputs[: second.num_consts], strict=False)):
        value = in_first.get(outer) if isinstance(outer, int) else None
        if isinstance(value, int):
            same[inner] = value
    return same


def _joined_scans(
    first: Op, second: Op, elsewhere: set[int], named: OpGraph, wanted: set[int], fresh: Fresh, around: Around
) -> tuple[Op, Op]:
    """Two scans, the second of which reads what the first stacks up, with attention found as if their bodies were one.

    What the second body then reads of the first is stacked, and nothing else but what is read `elsewhere`.
    """
    (one,), (two,) = first.blocks, second.blocks
    c, fixed = first.num_carry, second.num_consts + second.num_carry
    stacked = dict(zip(first.outputs[c:], one.outputs[c:], strict=True))
    slices = list(zip(second.inputs[fixed:], two.inputs[fixed:], strict=True))
    same = _same_values(first, second, stacked)
    handed_on = [v for v in stacked if v in elsewhere]
    both = Block(
        inputs=(*one.inputs, *(v for v in two.inputs if v not in same)),
        outputs=(
            *one.outputs[:c],
            *(stacked[v] for v in handed_on),
            *(same.get(a, a) if isinstance(a, int) else a for a in two.outputs),
        ),
        ops=(*one.ops, *(reading(op, same) for op in two.ops)),
    )
    reader = Reader(both, named, wanted, around)
    reader.run()
    writer = PassWriter(both, reader, named, fresh)
    found = writer.run()
    if not writer.added:
        return first, second
    in_first = {op.id for op in one.ops}
    in_first |= {op.id for op in writer.added if writer.like[op.id] in in_first}
    mine, theirs = (tuple(op for op in found.ops if (op.id in in_first) is is_mine) for is_mine in (True, False))
    ends = found.outputs[c + len(handed_on) :]
    there = {*one.inputs, *(v for op in mine for v in op.outputs)}
    read = [*(v for op in theirs for v in read_by(op)), *(a for a in ends if isinstance(a, int))]
    crossing = dict.fromkeys(v for v in read if v in there)
    inside = {made: inner for inner, made in same.items() if made in crossing}
    kept = [(outer, inner) for outer, inner in slices if inner not in same or inner in inside.values()]
    ys = dict(zip(handed_on, found.outputs[c:], strict=False))
    ys.update({outer: stacked[outer] for outer, inner in kept if isinstance(outer, int) and inner in same})
    for v in crossing:
        if v not in inside:
            value = fresh.values[v]
            outer = fresh.value((first.trips, *value.shape), value.dtype, value.itemsize)
            inside[v], ys[outer] = fresh.copy_of(v), v
            kept.append((outer, inside[v]))
    one = Block(inputs=one.inputs, outputs=(*found.outputs[:c], *ys.values()), ops=mine)
    two = Block(
        inputs=(*two.inputs[:fixed], *(inner for _, inner in kept)),
        outputs=tuple(inside.get(a, a) if isinstance(a, int) else a for a in ends),
        ops=tuple(reading(op, inside) for op in theirs),
    )
    first = dataclasses.replace(first, outputs=(*first.outputs[:c], *ys), blocks=(one,))
    second_inputs = (*second.inputs[:fixed], *(outer for outer, _ in kept))
    second = dataclasses.replace(second, inputs=second_inputs, blocks=(two,))
    return first, second
