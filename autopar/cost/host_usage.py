"""What a lowered step keeps in the memory of the host: its bytes there, and the seconds of its copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.cost.cost_model import CostModel
from autopar.cost.xla_program import MemoryStep as MemoryStep
from autopar.ir.graph import HOST, OpGraph
from autopar.ir.layout import Layout, local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.lowering.instructions import HostCopy, Instruction, LoweredBlock, host_copies_in


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """What one device keeps in the memory of its host, and copies from there and back in a step. `saved_bytes`: of one
    micro-batch (else of the step), between the passes.
    """

    kept_bytes: int
    saved_bytes: int
    copied_bytes: int
    time_s: float


def host_use(graph: OpGraph, lowered: LoweredBlock, model: CostModel) -> HostUse:
    """Of the state that a lowered step finds in the memory of the host, and the activations that it saves there."""
    mesh = model.links.mesh

    def local(value: int, layout: Layout) -> int:
        v = graph.values[value]
        return local_bytes(v.shape, v.itemsize, layout, mesh)

    entries = zip(lowered.block.inputs, lowered.entries(), strict=True)
    copies = list(host_copies_in(lowered))
    outputs = zip(lowered.block.outputs, lowered.outputs, strict=True)
    new_state = {(atom, place) for atom, place in outputs if isinstance(atom, int)}
    saved = [t for t in copies if t.to_host and (t.value, t.target) not in new_state]
    return HostUse(
        kept_bytes=sum(local(v, layout) for v, (layout, state) in entries if state == HOST),
        saved_bytes=sum(t.trips * local(t.value, t.target[0]) for t in saved),
        copied_bytes=sum(_runs(graph, t) * local(t.value, t.target[0]) for t in copies),
        time_s=sum(host_copy_s(graph, t, model) for t in copies),
    )


def passing_bytes(graph: OpGraph, instructions: Sequence[Instruction], mesh: LogicalMesh) -> int:
    """Bytes of what a device sends to the memory of its host and brings back within a part of a step."""
    read = {key for instruction in instructions for key in instruction.keys_read}
    made = {key for instruction in instructions for key in instruction.keys_made if key[1][1] == HOST}
    values = ((graph.values[value], layout) for value, (layout, _) in made & read)
    return sum(local_bytes(v.shape, v.itemsize, layout, mesh) for v, layout in values)


def host_copy_s(graph: OpGraph, copy: HostCopy, model: CostModel) -> float:
    """Seconds of all runs, in a step, of a copy from the memory of the host, or to it."""
    value = graph.values[copy.value]
    nbytes = local_bytes(value.shape, value.itemsize, copy.target[0], model.links.mesh)
    return _runs(graph, copy) * model.device.host_copy_s(nbytes)


def _runs(graph: OpGraph, copy: HostCopy) -> int:
    return copy.trips * (graph.num_microbatches if copy.section.repeats else 1)
