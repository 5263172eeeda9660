"""Pipelines of one stage that are estimated on fewer of their equal layers.

Each layer of a run of equal ones takes as long, and holds as much, as the others. A step with six of forty is decided,
lowered and simulated; the same decisions for four of them tell what two layers more take.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from autopar.cost.cost_model import CostsOnMeshes, cost_model
from autopar.cost.overlap import crossing_s
from autopar.cost.roofline import flops_of
from autopar.cost.stream_simulator import overlap_of
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import CollectiveKind, time_s
from autopar.ir.constraints import Constraints
from autopar.ir.graph import Op, OpGraph, OpKind, Section
from autopar.ir.layout import LogicalMesh
from autopar.ir.partial_sums import Partials, find_partials
from autopar.ir.rewrite import renumbered
from autopar.lowering.instructions import Accumulate
from autopar.lowering.lower import ShardingPlan
from autopar.passes.assign_layers import LayerAssignment, assign_layers
from autopar.passes.fold_layers import drop_layers, runs_of_layers
from autopar.passes.layers import Layers
from autopar.passes.stage_graph import StageGraph
from autopar.plan.options import WORTHWHILE
from autopar.search.inter_op.build_stages import MicrobatchedStep, StageGraphs, build, join_where_it_pays, stage_graphs
from autopar.search.inter_op.decide_stages import (
    BuildLimits,
    GivenStageLayouts,
    Round,
    StageChoice,
    StageDecider,
    StageDecisions,
    first_terms,
    fit_stages,
)
from autopar.search.inter_op.staged import StagedStep, model_of, part_of, place, planned_stage, stage_program
from autopar.search.intra_op.ilp import IntraOp

# The layers of a run that a short step has; a shorter one has two fewer, since a collective may sum gradients of two
# layers. Runs of at most twice as many are built as they are.
SHORT = 6
# Where a collective may sum gradients of more layers, two of them may take one collective more or less than two others:
# for all that are left out, this may come to `ESTIMATE_ERROR` of the least time of the step. By this part an estimate's
# time may be too long: layers are decided alike for it that are not where it is built (seen with BERT of 340M).
ESTIMATE_ERROR = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedModel:
    """A step with some layers of its long runs left out: `kept[l]` is the layer of the whole step that its layer l is.

    `runs`: for each such run its layers in the short step, and how many it has in the whole one; `of_whole`: how many
    times as much state the whole step has.
    """

    microbatched: MicrobatchedStep
    kept: tuple[int, ...]
    runs: Mapping[tuple[int, ...], int]
    of_whole: float

    @functools.cached_property
    def shorter_stages(self) -> dict[int, tuple[StageGraphs, list[_Shorter] | None]]:
        """The shorter stages of stages, by the id of their graphs, which are kept so that it stays theirs."""
        return {}

    def forget_stages(self) -> None:
        """Frees the stages of the choices that were estimated, which others of the same recomputation would share."""
        self.shorter_stages.clear()
        for microbatched in (self.microbatched, self.microbatched.annotated):
            microbatched.stage_graphs.clear()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The time of a step in one stage, the peak of its devices, and the rounds of decisions that led to them.

    `least_s`: of the time, what other decisions in as many micro-batches, with the same recomputation, take too:
    computation for each of them, every operation by its fastest strategy and split over all devices.
    """

    step_time_s: float
    peak_bytes: tuple[int]
    rounds: tuple[Round, ...] = ()
    least_s: float = 0.0


def short_step(microbatched: MicrobatchedStep, cluster: Cluster, least_s: float = 0.0) -> TruncatedModel | None:
    """The step with `SHORT` layers of each long run; None where it has no such run, or a run cannot be made shorter, or
    where the gradients of more than two layers may be summed by one collective, which then takes longer than a small
    part of `least_s`, the least time of the whole step: no two layers are like the others.
    """
    graph, layers = microbatched.graph, microbatched.layers
    if microbatched.step.parts > 1 or len(layers) <= 2 * SHORT:
        return None
    assignment = assign_layers(graph, layers)
    long = [tuple(run) for run in runs_of_layers(graph, assignment, len(layers)) if len(run) > 2 * SHORT]
    combined_bytes = overlap_of(cluster.device.platform).combined_bytes
    least_bytes = combined_bytes * cluster.num_devices / 2
    summed = _summed_bytes(graph, assignment)
    uneven = [run for run in long if summed.get(run[0], 0) < least_bytes]
    uneven_s = sum(map(_more_layers, map(len, uneven))) * _summing_s(cluster, combined_bytes)
    if not long or uneven_s > ESTIMATE_ERROR * least_s:
        return None
    dropped = drop_layers(graph, assignment, len(layers), dict.fromkeys(long, SHORT))
    if dropped is None:
        return None
    kept = tuple(layer for layer, like in enumerate(dropped.stands_for) if layer == like)
    number = {op.id: at for at, op in enumerate(dropped.graph.ops())}
    short = renumbered(dropped.graph)
    at = {layer: n for n, layer in enumerate(kept)}
    return TruncatedModel(
        microbatched=dataclasses.replace(microbatched, graph=short, layers=_of_layers(layers, kept, number)),
        kept=kept,
        runs={tuple(at[layer] for layer in run if layer in at): len(run) for run in long},
        of_whole=_state_bytes(graph) / max(1, _state_bytes(short)),
    )


def _summed_bytes(graph: OpGraph, assignment: LayerAssignment) -> dict[int | None, int]:
    """Bytes of the sums over micro-batches of each layer, which are mostly of gradients."""
    summed: dict[int | None, int] = {}
    for op, layer in zip(graph.block.ops, assignment.layer_of, strict=True):
        if op.kind is OpKind.ACCUMULATE:
            summed[layer] = summed.get(layer, 0) + sum(graph.values[v].nbytes for v in op.outputs)
    return summed


def _more_layers(num_layers: int) -> float:
    """How many times a run of so many layers has more than a short one what the short one has more than the shorter."""
    return (num_layers - SHORT) / 2


def _summing_s(cluster: Cluster, nbytes: int) -> float:
    """Seconds in which all devices of a cluster sum an array."""
    (link,) = cluster.axis_links((cluster.num_devices,))
    return float(time_s(CollectiveKind.ALL_REDUCE, nbytes, cluster.num_devices, link))


def _of_layers(layers: Layers, kept: Sequence[int], number: Mapping[int, int]) -> Layers:
    """The layers that were kept, with the new numbers of their operations."""
    return Layers(
        ops=tuple(tuple(number[op] for op in layers.ops[layer] if op in number) for layer in kept),
        names=tuple(layers.names[layer] for layer in kept),
        flops=tuple(layers.flops[layer] for layer in kept),
        kind_of=tuple(layers.kind_of[layer] for layer in kept),
        crossing_bytes=tuple(layers.crossing_bytes[layer] for layer in kept),
    )


def _state_bytes(graph: OpGraph) -> int:
    return sum(graph.values[graph.block.inputs[i]].nbytes for i in graph.donated)


def estimate(
    short: TruncatedModel,
    choice: StageChoice,
    cluster: Cluster,
    limits: BuildLimits,
    constraints: Constraints | None = None,
) -> Estimate | None:
    """What a choice of one stage comes to when it is built: decided on the short step, as `build` decides, and told
    from it and from shorter ones. None where the layers of a run have several policies, or differ in the stage.

    Raises: SolverError where there is no solution in time.
    """
    microbatched = short.microbatched if constraints is None else short.microbatched.annotated
    policies = tuple(choice.policies[layer] for layer in short.kept)
    if any(len({policies[layer] for layer in run}) > 1 for run in short.runs):
        return None
    graphs = stage_graphs(microbatched, policies, choice.first_layers, choice.schedule, choice.chunks)
    (stage,) = graphs.stages
    if id(graphs) not in short.shorter_stages:
        made = _shorter_stages(stage, microbatched, short.runs)
        short.shorter_stages[id(graphs)] = graphs, made
    _, shorter = short.shorter_stages[id(graphs)]
    if shorter is None:
        return None
    paired_ops = [pair for each in shorter for pair in each.paired_ops]
    submeshes, step = place(choice.group_meshes, graphs.schedule.mesh_of_stage), microbatched.step
    models = [model_of(cluster, s) for s in submeshes]
    meshes = [s.mesh for s in submeshes]
    known, given = [graphs.costs[0].on(models[0])], GivenStageLayouts()
    decider = StageDecider(graphs.stages, known, meshes, limits.time_limit_s, {}, constraints, given, paired_ops)

    def simulated(at: StageGraph, costs: CostsOnMeshes, sharding: ShardingPlan) -> StagedStep:
        planned = planned_stage(0, at, costs.on(models[0]), sharding, graphs.schedule.mesh_of_stage[0], 0)
        return stage_program(step, graphs.graph, microbatched.layers, [planned], submeshes, graphs.schedule, cluster)

    def of_whole(decisions: StageDecisions) -> Estimate:
        ((_, sharding),) = decisions
        at_short = simulated(stage, graphs.costs[0], sharding)
        at_shorter = [simulated(e.stage, e.costs, dataclasses.replace(sharding, partials=e.partials)) for e in shorter]
        more = [each.more for each in shorter]
        problem = decider.problem_of(0)
        least_at_shorter = (_least_s(a, problem, each.stage) for a, each in zip(at_shorter, shorter, strict=True))
        all_least_s = _at_whole(_least_s(at_short, problem, stage), least_at_shorter, more)
        apart = dataclasses.replace(_extended(at_short, at_shorter, more), least_s=all_least_s)
        least_s = WORTHWHILE * apart.step_time_s
        if _at_whole(_once_s(at_short), map(_once_s, at_shorter), more) < least_s:
            return apart
        at_short, *at_shorter = (join_where_it_pays(each, limits.limit_bytes) for each in (at_short, *at_shorter))
        joined = _extended(at_short, at_shorter, more)
        joined = dataclasses.replace(joined, least_s=all_least_s)
        # As `join_where_it_pays` decides for the whole step.
        pays = joined.step_time_s + least_s <= apart.step_time_s
        return joined if pays and joined.peak_bytes[0] <= max(limits.limit_bytes, apart.peak_bytes[0]) else apart

    terms = first_terms(choice, models, constraints)
    found, rounds = fit_stages(choice, graphs.schedule, decider, terms, limits, of_whole, short.of_whole)
    return dataclasses.replace(found, rounds=rounds)


def _extended(short: StagedStep, shorter: Sequence[StagedStep], more: Sequence[float]) -> Estimate:
    """What the whole step comes to."""
    step_time_s = _at_whole(short.step_time_s, (each.step_time_s for each in shorter), more)
    peak_bytes = _at_whole(short.peak_bytes[0], (each.peak_bytes[0] for each in shorter), more)
    return Estimate(step_time_s=step_time_s, peak_bytes=(int(peak_bytes),))


def _least_s(staged: StagedStep, problem: IntraOp, stage: StageGraph) -> float:
    """Seconds in which a step of one stage computes in its micro-batches, less what faster strategies would save, and
    sums that are split over all devices. What is computed once may be shared by more devices too, and is left out.
    """
    tasks = zip(staged.staged.tasks, staged.task_s, staged.waits_s, strict=True)
    computes_s = sum(seconds - waits_s for task, seconds, waits_s in tasks if task.kind.repeats)
    (planned,) = staged.stages
    mesh, twice_s = planned.model.links.mesh, problem.excess_s(stage.graph, planned.sharding)
    for i in planned.lowered.lowered.instructions:
        if isinstance(i, Accumulate):
            twice_s += crossing_s(stage.graph, i, planned.model) * (1 - i.sum_[0].shards(mesh) / mesh.num_devices)
    least_s = staged.graph.num_microbatches * computes_s - twice_s
    return least_s * _share_of_devices(stage.graph, planned.sharding)


def _share_of_devices(graph: OpGraph, sharding: ShardingPlan) -> float:
    """The work of a device on micro-batches if all of it were split over all devices, as a part of its work under
    decisions: by bytes read and written, or by arithmetic, whichever is less. 0, which bounds nothing, where there are
    loops. Transposes and reshapes are no work: XLA makes products in the layout of their readers.
    """
    num_devices, shared, whole = sharding.mesh.num_devices, [0.0, 0.0], [0.0, 0.0]
    for op in graph.ops():
        if op.blocks:
            return 0.0
        if op.section.repeats and op.rule is not None and op.primitive not in ("transpose", "reshape"):
            split = sharding.strategy[op.id].split if op.id in sharding.strategy else 1
            touched = sum(graph.values[v].nbytes for v in (*op.inputs, *op.outputs) if isinstance(v, int))
            for i, work in enumerate((op.count * touched, op.count * flops_of(op))):
                shared[i] += work / num_devices
                whole[i] += work / split
    return min((a / b for a, b in zip(shared, whole, strict=True) if b), default=1.0)


def _at_whole(at_short: float, at_shorter: Iterable[float], more: Sequence[float]) -> float:
    """A quantity of the whole step, which has so many times more of what a short one has more than each shorter one."""
    return at_short + sum(times * (at_short - each) for times, each in zip(more, at_shorter, strict=True))


def _once_s(staged: StagedStep) -> float:
    """Seconds of the tasks that run once a step: no more than that can hide where they are joined to others."""
    tasks = zip(staged.staged.tasks, staged.task_s, strict=True)
    return sum(seconds for task, seconds in tasks if not task.kind.repeats)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shorter:
    """A stage with two layers of a run fewer: the whole step has `more` times the difference to the short one beyond
    that. `paired_ops`: of neighbours that are alike in the short stage, and decided alike.
    """

    stage: StageGraph
    partials: Partials
    costs: CostsOnMeshes
    more: float
    paired_ops: tuple[tuple[Op, Op], ...]


def _shorter_stages(
    stage: StageGraph, microbatched: MicrobatchedStep, runs: Mapping[tuple[int, ...], int]
) -> list[_Shorter] | None:
    """A shorter stage for each run, of the one stage of a step."""
    layers, made = microbatched.layers, {op.id: op.outputs for op in microbatched.graph.block.ops}
    layer_of = {v: number for number, ops in enumerate(layers.ops) for op in ops for v in made[op]}
    members: list[list[int]] = [[] for _ in layers.ops]
    for op in stage.graph.block.ops:
        if op.section is Section.FORWARD and op.outputs and op.outputs[0] in layer_of:
            members[layer_of[op.outputs[0]]].append(op.id)
    in_stage = dataclasses.replace(layers, ops=tuple(map(tuple, members)))
    assignment = assign_layers(stage.graph, in_stage)
    equal = runs_of_layers(stage.graph, assignment, len(layers))
    shorter: list[_Shorter] = []
    for run, num_layers in runs.items():
        # The ends of a run may differ in the stage, where layers recompute what they read of others.
        alike = max((tuple(layer for layer in run if layer in same) for same in equal), key=len)
        if len(alike) < 4:  # what is left out lies between two that stay
            return None
        dropped = drop_layers(stage.graph, assignment, len(layers), {alike: len(alike) - 2})
        if dropped is None:
            return None
        neighbours = (zip(dropped.members[a], dropped.members[b], strict=True) for a, b in itertools.pairwise(alike))
        shorter.append(
            _Shorter(
                stage=_with_graph(stage, dropped.graph),
                partials=find_partials(dropped.graph),
                costs=CostsOnMeshes(dropped.graph),
                more=_more_layers(num_layers),
                paired_ops=tuple(pair for pairs in neighbours for pair in pairs),
            )
        )
    return shorter


def _with_graph(stage: StageGraph, graph: OpGraph) -> StageGraph:
    """A stage that neither sends nor receives, with fewer of its operations, arguments and results."""
    stay, whole = set(graph.block.inputs), stage.graph.block
    made = stay.union(*(op.outputs for op in graph.block.ops))
    results = zip(stage.results, whole.outputs, strict=True)
    return dataclasses.replace(
        stage,
        graph=graph,
        arguments=tuple(p for p, v in zip(stage.arguments, whole.inputs, strict=True) if v in stay),
        results=tuple(p for p, atom in results if not isinstance(atom, int) or atom in made),
    )


def least_bytes(
    microbatched: MicrobatchedStep,
    choice: StageChoice,
    cluster: Cluster,
    time_limit_s: float,
    short: TruncatedModel | None = None,
) -> int:
    """Bytes that each device needs for a choice of one stage even if every value is split over all devices. By an
    estimate, where the step has a shorter form.

    What may lie in vector memory, if it is split, does not count.
    """
    alone = dataclasses.replace(choice, group_meshes=(LogicalMesh(axis_sizes=(1,)),), terms=(), over_limit=())
    # What takes longer than nothing is not decided again to fit.
    limits = BuildLimits(
        limit_bytes=cluster.num_devices * cluster.device.memory_bytes, time_limit_s=time_limit_s, to_beat_s=0.0
    )
    one_device = part_of(cluster, 1)
    found = None if short is None else estimate(short, alone, one_device, limits)
    peak_bytes = (build(microbatched, alone, one_device, limits) if found is None else found).peak_bytes[0]
    vector_bytes = cost_model(one_device, alone.group_meshes[0]).compiler.vector_memory_bytes
    return max(0, -(-peak_bytes // cluster.num_devices) - vector_bytes)
