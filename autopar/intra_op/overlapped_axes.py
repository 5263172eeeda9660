"""The mesh axes over which products send while they run ("collective matmul"): chosen on the clock.

The integer program prices what is gathered and scattered whole; whether it is faster in pieces depends on what else is
sent and computed meanwhile, which only the simulation tells.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.cost.usage import predicted_collectives, uses_of_pieces
from autopar.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.ir.graph import OpGraph, OpKind
from autopar.lowering.collective_matmul import with_collective_matmuls
from autopar.lowering.instructions import Compute, Instruction, Loop, LoweredBlock, Move
from autopar.plan.options import WORTHWHILE


def with_overlapped_axes(graph: OpGraph, model: CostModel, found: TimedSharding) -> TimedSharding:
    """The decisions with products in pieces over the axes where that is fastest, on the clock; as they are where it
    gains next to nothing (`WORTHWHILE`), no product waits for what is sent, or a recipe has set the axes.
    """
    waits_s, least_s = found.ran.end_s - found.ran.compute_s, WORTHWHILE * found.ran.end_s
    if found.sharding.overlapped_axes or not model.overlap.kinds or waits_s < least_s:
        return found
    axes = range(len(model.links.mesh.axis_sizes))
    best = found
    for chosen in (chosen for n in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, n)):
        in_pieces = with_collective_matmuls(found.lowered, chosen)
        sent_whole_s = _sent_whole_s(graph, model, found.lowered, in_pieces)
        if sent_whole_s < least_s:
            continue
        more_to_compute_s, sent_in_pieces_s = _pieces_s(graph, in_pieces, found.costs)
        least_compute_s = found.ran.compute_s + more_to_compute_s
        least_send_s = found.ran.send_s - sent_whole_s + sent_in_pieces_s
        if max(least_compute_s, least_send_s) >= min(best.ran.end_s, found.ran.end_s - least_s):
            continue  # one of the streams alone takes too long
        sharding = dataclasses.replace(found.sharding, overlapped_axes=chosen)
        best = min(best, timed_sharding(graph, model, sharding, found.costs), key=lambda each: each.ran.end_s)
    return best if best.ran.end_s < found.ran.end_s - least_s else found


def _sent_whole_s(graph: OpGraph, model: CostModel, lowered: LoweredBlock, in_pieces: LoweredBlock) -> float:
    """Seconds of what is gathered or scattered whole and would be sent in pieces: no more is gained."""
    whole = _sent_in_pieces(lowered, in_pieces)
    uses = predicted_collectives(graph, dataclasses.replace(lowered, instructions=whole), model)
    return sum(use.time_s for use in uses)


def _pieces_s(graph: OpGraph, in_pieces: LoweredBlock, costs: NodeCosts) -> tuple[float, float]:
    """(seconds by which products take longer to compute in pieces than whole, seconds in which the pieces are sent);
    -inf where that depends on which branch takes longer.
    """
    more_s = sent_s = 0.0
    for instruction in in_pieces.instructions:
        if isinstance(instruction, Loop):
            of_blocks = [_pieces_s(graph, block, costs) for block in instruction.blocks]
            if instruction.op.kind is OpKind.COND and any(more or sent for more, sent in of_blocks):
                return -math.inf, -math.inf
            more_s += sum(more for more, _ in of_blocks)
            sent_s += sum(sent for _, sent in of_blocks)
        elif isinstance(instruction, Compute) and instruction.pieces is not None:
            strategy, n = instruction.strategy, costs.model.links.mesh.size(instruction.pieces.axes)
            assert strategy is not None, "products in pieces are split"
            pieces_s = n * costs.piece_s(instruction.op, strategy, instruction.pieces)
            more_s += pieces_s - costs.compute_s(instruction.op, strategy)
            sent_s += sum(use.time_s for use in uses_of_pieces(graph, instruction, costs.model))
    return more_s, sent_s


def _sent_in_pieces(lowered: LoweredBlock, in_pieces: LoweredBlock) -> tuple[Instruction, ...]:
    """The instructions of a block that send what products send in pieces in the other, whose products may stand in
    another order.
    """
    found: list[Instruction] = []
    pairs = [[i for i in block.instructions if isinstance(i, (Loop, Move))] for block in (lowered, in_pieces)]
    for whole, marked in zip(*pairs, strict=True):
        if isinstance(whole, Loop) and isinstance(marked, Loop):
            blocks = zip(whole.blocks, marked.blocks, strict=True)
            found += (each for block, other in blocks for each in _sent_in_pieces(block, other))
        elif isinstance(marked, Move) and marked.in_pieces:
            found.append(whole)
    return tuple(found)
