"""From a candidate to a `Plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.attention.match import attention_as_written, attention_left
from autopar.compiler.axis_roles import dimensions_of, roles_of_axes
from autopar.compiler.memory_breakdown import memory_of_program
from autopar.compiler.notes import (
    batch_notes,
    bound_stages,
    bound_step,
    island_notes,
    offload_notes,
    recipe_notes,
    recomputation_notes,
)
from autopar.compiler.padding import padding_notes
from autopar.compiler.send_times import sends_of_stages
from autopar.compiler.write_record import (
    flops_in,
    module_rows,
    pipeline_record,
    predicted,
    replicated_notes,
    stage_rows,
    staged_predicted,
    together,
)
from autopar.compiler.write_values import planned_values, staged_values
from autopar.cost.compiler_options import exchange_options_of, options_of, unlike_assumed
from autopar.cost.memory_program import memory_program
from autopar.inter_op.pipeline_candidate import PipelineCandidate
from autopar.intra_op import baselines
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.ir.graph import OpGraph
from autopar.plan.codec import decisions_of
from autopar.plan.context import Candidate, PlanningContext, Rejection
from autopar.plan.plan import Plan, Trees
from autopar.plan.schema import FORMAT_VERSION, Decisions, MeshTrial, PlanRecord


def plan_of(
    context: PlanningContext,
    chosen: Candidate,
    trees: Trees,
    notes: Sequence[str] = (),
    rejections: Sequence[Rejection] = (),
) -> Plan:
    """The plan of a candidate; under a recipe, with the names of its mesh axes and notes on arrays left whole."""
    binding = context.request.binding
    with context.progress.pass_("write the plan"):
        if isinstance(chosen, PipelineCandidate):
            record = _pipeline_record(context, chosen)
        else:
            assert isinstance(chosen, SpmdCandidate), "the sources have candidates of these two kinds"
            record = _program_record(context, chosen, notes)
        rejected = tuple(rejection.record for rejection in rejections)
        notes = (*batch_notes(context.traced, record), *record.notes)
        record = dataclasses.replace(record, rejected=rejected, recipe=context.request.recipe, notes=notes)
        plan = Plan(record, trees)
        if binding is None:
            return plan
        _, constraints = binding.on(plan.mesh.num_devices)
        if isinstance(chosen, PipelineCandidate):
            bounds = bound_stages(chosen.staged.stages, constraints)
        else:
            bounds = [bound_step(context.graph, chosen, binding)]
        names = tuple(use.name for use in constraints.axes)
        notes = (*record.notes, *recipe_notes(bounds))
        return dataclasses.replace(plan, record=dataclasses.replace(record, axis_names=names, notes=notes))


def _pipeline_record(context: PlanningContext, candidate: PipelineCandidate) -> PlanRecord:
    traced, graph = context.traced, context.graph
    staged, choice = candidate.staged, candidate.choice
    followed = context.request.followed_stages
    arguments, results = staged_values(traced, staged, dict(followed.leaves) if followed is not None else None)
    values = dimensions_of(staged.graph)
    reports = [planned.sharding.report for planned in staged.stages]
    sends = sends_of_stages(staged)
    largest_axis = max(n for planned in staged.stages for n in planned.sharding.mesh.axis_sizes)
    return PlanRecord(
        format_version=FORMAT_VERSION,
        step=traced.name,
        fingerprint=traced.fingerprint,
        saved_names=traced.saved_names,
        blockwise_attention=traced.blockwise_attention,
        stacked_over=staged.step.traced.stacked_over,
        per_microbatch=traced.per_microbatch,
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
        predicted=staged_predicted(staged, sends, context.cluster, flops_in(graph)),
        solver=together(reports),
        modules=tuple(
            row
            for number, (planned, times) in enumerate(zip(staged.stages, sends, strict=True))
            for row in stage_rows(planned, number, times)
        ),
        axis_roles=tuple(roles_of_axes(planned.sharding, planned.stage.graph, values) for planned in staged.stages),
        tried=_trials(context),
        notes=(
            *_notes_of(context, largest_axis),
            *_accumulation_note(staged.graph.per_microbatch, staged.graph.num_microbatches),
            *offload_notes(
                ((planned.stage.graph, planned.lowered.lowered) for planned in staged.stages),
                context.cluster.device.platform,
            ),
        ),
        pipeline=pipeline_record(staged, choice.policies, choice.chunks, candidate.hoist_casts),
        weighed=candidate.weighed,
    )


def _program_record(context: PlanningContext, best: SpmdCandidate, notes: Sequence[str]) -> PlanRecord:
    traced, graph = context.traced, context.graph
    arguments, results = planned_values(traced, graph, best.lowered)
    program, stands_for = memory_program(graph, best.lowered, best.model)
    use = memory_of_program(graph, best.lowered, program, best.estimate, stands_for, best.sharding.mesh)
    largest_axis = max(best.sharding.mesh.axis_sizes)
    prediction, timeline = predicted(graph, best, context.cluster, use)
    return PlanRecord(
        format_version=FORMAT_VERSION,
        step=traced.name,
        fingerprint=traced.fingerprint,
        saved_names=traced.saved_names,
        blockwise_attention=traced.blockwise_attention,
        stacked_over=traced.stacked_over,
        uneven_over=traced.uneven_over,
        per_microbatch=traced.per_microbatch,
        cluster=context.cluster,
        compiler_options=options_of(context.request.compiler_options, context.cluster.device.platform, largest_axis),
        least_step_time_s=context.least_s,
        axis_sizes=best.sharding.mesh.axis_sizes,
        memory_limit_bytes=context.limit_bytes,
        arguments=tuple(arguments),
        results=tuple(results),
        decisions=decisions_of(best.sharding, graph),
        predicted=prediction,
        solver=best.sharding.report,
        modules=module_rows(graph, best.lowered, best.model, prediction.collectives, compute_s=best.compute_s),
        axis_roles=(roles_of_axes(best.sharding, graph, dimensions_of(context.views.annotated)),),
        tried=_trials(context),
        notes=(
            *_notes_of(context, largest_axis, _score_part(graph, best)),
            *island_notes(graph, best.sharding),
            *offload_notes([(graph, best.lowered)], context.cluster.device.platform),
            *recomputation_notes(graph, best, program, context.limit_bytes),
            *notes,
        ),
        timeline=timeline,
    )


def _trials(context: PlanningContext) -> tuple[MeshTrial, ...]:
    """The logical meshes that were tried, and the reasons for which others were not."""
    trials = []
    for outcome in context.results:
        if isinstance(outcome, SpmdCandidate):
            roles = roles_of_axes(outcome.sharding, context.graph, dimensions_of(context.views.annotated))
            trials.append(dataclasses.replace(outcome.trial, axis_roles=roles))
        elif isinstance(outcome, Rejection) and outcome.axis_sizes:
            name = outcome.text if outcome.source == baselines.SOURCE else ""
            trials.append(
                MeshTrial(
                    axis_sizes=outcome.axis_sizes,
                    step_time_s=outcome.step_time_s,
                    peak_bytes=outcome.peak_bytes,
                    status=outcome.why,
                    name=name,
                )
            )
    return tuple(trials)


def _score_part(graph: OpGraph, best: SpmdCandidate) -> float:
    """The part of the step that operations on scores of attention take, without the products among them."""
    seconds = (best.compute_s.get(op.id, 0.0) for op in graph.ops() if op.kernel_bytes is not None)
    return sum(seconds) / best.step_time_s if best.step_time_s else 0.0


def _notes_of(context: PlanningContext, largest_axis: int, score_part: float = 0.0) -> tuple[str, ...]:
    """Notes that apply to a step whatever its plan. `score_part`: as of `_score_part`."""
    traced, graph = context.traced, context.graph
    unlike = unlike_assumed(context.request.compiler_options, context.cluster.device.platform, largest_axis)
    untied = sorted(i for i in traced.donated if i not in traced.tied)
    notes = list(replicated_notes(graph))
    if untied:
        paths = ", ".join(traced.in_paths[i] for i in untied[:3])
        notes.append(
            f"{len(untied)} leaves of the donated arguments come back in no result with the same tree ({paths}, ...): "
            "their memory is not reused"
        )
    notes += [unlike] if unlike else []
    notes += padding_notes(traced)
    annotated = context.views.annotated
    if traced.blockwise_attention:
        return (*notes, *attention_left(annotated))
    return (*notes, *attention_as_written(annotated, score_part))


def _accumulation_note(patterns: Sequence[str], num_microbatches: int) -> tuple[str, ...]:
    """A note on modules that are taken per micro-batch, where there are any."""
    if not patterns:
        return ()
    return (
        f"{', '.join(patterns)}: taken per micro-batch, so that the results are those of gradient accumulation over "
        f"{num_microbatches} micro-batches, not those of the whole batch",
    )
