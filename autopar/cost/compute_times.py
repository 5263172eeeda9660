"""The seconds of computation of each operation of a lowered step on one device, without collectives."""

from __future__ import annotations

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.cost.xla_program import MemoryStep as MemoryStep
from autopar.ir.graph import OpGraph, OpKind
from autopar.lowering.instructions import (
    Compute,
    Loop,
    LoweredBlock,
)


def compute_times_s(
    graph: OpGraph, lowered: LoweredBlock, model: CostModel, costs: NodeCosts | None = None
) -> dict[int, float]:
    """Seconds that one device computes each operation (by its number) in a step, collectives left out.

    Of a branch, the alternative that takes longest. `costs` of the same graph and model are not computed again.
    """
    costs = costs or NodeCosts(graph, model)

    def of_block(block: LoweredBlock) -> dict[int, float]:
        out: dict[int, float] = {}
        for instruction in block.instructions:
            if isinstance(instruction, Compute):
                out[instruction.op.id] = costs.compute_s(instruction.op, instruction.strategy)
            elif isinstance(instruction, Loop):
                inner = [of_block(b) for b in instruction.blocks]
                if instruction.op.kind is OpKind.COND:
                    inner = [max(inner, key=lambda seconds: sum(seconds.values()))]
                for seconds in inner:
                    out.update(seconds)
        return out

    return of_block(lowered)
