"""From a choice of stages to a `StagedStep`: rematerialisation, stage graphs, decisions, instructions, simulation."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from autopar.common.cached_attribute import lazy
from autopar.cost.cost_model import CostModel
from autopar.errors import UnsupportedError
from autopar.hardware.cluster import Cluster
from autopar.inter_op.decide_stages import GivenStageLayouts, StageDecider
from autopar.inter_op.joined_tasks import join_where_it_pays
from autopar.inter_op.layer_decisions import lowest_price
from autopar.inter_op.staged import (
    PlannedStage,
    StagedStep,
    Submesh,
    TaskCosts,
    check_directions,
    cut_stages,
    layers_of,
    model_of,
    planned_stage,
    schedule_of,
    stage_program,
)
from autopar.intra_op.ilp import ObjectiveWeights
from autopar.ir.graph import OpGraph, OpKind
from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh
from autopar.microbatch.microbatch import micro_batched
from autopar.passes.layers import Layers
from autopar.passes.remat import Recompute, rematerialise
from autopar.passes.remat_cheap import sink_cheap_ops
from autopar.passes.split_scan import SplitStep
from autopar.passes.stage_graph import StageGraph
from autopar.runtime.pipeline.standard_schedules import PipelineSchedule
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

    @lazy
    def annotated(self) -> MicrobatchedStep:
        """The same with the semantics of its values."""
        return dataclasses.replace(self, graph=annotate_semantics(self.graph))

    @lazy
    def stage_graphs(self) -> dict[tuple, StageGraphs]:
        """The stages of choices that were built, by what they depend on."""
        return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Stages to build: the first layer of each, the mesh of each group of devices, the policy of each layer.

    `terms`: the weights under which each stage is estimated to fit, where they are known. `over_limit`: whether its
    state alone would exceed the memory under the lowest price of a byte.
    """

    schedule: str
    chunks: int
    first_layers: tuple[int, ...]
    group_meshes: tuple[LogicalMesh, ...]
    policies: tuple[str, ...]
    terms: tuple[ObjectiveWeights, ...] = ()
    over_limit: tuple[bool, ...] = ()

    @property
    def text(self) -> str:
        meshes = [f"{n} x {mesh}" for mesh, n in _runs(self.group_meshes)]
        policies = {p for p in self.policies if p != "nothing"}
        recompute = f", recompute {' and '.join(sorted(policies))}" if policies else ""
        return f"{len(self.first_layers)} stages on {' + '.join(meshes)}, {self.schedule}{recompute}"


def cut_layers(
    step: SplitStep, num_microbatches: int, rules: RuleBook, whole: OpGraph | None = None, *, hoist_casts: bool = True
) -> MicrobatchedStep:
    """A step in micro-batches and layers; `whole` is its graph with unsplit scans, if that exists already."""
    graph = micro_batched(step.traced, num_microbatches, rules, whole if step.parts == 1 else None)
    graph = sink_cheap_ops(graph, of_state=not hoist_casts)
    return MicrobatchedStep(step=step, graph=graph, layers=layers_of(graph), hoist_casts=hoist_casts)


def layers_of_pieces(microbatched: MicrobatchedStep) -> tuple[int, ...]:
    """The first layer of each stage where each holds one part of a scan over layers.

    Raises: UnsupportedError where the layers do not follow the parts.
    """
    layer_of = {op: number for number, ops in enumerate(microbatched.layers.ops) for op in ops}
    scans = {
        op.module.split("/")[-1]: layer_of[op.id]
        for op in microbatched.graph.block.ops
        if op.kind is OpKind.SCAN and op.id in layer_of
    }
    firsts = [0, *(scans.get(scope, 0) for scope in microbatched.step.scopes[1:])]
    if sorted(set(firsts)) != firsts:
        raise UnsupportedError(
            where=f"the scan over {microbatched.step.trips} layers of {microbatched.step.traced.name}",
            expected="parts that follow one another in the forward pass",
            got=f"parts in layers {firsts}",
            hint="use fewer stages, or write the layers out in a Python loop",
        )
    return tuple(firsts)


def pieces_of(microbatched: MicrobatchedStep) -> dict[int, int]:
    """The leaf of each argument that is a slice of a leaf, by the position of the argument."""
    first = len(microbatched.graph.constants)
    return {first + i: piece.leaf for i, piece in enumerate(microbatched.step.arguments) if piece.parts > 1}


def recomputed(microbatched: MicrobatchedStep, policies: Sequence[str]) -> OpGraph:
    """The graph in which each layer recomputes values by its policy."""
    if all(p == "nothing" for p in policies):
        return microbatched.graph
    return rematerialise(microbatched.graph, microbatched.layers, [Recompute(p) for p in policies])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageGraphs:
    """A step in stages before their decisions: the graph of the whole step, its schedule, the graph of each stage."""

    graph: OpGraph
    schedule: PipelineSchedule
    stages: Sequence[StageGraph]


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
    graph, num_stages = recomputed(microbatched, policies), len(first_layers)
    order = schedule_of(schedule, num_stages, graph.num_microbatches, chunks)
    check_directions(graph, order)
    stages = cut_stages(graph, microbatched.layers, first_layers, order.splits_backward, num_stages)
    return StageGraphs(graph=graph, schedule=order, stages=stages)


def place(group_meshes: Sequence[LogicalMesh], schedule: PipelineSchedule) -> list[Submesh]:
    """The devices of each stage: larger groups first, so that no group lies across hosts that it does not fill."""
    order = sorted(range(len(group_meshes)), key=lambda g: -group_meshes[g].num_devices)
    firsts = [0, *itertools.accumulate(group_meshes[g].num_devices for g in order)]
    first_of = dict(zip(order, firsts, strict=False))
    groups = [Submesh(first_device=first_of[g], mesh=mesh) for g, mesh in enumerate(group_meshes)]
    return [groups[g] for g in schedule.mesh_of_stage]


# A stage that exceeds the memory is decided again with a higher price on the bytes of its state, then with that price
# also on values saved for backward passes, then with higher prices on both: the number of prices, the first one (as a
# part of the stage's objective divided by the memory), and the ratio of neighbouring ones.
LEANER, FIRST_PRICE, PRICE_RISE = 5, 0.02, 4.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """The memory of a device, the seconds that a solver may take, and the time of a step from which on a pipeline is of
    no use, so that nothing need be done to make it fit.
    """

    limit_bytes: int
    time_limit_s: float
    to_beat_s: float = math.inf


def build(
    microbatched: MicrobatchedStep,
    choice: StageChoice,
    cluster: Cluster,
    limits: BuildLimits,
    constraints: Constraints | None = None,
    pins: PinsOnMesh | None = None,
    followed: Mapping[int, Layout] | None = None,
) -> StagedStep:
    """Builds a choice: recomputation, stages, decisions, instructions, tasks, the instruction list, its simulation.

    Stages that exceed the memory are decided again under higher prices of a byte, a few times at most, unless their
    state exceeds it whatever is decided, or the step takes too long already. Pins apply to every stage.
    `followed`: layouts of leaves in another step's plan.
    """
    limit_bytes = limits.limit_bytes
    graphs = stage_graphs(microbatched, choice.policies, choice.first_layers, choice.schedule, choice.chunks)
    graph, schedule, stages = graphs.graph, graphs.schedule, graphs.stages
    submeshes = place(choice.group_meshes, schedule)
    models = [model_of(cluster, s.mesh) for s in submeshes]
    given = GivenStageLayouts(
        pins=pins.layouts(graph, microbatched.leaves) if pins is not None else {},
        followed=_of_arguments(microbatched, followed or {}),
    )
    meshes = [s.mesh for s in submeshes]
    decider = StageDecider(stages, models, meshes, limits.time_limit_s, pieces_of(microbatched), constraints, given)
    terms, costs = _first_terms(choice, models, constraints), TaskCosts()
    planned: list[PlannedStage] = []
    for leaner in range(LEANER + 1):
        decisions = decider.decide(terms)
        if [n for n, _ in decisions] != [p.like for p in planned]:
            planned = [
                planned[q]
                if planned and planned[q].like == like
                else planned_stage(
                    choice.first_layers[q], stages[q], models[q], sharding, schedule.mesh_of_stage[q], like
                )
                for q, (like, sharding) in enumerate(decisions)
            ]
            staged = stage_program(
                microbatched.step, graph, microbatched.layers, planned, submeshes, schedule, cluster, costs
            )
        peak_bytes = staged.simulation.peak_bytes
        over = [q for q, group in enumerate(schedule.mesh_of_stage) if peak_bytes[group] > limit_bytes]
        if not over or leaner == LEANER or staged.simulation.step_time_s >= limits.to_beat_s:
            break
        if any(decider.cannot_fit(q, limit_bytes) for q in over):
            break
        for q in over:
            dear = FIRST_PRICE * planned[q].sharding.report.objective_s / limit_bytes
            known_s_per_byte = choice.terms[q].s_per_byte if choice.terms else dear
            in_flight = schedule.in_flight[schedule.mesh_of_stage[q]] // schedule.chunks
            terms[q] = _leaner(terms[q], known_s_per_byte, dear, in_flight)
    return join_where_it_pays(staged, limit_bytes)


def _of_arguments(microbatched: MicrobatchedStep, of_leaf: Mapping[int, Layout]) -> dict[int, Layout]:
    """Layouts of leaves by the positions of the arguments that they are, or whose slices these are."""
    first = len(microbatched.graph.constants)
    return {first + i: of_leaf[leaf] for i, leaf in enumerate(microbatched.leaves) if leaf in of_leaf}


def _first_terms(
    choice: StageChoice, models: Sequence[CostModel], constraints: Constraints | None
) -> list[ObjectiveWeights]:
    """The first weights of each stage: the lowest price of a byte, unless it is known that its state alone does not fit
    under it, or that its saved values have a price.

    Under a recipe, hideable communication is charged fully: the plan is that of the recipe's source.
    """
    lowest = [lowest_price(model) for model in models]
    if not choice.terms:
        fractions = [model.exposed_fraction if constraints is None else 1.0 for model in models]
        return [ObjectiveWeights(s_per_byte=p, exposed_fraction=f) for p, f in zip(lowest, fractions, strict=True)]
    return [
        terms if over_limit or terms.in_flight else dataclasses.replace(terms, s_per_byte=price)
        for terms, over_limit, price in zip(choice.terms, choice.over_limit, lowest, strict=True)
    ]


def _leaner(terms: ObjectiveWeights, sufficient_price: float, first_price: float, in_flight: int) -> ObjectiveWeights:
    """Weights under which a stage needs less memory: the price that is known to suffice, then that price also on the
    values saved for the micro-batches in flight, then higher prices.
    """
    if terms.s_per_byte < sufficient_price:
        return dataclasses.replace(terms, s_per_byte=sufficient_price)
    if not terms.in_flight:
        return dataclasses.replace(terms, in_flight=_rounded_up(in_flight))
    return dataclasses.replace(terms, s_per_byte=max(first_price, terms.s_per_byte * PRICE_RISE))


def _rounded_up(n: int) -> int:
    """The next power of two, so that stages that differ only in the micro-batches in flight are decided together."""
    return 1 << max(0, n - 1).bit_length()


def evened(microbatched: MicrobatchedStep, choice: StageChoice) -> StageChoice:
    """The choice for a step with one part of its scan on each stage, from the choice for the step with its scan in
    small parts: all stages get the mesh, policy and weights of the middle stage.
    """
    num_stages = len(choice.first_layers)
    middle = num_stages // 2
    policy = choice.policies[choice.first_layers[middle]]
    return dataclasses.replace(
        choice,
        first_layers=layers_of_pieces(microbatched) if microbatched.step.parts > 1 else (0,),
        group_meshes=(choice.group_meshes[middle],) * num_stages,
        policies=(policy,) * len(microbatched.layers),
        terms=choice.terms and (choice.terms[middle],) * num_stages,
        over_limit=choice.over_limit and (choice.over_limit[middle],) * num_stages,
    )


def _runs(meshes: Sequence[LogicalMesh]) -> list[tuple[LogicalMesh, int]]:
    return [(mesh, len(list(group))) for mesh, group in itertools.groupby(meshes)]
