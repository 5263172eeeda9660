"""From a choice of stages to a `StagedStep`: rematerialisation, stage graphs, decisions, instructions, simulation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from autopar.cost.cost_model import CostsOnMeshes
from autopar.cost.roofline import flops_of
from autopar.errors import UnsupportedError
from autopar.frontend.recompute_in_scans import Recompute, is_by_value, is_product, saves_inputs_alone
from autopar.hardware.cluster import Cluster
from autopar.inter_op.decide_stages import (
    BuildLimits,
    GivenStageLayouts,
    StageChoice,
    StageDecider,
    StageDecisions,
    first_terms,
    fit_stages,
)
from autopar.inter_op.joined_tasks import join_where_it_pays
from autopar.inter_op.staged import (
    PlannedStage,
    StagedStep,
    TaskCosts,
    check_directions,
    cut_stages,
    layers_of,
    model_of,
    place,
    planned_stage,
    schedule_of,
    stage_program,
)
from autopar.intra_op.ilp import ObjectiveWeights
from autopar.ir.graph import OpGraph, OpKind
from autopar.ir.layout import Layout
from autopar.microbatch.microbatch import micro_batched
from autopar.passes.assign_layers import LayerAssignment, assign_layers
from autopar.passes.assign_stages import assign
from autopar.passes.layers import Layers
from autopar.passes.remat import Rematerialised, rematerialise
from autopar.passes.remat_cheap import sink_cheap_ops
from autopar.passes.split_scan import SplitStep
from autopar.passes.stack_updates import stack_updates
from autopar.passes.stage_graph import StageGraph
from autopar.passes.summed_products import with_summed_products
from autopar.runtime.standard_schedules import PipelineSchedule
from autopar.sharding.constraints import Constraints
from autopar.sharding.pins import PinsOnMesh
from autopar.sharding.rules import RuleBook
from autopar.sharding.semantics import annotate_semantics


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchedStep:
    """A step in micro-batches and layers; `step` is the step before. `hoist_casts`: cheap copies of the state are made
    once for all micro-batches.
    """

    step: SplitStep
    graph: OpGraph
    layers: Layers
    hoist_casts: bool = True

    @property
    def leaves(self) -> tuple[int, ...]:
        """The leaf that each argument is, or is a slice of."""
        return tuple(piece.leaf for piece in self.step.arguments)

    @functools.cached_property
    def annotated(self) -> MicrobatchedStep:
        """The same with the semantics of its values."""
        return dataclasses.replace(self, graph=annotate_semantics(self.graph))

    @functools.cached_property
    def assignment(self) -> LayerAssignment:
        """The layer of every operation."""
        return assign_layers(self.graph, self.layers, self.homes)

    @functools.cached_property
    def homes(self) -> dict[int, int]:
        """The layer at which state of the layers of a scan lies, by the position of the argument: that of its part."""
        layer_of, first = _layers_of_scopes(self), len(self.graph.constants)
        parts = enumerate(self.step.part_of_argument, first)
        scopes = {position: self.step.scopes[part] for position, part in parts if part is not None}
        return {position: layer_of[scope] for position, scope in scopes.items() if scope in layer_of}

    @functools.cached_property
    def stage_graphs(self) -> dict[tuple, StageGraphs]:
        """The stages of choices that were built, by what they depend on."""
        return {}


def cut_layers(
    step: SplitStep,
    num_microbatches: int,
    rules: RuleBook,
    whole: OpGraph | None = None,
    *,
    hoist_casts: bool = True,
) -> MicrobatchedStep:
    """A step in micro-batches and layers; `whole` is the graph of `step.traced`, if that exists already."""
    graph = with_summed_products(micro_batched(step.traced, num_microbatches, rules, whole), rules)
    graph = sink_cheap_ops(graph, of_state=not hoist_casts)
    if step.traced.stacked_over:
        graph = stack_updates(graph, step.traced.stacked_over, flops_of, rules)
    return MicrobatchedStep(step=step, graph=graph, layers=layers_of(graph), hoist_casts=hoist_casts)


def layers_of_pieces(microbatched: MicrobatchedStep) -> tuple[int, ...]:
    """The first layer of each stage where each holds one part of a scan over layers.

    Raises: UnsupportedError where the layers do not follow the parts.
    """
    layer_of = _layers_of_scopes(microbatched)
    first, *behind = (layer_of.get(scope, 0) for scope in microbatched.step.scopes)
    firsts = [0, *behind]
    if sorted({first, *behind}) != [first, *behind]:
        raise UnsupportedError(
            where=f"the scan over {microbatched.step.trips} layers of {microbatched.step.traced.name}",
            expected="parts that follow one another in the forward pass",
            got=f"parts in layers {[first, *behind]}",
            hint="use fewer stages, or write the layers out in a Python loop",
        )
    return tuple(firsts)


def _layers_of_scopes(microbatched: MicrobatchedStep) -> dict[str, int]:
    """The layer of the forward pass's scan in each part, by the part's name: of the one with matrix products."""
    layer_of = {op: number for number, ops in enumerate(microbatched.layers.ops) for op in ops}
    scans = [op for op in microbatched.graph.block.ops if op.kind is OpKind.SCAN and op.id in layer_of]
    return {op.module.split("/")[-1]: layer_of[op.id] for op in sorted(scans, key=is_product)}


def pieces_of(microbatched: MicrobatchedStep) -> dict[int, int]:
    """The leaf of each argument that is a slice of a leaf, by the position of the argument."""
    first = len(microbatched.graph.constants)
    return {first + i: piece.leaf for i, piece in enumerate(microbatched.step.arguments) if piece.parts > 1}


def recomputed(microbatched: MicrobatchedStep, policies: Sequence[str]) -> Rematerialised:
    """The graph in which each layer recomputes values by its policy."""
    if all(p == "nothing" for p in policies):
        return Rematerialised(graph=microbatched.graph, assignment=microbatched.assignment)
    layers, of_layers = microbatched.layers, list(policies)
    if saves_inputs_alone(microbatched.step.traced.scan_recompute):
        # What scans compute again turn by turn need not be computed again before, as a whole.
        ops = zip(microbatched.graph.block.ops, microbatched.assignment.layer_of, strict=True)
        scans = {layer for op, layer in ops if op.kind is OpKind.SCAN and is_product(op)}
        of_layers = [
            Recompute.CHEAP if policy == Recompute.ALL and layer in scans else policy
            for layer, policy in enumerate(of_layers)
        ]
    return rematerialise(microbatched.graph, layers, of_layers, microbatched.assignment)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageGraphs:
    """A step in stages before their decisions: the graph of the whole step, its schedule, the graph of each stage, and
    what is known of its costs.
    """

    graph: OpGraph
    schedule: PipelineSchedule
    stages: Sequence[StageGraph]
    costs: Sequence[CostsOnMeshes]


def stage_graphs(
    microbatched: MicrobatchedStep, policies: Sequence[str], first_layers: Sequence[int], schedule: str, chunks: int
) -> StageGraphs:
    """The graphs of the stages, for a search and for the restoration of a plan.

    Raises: InvalidArgumentError for a schedule that cannot run the step.
    """
    key = tuple(policies), tuple(first_layers), schedule, chunks
    if key not in microbatched.stage_graphs:
        microbatched.stage_graphs[key] = _stage_graphs(microbatched, *key)
    return microbatched.stage_graphs[key]


def _stage_graphs(
    microbatched: MicrobatchedStep, policies: Sequence[str], first_layers: Sequence[int], schedule: str, chunks: int
) -> StageGraphs:
    again, num_stages = recomputed(microbatched, policies), len(first_layers)
    graph = again.graph
    order = schedule_of(schedule, num_stages, graph.num_microbatches, chunks)
    check_directions(graph, order)
    assigned = assign(graph, microbatched.layers, first_layers, again.assignment)
    stages = cut_stages(assigned, order.splits_backward, num_stages)
    costs = [CostsOnMeshes(stage.graph) for stage in stages]
    return StageGraphs(graph=graph, schedule=order, stages=stages, costs=costs)


def build(
    microbatched: MicrobatchedStep,
    choice: StageChoice,
    cluster: Cluster,
    limits: BuildLimits,
    constraints: Constraints | None = None,
    pins: PinsOnMesh | None = None,
    followed: Mapping[int, Layout] | None = None,
    terms: Sequence[ObjectiveWeights] = (),
) -> StagedStep:
    """Builds a choice: recomputation, stages, decisions, instructions, tasks, the instruction list, its simulation.

    Stages that exceed the memory are decided again under higher prices (`fit_stages`). Pins apply to every stage.
    `followed`: layouts of leaves in another step's plan. `terms`: the weights of each stage that are tried first.
    """
    graphs = stage_graphs(microbatched, choice.policies, choice.first_layers, choice.schedule, choice.chunks)
    graph, schedule, stages = graphs.graph, graphs.schedule, graphs.stages
    submeshes = place(choice.group_meshes, schedule.mesh_of_stage)
    models = [model_of(cluster, s) for s in submeshes]
    given = GivenStageLayouts(
        pins=pins.layouts(graph, microbatched.leaves) if pins is not None else {},
        followed=_of_arguments(microbatched, followed or {}),
        last_is_shorter=not microbatched.step.is_even,
    )
    meshes = [s.mesh for s in submeshes]
    task_costs, costs = TaskCosts(), [each.on(model) for each, model in zip(graphs.costs, models, strict=True)]
    decider = StageDecider(stages, costs, meshes, limits.time_limit_s, pieces_of(microbatched), constraints, given)
    planned: list[PlannedStage] = []

    def staged(decisions: StageDecisions) -> StagedStep:
        nonlocal planned
        planned = [
            planned[q]
            if planned and planned[q].like == like
            else planned_stage(choice.first_layers[q], stages[q], costs[q], sharding, schedule.mesh_of_stage[q], like)
            for q, (like, sharding) in enumerate(decisions)
        ]
        return stage_program(
            microbatched.step, graph, microbatched.layers, planned, submeshes, schedule, cluster, task_costs
        )

    first = list(terms) or first_terms(choice, models, constraints)
    built, _ = fit_stages(choice, schedule, decider, first, limits, staged)
    return join_where_it_pays(built, limits.limit_bytes)


def _of_arguments(microbatched: MicrobatchedStep, of_leaf: Mapping[int, Layout]) -> dict[int, Layout]:
    """Layouts of leaves by the positions of the arguments that they are, or whose slices these are."""
    first = len(microbatched.graph.constants)
    return {first + i: of_leaf[leaf] for i, leaf in enumerate(microbatched.leaves) if leaf in of_leaf}


def evened(microbatched: MicrobatchedStep, choice: StageChoice) -> StageChoice:
    """The choice for a step with one part of its scan on each stage, from the choice for the step with its scan in
    small parts: all stages get the mesh, policy and weights of the middle stage.
    """
    num_stages = len(choice.first_layers)
    middle = num_stages // 2
    policy = choice.policies[choice.first_layers[middle]]
    assert not is_by_value(policy), "values of parts of a scan are those of its bodies"
    return dataclasses.replace(
        choice,
        first_layers=layers_of_pieces(microbatched) if microbatched.step.parts > 1 else (0,),
        group_meshes=(choice.group_meshes[middle // choice.chunks],) * (num_stages // choice.chunks),
        policies=(policy,) * len(microbatched.layers),
        terms=choice.terms and (choice.terms[middle],) * num_stages,
        over_limit=choice.over_limit and (choice.over_limit[middle],) * num_stages,
    )
