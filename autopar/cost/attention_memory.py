"""What a pass of attention that is one operation needs of memory, by the kernel that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.attention.form import KEY, sizes_of
from autopar.attention.work import (
    block_bytes,
    held_in_steps,
    in_steps,
    order_of,
    repeated_operands,
    row_bytes,
    travelling,
)
from autopar.cost.attention_cost import kernel_under
from autopar.cost.xla_program import MemoryStep
from autopar.hardware.kinds import DeviceKind
from autopar.ir.graph import Op
from autopar.ir.layout import local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.strategies import Strategy


def attention_steps(
    op: Op,
    strategy: Strategy | None,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    device: DeviceKind,
    mesh: LogicalMesh,
    nbytes: Mapping[int, int],
    new: Callable[[int], int],
) -> list[MemoryStep]:
    """A block of scores and one of weights, in 32 bits, beside the keys and values that have come round; of a kernel
    that keeps none, what it makes of each row. `new` makes a value of so many bytes.
    """
    steps: list[MemoryStep] = []
    buffers: list[int] = []
    split = 1 if strategy is None else strategy.split
    ring_size = 1 if strategy is None else mesh.size(strategy.ring)
    kernel = kernel_under(op, device, ring_size)
    if strategy is not None and ring_size > 1:
        held = travelling(op.eqn)
        if in_steps(op.eqn, kernel, ring_size):
            held = (*held, *held_in_steps(op.eqn, order_of(op.eqn, ring_size)))
        for i, itemsize in held:
            shape = op.eqn.invars[i].aval.shape
            buffers.append(new(local_bytes(shape, itemsize, strategy.operands[i], mesh)))
        sent = tuple(buffers)
        steps.append(
            MemoryStep(inputs=inputs, outputs=sent, kind="collective_permute", fusible=False, key=("ring", op.id))
        )
    for i in repeated_operands(op.eqn, kernel) if ring_size == 1 else ():
        sizes = sizes_of(op.eqn)
        buffers.append(new(nbytes[inputs[0]] * sizes[KEY] // sizes[op.eqn.params["form"].position]))
        step = MemoryStep(
            inputs=(inputs[i],), outputs=(buffers[-1],), kind="repeat", fusible=False, key="heads of queries"
        )
        steps.append(step)
    at = (*inputs, *buffers)
    if not kernel.writes_scores:
        rows = new(row_bytes(op.eqn, kernel) // split)
        pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((rows,), at), (outputs, (*at, rows)))
    else:
        block = block_bytes(op.eqn, split, ring_size)
        scores, weights = new(block), new(block)
        pairs = (((scores,), at), ((weights,), (*at, scores)), (outputs, (*at, weights)))
    for made, read in pairs:
        steps.append(MemoryStep(inputs=read, outputs=made, kind=op.primitive, fusible=False, key=(op.id, made)))
    return steps
