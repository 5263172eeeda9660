"""An operation with some of its results: a scan over layers without the carried values that they do not depend on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from autopar.common import jax_compat
from autopar.common.records import replaced
from autopar.ir.graph import Block, Op, OpKind, free_values, has_effects, read_by


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
    results = {i for i, v in enumerate(op.outputs) if v in wanted}
    while True:
        ops, read = _needed(body, [body.outputs[i] for i in results])
        positions = [i for i, v in enumerate(body.inputs) if v in read or i - k in results & set(range(op.num_carry))]
        carried = {i - k for i in positions if k <= i < n}
        if carried <= results:
            break
        results |= carried
    kept = sorted(results)
    block = Block(
        inputs=tuple(body.inputs[i] for i in positions), outputs=tuple(body.outputs[i] for i in kept), ops=tuple(ops)
    )
    invars, outvars = [op.eqn.invars[i] for i in positions], [op.eqn.outvars[i] for i in kept]
    return replaced(
        op,
        eqn=with_body_inputs(op.eqn, positions).replace(invars=invars, outvars=outvars),
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
        if not read.isdisjoint(op.outputs):
            needed = part_of_results(op, read) or op
            ops.append(needed)
            read |= set(read_by(needed))
    return ops[::-1], read


def with_body_inputs(eqn: Any, positions: Iterable[int], more: Sequence[Any] = ()) -> Any:
    """The equation of a scan whose body has some of its inputs, and more (variables); of what else that does only the
    operations say more.
    """
    jaxpr = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    variables = [*(jaxpr.invars[i] for i in positions), *more]
    inner = jaxpr.replace(constvars=[], invars=variables, outvars=variables, eqns=[])
    return eqn.replace(params={**eqn.params, "jaxpr": inner})
