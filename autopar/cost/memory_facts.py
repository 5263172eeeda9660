"""What the prediction of memory reads off operations and instructions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from autopar.cost.roofline import is_fusible
from autopar.cost.xla_program import Compiler
from autopar.ir.graph import REDUCED, RETURNED, UNREDUCED, Op, OpGraph
from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh
from autopar.lowering.instructions import Compute, Instruction, Move


def facts_of(op: Op, compiler: Compiler) -> tuple[str, bool, bool, bool]:
    """(kind, fusible, reduces_last, half_precision) of an equation, as of `xla_program.MemoryStep`."""
    if compiler.scatters_select and puts_one_in_each_row(op):
        return "select_n", True, reduces_last(op), is_half_precision(op)
    return kind_of(op), is_fusible(op.primitive), reduces_last(op), is_half_precision(op)


# Over dimensions of size one they are reshapes.
_RESHAPING = frozenset({"broadcast_in_dim", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})


def kind_of(op: Op) -> str:
    """The primitive's name; a broadcast or a reduction of dimensions of size one only is a reshape."""
    if op.primitive in _RESHAPING and op.eqn.outvars[0].aval.size == op.eqn.invars[0].aval.size:
        return "reshape"
    return op.primitive


_HALF_PRECISION = frozenset({np.dtype(jnp.bfloat16), np.dtype(np.float16)})


def is_half_precision(op: Op) -> bool:
    """Whether all operands and results are 16-bit floats."""
    # The size first: looking the type up costs ten times as much, and most are wider.
    return all(
        v.aval.dtype.itemsize == 2 and v.aval.dtype in _HALF_PRECISION for v in (*op.eqn.invars, *op.eqn.outvars)
    )


def reduces_last(op: Op) -> bool:
    """Whether a reduction runs over its operand's last dimension."""
    axes = op.eqn.params.get("axes", ())
    return not axes or len(op.eqn.invars[0].aval.shape) - 1 in axes


def puts_one_in_each_row(op: Op) -> bool:
    """Whether a scatter puts one number into each row, as the gradient of `take_along_axis` of one index a row does."""
    if op.primitive not in ("scatter-add", "scatter"):
        return False
    numbers, (operand, indices, _) = op.eqn.params["dimension_numbers"], (v.aval.shape for v in op.eqn.invars)
    last = len(operand) - 1
    return (
        numbers.update_window_dims == ()
        and (*numbers.operand_batching_dims, *numbers.inserted_window_dims) == tuple(range(last + 1))
        and numbers.scatter_dims_to_operand_dims == (last,)
        and math.prod(indices) == math.prod(operand[:-1])
    )


def transposed_alone(instructions: Sequence[Instruction]) -> dict[int, Sequence[int]]:
    """The values that a transpose reads and nothing else computes with, and its order of their dimensions."""
    reads: Counter[int] = Counter()
    order: dict[int, Sequence[int]] = {}
    for instruction in instructions:
        if not isinstance(instruction, Move):
            reads.update(value for value, _ in instruction.keys_read)
        if isinstance(instruction, Compute) and instruction.op.primitive == "transpose":
            order |= {value: instruction.op.eqn.params["permutation"] for value, _ in instruction.keys_read}
    return {value: dims for value, dims in order.items() if reads[value] == 1}


def place_names(
    graph: OpGraph, stands_for: dict[int, tuple[int, tuple[Layout, str]]], made_by: dict[int, str], mesh: LogicalMesh
) -> dict[int, str]:
    """What to call the values of a memory program in messages."""
    out = {}
    for number, (v, place) in stands_for.items():
        value = graph.values[v]
        what = value.name or f"{made_by.get(v, 'value')} {value.dtype}{list(value.shape)}"
        copy = "" if place[1] in (UNREDUCED, REDUCED) else f", copy for {place[1]}"
        copy = f", {place[1]}" if place[1] == RETURNED else copy
        out[number] = f"{what} {place[0].text(mesh)}{copy}"
    return out
