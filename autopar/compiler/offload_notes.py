"""Notes on what the step's code sends to the memory of the host and the plan keeps on the devices."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.common import jax_compat, jax_remat
from autopar.ir.graph import OpGraph
from autopar.lowering.instructions import LoweredBlock, host_copies_in


def offload_notes(programs: Iterable[tuple[OpGraph, LoweredBlock]]) -> tuple[str, ...]:
    """One for each line of the step's code: of values that no backward pass reads, that a branch or a `while` makes, or
    whose sums over devices are not reduced.
    """
    notes: dict[str, None] = {}
    for graph, lowered in programs:
        gone = {copy.value for copy in host_copies_in(lowered) if copy.to_host}
        for op in graph.ops():
            if jax_remat.is_in_host_memory(op.eqn) and gone.isdisjoint(op.outputs):
                line = jax_compat.source_line(op.eqn)
                at = f" at {line}" if line else ""
                notes.setdefault(
                    f"what the code sends to the memory of the host{at} stays on the devices: only what the forward "
                    "pass makes for the backward pass goes there, outside of branches and while loops, and of programs "
                    "for TPU that hold both passes only what scans stack up, since others would be back early"
                )
    return tuple(notes)
