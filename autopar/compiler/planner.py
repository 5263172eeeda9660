"""The compiler, on one page: a traced step and a cluster in, a plan out; a plan and a mesh in, a function out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from autopar.attention.checks import check_attention
from autopar.common import jax_compat
from autopar.common.deadline import Deadline
from autopar.common.progress import Progress
from autopar.common.units import text_of_bytes, text_of_s
from autopar.compiler.axis_roles import dimensions_of, roles_of_axes
from autopar.compiler.check_decisions import (
    at_place,
    check_decisions,
    check_groups,
    check_layers,
    check_transfers,
    check_values,
)
from autopar.compiler.memory_breakdown import memory_of_program
from autopar.compiler.memory_errors import fits, pipeline_refusal
from autopar.compiler.pin_costs import price_in_one_program, price_in_stages
from autopar.compiler.recipe_notes import Bound, bound_stages, bound_step, recipe_notes
from autopar.compiler.write_record import (
    decisions_of,
    module_rows,
    pipeline_record,
    planned_values,
    predicted,
    replicated_notes,
    sharding_plan_of,
    stage_rows,
    staged_predicted,
    staged_values,
    together,
)
from autopar.cost.cost_model import cost_model
from autopar.cost.prediction import allocation_s
from autopar.cost.roofline import flops_of
from autopar.errors import (
    AutoparError,
    BatchMismatchError,
    InvalidArgumentError,
    MemoryLimitError,
    PlanMismatchError,
    SolverError,
    UnsupportedError,
)
from autopar.frontend.build_graph import build_graph
from autopar.frontend.callbacks import any_callbacks
from autopar.hardware.cluster import Cluster
from autopar.inter_op.build_stages import cut_layers, recomputed
from autopar.inter_op.evaluate import PipelineCandidate
from autopar.inter_op.requested import in_one_stage, requested_pipeline
from autopar.inter_op.search import search_pipelines
from autopar.inter_op.staged import (
    StagedStep,
    Submesh,
    check_directions,
    cut_stages,
    model_of,
    planned_stage,
    schedule_of,
    stage_program,
)
from autopar.intra_op.spmd_search import LONG_STEP, SpmdCandidate, check_state_fits, search_spmd, state_bytes
from autopar.ir.graph import OpGraph, OpKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.traced_step import TracedStep
from autopar.lowering.emit import Emitter
from autopar.lowering.host_offload import with_host_copies
from autopar.lowering.instructions import LoweredBlock
from autopar.lowering.lower import lower
from autopar.passes.split_scan import cut_scans
from autopar.plan.options import PlanOptions
from autopar.plan.plan import Plan, Trees
from autopar.plan.schema import FORMAT_VERSION, Decisions, MeshTrial, PinsRecord, PlanRecord
from autopar.sharding.rules import RuleBook
from autopar.sharding.semantics import annotate_semantics

# Steps on more devices than this run as pipelines only (of one stage too): a single program over all of them cuts no
# batch, so that it needs more memory, and its search costs more.
WHOLE_UP_TO = 64
# Where a pipeline is searched for although a single program fits: the share of the step that is lost to sending and to
# work done twice, or to memory that is new in every step, of which micro-batches need less; all of these (beside what
# is left idle) where devices share processors and a bubble costs next to nothing; and how long the step must be, so
# that handing out tasks (about 0.1 ms each) does not matter.
LOST_BETWEEN_HOSTS, LOST_INSIDE_HOST, LOST_TO_MEMORY, LEAST_PIPELINE_S = 0.1, 0.3, 0.1, 5e-3
LOST_ON_SHARED_PROCESSORS = 0.05
# The part of a device's memory that is left where no limit is given: predictions come within it of what XLA's CPU
# compiler allocates, of which 1 % in the median of 37 models, and more than 10 % in four, is lost between buffers
# (`benchmarks/memory_study.py`).
MEMORY_MARGIN = 0.1


def make_plan(
    traced: TracedStep, trees: Trees, cluster: Cluster, options: PlanOptions, rules: RuleBook, progress: Progress
) -> Plan:
    """The best plan. Raises: as `make_plans`."""
    return make_plans(traced, trees, cluster, options, rules, progress)[0]


@jax_compat.no_mesh_set()
def make_plans(
    traced: TracedStep,
    trees: Trees,
    cluster: Cluster,
    options: PlanOptions,
    rules: RuleBook,
    progress: Progress,
    within: float = 1.0,
) -> tuple[Plan, ...]:
    """Traced step -> graph -> the best plan as one program, and as a pipeline where that may pay -> the faster one.

    Behind it come other plans that the search worked out, that fit and are predicted to take at most `within` times as
    long, the fastest first: none for 1, nor of a recipe, of pins, or of a number of stages that was asked for. Where
    they are wanted, pipelines are searched for although they may not pay; the best plan stays the one that it is.

    Raises: MemoryLimitError when nothing fits; UnsupportedError; SolverError; what cutting into micro-batches and
    stages raises, where they were asked for.
    """
    if options.binding is not None:
        traced = dataclasses.replace(traced, blockwise_attention=options.binding.blockwise_attention)
    options = dataclasses.replace(options, deadline=Deadline.after(options.time_limit_s))
    with progress.pass_("graph"):
        graph = build_graph(traced, rules)
    limit_bytes = options.memory_limit_bytes or int((1 - MEMORY_MARGIN) * cluster.device.memory_bytes)
    asked = options.pipeline
    if options.pins is not None:
        check_pins(options)
    check_host_link(cluster, options)
    # A recipe that is cut into micro-batches is built as it says, with one stage where it names none.
    if asked.num_stages is not None or (asked.is_asked and (options.binding is not None or options.pins is not None)):
        found = requested_pipeline(traced, cluster, options, limit_bytes, rules, progress)
        plan = named(staged_plan(traced, trees, graph, cluster, limit_bytes, found, progress), options)
        if not fits(plan, limit_bytes):
            raise pipeline_refusal(plan, limit_bytes)
        if options.binding is not None:
            plan = noted(plan, bound_stages(found.staged.stages, options.binding.on(plan.mesh.num_devices)[1]))
        if found.pins is None:
            return (plan,)
        cost = price_in_stages(traced, cluster, options, limit_bytes, rules, progress, found)
        return (pinned(plan, found.pins.names, cost),)
    if options.is_free and not options.in_host and len(graph.block.ops) > LONG_STEP:
        check_state_fits(traced, graph, cluster, limit_bytes)
    spmd_candidates: tuple[SpmdCandidate, ...] = ()
    refused: AutoparError | None = None
    trials: list[MeshTrial] = []
    keep_tolerance = within if options.is_free else 1.0
    if options.binding is not None:
        graph = annotate_semantics(graph)
        options.binding.check(graph, cluster.num_devices)
        if options.binding.shares_sequences:
            check_attention(graph)
    searches_whole = not options.is_free or cluster.num_devices <= WHOLE_UP_TO or any_callbacks(traced.jaxpr)
    if not asked.is_asked and searches_whole:
        made = search_spmd(traced, graph, cluster, limit_bytes, options, trials, progress, keep_tolerance)
        spmd_candidates, refused = ((), made) if isinstance(made, AutoparError) else (made, None)
    if isinstance(refused, MemoryLimitError) and state_bytes(graph, cluster) > limit_bytes:
        text = text_of_bytes(state_bytes(graph, cluster))
        raise refused.beside([f"nor do stages fit: the arguments alone, split over all devices, take {text} on each"])
    best = spmd_candidates[0] if spmd_candidates else None
    notes: list[str] = []
    pipelines: tuple[PipelineCandidate, ...] = ()
    other: PipelineCandidate | None = None
    to_beat_s = best.step_time_s if best is not None else math.inf
    pays = asked.is_asked or (options.is_free and pipeline_may_pay(best, cluster))
    if best is not None and pays and options.deadline.passed:
        pays = False
        notes.append(f"no pipeline was searched for: {options.deadline.text}")
    if pays or (not options.deadline.passed and keep_tolerance > 1 and cluster.num_devices > 1):
        other, reason = searched_pipeline(
            traced, graph, cluster, options, limit_bytes, rules, progress, to_beat_s, keep_tolerance
        )
        if other is not None and other.fits(limit_bytes):
            pipelines = (other, *other.near)
        notes += [reason] if pays else []
    chosen: SpmdCandidate | PipelineCandidate | None = best
    if pays and pipelines and pipelines[0].step_time_s < to_beat_s:
        chosen = pipelines[0]
    if chosen is None and options.deadline.passed:
        notes.append(f"{options.deadline.text}: give the search more")
    if chosen is None and isinstance(refused, MemoryLimitError):
        raise refused.beside(notes)
    if chosen is None and other is None and refused is None:
        other = in_one_stage(traced, cluster, options, limit_bytes, rules, progress)
        chosen = other if other is not None and other.fits(limit_bytes) else None
    if chosen is None and other is not None:
        nearest = staged_plan(traced, trees, graph, cluster, limit_bytes, other, progress)
        raise pipeline_refusal(nearest, limit_bytes, [str(refused)] if refused is not None else notes)
    if chosen is None:
        raise refused or no_pipeline_fits(traced, cluster, limit_bytes, notes)
    if options.pins is not None and options.binding is None:
        notes.append("pins keep the step in one program: stages were not searched for, but may be asked for")

    def planned(way: SpmdCandidate | PipelineCandidate) -> Plan:
        if isinstance(way, PipelineCandidate):
            return staged_plan(traced, trees, graph, cluster, limit_bytes, way, progress)
        with progress.pass_("record"):
            plan = named(Plan(record(traced, graph, cluster, limit_bytes, way, trials, notes), trees), options)
            return plan if options.binding is None else noted(plan, [bound_step(graph, way, options.binding)])

    plan = planned(chosen)
    if isinstance(chosen, SpmdCandidate) and chosen.pins is not None:
        cost = price_in_one_program(traced, graph, cluster, limit_bytes, options, chosen, progress)
        return (pinned(plan, chosen.pins.names, cost),)
    if keep_tolerance <= 1:
        return (plan,)
    longest_s = keep_tolerance * chosen.step_time_s
    others: list[SpmdCandidate | PipelineCandidate] = [*spmd_candidates, *pipelines]
    others = [way for way in others if way is not chosen and way.step_time_s <= longest_s]
    return (plan, *map(planned, sorted(others, key=lambda way: way.step_time_s)))


def check_pins(options: PlanOptions) -> None:
    """Raises: InvalidArgumentError for what cannot be asked for beside pins."""
    asked = options.pipeline
    if asked.num_stages is None and (asked.schedule is not None or asked.chunks is not None):
        raise InvalidArgumentError(
            where="constrain",
            expected="a number of stages, or none at all: under pins none is searched for",
            got=f"schedule {asked.schedule} without a number of stages",
            hint="name the stages: constrain(pins, recipe=autopar.recipes.pipeline(2, ...))",
        )
    if options.fixed or options.axis_sizes is not None:
        raise InvalidArgumentError(
            where="constrain",
            expected="pins, or a step to follow",
            got="both",
            hint="leave out follow, and pin the state as that step has it: step.plan(...).record.arguments",
        )


def check_host_link(cluster: Cluster, options: PlanOptions) -> None:
    """Raises: InvalidArgumentError where nothing is known of the link to the host's memory, and state is kept there."""
    offloads = bool(options.in_host) or (options.binding is not None and options.binding.offloads_optimizer)
    if offloads and cluster.device.host_link_bytes_per_s is None:
        raise InvalidArgumentError(
            where=f"offload='optimizer' on cluster {cluster.name}",
            expected="a rate of the link between a device and the memory of its host",
            got=f"none for {cluster.device.name}",
            hint="give it: dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, "
            "host_link_bytes_per_s=...))",
        )


def pinned(plan: Plan, axis_names: tuple[str, ...], cost: PinsRecord) -> Plan:
    """The plan with what its pins call the mesh axes, and what they cost."""
    return dataclasses.replace(plan, record=dataclasses.replace(plan.record, axis_names=axis_names, pinned=cost))


def named(plan: Plan, options: PlanOptions) -> Plan:
    """The plan with what its mesh axes are for, where it was bound to that."""
    if options.binding is None:
        return plan
    names = tuple(use.name for use in options.binding.on(plan.mesh.num_devices)[1].axes)
    return dataclasses.replace(plan, record=dataclasses.replace(plan.record, axis_names=names))


def noted(plan: Plan, bounds: Sequence[Bound]) -> Plan:
    """The plan with notes on what its recipe left whole."""
    notes = (*plan.record.notes, *recipe_notes(bounds))
    return dataclasses.replace(plan, record=dataclasses.replace(plan.record, notes=notes))


def pipeline_may_pay(best: SpmdCandidate | None, cluster: Cluster) -> bool:
    """Whether a pipeline may beat a plan that runs the step as one program: where that does not fit, or where sending
    and work done twice, or waiting for memory, take long enough to be worth the trouble of handing out many tasks.
    """
    if best is None:
        return cluster.num_devices > 1
    if best.step_time_s <= LEAST_PIPELINE_S:
        return False
    if cluster.oversubscribed_cores:
        return 1 - best.shared_out_s / best.step_time_s > LOST_ON_SHARED_PROCESSORS
    waits_s = allocation_s(best.estimate, best.model)
    lost = 1 - (best.shared_out_s + waits_s) / best.step_time_s
    least = LOST_BETWEEN_HOSTS if cluster.num_hosts > 1 else LOST_INSIDE_HOST
    # One CPU device gained nothing by micro-batches when that was measured: its tasks leave cores idle between them.
    waits = cluster.num_devices > 1 and waits_s / best.step_time_s > LOST_TO_MEMORY
    return lost > least or waits


def searched_pipeline(
    traced: TracedStep,
    graph: OpGraph,
    cluster: Cluster,
    options: PlanOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
    to_beat_s: float,
    keep_tolerance: float,
) -> tuple[PipelineCandidate | None, str]:
    """(the best pipeline, one that fits where there is one, with those `keep_tolerance` so many times of its time; what
    to say of it, or why there is none).

    Raises: what cutting into micro-batches raises, where a pipeline was asked for.
    """
    try:
        found = search_pipelines(
            traced,
            cluster,
            options.pipeline,
            limit_bytes,
            rules,
            progress,
            options.deadline,
            to_beat_s,
            graph,
            keep_tolerance,
        )
    except (UnsupportedError, BatchMismatchError) as error:
        if options.pipeline.is_asked:
            raise
        return None, f"no pipeline was weighed: {error.where}: {error.got}"
    if isinstance(found, str):
        return None, f"no pipeline: {found}"
    if not found.fits(limit_bytes):
        needed_bytes = max(found.staged.simulation.peak_bytes)
        return found, f"the pipeline nearest to fitting needs {text_of_bytes(needed_bytes)} on a device"
    return found, f"the best pipeline would take {text_of_s(found.step_time_s)} ({found.trial.text})"


def no_pipeline_fits(traced: TracedStep, cluster: Cluster, limit_bytes: int, notes: Sequence[str]) -> SolverError:
    """The error of a step for which no pipeline could be had and nothing else was tried."""
    return SolverError(
        where=f"{traced.name} on {cluster.num_devices} devices of {cluster.name}",
        expected=f"a pipeline that fits into {text_of_bytes(limit_bytes)} on each device",
        got="; ".join(notes),
        hint="use more devices, a smaller batch, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )


def staged_plan(
    traced: TracedStep,
    trees: Trees,
    graph: OpGraph,
    cluster: Cluster,
    limit_bytes: int,
    found: PipelineCandidate,
    progress: Progress,
) -> Plan:
    """A pipeline as a plan."""
    with progress.pass_("record"):
        return Plan(staged_record(traced, graph, cluster, limit_bytes, found), trees)


def staged_record(
    traced: TracedStep, graph: OpGraph, cluster: Cluster, limit_bytes: int, found: PipelineCandidate
) -> PlanRecord:
    """Writes down a pipeline."""
    staged, choice = found.staged, found.choice
    arguments, results = staged_values(traced, staged)
    values = dimensions_of(staged.graph)
    flops = sum(flops_of(op) * op.count for op in graph.ops() if op.kind is OpKind.EQUATION)
    reports = [planned.sharding.report for planned in staged.stages]
    return PlanRecord(
        format_version=FORMAT_VERSION,
        step=traced.name,
        fingerprint=traced.fingerprint,
        blockwise_attention=traced.blockwise_attention,
        cluster=cluster,
        axis_sizes=(),
        memory_limit_bytes=limit_bytes,
        arguments=tuple(arguments),
        results=tuple(results),
        decisions=Decisions(layouts=(), strategies=(), of_op={}, raw={}, placed={}, copies=()),
        predicted=staged_predicted(staged, flops),
        solver=together(reports),
        modules=tuple(row for planned in staged.stages for row in stage_rows(planned)),
        axis_roles=tuple(roles_of_axes(planned.sharding, planned.stage.graph, values) for planned in staged.stages),
        tried=(),
        notes=notes_of(traced, graph),
        pipeline=pipeline_record(staged, choice.policies, choice.chunks, found.hoist_casts),
        weighed=found.weighed,
    )


def record(
    traced: TracedStep,
    graph: OpGraph,
    cluster: Cluster,
    limit_bytes: int,
    best: SpmdCandidate,
    trials: Sequence[MeshTrial],
    notes: Sequence[str],
) -> PlanRecord:
    """Writes down the chosen candidate."""
    arguments, results = planned_values(traced, graph, best.lowered)
    flops = sum(flops_of(op) * op.count for op in graph.ops() if op.kind is OpKind.EQUATION)
    use = memory_of_program(graph, best.lowered, best.program, best.estimate, best.stands_for, best.sharding.mesh)
    made, timeline = predicted(graph, best.lowered, best.model, best.estimate, use, flops)
    return PlanRecord(
        format_version=FORMAT_VERSION,
        step=traced.name,
        fingerprint=traced.fingerprint,
        blockwise_attention=traced.blockwise_attention,
        cluster=cluster,
        axis_sizes=best.sharding.mesh.axis_sizes,
        memory_limit_bytes=limit_bytes,
        arguments=tuple(arguments),
        results=tuple(results),
        decisions=decisions_of(best.sharding),
        predicted=made,
        solver=best.sharding.report,
        modules=module_rows(graph, best.lowered, best.model, made.collectives),
        axis_roles=(roles_of_axes(best.sharding, graph, dimensions_of(graph)),),
        tried=tuple(trials),
        notes=(*notes_of(traced, graph), *notes),
        timeline=timeline,
    )


def notes_of(traced: TracedStep, graph: OpGraph) -> tuple[str, ...]:
    """What a user should know of a step whatever its plan."""
    untied = sorted(i for i in traced.donated if i not in traced.tied)
    notes = list(replicated_notes(graph))
    if untied:
        paths = ", ".join(traced.in_paths[i] for i in untied[:3])
        notes.append(
            f"{len(untied)} leaves of the donated arguments come back in no result with the same tree ({paths}, ...): "
            "their memory is not reused"
        )
    return tuple(notes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardedFunction:
    """A step under a plan: the flat function (constants first, then arguments), and what it was made from. `failures`
    is where callbacks leave what they raise; None where there are none.
    """

    function: Callable[..., list[Any]]
    graph: OpGraph
    lowered: LoweredBlock
    failures: list[BaseException] | None


def make_staged(traced: TracedStep, plan: Plan, rules: RuleBook) -> StagedStep:
    """Traced step and plan with a pipeline -> graph -> stages -> instructions -> tasks and the list that runs them.

    Raises: PlanMismatchError when the plan was made for another step or other shapes.
    """
    check_plan(plan, traced)
    traced = dataclasses.replace(traced, blockwise_attention=plan.record.blockwise_attention)
    made = plan.record.pipeline
    assert made is not None, "a plan without a pipeline is one function"
    name, place, num_stages = traced.name, "$.plan.pipeline", len(made.stages)
    with at_place(name, f"{place}.scan_parts"):
        step = cut_scans(traced, made.scan_parts, rules)
    with at_place(name, f"{place}.num_microbatches"):
        cut = cut_layers(step, made.num_microbatches, rules, hoist_casts=made.keeps_copies)
    layers = cut.layers
    check_layers(made, layers.names, name)
    graph = recomputed(cut, made.recomputed)
    with at_place(name, f"{place}.schedule"):
        schedule = schedule_of(made.schedule, num_stages, made.num_microbatches, made.chunks)
        check_directions(graph, schedule)
    check_groups(made, schedule.mesh_of_stage, name)
    first_layers = [s.first_layer for s in made.stages]
    stages = cut_stages(graph, layers, first_layers, schedule.splits_backward, num_stages)
    submeshes = [Submesh(first_device=s.first_device, mesh=LogicalMesh(axis_sizes=s.axis_sizes)) for s in made.stages]
    with at_place(name, f"{place}.stages"):
        models = [model_of(plan.cluster, s.mesh) for s in submeshes]
    shardings = [
        sharding_plan_of(s.decisions, s.solver, at.mesh, stage.graph)
        for s, at, stage in zip(made.stages, submeshes, stages, strict=True)
    ]
    for q, (sharding, stage) in enumerate(zip(shardings, stages, strict=True)):
        check_decisions(sharding, stage.graph, f"{place}.stages[{q}].decisions", name)
    check_transfers(shardings, stages, schedule.mesh_of_stage, name)
    planned = [
        planned_stage(first_layers[q], stage, models[q], shardings[q], schedule.mesh_of_stage[q], like=q)
        for q, stage in enumerate(stages)
    ]
    staged = stage_program(cut.step, graph, layers, planned, submeshes, schedule, plan.cluster)
    arguments, results = staged_values(traced, staged)
    check_values(plan.record.arguments, arguments, "$.plan.arguments", name)
    check_values(plan.record.results, results, "$.plan.results", name)
    return staged


def make_function(traced: TracedStep, plan: Plan, mesh: Mesh, rules: RuleBook) -> ShardedFunction:
    """Traced step and plan -> graph -> instructions -> function on global arrays.

    Raises: PlanMismatchError when the plan was made for another step or other shapes.
    """
    check_plan(plan, traced)
    traced = dataclasses.replace(traced, blockwise_attention=plan.record.blockwise_attention)
    graph = build_graph(traced, rules)
    model = cost_model(plan.cluster, plan.mesh)
    sharding = sharding_plan_of(plan.record.decisions, plan.record.solver, plan.mesh, graph)
    check_decisions(sharding, graph, "$.plan.decisions", traced.name)
    lowered = with_host_copies(graph, lower(graph, sharding, model.links), sharding.in_host, plan.mesh)
    arguments, results = planned_values(traced, graph, lowered)
    check_values(plan.record.arguments, arguments, "$.plan.arguments", traced.name)
    check_values(plan.record.results, results, "$.plan.results", traced.name)
    emitter = Emitter(graph, mesh)
    failures = emitter.failures if any_callbacks(traced.jaxpr) else None
    return ShardedFunction(
        function=lambda *args: emitter(lowered, args), graph=graph, lowered=lowered, failures=failures
    )


def check_plan(plan: Plan, traced: TracedStep) -> None:
    """Raises: PlanMismatchError when a plan was not made for this step."""
    if plan.record.fingerprint == traced.fingerprint:
        return
    now = {p: f"{a.dtype}{list(a.shape)}" for p, a in zip(traced.in_paths, traced.in_avals, strict=True)}
    then = {a.path: f"{a.dtype}{list(a.shape)}" for a in plan.record.arguments if a.kind != "constant"}
    differing = [path for path in {**now, **then} if now.get(path) != then.get(path)]
    if differing:
        is_now, was = (", ".join(f"{p} {shapes.get(p, 'absent')}" for p in differing[:3]) for shapes in (now, then))
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        expected, got = f"a plan for {traced.name} with {is_now}{more}", f"one for {was}{more}"
    else:
        expected = f"a plan for {traced.name} as it is traced now (fingerprint {traced.fingerprint[:12]})"
        got = f"one for the same shapes, and other operations (fingerprint {plan.record.fingerprint[:12]})"
    raise PlanMismatchError(
        where=f"plan of {plan.record.step}",
        expected=expected,
        got=got,
        hint="the step, the shapes of its arguments or its closed-over constants have changed: plan again",
    )
