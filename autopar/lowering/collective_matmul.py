"""Products in pieces, so that what they gather or scatter is sent while they are computed ("collective matmul").

An operand that is gathered over mesh axes for products alone is sent round the devices of these axes part by part, and
each part is multiplied while the next one is on its way. A sum that is scattered is computed part by part, and each
part's sum goes round while the next part is computed. In the instructions these are the same moves and products as
before, marked with `Pieces`; `autopar.lowering.ring_products` runs them.

Source: Wang et al., "Overlap communication with dependent computation via decomposition in large deep learning models",
2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from autopar.kernels.local import runs_locally
from autopar.lowering.instructions import Compute, Instruction, Key, Loop, LoweredBlock, Move, Pieces, section_of
from autopar.sharding.resharding import ReshardStep, StepKind


def with_collective_matmuls(lowered: LoweredBlock, axes: Collection[int]) -> LoweredBlock:
    """A block whose products run in pieces where one of their operands is gathered, or their result is scattered, over
    some of the axes.

    Left as they are: gathers that something else reads too (it wants the whole array), sums that something else reads,
    resharding of several steps, and products that leave another section than they read.
    """
    instructions = [_with_blocks(i, axes) for i in lowered.instructions]
    kept = {(a, p) for a, p in zip(lowered.block.outputs, lowered.outputs, strict=True) if isinstance(a, int)}
    readers: dict[Key, list[int]] = {}
    maker: dict[Key, int] = {}
    for i, instruction in enumerate(instructions):
        for key in dict.fromkeys(instruction.keys_read):
            readers.setdefault(key, []).append(i)
        for key in instruction.keys_made:
            maker[key] = i
    for i, move in enumerate(instructions):
        if not isinstance(move, Move) or len(move.steps) != 1 or not set(move.steps[0].axes) <= set(axes):
            continue
        (step,), source, target = move.steps, (move.value, move.source), (move.value, move.target)
        if step.kind is StepKind.ALL_GATHER and target not in kept:
            _gather(instructions, i, step, readers.get(target, ()))
        elif step.kind is StepKind.REDUCE_SCATTER and source not in kept and readers[source] == [i]:
            _scatter(instructions, i, step, maker.get(source))
    return dataclasses.replace(lowered, instructions=tuple(instructions))


def _with_blocks(instruction: Instruction, axes: Collection[int]) -> Instruction:
    if not isinstance(instruction, Loop):
        return instruction
    blocks = tuple(with_collective_matmuls(block, axes) for block in instruction.blocks)
    return dataclasses.replace(instruction, blocks=blocks)


def _gather(instructions: list[Instruction], at: int, step: ReshardStep, readers: Sequence[int]) -> None:
    """Marks a gather and the products that read it, where they alone do."""
    move = instructions[at]
    assert isinstance(move, Move), "only moves gather"
    dim = _changed(step)
    axes = step.before.dims[dim][len(step.after.dims[dim]) :]
    marked: dict[int, Compute] = {}
    for i in readers:
        compute = instructions[i]
        if not isinstance(compute, Compute) or section_of(compute) is not move.section:
            return
        operands = [p for p, (atom, place) in enumerate(_reads(compute)) if (atom, place) == (move.value, move.target)]
        if not _is_plain(compute) or len(operands) != 1:
            return
        (operand,) = operands
        pieces = Pieces(axes=axes, operand=operand, dim=dim, step=step, sends=not marked, is_last=i == readers[-1])
        marked[i] = dataclasses.replace(compute, pieces=pieces)
    for i, compute in marked.items():
        instructions[i] = compute
    if marked:
        instructions[at] = dataclasses.replace(move, in_pieces=len(marked))


def _scatter(instructions: list[Instruction], at: int, step: ReshardStep, made: int | None) -> None:
    """Marks a reduce-scatter and the product whose result it takes."""
    move, compute = instructions[at], instructions[made] if made is not None else None
    assert isinstance(move, Move), "only moves scatter"
    if not isinstance(compute, Compute) or section_of(compute) is not move.section or not _is_plain(compute):
        return
    if not compute.written_out:
        return
    dim = _changed(step)
    axes = step.after.dims[dim][len(step.before.dims[dim]) :]
    pieces = Pieces(axes=axes, operand=None, dim=dim, step=step, sends=True, is_last=True)
    assert made is not None, "what is marked was made here"
    instructions[made] = dataclasses.replace(compute, pieces=pieces)
    instructions[at] = dataclasses.replace(move, in_pieces=1)


def _reads(compute: Compute) -> Iterable[tuple[object, object]]:
    return zip(compute.op.inputs, compute.reads, strict=True)


def _is_plain(compute: Compute) -> bool:
    """Whether it is a product of two arrays, summands of none, that is in no pieces yet."""
    is_product = compute.op.primitive == "dot_general" and not runs_locally(compute.op.eqn)
    whole = all(place is not None and not place[0].partial for place in compute.reads)
    return is_product and whole and compute.strategy is not None and compute.pieces is None


def _changed(step: ReshardStep) -> int:
    """The dimension that a step gathers or scatters."""
    (dim,) = (d for d, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b)
    return dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """The dimensions of a product that run along with one of an operand, or of the result: by operand, and of the
    result, None where the product sums over it.
    """

    operands: Mapping[int, int]
    result: int | None

    @classmethod
    def of(cls, eqn: Any, operand: int | None, dim: int) -> Along:
        """Those of a `dot_general`, for a dimension of an operand, or of the result (operand None)."""
        summed, batch = eqn.params["dimension_numbers"]
        ranks = [len(v.aval.shape) for v in eqn.invars]
        free = [[d for d in range(ranks[i]) if d not in (*summed[i], *batch[i])] for i in (0, 1)]
        found = [cls(operands={0: a, 1: b}, result=i) for i, (a, b) in enumerate(zip(*batch, strict=True))]
        found += [cls(operands={0: d}, result=len(batch[0]) + i) for i, d in enumerate(free[0])]
        found += [cls(operands={1: d}, result=len(batch[0]) + len(free[0]) + i) for i, d in enumerate(free[1])]
        found += [cls(operands={0: a, 1: b}, result=None) for a, b in zip(*summed, strict=True)]
        (along,) = (a for a in found if (a.result if operand is None else a.operands.get(operand)) == dim)
        return along
