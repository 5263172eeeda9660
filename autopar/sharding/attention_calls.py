"""Attention inside of kernels, known by the factors of their calls.

A call attends where it reads two or more arrays of positions by something that may be split, and needs the positions
of one of them whole: those of keys. The factors that may be split, stand in all of these arrays, and count neither
examples nor positions are heads. Several heads of queries to a head of keys are one factor with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.ir.graph import Dimension, FactorKind, Op, OpGraph
from autopar.ir.primitives import KERNEL_CALLS

Dims = tuple[tuple[int, ...], ...]
NamesOf = Callable[[int, int], frozenset[Dimension]]  # what a dimension of a value counts


def is_attention(op: Op, names_of: NamesOf) -> bool:
    """Whether an operation is a call that needs whole positions of one of several arrays of them."""
    if op.primitive not in KERNEL_CALLS or op.rule is None:
        return False
    sequences = list(_sequences(op, names_of))
    needs_whole = any(
        op.rule.factors[f].kind is not FactorKind.PASS
        for atom, dims in sequences
        for d, factors in enumerate(dims)
        for f in factors
        if Dimension.SEQUENCE in names_of(atom, d)
    )
    return needs_whole and len(sequences) > 1


def heads_of(op: Op, names_of: NamesOf) -> frozenset[int]:
    """The factors of a call of attention that are heads."""
    return frozenset.intersection(*(_uncounted(op, atom, dims, names_of) for atom, dims in _sequences(op, names_of)))


def attention_calls(graph: OpGraph) -> Iterator[tuple[Op, frozenset[int]]]:
    """The calls of a described graph that attend, and their factors that are heads."""

    def names_of(atom: int, d: int) -> frozenset[Dimension]:
        names = graph.values[atom].dimensions
        return names[d] if names else frozenset()

    for op in graph.ops():
        if is_attention(op, names_of):
            yield op, heads_of(op, names_of)


def _sequences(op: Op, names_of: NamesOf) -> Iterator[tuple[int, Dims]]:
    """The operands of positions by something that may be split, and the factors of their dimensions."""
    assert op.rule is not None, "only operations with a rule are asked"
    for atom, dims in zip(op.inputs, op.rule.operands, strict=True):
        if not isinstance(atom, int) or not _uncounted(op, atom, dims, names_of):
            continue
        if any(Dimension.SEQUENCE in names_of(atom, d) for d in range(len(dims))):
            yield atom, dims


def _uncounted(op: Op, atom: int, dims: Dims, names_of: NamesOf) -> frozenset[int]:
    """The factors of an operand that may be split and count neither examples nor positions."""
    assert op.rule is not None, "only operations with a rule are asked"
    counted = {Dimension.EXAMPLE, Dimension.SEQUENCE}
    return frozenset(
        f
        for d, factors in enumerate(dims)
        if not names_of(atom, d) & counted
        for f in factors
        if op.rule.factors[f].kind is FactorKind.PASS
    )
