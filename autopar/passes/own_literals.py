"""The literals of a micro-batch's own program: those of the whole batch's, times or by the number of micro-batches.

Gradient accumulation runs the program that was traced on a micro-batch. Where that is the one cut out of the whole
batch but for literals that grow with the examples, or shrink with them, so is the program in a number of micro-batches
that divides the one in which this was seen: a size that is rounded is even in multiples of examples in which it is, and
one that is at least, or at most, so large is no more even at one end, the examples seen or the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.ir.graph import Block, Constant, Op, OpGraph, OpKind, values_of
from autopar.ir.rules import equation_key
from autopar.passes.microbatch_analysis import same_code

# By the results of an operation and the position of an operand: 1 for a literal that is multiplied by the number of
# micro-batches, as a factor that makes a mean is, -1 for one that is divided by it, as a number of examples is.
Powers = Mapping[tuple[int, ...], Mapping[int, int]]


def own_powers(cut: OpGraph, own: OpGraph, num_microbatches: int) -> Powers | None:
    """How literals follow the number of micro-batches; None where the graphs differ in more.

    Args:
        cut: Of a micro-batch, with the literals of the whole batch.
        own: Of the trace on a micro-batch.
    """
    found: dict[tuple[int, ...], dict[int, int]] = {}
    if not _are_alike(cut.block, own.block, num_microbatches, found):
        return None
    types = ([(v.shape, v.dtype) for v in map(graph.values.__getitem__, values_of(cut.block))] for graph in (cut, own))
    return found if next(types) == next(types) else None


def _are_alike(block: Block, own: Block, num_microbatches: int, found: dict[tuple[int, ...], dict[int, int]]) -> bool:
    if block.inputs != own.inputs or len(block.ops) != len(own.ops):
        return False
    if not _are_same_atoms(block.outputs, own.outputs):
        return False
    for op, other in zip(block.ops, own.ops, strict=True):
        powers: dict[int, int] = {}
        for i, (a, b) in enumerate(zip(op.inputs, other.inputs, strict=False)):
            if isinstance(a, Constant) and isinstance(b, Constant) and a.content != b.content:
                power = _power(a, b, num_microbatches)
                if power is None:
                    return False
                powers[i] = power
        if powers and not op.outputs:
            return False
        if powers:
            found[op.outputs] = powers
        expected = _with_powers(op, powers, num_microbatches)
        if expected is None or not _is_same(expected, other):
            return False
        pairs = zip(op.blocks, other.blocks, strict=False)
        if not all(_are_alike(inner, of_own, num_microbatches, found) for inner, of_own in pairs):
            return False
    return True


def _is_same(op: Op, own: Op) -> bool:
    """Whether two operations are the same but for their blocks."""
    ours, theirs = (
        (x.kind, x.primitive, x.outputs, x.key, x.trips, x.num_consts, x.num_carry, x.kernel_bytes, x.order_cost,
         x.role, x.module, x.count, len(x.blocks))
        for x in (op, own)
    )  # fmt: skip
    if ours != theirs or not _are_same_atoms(op.inputs, own.inputs):
        return False
    return op.kind is not OpKind.EQUATION or same_code(op.eqn, own.eqn)


def _are_same_atoms(atoms: tuple[Any, ...], own: tuple[Any, ...]) -> bool:
    return len(atoms) == len(own) and all(
        a == b if isinstance(a, int) else isinstance(b, Constant) and a.content == b.content
        for a, b in zip(atoms, own, strict=True)
    )


def _power(whole: Constant, own: Constant, num_microbatches: int) -> int | None:
    is_typed = whole.literal.aval.str_short() == own.literal.aval.str_short()
    for power in (1, -1) if is_typed else ():
        scaled = _scaled(whole, power, num_microbatches)
        if scaled is not None and scaled.content == own.content:
            return power
    return None


def _scaled(constant: Constant, power: int, num_microbatches: int) -> Constant | None:
    """A literal times a power of the number of micro-batches; None where its type has no such number."""
    literal = constant.literal
    dtype = literal.aval.dtype
    if jax_compat.is_key_dtype(dtype) or dtype.kind == "b":
        return None
    value = np.asarray(literal.val, dtype)
    if np.issubdtype(dtype, np.integer) and power < 0:
        made, rest = np.divmod(value, num_microbatches)
        if np.any(rest):
            return None
    else:
        made = value * num_microbatches if power > 0 else value / num_microbatches
    return Constant(type(literal)(np.asarray(made, dtype)[()], literal.aval))


def _with_powers(op: Op, powers: Mapping[int, int], num_microbatches: int) -> Op | None:
    if not powers:
        return op
    inputs, invars = list(op.inputs), list(op.eqn.invars)
    for i, power in powers.items():
        literal = op.inputs[i]
        scaled = None if isinstance(literal, int) else _scaled(literal, power, num_microbatches)
        if scaled is None:
            return None
        inputs[i] = scaled
        if isinstance(invars[i], jax_compat.Literal):  # else it is an argument of a call
            invars[i] = scaled.literal
    eqn = op.eqn.replace(invars=invars)
    is_read = any(a is not b for a, b in zip(invars, op.eqn.invars, strict=True))
    return replace(op, inputs=tuple(inputs), eqn=eqn, key=equation_key(eqn) if op.key and is_read else op.key)


def with_own_literals(cut: OpGraph, powers: Powers, num_microbatches: int) -> OpGraph | None:
    """The graph of a micro-batch with its own literals; None where one is no number of its type."""
    block = _block_with(cut.block, powers, num_microbatches)
    return None if block is None else dataclasses.replace(cut, block=block)


def _block_with(block: Block, powers: Powers, num_microbatches: int) -> Block | None:
    ops = []
    for op in block.ops:
        made = _with_powers(op, powers.get(op.outputs, {}), num_microbatches)
        inner = [_block_with(b, powers, num_microbatches) for b in op.blocks]
        if made is None or None in inner:
            return None
        ops.append(replace(made, blocks=tuple(inner)) if inner else made)
    return replace(block, ops=tuple(ops))
