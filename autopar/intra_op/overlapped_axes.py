"""The mesh axes over which products send while they run ("collective matmul"): chosen on the clock.

The integer program prices what is gathered and scattered whole; whether it is faster in pieces depends on what else is
sent and computed meanwhile, which only the simulation tells.
"""

from __future__ import annotations

import dataclasses
import itertools

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
    waits_s = found.ran.end_s - found.ran.compute_s
    if found.sharding.overlapped_axes or not model.overlap.kinds or waits_s < LEAST_GAIN * found.ran.end_s:
        return found
    axes = range(len(model.links.mesh.axis_sizes))
    used = [a for a in axes if _in_pieces(with_collective_matmuls(found.lowered, (a,)))]
    several = (chosen for n in range(1, len(used) + 1) for chosen in itertools.combinations(used, n))
    shardings = (dataclasses.replace(found.sharding, overlapped_axes=chosen) for chosen in several)
    in_pieces = [timed_sharding(graph, model, sharding, found.costs) for sharding in shardings]
    best = min(in_pieces, key=lambda each: each.ran.end_s, default=found)
    return best if best.ran.end_s < (1 - LEAST_GAIN) * found.ran.end_s else found


def _in_pieces(lowered: LoweredBlock) -> bool:
    """Whether a product runs in pieces."""
    return any(_has_pieces(instruction) for instruction in lowered.instructions)


def _has_pieces(instruction: Instruction) -> bool:
    if isinstance(instruction, Loop):
        return any(_in_pieces(block) for block in instruction.blocks)
    return isinstance(instruction, Move) and instruction.in_pieces > 0
