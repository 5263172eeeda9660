"""From a candidate to a `Plan`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from autopar.common.text import text_of_bytes
from autopar.common.trace_events import Timeline
from autopar.cost.compiler_options import exchange_options_of, options_of, unlike_assumed
from autopar.cost.cost_model import CostModel, NodeCosts, cost_model, in_turn_s
from autopar.cost.memory_program import memory_program
from autopar.cost.overlap import crossing_s, timeline_of
from autopar.cost.roofline import flops_of, main_dtype, peak_dtype
from autopar.cost.stream_simulator import NO_TIME, Cause, SendTime
from autopar.cost.usage import CollectiveUse, compute_times_s, host_use, predicted_collectives
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Atom, Constant, Dimension, FactorKind, Op, OpGraph, OpKind, Role, Value
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.primitives import (
    ATTENTION_PASSES,
    GROUPED_PRODUCT,
    MATRIX_PRODUCTS,
    RAGGED_PRODUCT,
    SCATTERS,
    product_dimension_numbers,
)
from autopar.ir.semantics import annotate_semantics
from autopar.lowering.instructions import Accumulate, Compute, Loop, LoweredBlock, Split, Stack
from autopar.lowering.lower import ShardingPlan, SolverReport
from autopar.ops.attention import ring
from autopar.ops.attention.kernels import Kernel, library_of
from autopar.ops.attention.match import attention_as_written, attention_left
from autopar.plan import summary
from autopar.plan.codec import decisions_of
from autopar.plan.context import Candidate, PlanningContext
from autopar.plan.plan import Plan, Trees
from autopar.plan.schema import (
    FORMAT_VERSION,
    CandidateRecord,
    Decisions,
    MemoryUse,
    ModuleRow,
    PipelineRecord,
    PlanRecord,
    Predicted,
    PredictedCollective,
    StageRecord,
)
from autopar.plan.summary import DATA, SHARDED, STATE, TENSOR
from autopar.runtime.program import TaskKind
from autopar.runtime.simulator import timeline_of as pipeline_timeline
from autopar.search.comparison import why_lost
from autopar.search.inter_op.build_stages import chain_name, timed_chain
from autopar.search.inter_op.pipeline_candidate import PipelineCandidate
from autopar.search.inter_op.staged import PlannedStage, StagedStep, timed_task
from autopar.search.intra_op.spmd_candidate import SpmdCandidate
from autopar.search.memory_breakdown import memory_of_program, memory_of_stages, saved_bytes
from autopar.search.notes import (
    batch_notes,
    bound_stages,
    bound_step,
    island_notes,
    offload_notes,
    ragged_notes,
    recipe_notes,
    recomputation_notes,
    stack_notes,
)
from autopar.search.write_values import planned_values, staged_values

Sends = dict[Cause, SendTime]

# The roles of a plan's mesh axes, by the names of the known parallelisms, from the decisions of a search.
#
# The role of an axis follows from the dimensions that it splits in the matrix products of the forward and backward
# pass, weighted by their arithmetic: examples (data), positions (sequence), experts (expert) or widths (tensor). A data
# axis that also shards state has the role of sharded data (ZeRO, FSDP). An axis that splits state and no product has
# the role of state: its devices compute the same. Of a step without products, the role follows from the batch. Experts
# are those among which a router chooses; without one, as in ensembles, their dimension is that of a stack.

SEQUENCE, EXPERT, STACK = "sequence", "expert", "stack"
# What a product does that an axis splits in dimensions of several names: experts have examples too, as positions have.
_FIRST = ((Dimension.EXPERT, EXPERT), (Dimension.EXAMPLE, DATA), (Dimension.SEQUENCE, SEQUENCE))


def dimensions_of(graph: OpGraph) -> Mapping[int, Value]:
    """The values of a graph by number, with the meaning of their dimensions."""
    is_described = any(value.purpose is not None for value in graph.values)
    return {value.id: value for value in (graph if is_described else annotate_semantics(graph)).values}


def roles_of_axes(plan: ShardingPlan, graph: OpGraph, values: Mapping[int, Value]) -> tuple[str, ...]:
    """The role of each axis of the plan's mesh; empty where it splits nothing."""
    roles = [_role(plan, graph, values, axis) or "" if n > 1 else "" for axis, n in enumerate(plan.mesh.axis_sizes)]
    if EXPERT in roles and not has_router(graph, values):
        roles = [STACK if role == EXPERT else role for role in roles]
    return tuple(roles)


def has_router(graph: OpGraph, values: Mapping[int, Value]) -> bool:
    """Whether rows go to some of the experts of a step, or their results are weighed: rows are sorted or exchanged,
    places among the experts are computed, or a product sums over them, in the backward pass over nothing else: there
    what a stack of matrices reads has a gradient that is summed over the stack too.
    """

    def are_experts(atom: Atom, dims: Sequence[int]) -> list[bool]:
        names = values[atom].dimensions if isinstance(atom, int) and atom in values else ()
        return [d < len(names) and Dimension.EXPERT in names[d] for d in dims]

    for op in graph.ops():
        if op.primitive in (RAGGED_PRODUCT, GROUPED_PRODUCT):
            return True
        if op.rule is not None and any(f.kind is FactorKind.EXCHANGE for f in op.rule.factors):
            return True
        if op.primitive == "dot_general":
            (summed, _), _ = product_dimension_numbers(op.eqn)
            over = are_experts(op.inputs[0], summed)
            if any(over) if op.role is Role.FORWARD else over and all(over):
                return True
        elif op.primitive in ("gather", *SCATTERS):
            numbers = op.eqn.params["dimension_numbers"]
            is_gather = op.primitive == "gather"
            indexed = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
            if any(are_experts(op.inputs[0], indexed)):
                return True
    return False


def _role(plan: ShardingPlan, graph: OpGraph, values: Mapping[int, Value], axis: int) -> str | None:
    work: dict[str, float] = collections.defaultdict(float)
    has_products = False
    of_passes = graph.forward_role is not Role.UPDATE  # a step without gradients is all forward
    for op in graph.ops():
        strategy = plan.strategy.get(op.id)
        if (
            strategy is None
            or op.kind is not OpKind.EQUATION
            or (op.role is Role.UPDATE and of_passes)
            or op.primitive not in MATRIX_PRODUCTS
        ):
            continue
        has_products = True
        layouts = (*zip(op.inputs, strategy.operands, strict=True), *zip(op.outputs, strategy.results, strict=True))
        split = {name for v, at in layouts if isinstance(v, int) for name in _split(values.get(v), at, axis)}
        if split or any(axis in at.sharded_axes for _, at in layouts):
            work[_named(split)] += op.count * flops_of(op)
    role = max(work, key=lambda name: work[name]) if work else None
    inputs = [(v, plan.unreduced.get(v)) for v in graph.block.inputs]
    state = [at for i, (_, at) in enumerate(inputs) if i in graph.donated and at is not None]
    batch = [(v, at) for i, (v, at) in enumerate(inputs) if i in graph.batch and at is not None]
    in_parts = any(axis in at.sharded_axes for at in state)
    if role is None and not has_products:
        split = {name for v, at in batch for name in _split(values.get(v), at, axis)}
        role = _named(split) if split else None
    if role is None and in_parts:
        return STATE
    return SHARDED if role == DATA and in_parts else role


def _split(value: Value | None, layout: Layout, axis: int) -> Iterator[Dimension]:
    """The meanings of the dimensions that an axis splits."""
    if value is not None:
        for axes, names in zip(layout.dims, value.dimensions, strict=False):
            if axis in axes:
                yield from names


def _named(split: set[Dimension]) -> str:
    return next((role for dimension, role in _FIRST if dimension in split), TENSOR)


# The predictions of a search as a plan records them: collectives, times, modules, stages.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """The operations of a step on all devices, those among them that `jax.checkpoint` has done again, and those of
    matrix products and attention by the type of their operands; `main` is that of the largest product.
    """

    done: float
    recomputed: float
    by_dtype: Mapping[str, float]
    main: str

    @property
    def of_model(self) -> float:
        return self.done - self.recomputed

    def at_peak_s(self, peak_flops_per_s: Callable[[str], float]) -> float:
        """Seconds of all operations at the peak rates of devices together, by type; those of no product at `main`'s."""
        others = self.done - sum(self.by_dtype.values())
        seconds = (flops / peak_flops_per_s(dtype) for dtype, flops in self.by_dtype.items())
        return others / peak_flops_per_s(self.main) + sum(seconds)


def flops_in(graph: OpGraph) -> Flops:
    """The operations of a step as it is written, without what a plan recomputes of its own accord."""
    done = recomputed = 0.0
    by_dtype: dict[str, float] = collections.defaultdict(float)
    for op in graph.ops():
        if op.kind is OpKind.EQUATION:
            flops = flops_of(op) * op.count
            done += flops
            recomputed += flops if op.recomputes else 0.0
            if op.primitive in MATRIX_PRODUCTS or op.primitive in ATTENTION_PASSES:
                by_dtype[peak_dtype(op.eqn)] += flops
    return Flops(done=done, recomputed=recomputed, by_dtype=by_dtype, main=main_dtype(graph))


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
        joined=tuple(dict.fromkeys(chain_name(staged, task.parts) for task in staged.joined)),
        stages=tuple(stages),
        scan_parts=staged.step.parts,
        timeline=pipeline_timeline(simulation, staged.simulated),
    )


def staged_predicted(
    staged: StagedStep, sends: Sequence[Sends], cluster: Cluster, flops: Flops, meshes: Sequence[LogicalMesh]
) -> Predicted:
    """The prediction of a pipelined step. Seconds of computation and communication are means over the devices.

    `sends`: of each stage, its collectives (`sends_of_stages`). `meshes`: of each stage, with the names of its axes.
    """
    simulation, devices = staged.simulation, 0
    compute_s = product_s = collective_s = hidden_s = host_s = copied_bytes = 0.0
    kept_bytes = [0] * len(simulation.peak_bytes)
    collectives: list[PredictedCollective] = []
    for planned, times, mesh in zip(staged.stages, sends, meshes, strict=True):
        graph, block, model = planned.stage.graph, planned.lowered.lowered, planned.model
        n = model.links.mesh.num_devices
        seconds_of = _seconds_of(graph, block, model, compute_times_s(graph, block, model, planned.costs))
        compute_s += n * sum(seconds_of.values())
        product_s += n * _product_s(block, seconds_of)
        rows = grouped(predicted_collectives(graph, block, model), mesh, times)
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
    devices, step_s = sum(s.mesh.num_devices for s in {*staged.submeshes}), simulation.step_time_s

    def peak_rate(dtype: str) -> float:
        return devices * cluster.device.peak_flops_per_s(dtype)

    return Predicted(
        step_time_s=step_s,
        compute_time_s=compute_s / devices,
        collective_time_s=collective_s / devices,
        hidden_time_s=hidden_s / devices,
        peak_bytes=tuple(simulation.peak_bytes),
        flops=flops.done,
        recomputed_flops=flops.recomputed,
        mfu=flops.of_model / (step_s * peak_rate(flops.main)) if step_s else 0.0,
        bubble_fraction=simulation.bubble_fraction,
        collectives=tuple(collectives),
        memory=memory_of_stages(staged, meshes),
        host_bytes=tuple(kept_bytes) if any(kept_bytes) else (),
        host_copied_bytes=copied_bytes / devices,
        host_time_s=host_s / devices,
        product_time_s=product_s / devices,
        peak_rate_time_s=flops.at_peak_s(peak_rate),
    )


def predicted(
    graph: OpGraph, best: SpmdCandidate, cluster: Cluster, use: MemoryUse, mesh: LogicalMesh
) -> tuple[Predicted, Timeline]:
    """The prediction of a program, and its timeline, from the simulation with which it was compared."""
    lowered, model, estimate, ran = best.lowered, best.model, best.estimate, best.ran
    collectives = grouped(predicted_collectives(graph, lowered, model), mesh, ran.sends())
    seconds_of = _seconds_of(graph, lowered, model, best.compute_s)
    compute_s = sum(seconds_of.values())
    host = host_use(graph, lowered, model)
    kept_bytes = host.kept_bytes + host.saved_bytes
    step_s, flops = ran.end_s, flops_in(graph)

    def peak_rate(dtype: str) -> float:
        return model.links.mesh.num_devices * cluster.device.peak_flops_per_s(dtype)

    prediction = Predicted(
        step_time_s=step_s,
        compute_time_s=compute_s,
        collective_time_s=sum(row.time_s for row in collectives),
        hidden_time_s=ran.hidden_s,
        peak_bytes=(estimate.peak_bytes,),
        flops=flops.done,
        recomputed_flops=flops.recomputed,
        mfu=flops.of_model / (step_s * peak_rate(flops.main)) if step_s else 0.0,
        bubble_fraction=0.0,
        collectives=collectives,
        memory=(use,),
        host_bytes=(kept_bytes,) if kept_bytes else (),
        host_copied_bytes=float(host.copied_bytes),
        host_time_s=host.time_s,
        product_time_s=_product_s(lowered, seconds_of),
        peak_rate_time_s=flops.at_peak_s(peak_rate),
    )
    return prediction, timeline_of(ran, mesh)


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
    mesh: LogicalMesh,
    stage: int = 0,
    compute_s: Mapping[int, float] | None = None,
) -> tuple[ModuleRow, ...]:
    """One row for each module: layouts of its matrix products, seconds, communication, saved bytes. `mesh` has the
    names of the axes. `compute_s` of the operations are not computed again.
    """
    seconds = _seconds_of(graph, lowered, model, compute_s)
    saved = saved_bytes(graph, lowered, mesh)
    splits: dict[str, dict[str, None]] = {}
    count: dict[str, int] = {}
    time: dict[str, float] = {}
    update: dict[str, float] = {}
    for op, compute in _computes(lowered):
        count[op.place] = count.get(op.place, 0) + 1
        time[op.place] = time.get(op.place, 0.0) + seconds.get(op.id, 0.0)
        if op.role is Role.UPDATE:
            update[op.place] = update.get(op.place, 0.0) + seconds.get(op.id, 0.0)
        products = splits.setdefault(op.place, {})
        if op.primitive in MATRIX_PRODUCTS:
            replicated_operands = [
                replicated(len(a.shape if isinstance(a, Constant) else graph.values[a].shape)) for a in op.inputs
            ]
            layouts = compute.strategy.operands if compute.strategy is not None else replicated_operands
            reads = " @ ".join(layout.text(mesh) for layout in layouts)
            result = compute.strategy.results[0] if compute.strategy is not None else compute.results[0]
            products[f"{op.role.value}: {reads} -> {result.text(mesh)}"] = None
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
            update_time_s=update.get(m, 0.0),
            saved_bytes=saved.get(m, 0),
            stage=stage,
        )
        for m in modules
    )


def stage_rows(planned: PlannedStage, number: int, times: Sends, mesh: LogicalMesh) -> tuple[ModuleRow, ...]:
    """The rows of one stage of a pipeline, by its number."""
    graph, block, model = planned.stage.graph, planned.lowered.lowered, planned.model
    collectives = grouped(predicted_collectives(graph, block, model), mesh, times)
    return module_rows(
        graph, block, model, collectives, mesh, number, compute_times_s(graph, block, model, planned.costs)
    )


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


def replicated_notes(context: PlanningContext) -> tuple[str, ...]:
    """The operations that no rule allows to split, where that costs a part of the step or of the memory that is told,
    and mixtures of experts that are not split by tokens; one note for each primitive and reason.
    """
    graph, num_devices = context.graph, context.cluster.num_devices
    noted: dict[tuple[str, str], list[Op]] = collections.defaultdict(list)
    for op in graph.ops():
        if op.rule is not None and op.rule.note:
            noted[op.primitive, op.rule.note].append(op)
    costs = NodeCosts(graph, cost_model(context.cluster, LogicalMesh(axis_sizes=(num_devices,))))
    texts = []
    for (primitive, note), ops in noted.items():
        if primitive in (RAGGED_PRODUCT, GROUPED_PRODUCT):
            texts.append(f"{primitive}: {note}")
            continue
        largest = max(graph.values[v].nbytes for op in ops for v in op.outputs)
        alone_s = in_turn_s(ops, lambda op: costs.compute_s(op, None) - costs.shared_s(op, num_devices))
        told_s, told_bytes = (summary.ROUNDED_AWAY * whole for whole in (context.least_s, context.limit_bytes))
        if alone_s > told_s or largest > told_bytes:
            made = text_of_bytes(largest)
            texts.append(f"{primitive} is replicated ({len(ops)} of them, the largest makes {made}): {note}")
    return tuple(texts)


def plan_of(
    context: PlanningContext,
    chosen: Candidate,
    trees: Trees,
    notes: Sequence[str] = (),
) -> Plan:
    """The plan of a candidate; under a recipe, with the names of its mesh axes and notes on arrays left whole."""
    binding = context.request.binding
    with context.progress.pass_("write the plan"):
        if isinstance(chosen, PipelineCandidate):
            record = _pipeline_record(context, chosen)
        else:
            assert isinstance(chosen, SpmdCandidate), "the sources have candidates of these two kinds"
            record = _program_record(context, chosen, notes)
        notes = (*batch_notes(context.traced, record), *record.notes)
        record = dataclasses.replace(record, recipe=context.request.recipe, notes=notes)
        plan = Plan(record, trees)
        if binding is None:
            return plan
        _, constraints = binding.on(plan.mesh.num_devices)
        if isinstance(chosen, PipelineCandidate):
            bounds = bound_stages(chosen.staged.stages, constraints)
        else:
            bounds = [bound_step(context.graph, chosen, binding)]
        notes = (*record.notes, *recipe_notes(bounds))
        return dataclasses.replace(plan, record=dataclasses.replace(record, notes=notes))


def _named_mesh(
    context: PlanningContext, candidate: SpmdCandidate | PipelineCandidate, mesh: LogicalMesh, roles: Sequence[str]
) -> LogicalMesh:
    """A mesh of a candidate with the names that a recipe or pins give its axes; the others are named by their roles."""
    given: Sequence[str] = ()
    if candidate.pins is not None:
        given = candidate.pins.names
    elif context.request.binding is not None:
        given = [use.name for use in context.request.binding.on(mesh.num_devices)[1].axes]
    return LogicalMesh(axis_sizes=mesh.axis_sizes, names=summary.axis_names_of(roles, given))


def _pipeline_record(context: PlanningContext, candidate: PipelineCandidate) -> PlanRecord:
    traced, graph = context.traced, context.graph
    staged, choice = candidate.staged, candidate.choice
    followed = context.request.followed_stages
    arguments, results = staged_values(traced, staged, dict(followed.leaves) if followed is not None else None)
    values = dimensions_of(staged.graph)
    reports = [planned.sharding.report for planned in staged.stages]
    sends = sends_of_stages(staged)
    largest_axis = max(n for planned in staged.stages for n in planned.sharding.mesh.axis_sizes)
    shardings = [planned.sharding for planned in staged.stages]
    roles = tuple(
        roles_of_axes(s, planned.stage.graph, values) for s, planned in zip(shardings, staged.stages, strict=True)
    )
    meshes = [_named_mesh(context, candidate, s.mesh, own) for s, own in zip(shardings, roles, strict=True)]
    return PlanRecord(
        format_version=FORMAT_VERSION,
        step=traced.name,
        fingerprint=traced.fingerprint,
        saved_names=traced.saved_names,
        attention_kernel=traced.attention_kernel,
        scan_recompute=traced.scan_recompute,
        stacked_over=staged.step.traced.stacked_over,
        per_microbatch=traced.per_microbatch,
        expert_load=traced.expert_load,
        row_blocks=traced.row_blocks is not None,
        cluster=context.cluster,
        compiler_options=options_of(context.request.compiler_options, context.cluster.device.platform, largest_axis),
        exchange_options=exchange_options_of(
            context.request.compiler_options, context.cluster.device.platform, largest_axis
        ),
        least_step_time_s=context.least_s,
        axis_sizes=(),
        memory_limit_bytes=context.limit_bytes,
        arguments=tuple(arguments),
        results=tuple(results),
        decisions=Decisions(layouts=(), strategies=(), of_op={}, raw={}, placed={}, copies=()),
        predicted=staged_predicted(staged, sends, context.cluster, flops_in(graph), meshes),
        solver=together(reports),
        modules=tuple(
            row
            for number, (planned, times, mesh) in enumerate(zip(staged.stages, sends, meshes, strict=True))
            for row in stage_rows(planned, number, times, mesh)
        ),
        axis_names=tuple(mesh.axis_names for mesh in meshes),
        axis_roles=roles,
        candidates=_candidates(context, candidate),
        notes=(
            *_notes_of(context, largest_axis),
            *stack_notes(staged.step),
            *_accumulation_note(staged.graph.per_microbatch, staged.graph.num_microbatches),
            *offload_notes(
                ((planned.stage.graph, planned.lowered.lowered) for planned in staged.stages),
                context.cluster.device.platform,
            ),
            *replicated_notes(context),
        ),
        pipeline=pipeline_record(staged, choice.policies, choice.chunks, candidate.hoist_casts),
    )


def _program_record(context: PlanningContext, best: SpmdCandidate, notes: Sequence[str]) -> PlanRecord:
    traced, graph = context.traced, context.graph
    arguments, results = planned_values(traced, graph, best.lowered)
    program, stands_for = memory_program(graph, best.lowered, best.model)
    roles = roles_of_axes(best.sharding, graph, dimensions_of(context.views.annotated))
    mesh = _named_mesh(context, best, best.sharding.mesh, roles)
    use = memory_of_program(graph, best.lowered, program, best.estimate, stands_for, mesh)
    largest_axis = max(mesh.axis_sizes)
    prediction, timeline = predicted(graph, best, context.cluster, use, mesh)
    return PlanRecord(
        format_version=FORMAT_VERSION,
        step=traced.name,
        fingerprint=traced.fingerprint,
        saved_names=traced.saved_names,
        attention_kernel=traced.attention_kernel,
        scan_recompute=traced.scan_recompute,
        stacked_over=traced.stacked_over,
        uneven_over=traced.uneven_over,
        per_microbatch=traced.per_microbatch,
        expert_load=traced.expert_load,
        row_blocks=traced.row_blocks is not None,
        cluster=context.cluster,
        compiler_options=options_of(context.request.compiler_options, context.cluster.device.platform, largest_axis),
        least_step_time_s=context.least_s,
        axis_sizes=mesh.axis_sizes,
        memory_limit_bytes=context.limit_bytes,
        arguments=tuple(arguments),
        results=tuple(results),
        decisions=decisions_of(best.sharding, graph),
        predicted=prediction,
        solver=best.sharding.report,
        modules=module_rows(graph, best.lowered, best.model, prediction.collectives, mesh, compute_s=best.compute_s),
        axis_names=(mesh.axis_names,),
        axis_roles=(roles,),
        candidates=_candidates(context, best),
        notes=(
            *_notes_of(context, largest_axis, _score_part(graph, best)),
            *island_notes(graph, best.sharding),
            *offload_notes([(graph, best.lowered)], context.cluster.device.platform),
            *recomputation_notes(graph, best, program, context.limit_bytes),
            *notes,
            *replicated_notes(context),
        ),
        timeline=timeline,
    )


def _candidates(context: PlanningContext, chosen: Candidate) -> tuple[CandidateRecord, ...]:
    """Every way to run the step that was looked at, with the reason for which it is not the plan."""
    values = dimensions_of(context.views.annotated)
    roles_of: dict[CandidateRecord, tuple[str, ...]] = {}
    # Another plan near the best may be of a search that came after these.
    is_among = any(outcome is chosen for outcome in context.results)
    for outcome in (*context.results, *(() if is_among else (chosen,))):
        # Pipelines that were evaluated and are no candidates, as another of the same search is better.
        others = outcome.weighed if isinstance(outcome, PipelineCandidate) else ()
        roles: tuple[str, ...] = ()
        if isinstance(outcome, SpmdCandidate):
            roles = roles_of_axes(outcome.sharding, context.graph, values)
        roles_of |= dict.fromkeys((*others, outcome.record), roles)

    def why(row: CandidateRecord) -> str:
        if row.why or row == chosen.record or row.step_time_s is None:
            return row.why
        return why_lost(row.step_time_s, row.peak_bytes or 0, chosen.step_time_s, context.limit_bytes)

    return tuple(dataclasses.replace(row, why=why(row), axis_roles=roles) for row, roles in roles_of.items())


def _score_part(graph: OpGraph, best: SpmdCandidate) -> float:
    """The part of the step that operations on scores of attention take, without the products among them."""
    seconds = (best.compute_s.get(op.id, 0.0) for op in graph.ops() if op.kernel_bytes is not None)
    return sum(seconds) / best.step_time_s if best.step_time_s else 0.0


def _notes_of(context: PlanningContext, largest_axis: int, score_part: float = 0.0) -> tuple[str, ...]:
    """Notes that apply to a step whatever its plan. `score_part`: as of `_score_part`."""
    traced, graph = context.traced, context.graph
    platform = context.cluster.device.platform
    unlike = unlike_assumed(context.request.compiler_options, platform, largest_axis)
    untied = sorted(i for i in traced.donated if i not in traced.tied)
    notes = [*traced.notes, *ragged_notes(graph, platform)]
    if untied:
        paths = ", ".join(traced.in_paths[i] for i in untied[:3]) + ", ..." * (len(untied) > 3)
        leaves, them = ("leaf of the state is", "it") if len(untied) == 1 else ("leaves of the state are", "them")
        notes.append(f"{len(untied)} {leaves} not donated, as no result with the same tree replaces {them} ({paths})")
    notes += [unlike] if unlike else []
    annotated = context.views.annotated
    if traced.attention_kernel:
        return (*notes, *attention_left(annotated, Kernel[traced.attention_kernel]))
    return (*notes, *attention_as_written(annotated, library_of(context.cluster.device), score_part))


def _accumulation_note(patterns: Sequence[str], num_microbatches: int) -> tuple[str, ...]:
    """A note on modules that are taken per micro-batch, where there are any."""
    if not patterns:
        return ()
    return (
        f"{', '.join(patterns)}: taken per micro-batch, so that the results are those of gradient accumulation over "
        f"{num_microbatches} micro-batches, not those of the whole batch",
    )


# How long the collectives of a pipeline take, and for how much of that the step waits, by stage.


def sends_of_stages(staged: StagedStep) -> tuple[Sends, ...]:
    """Of each stage: cause of collectives -> their seconds in a step, on each of its devices.

    Tasks are timed as their costs are: those that run alone by themselves, joined ones as the one program that they
    are. Stages that do the same, in modules of names that differ in numbers only, send alike and are timed once.
    """
    in_joined = collections.Counter(number for joined in staged.joined for number, _ in joined.parts)
    numbers = [[i for i, task in enumerate(staged.staged.tasks) if task.stage == s] for s in range(len(staged.stages))]
    runs_of = collections.Counter(tuple(number for number, _ in joined.parts) for joined in staged.joined)
    first_of = {tuple(number for number, _ in joined.parts): joined.parts for joined in reversed(staged.joined)}
    known: dict[Hashable, tuple[Sequence[str], Sends]] = {}
    found = []
    for planned, tasks in zip(staged.stages, numbers, strict=True):
        modules = tuple(dict.fromkeys(op.place for op in planned.stage.graph.ops()))
        chains = [chain for chain in runs_of if not set(tasks).isdisjoint(chain)]
        key = (
            planned.like,
            tuple(map(summary.folded, modules)),
            tuple(_form(staged, number, in_joined) for number in tasks),
            tuple(tuple(_joined_form(staged, number, tasks) for number in chain) for chain in chains),
            tuple(runs_of[chain] for chain in chains),
        )
        if key not in known:
            sends: Sends = {}
            for number in tasks:
                _add(sends, *_alone(staged, planned, number, in_joined))
            for chain in chains:
                of_chain = timed_chain(staged, first_of[chain]).sends()
                _add(sends, {cause: s for cause, s in of_chain.items() if cause[-1] in modules}, runs_of[chain])
            known[key] = modules, sends
        first_modules, sends = known[key]
        name = dict(zip(first_modules, modules, strict=True))
        found.append({(kind, axes, name.get(module, module)): s for (kind, axes, module), s in sends.items()})
    return tuple(found)


def _joined_form(staged: StagedStep, number: int, tasks: Sequence[int]) -> Hashable:
    """Equal for tasks of joined ones that are the same of these tasks, or of other stages that do the same."""
    task = staged.staged.tasks[number]
    return tasks.index(number) if number in tasks else (task.kind, task.level, staged.stages[task.stage].like)


def _form(staged: StagedStep, number: int, in_joined: Mapping[int, int]) -> Hashable:
    """Equal for tasks of alike stages that are cut alike and run alone alike often."""
    task = staged.staged.tasks[number]
    sizes = len(task.instructions), len(task.inputs), len(task.outputs)
    return task.kind, task.level, sizes, in_joined.get(number, 0)


def _alone(staged: StagedStep, planned: PlannedStage, number: int, in_joined: Mapping[int, int]) -> tuple[Sends, float]:
    """The collectives of all runs of a task, and the part of these runs that are programs of their own."""
    task = staged.staged.tasks[number]
    runs = staged.graph.num_microbatches if task.kind.repeats else 1
    return timed_task(planned, task).sends(), 1 - in_joined.get(number, 0) / runs


def _add(sends: Sends, more: Sends, share: float) -> None:
    for cause, time in more.items():
        sends[cause] = sends.get(cause, NO_TIME) + time.times(share)
