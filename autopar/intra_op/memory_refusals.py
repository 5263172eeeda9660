"""The errors of steps that exceed the memory of all devices: by their arguments, or as one program."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.attention.kernels import Kernel
from autopar.attention.match import large_scores
from autopar.cost.cost_model import cost_model
from autopar.cost.xla_program import place_names
from autopar.errors import MemoryLimitError
from autopar.intra_op.ilp import IntraOp
from autopar.intra_op.spmd_candidate import ProgramMemory, SpmdCandidate, memory_of, unfold
from autopar.ir.graph import Block, OpGraph, read_by
from autopar.ir.layout import LogicalMesh
from autopar.lowering.host_copies import with_host_copies
from autopar.lowering.lower import lower
from autopar.plan.context import PlanningContext


def state_bytes(context: PlanningContext) -> int:
    """The least bytes of the arguments on each device, for one program and for stages."""
    graph = context.graph
    return -(-sum(graph.values[v].nbytes for v in graph.block.inputs) // context.cluster.num_devices)


def check_state_fits(context: PlanningContext) -> None:
    """Raises: MemoryLimitError for a step whose arguments exceed the memory of all devices, in stages too."""
    graph, cluster, needed_bytes = context.graph, context.cluster, state_bytes(context)
    if needed_bytes <= context.limit_bytes:
        return
    largest = sorted((graph.values[v] for v in graph.block.inputs), key=lambda v: -v.nbytes)[:5]
    raise MemoryLimitError(
        where=f"the state of {context.traced.name}, split over all {cluster.num_devices} devices of {cluster.name}",
        limit_bytes=context.limit_bytes,
        needed_bytes=needed_bytes,
        largest=[(v.name or "a constant", v.nbytes // cluster.num_devices) for v in largest],
        hint="use more devices, a smaller model, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )


def fits_unfused(context: PlanningContext) -> bool:
    """Whether every value of the step could be written to memory, in program order, if all were split over all devices:
    then fused kernels need no more, and `cannot_fit`, which lowers the whole step to find out, need not be asked.
    """
    return _unfused_bytes(context.graph, context.graph.block) <= context.limit_bytes * context.cluster.num_devices


def _unfused_bytes(graph: OpGraph, block: Block) -> int:
    """The most bytes alive at once in a block whose every value is written to memory; of a loop, its body with it."""
    nbytes = {v: graph.values[v].nbytes for v in (*block.inputs, *(v for op in block.ops for v in op.outputs))}
    last = {v: i for i, op in enumerate(block.ops) for v in read_by(op)}
    freed: dict[int, list[int]] = {}
    for i, op in enumerate(block.ops):
        for v in op.outputs:
            last.setdefault(v, i)
    for v in {*last} & {*nbytes} - {*block.inputs} - {atom for atom in block.outputs if isinstance(atom, int)}:
        freed.setdefault(last[v], []).append(v)
    live = most = sum(nbytes[v] for v in block.inputs)
    for i, op in enumerate(block.ops):
        live += sum(nbytes[v] for v in op.outputs)
        most = max(most, live + max((_unfused_bytes(graph, inner) for inner in op.blocks), default=0))
        live -= sum(nbytes[v] for v in freed.get(i, ()))
    return most


def cannot_fit(context: PlanningContext) -> MemoryLimitError | None:
    """The error of a step that needs too much memory even if every value of it were split over all devices."""
    graph, cluster, step = context.graph, context.cluster, context.views.folded
    model = cost_model(cluster, LogicalMesh(axis_sizes=(1,)))
    intra_op = IntraOp(step.graph if step is not None else graph, model)
    sharding = intra_op.decode(intra_op.solve(time_limit_s=context.deadline.solve_s()))
    if step is not None:
        sharding = unfold(sharding, context.views.partials, graph, step)
    alone = memory_of(graph, with_host_copies(graph, lower(graph, sharding, model.links), sharding), model)
    if alone.estimate.peak_bytes <= context.limit_bytes * cluster.num_devices:
        return None
    where = f"{context.traced.name}, if every value were split over all {cluster.num_devices} devices of {cluster.name}"
    return _out_of_memory(context, where, graph, alone, sharding.mesh, cluster.num_devices)


def no_program_fits(context: PlanningContext, candidates: Sequence[SpmdCandidate]) -> MemoryLimitError:
    """The error for the smallest plan: the bytes over the limit, and the values that hold the memory."""
    least = min(candidates, key=lambda c: c.peak_bytes)
    where = f"{context.traced.name} on mesh {least.sharding.mesh}"
    memory = memory_of(context.graph, least.lowered, least.model)
    return _out_of_memory(context, where, context.graph, memory, least.sharding.mesh)


def _out_of_memory(
    context: PlanningContext, where: str, graph: OpGraph, memory: ProgramMemory, mesh: LogicalMesh, shared_by: int = 1
) -> MemoryLimitError:
    """The error of a plan that does not fit, whose bytes are shared by `shared_by` devices."""
    made_by = {v: f"{op.place}/{op.primitive}".lstrip("/") for op in graph.ops() for v in op.outputs}
    names = place_names(graph, memory.stands_for, made_by, mesh)
    return MemoryLimitError(
        where=where,
        limit_bytes=context.limit_bytes,
        needed_bytes=-(-memory.estimate.peak_bytes // shared_by),
        largest=[(names.get(v, "a temporary value"), n // shared_by) for v, n in memory.estimate.at_peak[:5]],
        hint=f"use more devices, a smaller batch, {_smaller(context)}jax.checkpoint around layers whose activations "
        "are named here, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )


def _smaller(context: PlanningContext) -> str:
    """The options of a step that let it need less at once, as far as they are not taken."""
    number = context.request.num_microbatches or 1
    cut = f"gradient accumulation (num_microbatches={2 * number} or more, of Search or of the recipe), "
    has_scores = context.traced.attention_kernel != Kernel.BLOCKS.name and bool(large_scores(context.views.annotated))
    return cut + ("Search(attention='blockwise') (scores are not kept), " if has_scores else "")
