"""From a traced step and its plan to a program: one function on global arrays, or the stages of a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from autopar.cost.cost_model import cost_model
from autopar.errors import PlanMismatchError
from autopar.frontend.callbacks import any_callbacks
from autopar.frontend.saved_names import saving
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.lowering.emit import Emitter
from autopar.lowering.host_copies import with_host_copies
from autopar.lowering.instructions import LoweredBlock
from autopar.lowering.lower import ShardingPlan, lower
from autopar.passes.split_scan import SplitStep, split_scans
from autopar.passes.stage_graph import StageGraph
from autopar.plan.codec import sharding_plan_of
from autopar.plan.plan import Plan
from autopar.plan.schema import PipelineRecord
from autopar.runtime.schedule import mesh_of_stages
from autopar.search.check_decisions import (
    at_place,
    check_decisions,
    check_layers,
    check_operations,
    check_values,
)
from autopar.search.inter_op.build_stages import (
    MicrobatchedStep,
    StageGraphs,
    cut_layers,
    joined_as_named,
    stage_graphs,
)
from autopar.search.inter_op.staged import StagedStep, Submesh, model_of, planned_stage, stage_program
from autopar.search.step_ways import program_graph
from autopar.search.write_values import planned_values, staged_values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardedFunction:
    """A step under a plan: the flat function (constants first, then arguments), its graph and its instructions.
    `failures` receives the exceptions of callbacks; None where there are none.
    """

    function: Callable[..., list[Any]]
    graph: OpGraph
    lowered: LoweredBlock
    failures: list[BaseException] | None


def with_saved_names(traced: TracedStep, plan: Plan) -> TracedStep:
    """The step as a plan has it: the names that `jax.checkpoint` saves."""
    if plan.record.saved_names is None or traced.saved_names is not None:
        return traced
    return saving(traced, plan.record.saved_names)


def with_options_of(plan: Plan, traced: TracedStep) -> TracedStep:
    """The traced step as the plan has it: its attention, its stacks, its modules that are taken per micro-batch, the
    names that it saves.
    """
    record, traced = plan.record, with_saved_names(traced, plan)
    return dataclasses.replace(
        traced,
        attention_kernel=record.attention_kernel,
        scan_recompute=record.scan_recompute,
        stacked_over=record.stacked_over,
        uneven_over=record.uneven_over,
        per_microbatch=record.per_microbatch,
        expert_load=record.expert_load,
        row_blocks=record.cluster.device if record.row_blocks else None,
    )


def make_function(
    traced: TracedStep, plan: Plan, mesh: Mesh, rules: RuleBook, *, is_numbered: bool = False
) -> ShardedFunction:
    """Traced step and plan -> graph -> instructions -> function on global arrays. `is_numbered`: as in `Emitter`.

    Raises: PlanMismatchError when the plan was made for another step or other shapes.
    """
    check_plan(plan, traced)
    traced = with_options_of(plan, traced)
    graph = program_graph(traced, rules)
    model = cost_model(plan.cluster, plan.mesh)
    sharding = sharding_plan_of(plan.record.decisions, plan.record.solver, plan.mesh, graph)
    check_operations(plan.record.decisions, graph, "$.plan.decisions", traced.name)
    check_decisions(sharding, graph, "$.plan.decisions", traced.name)
    lowered = with_host_copies(graph, lower(graph, sharding, model.links), sharding)
    arguments, results = planned_values(traced, graph, lowered)
    check_values(plan.record.arguments, arguments, "$.plan.arguments", traced.name)
    check_values(plan.record.results, results, "$.plan.results", traced.name)
    emitter = Emitter(graph, mesh, is_numbered=is_numbered)
    failures = emitter.failures if any_callbacks(traced.jaxpr) else None
    return ShardedFunction(
        function=lambda *args: emitter(lowered, args), graph=graph, lowered=lowered, failures=failures
    )


def make_staged(traced: TracedStep, plan: Plan, rules: RuleBook) -> StagedStep:
    """Traced step and plan with a pipeline -> graph -> stages -> instructions -> tasks and their instruction list.

    Raises: PlanMismatchError when the plan was made for another step or other shapes.
    """
    check_plan(plan, traced)
    traced = with_options_of(plan, traced)
    record = plan.record.pipeline
    assert record is not None, "a plan without a pipeline is one function"
    name, place = traced.name, "$.plan.pipeline"
    with at_place(name, f"{place}.scan_parts"):
        step = step_in_parts(traced, record, rules, plan.record.sliced)
    with at_place(name, f"{place}.num_microbatches"):
        microbatched = cut_layers(step, record.num_microbatches, rules, hoist_casts=record.keeps_copies)
    check_layers(record, microbatched.layers.names, name)
    first_layers = [s.first_layer for s in record.stages]
    with at_place(name, f"{place}.schedule"):
        graphs = stage_graphs(microbatched, record.recomputed, first_layers, record.schedule, record.chunks)
    with at_place(name, f"{place}.stages"):
        for submesh in submeshes_of(record):
            model_of(plan.cluster, submesh)
    shardings = stage_shardings(record, graphs.stages)
    for q, (sharding, stage) in enumerate(zip(shardings, graphs.stages, strict=True)):
        decided_at = f"{place}.stages[{q}].decisions"
        check_operations(record.stages[q].decisions, stage.graph, decided_at, name)
        check_decisions(sharding, stage.graph, decided_at, name)
    staged = recorded_stages(plan.cluster, record, microbatched, graphs, shardings)
    staged = joined_as_named(staged, record.joined, name)
    arguments, results = staged_values(traced, staged, plan.record.leaves)
    check_values(plan.record.arguments, arguments, "$.plan.arguments", name)
    check_values(plan.record.results, results, "$.plan.results", name)
    return staged


def step_in_parts(traced: TracedStep, record: PipelineRecord, rules: RuleBook, sliced: frozenset[int]) -> SplitStep:
    """The step with its scans over layers in the recorded parts."""
    groups = mesh_of_stages(record.schedule, len(record.stages) // record.chunks, record.chunks)
    return split_scans(traced, record.scan_parts, rules, sliced, groups if record.scan_parts > 1 else ())


def stage_shardings(record: PipelineRecord, stages: Sequence[StageGraph]) -> list[ShardingPlan]:
    """The recorded decisions of each stage."""
    return [
        sharding_plan_of(s.decisions, s.solver, LogicalMesh(axis_sizes=s.axis_sizes), stage.graph)
        for s, stage in zip(record.stages, stages, strict=True)
    ]


def submeshes_of(record: PipelineRecord) -> list[Submesh]:
    """The recorded devices of each stage."""
    return [Submesh(first_device=s.first_device, mesh=LogicalMesh(axis_sizes=s.axis_sizes)) for s in record.stages]


def recorded_stages(
    cluster: Cluster,
    record: PipelineRecord,
    microbatched: MicrobatchedStep,
    graphs: StageGraphs,
    shardings: Sequence[ShardingPlan],
) -> StagedStep:
    """Stages on their recorded devices, under these decisions, lowered and simulated."""
    submeshes = submeshes_of(record)
    rows = zip(record.stages, submeshes, graphs.stages, shardings, graphs.schedule.mesh_of_stage, strict=True)
    planned = [
        planned_stage(s.first_layer, stage, graphs.costs[q].on(model_of(cluster, at)), sharding, group, like=q)
        for q, (s, at, stage, sharding, group) in enumerate(rows)
    ]
    return stage_program(
        microbatched.step, graphs.graph, microbatched.layers, planned, submeshes, graphs.schedule, cluster
    )


def check_plan(plan: Plan, traced: TracedStep) -> None:
    """Raises: PlanMismatchError when a plan was not made for this step."""
    traced = with_saved_names(traced, plan)
    if plan.record.fingerprint == traced.fingerprint:
        return
    traced_shapes = {p: f"{a.dtype}{list(a.shape)}" for p, a in zip(traced.in_paths, traced.in_avals, strict=True)}
    planned_shapes = {a.path: f"{a.dtype}{list(a.shape)}" for a in plan.record.arguments if a.kind != "constant"}
    differing = [
        path for path in {**traced_shapes, **planned_shapes} if traced_shapes.get(path) != planned_shapes.get(path)
    ]
    if differing:
        is_now, was = (
            ", ".join(f"{p} {shapes.get(p, 'absent')}" for p in differing[:3])
            for shapes in (traced_shapes, planned_shapes)
        )
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
