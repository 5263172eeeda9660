"""What the step would take without `jax.checkpoint`, by the costs of its plan: for those who have the memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.common.units import text_of_bytes, text_of_part
from autopar.cost import peak_memory, xla_program
from autopar.cost.peak_memory import MemoryProgram
from autopar.cost.xla_program import Compiler
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.ir.graph import Block
from autopar.lowering.instructions import Place

# Of the step: less is within what costs are known. Of the memory: operations stand in the order of the step with
# `jax.checkpoint`, so that the peak without it is known to an eighth or so.
LEAST_SPARED, MOST_FILLED = 0.02, 0.8


def recomputation_notes(
    block: Block,
    best: SpmdCandidate,
    program: MemoryProgram,
    stands_for: Mapping[int, tuple[int, Place]],
    limit_bytes: int | None,
) -> tuple[str, ...]:
    """That the step fits without `jax.checkpoint` in the layouts of the plan, and the seconds that this spares; nothing
    where it does not fit. What a scan over layers recomputes stays: its layers are one body.
    """
    compiler = dataclasses.replace(best.model.compiler, keeps_barriers=False)

    def computed(at: Compiler) -> set[int]:
        steps = xla_program.without_recomputation(program.steps, program.results, at)
        return {v for step in steps if step.kind != xla_program.BARRIER for v in step.outputs}

    # What is computed twice without `jax.checkpoint` too is none of its doing.
    dropped = {stands_for[v][0] for v in computed(best.model.compiler) - computed(compiler) if v in stands_for}
    spared_s = sum(best.compute_s.get(op.id, 0.0) for op in block.ops if dropped.issuperset(op.outputs) and op.outputs)
    if limit_bytes is None or spared_s <= LEAST_SPARED * best.step_time_s:
        return ()
    peak_bytes = peak_memory.estimate(program, compiler).peak_bytes
    if peak_bytes > MOST_FILLED * limit_bytes:
        return ()
    part = text_of_part(spared_s / best.step_time_s)
    peak = f"peak about {text_of_bytes(peak_bytes)} of the {text_of_bytes(limit_bytes)} available"
    return (f"without jax.checkpoint the step would fit in the same layouts, {peak}, and take about {part} less time",)
