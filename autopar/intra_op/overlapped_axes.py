"""The mesh axes over which products send while they run ("collective matmul"): chosen on the clock.

The integer program prices what is gathered and scattered whole; whether it is faster in pieces depends on what else is
sent and computed meanwhile, which only the simulation tells.
"""

from __future__ import annotations

import dataclasses
import itertools

from autopar.cost.collective_usage import predicted_collectives
from autopar.cost.cost_model import CostModel
from autopar.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.ir.graph import OpGraph
from autopar.lowering.collective_matmul import with_collective_matmuls
from autopar.lowering.instructions import Instruction, Loop, LoweredBlock, Move

# The part of its time that a program must gain by products in pieces: less is within what the model of pieces errs by,
# and programs with them take longer to compile.
LEAST_GAIN = 0.01


def with_overlapped_axes(graph: OpGraph, model: CostModel, found: TimedSharding) -> TimedSharding:
    """The decisions with products in pieces over the axes where that is fastest, on the clock; as they are where it
    gains next to nothing (`LEAST_GAIN`), no product waits for what is sent, or a recipe has set the axes.
    """
    waits_s, least_s = found.ran.end_s - found.ran.compute_s, LEAST_GAIN * found.ran.end_s
    if found.sharding.overlapped_axes or not model.overlap.kinds or waits_s < least_s:
        return found
    axes = range(len(model.links.mesh.axis_sizes))
    best = found
    for chosen in (chosen for n in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, n)):
        if _sent_whole_s(graph, model, found.lowered, chosen) >= least_s:
            sharding = dataclasses.replace(found.sharding, overlapped_axes=chosen)
            best = min(best, timed_sharding(graph, model, sharding, found.costs), key=lambda each: each.ran.end_s)
    return best if best.ran.end_s < found.ran.end_s - least_s else found


def _sent_whole_s(graph: OpGraph, model: CostModel, lowered: LoweredBlock, axes: tuple[int, ...]) -> float:
    """Seconds of what is gathered or scattered whole and would be sent in pieces: no more is gained."""
    whole = _sent_in_pieces(lowered, with_collective_matmuls(lowered, axes))
    uses = predicted_collectives(graph, dataclasses.replace(lowered, instructions=whole), model)
    return sum(use.time_s for use in uses)


def _sent_in_pieces(lowered: LoweredBlock, in_pieces: LoweredBlock) -> tuple[Instruction, ...]:
    """The instructions of a block that send what products send in pieces in the other."""
    found: list[Instruction] = []
    for whole, marked in zip(lowered.instructions, in_pieces.instructions, strict=True):
        if isinstance(whole, Loop) and isinstance(marked, Loop):
            pairs = zip(whole.blocks, marked.blocks, strict=True)
            found += (each for block, other in pairs for each in _sent_in_pieces(block, other))
        elif isinstance(marked, Move) and marked.in_pieces:
            found.append(whole)
    return tuple(found)
