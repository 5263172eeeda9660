"""Checks for recipes that shard sequences: the step has attention, and its heads or positions divide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.ir.graph import Dimension, FactorKind, Op, OpGraph, OpKind, Purpose
from autopar.ir.semantics import attention_calls
from autopar.ops.attention.form import KEY, goes_round, sizes_of
from autopar.ops.attention.ring import PRIMITIVES


def has_attention(graph: OpGraph) -> bool:
    """Whether a described graph has attention between positions of the batch."""
    passes = (op for op in graph.ops() if op.primitive in PRIMITIVES)
    found = itertools.chain(passes, score_products(graph), (op for op, _ in attention_calls(graph)))
    return any(True for _ in found)


def check_attention(graph: OpGraph) -> None:
    """Raises: UnsupportedError where a described graph has no attention between positions of the batch."""
    if not has_attention(graph):
        raise UnsupportedError(
            where="recipe",
            expected="a step with attention, between positions that can be followed from the batch",
            got="none",
            hint="sequence parallelism has nothing to share here: use data or tensor parallelism",
        )


def score_products(graph: OpGraph) -> Iterator[Op]:
    """The products of a described graph whose result has the positions of both operands: queries by keys.

    A matrix is neither, though its columns may become positions: of an image that is put together from patches.
    """
    matrices = _matrices(graph)
    for op in graph.ops():
        if op.primitive != "dot_general" or op.rule is None:
            continue
        (result,), dimensions = op.rule.results, graph.values[op.outputs[0]].dimensions
        positions = {f for fs, names in zip(result, dimensions, strict=True) if Dimension.SEQUENCE in names for f in fs}
        left, right = ({f for dim in dims for f in dim} for dims in op.rule.operands)
        if positions - left and positions - right and all(isinstance(a, int) and a not in matrices for a in op.inputs):
            yield op


def _matrices(graph: OpGraph) -> set[int]:
    """State, and what is made of one array of it alone: its cast, its transpose, a layer's slice of a stack."""
    found = {v for v in graph.block.inputs if graph.values[v].purpose in (Purpose.MATRIX, Purpose.PARAMETER)}
    for op in graph.ops():
        read = [a for a in op.inputs if isinstance(a, int)]
        if op.kind is OpKind.EQUATION and len(read) == 1 and read[0] in found:
            found.update(op.outputs)
        elif op.kind is OpKind.BARRIER:
            found.update(b for a, b in zip(op.inputs, op.outputs, strict=True) if isinstance(a, int) and a in found)
        elif op.kind is OpKind.SCAN:
            carried = range(op.num_consts, op.num_consts + op.num_carry)
            inside = enumerate(zip(op.inputs, op.blocks[0].inputs, strict=True))
            found.update(b for i, (a, b) in inside if isinstance(a, int) and a in found and i not in carried)
    return found


def check_heads(graph: OpGraph, parts: int) -> None:
    """Raises: UnsupportedError where attention has no heads that so many devices can share."""
    if parts == 1:
        return
    for op in score_products(graph):
        value = graph.values[op.outputs[0]]
        heads = [n for n, names in zip(value.shape, value.dimensions, strict=True) if Dimension.HEAD in names]
        if math.prod(heads) % parts:
            raise UnsupportedError(
                where=_place(op),
                expected=f"heads that {parts} devices can share, apart from the examples",
                got=f"scores of shape {list(value.shape)}, heads: {heads or 'none'}",
                hint="plan the step with Search(attention='blockwise'), which takes heads to several devices, share "
                "sequences among fewer devices (sp, size), or take another kind of sequence parallelism",
            )

    for op, factors in attention_calls(graph):
        assert op.rule is not None
        sizes = [op.rule.factors[f].size for f in sorted(factors)]
        if math.prod(sizes) % parts:
            raise UnsupportedError(
                where=_place(op),
                expected=f"a kernel with heads of keys that {parts} devices can share, apart from the examples",
                got=f"heads: {sizes or 'none'}",
                hint="share sequences among fewer devices (sp, size), or write attention in plain JAX and plan it with "
                "Search(attention='blockwise'), which takes heads of keys to several devices",
            )


def check_rings(graph: OpGraph, parts: int) -> None:
    """Raises: UnsupportedError where attention has positions that so many devices cannot share evenly, or that a kernel
    needs whole.
    """
    for op, _ in attention_calls(graph) if parts > 1 else ():
        raise UnsupportedError(
            where=_place(op),
            expected="attention whose positions a ring of devices can share",
            got=f"a kernel ({op.primitive}) that needs the positions of keys whole",
            hint="write attention in plain JAX and plan it with Search(attention='blockwise'), or share heads: "
            "sequence_parallel('ulysses')",
        )
    for op in graph.ops():
        if op.primitive in PRIMITIVES and parts > 1 and not goes_round(op.eqn):
            form, sizes = op.eqn.params["form"], sizes_of(op.eqn)
            raise UnsupportedError(
                where=_place(op),
                expected="as many positions of queries as of keys, which a ring of devices can share",
                got=f"{sizes[form.position]:,} of queries and {sizes[KEY]:,} of keys",
                hint="share heads: sequence_parallel('ulysses')",
            )
        for factor in op.rule.factors if op.rule is not None else ():
            if factor.kind is FactorKind.RING and factor.size % parts:
                raise UnsupportedError(
                    where=_place(op),
                    expected=f"positions that {parts} devices can share evenly",
                    got=f"{factor.size} positions",
                    hint="pad the sequences, or share them among fewer devices (sp, size)",
                )


def _place(op: Op) -> str:
    line = jax_compat.source_line(op.eqn) if op.eqn is not None else ""
    return f"attention in {op.place or 'the step'}" + (f" at {line}" if line else "")
