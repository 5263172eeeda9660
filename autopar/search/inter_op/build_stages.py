"""From a choice of stages to a `StagedStep`: rematerialisation, stage graphs, decisions, instructions, simulation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

from autopar.cost import peak_memory
from autopar.cost.cost_model import CostsOnMeshes
from autopar.cost.memory_program import task_program
from autopar.cost.overlap import timed_beside, works_together
from autopar.cost.roofline import flops_of
from autopar.cost.stream_simulator import Ran
from autopar.errors import PlanMismatchError, UnsupportedError
from autopar.frontend.recompute_in_scans import Recompute, is_by_value, is_product, saves_inputs_alone
from autopar.hardware.cluster import Cluster
from autopar.ir.constraints import Constraints
from autopar.ir.graph import OpGraph, OpKind
from autopar.ir.layout import Layout
from autopar.ir.pins import PinsOnMesh
from autopar.ir.rules import RuleBook
from autopar.ir.semantics import annotate_semantics
from autopar.lowering.instructions import Key
from autopar.passes.assign_layers import LayerAssignment, assign_layers
from autopar.passes.assign_stages import assign
from autopar.passes.fold_layers import FoldedGraph, fold_layers
from autopar.passes.layers import Layers
from autopar.passes.microbatch import micro_batched
from autopar.passes.remat import Rematerialised, rematerialise
from autopar.passes.remat_cheap import sink_cheap_ops
from autopar.passes.split_scan import SplitStep
from autopar.passes.stack_updates import stack_updates
from autopar.passes.stage_graph import StageGraph
from autopar.passes.summed_products import with_summed_products
from autopar.plan.options import WORTHWHILE
from autopar.runtime.emit import emit, joinable, pairs
from autopar.runtime.program import Node, TaskKind, runs_of
from autopar.runtime.simulator import merged, simulate
from autopar.runtime.standard_schedules import PipelineSchedule
from autopar.search.inter_op.decide_stages import (
    BuildLimits,
    GivenStageLayouts,
    StageChoice,
    StageDecider,
    StageDecisions,
    first_terms,
    fit_stages,
)
from autopar.search.inter_op.staged import (
    JoinedTask,
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
    with_waits,
)
from autopar.search.intra_op.ilp import ObjectiveWeights

# Runs of one mesh that are one program: first and last micro-batches with what stands before and behind the loop, and
# forward passes with the backward passes of other micro-batches behind them.
#
# Gradients are exchanged once a step, behind the last micro-batch: a program of its own can hide that behind nothing.
# Compiled together with the backward pass of that micro-batch, the exchange of each gradient runs beside the backward
# passes of the layers in front of it; parameters that are gathered once run beside the first forward pass. What a
# forward pass sends within its mesh, such as the rows of experts, hides behind the computation of a backward pass that
# stands next to it, and the other way round. Each such program is compiled in addition to those of the other
# micro-batches, so it must save a part of the step.


def join_where_it_pays(staged: StagedStep, limit_bytes: int) -> StagedStep:
    """A step with those chains of runs, and pairs of neighbours, as one program each that hide what is sent within a
    mesh, and so take at least `WORTHWHILE` of the step off it, within the memory that there is or that the step needs
    anyway.
    """
    if not any(p.model.overlap.kinds for p in staged.stages):
        return staged
    return _with_pairs(_with_chains(staged, limit_bytes), limit_bytes)


def _with_pairs(staged: StagedStep, limit_bytes: int) -> StagedStep:
    """With forward and backward passes that stand next to each other as one program each, all of a pair of tasks."""
    least_s = WORTHWHILE * staged.simulation.step_time_s
    known: dict[Hashable, JoinedTask] = {}
    taken: list[JoinedTask] = []
    for chains in _by_tasks(staged, pairs(staged.simulated.pipeline, staged.schedule)).values():
        if len(chains) * sum(staged.waits_s[n] for n, _ in chains[0]) < least_s:
            continue  # no more than that can hide
        key = _key(staged, chains[0])
        if key not in known:
            known[key] = joined_task(staged, chains[0])
        cost = known[key]
        saved_s = sum(staged.task_s[n] for n, _ in chains[0]) - cost.seconds
        if saved_s * len(chains) >= least_s and cost.hidden_s > sum(staged.hidden_s[n] for n, _ in chains[0]):
            taken += [dataclasses.replace(cost, parts=chain) for chain in chains]
    if not taken:
        return staged
    made = with_joined(staged, [*staged.joined, *taken])
    fits = max(made.peak_bytes) <= max(limit_bytes, *staged.peak_bytes)
    return made if fits and made.simulation.step_time_s + least_s <= staged.simulation.step_time_s else staged


def _by_tasks(staged: StagedStep, chains: Sequence[tuple[Node, ...]]) -> dict[tuple[str, ...], list[tuple[Node, ...]]]:
    """Chains by the names of their tasks."""
    found: dict[tuple[str, ...], list[tuple[Node, ...]]] = {}
    for chain in chains:
        found.setdefault(chain_name(staged, chain), []).append(chain)
    return found


def _with_chains(staged: StagedStep, limit_bytes: int) -> StagedStep:
    """With chains at the beginning and at the end; of these at the end those of meshes that end about last. Chains on
    other meshes would not shorten the step.
    """
    least_s, end_s = WORTHWHILE * staged.simulation.step_time_s, staged.simulation.step_time_s
    once_of_stage: dict[int, float] = {}
    for each, seconds in zip(staged.staged.tasks, staged.task_s, strict=True):
        once_of_stage[each.stage] = once_of_stage.get(each.stage, 0.0) + (0.0 if each.kind.repeats else seconds)
    if all(once_s < least_s for once_s in once_of_stage.values()):
        return staged  # no chain can hide as much
    chains = joinable(staged.simulated.pipeline, staged.schedule)
    ends_s = _ends_s(staged)
    tasks: dict[tuple[Node, ...], JoinedTask] = {}
    known: dict[Hashable, JoinedTask] = {}
    for chain in chains:
        once_s = sum(staged.task_s[n] for n, _ in chain if not staged.staged.tasks[n].kind.repeats)
        if once_s < least_s:
            continue  # no more than that can hide
        key = _key(staged, chain)
        if key not in known:
            known[key] = joined_task(staged, chain)
        task = tasks[chain] = dataclasses.replace(known[key], parts=chain)
        saved_s = sum(staged.task_s[n] for n, _ in chain) - task.seconds
        at_end = staged.staged.tasks[chain[-1][0]].kind is TaskKind.AFTER
        hides = task.hidden_s > sum(staged.hidden_s[n] for n, _ in chain)
        if not hides or saved_s < least_s or (at_end and ends_s[_mesh_of(staged, chain[-1])] < end_s - saved_s):
            del tasks[chain]
    for kind in (TaskKind.AFTER, TaskKind.FORWARD):
        taken = [task.parts for task in staged.joined]
        taken += [chain for chain in tasks if staged.staged.tasks[chain[-1][0]].kind is kind]
        if len(taken) == len(staged.joined):
            continue
        made = with_joined(staged, [tasks[chain] for chain in chains if chain in taken])
        fits = max(made.peak_bytes) <= max(limit_bytes, *staged.peak_bytes)
        if fits and made.simulation.step_time_s + least_s <= staged.simulation.step_time_s:
            staged = made
    return staged


def _ends_s(staged: StagedStep) -> dict[int, float]:
    """When the last run of each mesh ends."""
    found: dict[int, float] = {}
    for step, end_s in zip(staged.simulated.instructions, staged.simulation.ends_s, strict=True):
        for run in runs_of(step):
            mesh = _mesh_of(staged, run)
            found[mesh] = max(found.get(mesh, 0.0), end_s)
    return found


def _mesh_of(staged: StagedStep, run: Node) -> int:
    return staged.simulated.pipeline.tasks[run[0]].mesh


def _key(staged: StagedStep, chain: Sequence[Node]) -> Hashable:
    """Equal for chains of stages that do the same, cut into the same tasks."""
    tasks = [staged.staged.tasks[number] for number, _ in chain]
    likes = tuple(staged.stages[task.stage].like for task in tasks)
    return likes, tuple((t.kind, t.level, len(t.instructions), len(t.inputs), len(t.outputs)) for t in tasks)


def joined_as_named(staged: StagedStep, names: Sequence[tuple[str, ...]], step_name: str) -> StagedStep:
    """A step with the chains that a plan names.

    Raises: PlanMismatchError for a chain that the step does not have.
    """
    if not names:
        return staged
    pipeline, schedule = staged.simulated.pipeline, staged.schedule
    chains = _by_tasks(staged, [*joinable(pipeline, schedule), *pairs(pipeline, schedule)])
    unknown = [name for name in names if tuple(name) not in chains]
    if unknown:
        raise PlanMismatchError(
            where=f"$.plan.pipeline.joined of the plan of {step_name}",
            expected=f"tasks that can be one program: {sorted(chains)}",
            got=str(unknown[0]),
            hint="plan again, or leave the field out: nothing is then run as one program",
        )
    return with_joined(
        staged,
        [
            dataclasses.replace(joined_task(staged, chains[name][0]), parts=chain)
            for name in dict.fromkeys(map(tuple, names))
            for chain in chains[name]
        ],
    )


def chain_name(staged: StagedStep, chain: Sequence[Node]) -> tuple[str, ...]:
    return tuple(staged.staged.tasks[number].name for number, _ in chain)


def joined_task(staged: StagedStep, chain: tuple[Node, ...]) -> JoinedTask:
    """What a chain costs as one program."""
    compiler, ran = staged.stages[staged.staged.tasks[chain[0][0]].stage].model.compiler, timed_chain(staged, chain)
    memory = [peak_memory.estimate(program, compiler) for _, program, _ in joined_memory(staged, chain)]
    return JoinedTask(
        parts=chain,
        seconds=ran.end_s,
        hidden_s=ran.hidden_s,
        nbytes=sum(each.temporary_bytes for each in memory),
    )


def _apart(staged: StagedStep, chain: Sequence[Node]) -> list[list[Node]]:
    """The runs of a chain that hand values to each other: all, or of a pair those of either micro-batch."""
    of: dict[int, list[Node]] = {}
    for number, micro_batch in chain:
        repeats = staged.staged.tasks[number].kind.repeats
        of.setdefault(micro_batch if repeats else -1, []).append((number, micro_batch))
    return list(of.values()) if -1 not in of else [list(chain)]


def timed_chain(staged: StagedStep, chain: Sequence[Node]) -> Ran:
    """A chain as one program, on the clock of one device of its mesh."""
    works = []
    for runs in _apart(staged, chain):
        tasks = [staged.staged.tasks[number] for number, _ in runs]
        planned = staged.stages[tasks[0].stage]
        graph = planned.stage.graph
        parts = [(task.instructions, graph.num_microbatches if task.kind.repeats else 1) for task in tasks]
        works.append(works_together(graph, parts, _places(staged, runs)[1], planned.model, planned.costs))
    return timed_beside(works, planned.model)


def joined_memory(
    staged: StagedStep, chain: Sequence[Node]
) -> list[tuple[int, peak_memory.MemoryProgram, dict[int, Key]]]:
    """A chain as the prediction of memory reads it, see `task_program`, behind its stage: a pair as two programs, both
    of whose temporaries are there at once. New state lies where old state did.
    """
    programs = []
    for runs in _apart(staged, chain):
        tasks = [staged.staged.tasks[number] for number, _ in runs]
        planned = staged.stages[tasks[0].stage]
        graph, block = planned.stage.graph, planned.lowered.lowered
        inputs, outputs = _places(staged, runs)
        arguments = list(zip(block.block.inputs, block.entries(), strict=True))
        results = list(zip(block.block.outputs, block.outputs, strict=True))
        tied = ((arguments[old], *results[new]) for old, new in graph.tied)
        program, stands_for = task_program(
            graph,
            [i for task in tasks for i in task.instructions],
            inputs,
            outputs,
            planned.model,
            zeros=[key for task in tasks for key in task.zeros],
            tied={old: (v, place) for old, v, place in tied if isinstance(v, int) and place is not None},
        )
        programs.append((tasks[0].stage, program, stands_for))
    return programs


def _places(staged: StagedStep, chain: Sequence[Node]) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """The places that a chain reads, and those that it fills and that are read afterwards."""
    pipeline, inside = staged.staged.pipeline, {number for number, _ in chain}
    wanted = {t.source for t in pipeline.transfers} | set(pipeline.outputs)
    wanted |= {b for number, task in enumerate(pipeline.tasks) if number not in inside for b in task.inputs}
    inputs: dict[Key, None] = {}
    made: dict[Key, bool] = {}
    for number, _ in chain:
        task, linked = staged.staged.tasks[number], pipeline.tasks[number]
        inputs |= dict.fromkeys(key for key in task.inputs if key not in made)
        for key, b in zip(task.outputs, linked.outputs, strict=True):
            made[key] = b in wanted or key in inputs
    return tuple(inputs), tuple(key for key, is_kept in made.items() if is_kept)


def with_joined(staged: StagedStep, joined: Sequence[JoinedTask]) -> StagedStep:
    """A step with chains as one program each, where meshes do not wait for each other by it, simulated anew."""
    smaller, sent_s = merged(staged.staged.pipeline, staged.transfer_s)
    program = emit(smaller, staged.schedule, joined=[task.parts for task in joined])
    task_of = {task.parts: task for task in joined}
    joined = [task_of[each.parts] for each in program.joined]
    task_s = (*staged.task_s, *(task.seconds for task in joined))
    task_bytes = (*staged.task_bytes, *(task.nbytes for task in joined))
    simulation = simulate(program, task_s, sent_s, task_bytes)
    simulation = with_waits(simulation, program, staged.stages, staged.submeshes, staged.cluster)
    return dataclasses.replace(staged, joined=tuple(joined), simulated=program, simulation=simulation)


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
    def folded(self) -> FoldedGraph:
        """The graph in which equal layers stand once, for the tables of the stage search."""
        return fold_layers(self.graph, self.assignment, len(self.layers))

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
