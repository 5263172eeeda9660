"""Notes on what the step's code sends to the memory of the host and the plan keeps on the devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.common import jax_compat, jax_remat
from autopar.hardware.kinds import Platform
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Role, read_by
from autopar.lowering.instructions import LoweredBlock, host_copies_in
from autopar.passes.saved_arrays import offloaded_on

_BRANCHES = frozenset({OpKind.COND, OpKind.WHILE})


def offload_notes(programs: Iterable[tuple[OpGraph, LoweredBlock]], platform: Platform) -> tuple[str, ...]:
    """One for each line of the step's code, with the reason."""
    notes: dict[str, None] = {}
    for graph, lowered in programs:
        gone = {copy.value for copy in host_copies_in(lowered) if copy.to_host}
        for op, kinds in _within(graph.block, frozenset()):
            if jax_remat.is_in_host_memory(op.eqn) and gone.isdisjoint(op.outputs):
                line = jax_compat.source_line(op.eqn)
                at = f" at {line}" if line else ""
                why = _why(graph, op, kinds, platform)
                notes.setdefault(f"what the code sends to the memory of the host{at} stays on the devices: {why}")
    return tuple(notes)


def _within(block: Block, kinds: frozenset[OpKind]) -> Iterator[tuple[Op, frozenset[OpKind]]]:
    """Each operation, and the kinds of those that it is inside of."""
    for op in block.ops:
        yield op, kinds
        for inner in op.blocks:
            yield from _within(inner, kinds | {op.kind})


def _why(graph: OpGraph, op: Op, kinds: frozenset[OpKind], platform: Platform) -> str:
    if kinds & _BRANCHES:
        return "a branch or a while loop makes it, and only what is made outside of these goes there"
    read = {v for other in graph.ops() if other.role is Role.BACKWARD for v in read_by(other)}
    if not kinds and (op.role is not Role.FORWARD or read.isdisjoint(op.outputs)):
        return "no backward pass reads it, and only what the forward pass makes for the backward pass goes there"
    if not kinds and offloaded_on(graph, platform).isdisjoint(op.outputs):
        return (
            "it belongs to layers that are written out, and in a program for TPU that holds both passes it would be "
            "back early; what a scan over layers stacks up does go there"
        )
    return "the plan leaves its sum over devices open there, or no backward pass reads what is stacked up of it"
