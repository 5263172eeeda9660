"""An operation with some of its results: a scan over layers without the carried values that they do not depend on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from autopar.common.records import replaced
from autopar.ir.graph import Block, Op, OpKind, free_values, has_effects, read_by
from autopar.ir.rewrite import handed_on, scan_equation


def part_of_results(op: Op, wanted: Collection[int]) -> Op | None:
    """The operation that makes the `wanted` results alone, of the operands that they need, under the same numbers.

    An equation is taken as it is. None for what cannot be taken apart, or has effects, which would happen once more.
    """
    if has_effects(op):
        return None
    if op.kind is OpKind.EQUATION:
        return op
    if op.kind is not OpKind.SCAN or free_values(op.blocks[0]):
        return None
    (body,), k, n = op.blocks, op.num_consts, op.num_consts + op.num_carry
    unchanged = handed_on(op)
    made = [body.inputs[k + i] if i in unchanged else a for i, a in enumerate(body.outputs)]
    results = {i for i, v in enumerate(op.outputs) if v in wanted}
    while True:
        ops, read = _needed(body, [made[i] for i in results])
        positions = [i for i, v in enumerate(body.inputs) if v in read or i - k in results & set(range(op.num_carry))]
        carried = {i - k for i in positions if k <= i < n}
        if carried <= results:
            break
        results |= carried
    kept = sorted(results)
    block = Block(inputs=tuple(body.inputs[i] for i in positions), outputs=tuple(made[i] for i in kept), ops=tuple(ops))
    return replaced(
        op,
        eqn=scan_equation(op, positions).replace(outvars=[op.eqn.outvars[i] for i in kept]),
        inputs=tuple(op.inputs[i] for i in positions),
        outputs=tuple(op.outputs[i] for i in kept),
        blocks=(block,),
        num_consts=sum(i < k for i in positions),
        num_carry=len(carried),
    )


def _needed(block: Block, outputs: Sequence[Any]) -> tuple[list[Op], set[int]]:
    """(the operations of a block that some of its outputs need, in order; all values that they read)."""
    read = {a for a in outputs if isinstance(a, int)}
    ops = []
    for op in reversed(block.ops):
        if read.isdisjoint(op.outputs):
            continue
        if op.kind is OpKind.BARRIER:
            passed = [(a, v) for a, v in zip(op.inputs, op.outputs, strict=True) if v in read]
            op = replaced(op, inputs=tuple(a for a, _ in passed), outputs=tuple(v for _, v in passed))
        op = part_of_results(op, read) or op
        ops.append(op)
        read |= set(read_by(op))
    return ops[::-1], read
