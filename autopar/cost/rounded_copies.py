"""What a compiler sends in 16 bits although it is kept in 32: copies that only matrix products read.

A TPU's matrix units take bfloat16, and at default precision XLA rounds the 32-bit operands of a product to it. Where a
copy of a value on other devices is read by such products only, XLA rounds before it sends: half the bytes go over the
links, and the copy takes half the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from autopar.cost.cost_model import CostModel
from autopar.ir.graph import Op, OpGraph
from autopar.lowering.instructions import Compute, Instruction, Key, Move

# They only move what they read: rounding before is rounding after.
_MOVING = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})


def rounded_copies(
    graph: OpGraph, instructions: Sequence[Instruction], results: Iterable[Key], model: CostModel
) -> frozenset[Key]:
    """The copies that moves among these instructions make in 16 bits; `results` are read by others too."""
    if not model.compiler.products_round:
        return frozenset()
    rounded: set[Key] = set()
    elsewhere: set[Key] = set(results)  # read by what does not round
    in_products: set[Key] = set()
    for instruction in reversed(instructions):
        if isinstance(instruction, Move):
            key = instruction.value, instruction.target
            wide = graph.values[instruction.value].dtype == "float32"
            if (
                wide
                and key in in_products
                and key not in elsewhere
                and not any(step.kind.reduces for step in instruction.steps)
            ):
                rounded.add(key)
            elsewhere.update(instruction.keys_read)
        elif isinstance(instruction, Compute) and _rounds(instruction.op):
            in_products.update(instruction.keys_read)
        elif isinstance(instruction, Compute) and instruction.op.primitive in _MOVING:
            (made,) = instruction.keys_made
            (in_products if made in in_products and made not in elsewhere else elsewhere).update(instruction.keys_read)
        else:
            elsewhere.update(instruction.keys_read)
    return frozenset(rounded)


def _rounds(op: Op) -> bool:
    """A matrix product at default precision."""
    if op.primitive != "dot_general":
        return False
    precision = op.eqn.params.get("precision")
    wanted = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in wanted)
