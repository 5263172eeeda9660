"""What the passes over a micro-batch hold between them, once it is decided what is computed again."""

from __future__ import annotations

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.frontend.recompute_in_scans import is_kept
from autopar.hardware.kinds import Platform
from autopar.ir.graph import OpGraph, OpKind, Purpose, Section, read_by


def saved_arrays(graph: OpGraph) -> frozenset[int]:
    """Activations that the forward pass makes, or another stage sends it, and that the backward pass reads: results of
    products and of attention, and what recomputation starts from. Of a product that the backward pass does not read,
    they are the values made of it that it does read.

    Whatever else is saved follows from these in a few elementwise operations. With `recompute="matmuls"` the backward
    pass does them again; without, what the compiler keeps of them stays on the device. Numbers are left out, and sums
    over micro-batches.
    """
    repeating = {v for i, v in enumerate(graph.block.inputs) if i in graph.repeating}
    forward = [op for op in graph.block.ops if op.section is Section.FORWARD and op.kind is not OpKind.SPLIT]
    made = {v for op in forward for v in op.outputs} | repeating.intersection(v for op in forward for v in read_by(op))
    backward = [op for op in graph.block.ops if op.section.is_backward]
    read = {v for op in backward for v in read_by(op)}
    arrays = made.intersection(v for op in backward if op.kind is OpKind.BARRIER for v in read_by(op))
    lost: set[int] = set()  # what does not follow from arrays
    for op in forward:
        if is_kept(op) or not lost.isdisjoint(read_by(op)):
            arrays |= read.intersection(op.outputs)
            lost.update(v for v in op.outputs if v not in arrays)
    values = (graph.values[v] for v in arrays)
    return frozenset(value.id for value in values if value.purpose is Purpose.ACTIVATION and value.shape)


def offloaded_by_policy(graph: OpGraph) -> frozenset[int]:
    """Values that a policy of `jax.checkpoint` sends to the memory of the host, inside of loops too."""
    return frozenset(v for op in graph.ops() if jax_compat.is_in_host_memory(op.eqn) for v in op.outputs)


def offloaded_on(graph: OpGraph, platform: Platform) -> frozenset[int]:
    """Those of them, and of what layers recompute, that wait there on devices of a platform: all, but where both passes
    are one program for TPU those that scans stack up. Its compiler brings others back early (`check_passes_apart`).
    """
    values = offloaded_by_policy(graph) | graph.saved_in_host
    has_neighbours = graph.repeating or any(op.kind is OpKind.SEND for op in graph.block.ops)
    if platform is not Platform.TPU or has_neighbours:
        return values
    return values.difference(*(op.outputs for op in graph.block.ops))


def waiting_in_host(graph: OpGraph, offloaded: frozenset[int]) -> frozenset[int]:
    """Offloaded values, and what scans stack up of them, which is in the memory of the host instead."""
    waiting = set(offloaded)
    for op in reversed(list(graph.ops())):  # bodies before their loops
        if op.kind is OpKind.SCAN:
            stacked = zip(op.outputs[op.num_carry :], op.blocks[0].outputs[op.num_carry :], strict=True)
            waiting |= {v for v, atom in stacked if isinstance(atom, int) and atom in waiting}
    return frozenset(waiting)


def check_saved_arrays(graph: OpGraph, step: str) -> None:
    """Raises: UnsupportedError for a step of which no saved arrays can be kept elsewhere: one without a backward pass,
    or whose layers are a loop, which makes the arrays of all layers before any of them could leave.
    """
    read = {v for op in graph.block.ops if op.section.is_backward for v in read_by(op)}
    loops = {OpKind.SCAN, OpKind.WHILE}
    loop = next((op for op in graph.block.ops if op.kind in loops and not read.isdisjoint(op.outputs)), None)
    if read and loop is None:
        return
    raise UnsupportedError(
        where=f"{step}, offload='activations'",
        expected="a backward pass that reads what layers of the forward pass make, one after the other",
        got="no backward pass" if loop is None else f"layers in a loop ({loop.module or loop.primitive})",
        hint="leave it out" if loop is None else "write the layers out in a Python loop, or leave it out",
    )


def check_passes_apart(step: str, platform: Platform, num_stages: int) -> None:
    """Raises: UnsupportedError where arrays would leave and come back within one program for TPU.

    Its compiler removes the barriers that say when a copy starts and starts copies where it likes: to the host late,
    back early. Such a program needs more memory of the device than one that keeps the arrays there, and so does
    `jax.checkpoint` with `save_and_offload_only_these_names` on layers that are written out. With stages the passes are
    programs of their own, and what waits between them is in no device's memory.
    """
    if platform is not Platform.TPU or num_stages > 1:
        return
    raise UnsupportedError(
        where=f"{step}, offload='activations' on TPU",
        expected="stages, whose forward and backward passes are programs of their own",
        got="one stage: both passes in one program, in which the compiler for TPU brings the arrays back early, so "
        "that its memory does not fall",
        hint="ask for stages (pp=2 of recipes.combine, stages=2 of recipes.cut), compute layers again "
        "(recompute='input'), or leave it out",
    )
