"""The predictions of a search as a plan records them: collectives, times, modules, stages."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from autopar.attention import ring
from autopar.common.trace_events import Timeline
from autopar.common.units import text_of_bytes
from autopar.compiler.memory_breakdown import memory_of_stages, saved_bytes
from autopar.compiler.send_times import Sends
from autopar.cost.collective_usage import CollectiveUse, predicted_collectives
from autopar.cost.compute_times import compute_times_s
from autopar.cost.cost_model import CostModel
from autopar.cost.host_usage import host_use
from autopar.cost.overlap import crossing_s, timeline_of
from autopar.cost.product_rate import main_dtype
from autopar.cost.roofline import flops_of
from autopar.cost.stream_work import NO_TIME, Cause, SendTime
from autopar.hardware.cluster import Cluster
from autopar.hardware.cluster_parts import peak_flops_per_s
from autopar.inter_op.joined_tasks import chain_name
from autopar.inter_op.staged import PlannedStage, StagedStep
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.ir.graph import Constant, Op, OpGraph, OpKind
from autopar.ir.layout import replicated
from autopar.ir.mesh import LogicalMesh
from autopar.ir.primitives import MATRIX_PRODUCTS
from autopar.lowering.decisions import SolverReport
from autopar.lowering.instructions import Accumulate, Compute, Loop, LoweredBlock, Split, Stack
from autopar.plan.codec import decisions_of
from autopar.plan.memory_use import MemoryUse
from autopar.plan.schema import ModuleRow, PipelineRecord, Predicted, PredictedCollective, StageRecord
from autopar.runtime.pipeline.program import TaskKind
from autopar.runtime.simulation.simulated_timeline import timeline_of as pipeline_timeline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """The operations of a step on all devices, and those among them that `jax.checkpoint` has done again."""

    done: float
    recomputed: float

    @property
    def of_model(self) -> float:
        return self.done - self.recomputed


def flops_in(graph: OpGraph) -> Flops:
    """The operations of a step as it is written, without what a plan recomputes of its own accord."""
    done = recomputed = 0.0
    for op in graph.ops():
        if op.kind is OpKind.EQUATION:
            flops = flops_of(op) * op.count
            done += flops
            recomputed += flops if op.recomputes else 0.0
    return Flops(done=done, recomputed=recomputed)


def pipeline_record(staged: StagedStep, recomputed: Sequence[str], chunks: int, hoist_casts: bool) -> PipelineRecord:
    """The stages of a step, and the decisions of each."""
    tasks, simulation = staged.staged.tasks, staged.simulation
    firsts = [s.first_layer for s in staged.stages]
    stages = []
    for number, (planned, at) in enumerate(zip(staged.stages, staged.submeshes, strict=True)):
        last = firsts[number + 1] if number + 1 < len(firsts) else len(staged.layers)

        def seconds(*kinds: TaskKind, number: int = number) -> float:
            return sum(
                t for t, task in zip(staged.task_s, tasks, strict=True) if task.stage == number and task.kind in kinds
            )

        mesh_index = planned.lowered.mesh_index
        stages.append(
            StageRecord(
                first_layer=firsts[number],
                layers=staged.layers.names[firsts[number] : last],
                first_device=at.first_device,
                axis_sizes=at.mesh.axis_sizes,
                decisions=decisions_of(planned.sharding, planned.stage.graph),
                solver=planned.sharding.report,
                forward_s=seconds(TaskKind.FORWARD),
                backward_s=seconds(TaskKind.BACKWARD),
                weight_s=seconds(TaskKind.WEIGHT),
                once_s=seconds(TaskKind.BEFORE, TaskKind.AFTER),
                peak_bytes=simulation.peak_bytes[mesh_index],
                in_flight=simulation.peak_in_flight[mesh_index],
            )
        )
    return PipelineRecord(
        schedule=staged.schedule.name,
        num_microbatches=staged.graph.num_microbatches,
        chunks=chunks,
        recomputed=tuple(recomputed),
        keeps_copies=hoist_casts,
        joined=tuple(chain_name(staged, task.parts) for task in staged.joined),
        stages=tuple(stages),
        scan_parts=staged.step.parts,
        timeline=pipeline_timeline(simulation, staged.simulated),
    )


def staged_predicted(staged: StagedStep, sends: Sequence[Sends], cluster: Cluster, flops: Flops) -> Predicted:
    """The prediction of a pipelined step. Seconds of computation and communication are means over the devices.

    `sends`: of each stage, its collectives (`sends_of_stages`).
    """
    simulation, devices = staged.simulation, 0
    compute_s = product_s = collective_s = hidden_s = host_s = copied_bytes = 0.0
    kept_bytes = [0] * len(simulation.peak_bytes)
    collectives: list[PredictedCollective] = []
    for planned, times in zip(staged.stages, sends, strict=True):
        graph, block, model = planned.stage.graph, planned.lowered.lowered, planned.model
        n = model.links.mesh.num_devices
        seconds_of = _seconds_of(graph, block, model, compute_times_s(graph, block, model, planned.costs))
        compute_s += n * sum(seconds_of.values())
        product_s += n * _product_s(block, seconds_of)
        rows = grouped(predicted_collectives(graph, block, model), model.links.mesh, times)
        collective_s += n * sum(row.time_s for row in rows)
        collectives += rows
        host = host_use(graph, block, model)
        mesh_index = planned.lowered.mesh_index
        kept_bytes[mesh_index] += host.kept_bytes + host.saved_bytes * max(1, simulation.peak_in_flight[mesh_index])
        host_s += n * host.time_s
        copied_bytes += n * host.copied_bytes
    in_joined = collections.Counter(number for joined in staged.joined for number, _ in joined.parts)
    for joined in staged.joined:
        hidden_s += staged.submeshes[staged.staged.tasks[joined.parts[0][0]].stage].mesh.num_devices * joined.hidden_s
    for number, (task, seconds) in enumerate(zip(staged.staged.tasks, staged.hidden_s, strict=True)):
        runs = (staged.graph.num_microbatches if task.kind.repeats else 1) - in_joined[number]
        hidden_s += staged.submeshes[task.stage].mesh.num_devices * runs * seconds
    kinds = dict(zip(staged.submeshes, (planned.model.device for planned in staged.stages), strict=True))
    devices, dtype = sum(s.mesh.num_devices for s in kinds), main_dtype(staged.graph)
    step_s = simulation.step_time_s
    peak = sum(peak_flops_per_s(cluster, device, at.mesh.num_devices, dtype) for at, device in kinds.items())
    return Predicted(
        step_time_s=step_s,
        compute_time_s=compute_s / devices,
        collective_time_s=collective_s / devices,
        hidden_time_s=hidden_s / devices,
        peak_bytes=tuple(simulation.peak_bytes),
        flops=flops.done,
        recomputed_flops=flops.recomputed,
        mfu=flops.of_model / (step_s * peak) if step_s else 0.0,
        bubble_fraction=simulation.bubble_fraction,
        collectives=tuple(collectives),
        memory=memory_of_stages(staged),
        host_bytes=tuple(kept_bytes) if any(kept_bytes) else (),
        host_copied_bytes=copied_bytes / devices,
        host_time_s=host_s / devices,
        product_time_s=product_s / devices,
    )


def predicted(graph: OpGraph, best: SpmdCandidate, cluster: Cluster, use: MemoryUse) -> tuple[Predicted, Timeline]:
    """The prediction of a program, and its timeline, from the simulation with which it was compared."""
    lowered, model, estimate, ran = best.lowered, best.model, best.estimate, best.ran
    collectives = grouped(predicted_collectives(graph, lowered, model), model.links.mesh, ran.sends())
    seconds_of = _seconds_of(graph, lowered, model, best.compute_s)
    compute_s = sum(seconds_of.values())
    host = host_use(graph, lowered, model)
    kept_bytes = host.kept_bytes + host.saved_bytes
    step_s, flops = ran.end_s, flops_in(graph)
    peak = peak_flops_per_s(cluster, model.device, model.links.mesh.num_devices, main_dtype(graph))
    prediction = Predicted(
        step_time_s=step_s,
        compute_time_s=compute_s,
        collective_time_s=sum(row.time_s for row in collectives),
        hidden_time_s=ran.hidden_s,
        peak_bytes=(estimate.peak_bytes,),
        flops=flops.done,
        recomputed_flops=flops.recomputed,
        mfu=flops.of_model / (step_s * peak) if step_s else 0.0,
        bubble_fraction=0.0,
        collectives=collectives,
        memory=(use,),
        host_bytes=(kept_bytes,) if kept_bytes else (),
        host_copied_bytes=float(host.copied_bytes),
        host_time_s=host.time_s,
        product_time_s=_product_s(lowered, seconds_of),
    )
    return prediction, timeline_of(ran)


def _product_s(lowered: LoweredBlock, seconds_of: Mapping[int, float]) -> float:
    """The seconds of the matrix products and attention kernels among operations."""
    products = {op.id for op, _ in _computes(lowered) if op.primitive in MATRIX_PRODUCTS | set(ring.PRIMITIVES)}
    return sum(seconds_of.get(op, 0.0) for op in products)


def grouped(
    uses: tuple[CollectiveUse, ...], mesh: LogicalMesh, times: Mapping[Cause, SendTime]
) -> tuple[PredictedCollective, ...]:
    """Collectives added up by kind, axes and module, in order of appearance, with their `times` in the step."""
    rows: dict[Cause, list[float]] = {}
    for use in uses:
        row = rows.setdefault((use.kind, use.axes, use.module), [0.0, 0.0])
        row[0] += use.count
        row[1] += use.total_bytes
    return tuple(
        PredictedCollective(
            kind=kind.value,
            axes=tuple(mesh.axis_names[a] for a in axes),
            module=module,
            count=count,
            sent_bytes=sent,
            time_s=times.get((kind, axes, module), NO_TIME).seconds,
            exposed_s=times.get((kind, axes, module), NO_TIME).exposed_s,
        )
        for (kind, axes, module), (count, sent) in rows.items()
    )


def module_rows(
    graph: OpGraph,
    lowered: LoweredBlock,
    model: CostModel,
    collectives: Sequence[PredictedCollective],
    stage: int = 0,
    compute_s: Mapping[int, float] | None = None,
) -> tuple[ModuleRow, ...]:
    """One row for each module: layouts of its matrix products, seconds, communication, saved bytes. `compute_s` of the
    operations are not computed again.
    """
    seconds = _seconds_of(graph, lowered, model, compute_s)
    saved = saved_bytes(graph, lowered, model.links.mesh)
    splits: dict[str, dict[str, None]] = {}
    count: dict[str, int] = {}
    time: dict[str, float] = {}
    for op, compute in _computes(lowered):
        count[op.place] = count.get(op.place, 0) + 1
        time[op.place] = time.get(op.place, 0.0) + seconds.get(op.id, 0.0)
        products = splits.setdefault(op.place, {})
        if op.primitive in MATRIX_PRODUCTS:
            replicated_operands = [
                replicated(len(a.shape if isinstance(a, Constant) else graph.values[a].shape)) for a in op.inputs
            ]
            layouts = compute.strategy.operands if compute.strategy is not None else replicated_operands
            reads = " @ ".join(layout.text(model.links.mesh) for layout in layouts)
            result = compute.strategy.results[0] if compute.strategy is not None else compute.results[0]
            products[f"{op.role.value}: {reads} -> {result.text(model.links.mesh)}"] = None
    for instruction in _crossings(lowered):
        op = instruction.op
        time[op.place] = time.get(op.place, 0.0) + seconds[op.id]
    by_module: dict[str, list[PredictedCollective]] = {}
    for c in collectives:
        by_module.setdefault(c.module, []).append(c)
    modules = dict.fromkeys((*count, *time, *by_module, *saved))
    return tuple(
        ModuleRow(
            module=m,
            operations=count.get(m, 0),
            splits=tuple(splits.get(m, ())),
            compute_time_s=time.get(m, 0.0),
            collectives=tuple(by_module.get(m, ())),
            saved_bytes=saved.get(m, 0),
            stage=stage,
        )
        for m in modules
    )


def stage_rows(planned: PlannedStage, number: int, times: Sends) -> tuple[ModuleRow, ...]:
    """The rows of one stage of a pipeline, by its number."""
    graph, block, model = planned.stage.graph, planned.lowered.lowered, planned.model
    collectives = grouped(predicted_collectives(graph, block, model), model.links.mesh, times)
    return module_rows(graph, block, model, collectives, number, compute_times_s(graph, block, model, planned.costs))


def together(reports: Sequence[SolverReport]) -> SolverReport:
    """The report of the solver for all stages: the worst status and gap, the sums of the other numbers."""
    worst = max(reports, key=lambda r: r.gap)
    return SolverReport(
        status=worst.status,
        objective_s=sum(r.objective_s for r in reports),
        bound_s=sum(r.bound_s for r in reports),
        gap=worst.gap,
        nodes=sum(r.nodes for r in reports),
        classes=sum(r.classes for r in reports),
    )


def _seconds_of(
    graph: OpGraph, lowered: LoweredBlock, model: CostModel, compute_s: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Seconds in a step that one device computes each operation, what cuts, adds up and joins micro-batches too.
    `compute_s` of the operations alone are not computed again.
    """
    seconds = compute_times_s(graph, lowered, model) if compute_s is None else dict(compute_s)
    for instruction in _crossings(lowered):
        seconds[instruction.op.id] = crossing_s(graph, instruction, model)
    return seconds


def _crossings(lowered: LoweredBlock) -> list[Split | Accumulate | Stack]:
    return [instruction for instruction in lowered.instructions if isinstance(instruction, Split | Accumulate | Stack)]


def _computes(lowered: LoweredBlock) -> list[tuple[Op, Compute]]:
    out: list[tuple[Op, Compute]] = []
    for instruction in lowered.instructions:
        if isinstance(instruction, Compute):
            out.append((instruction.op, instruction))
        elif isinstance(instruction, Loop):
            for block in instruction.blocks:
                out += _computes(block)
    return out


def replicated_notes(graph: OpGraph) -> tuple[str, ...]:
    """The operations that no rule allows to split, one note for each primitive and reason."""
    counts: dict[tuple[str, str], int] = {}
    largest: dict[tuple[str, str], int] = {}
    stores = {"pad", "slice", "reshape"} if graph.padded else set()  # what the state is stored padded with
    for op in graph.ops():
        if op.rule is not None and op.rule.note and op.primitive not in stores:
            key = (op.primitive, op.rule.note)
            counts[key] = counts.get(key, 0) + 1
            sizes = [graph.values[v].nbytes for v in op.outputs]
            largest[key] = max(largest.get(key, 0), *sizes) if sizes else largest.get(key, 0)
    return tuple(
        f"{primitive} is replicated ({n} of them, the largest makes {text_of_bytes(largest[primitive, note])}): {note}"
        for (primitive, note), n in counts.items()
    )
