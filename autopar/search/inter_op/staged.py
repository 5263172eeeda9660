"""A step in stages: the decisions of each stage, their tasks, and the program that runs them on a schedule.

Devices get tasks no faster than the processes hand them out, which takes time too.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from autopar.common.text import text_of_limit
from autopar.cost.cost_model import CostModel, NodeCosts, cost_model
from autopar.cost.memory_program import task_memory
from autopar.cost.overlap import timed
from autopar.cost.roofline import flops_of
from autopar.cost.stream_simulator import Ran, overlap_of_exchanges
from autopar.errors import InvalidArgumentError, SolverError
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import Link
from autopar.ir.constraints import NO_SOLUTION, TOO_TIGHT, Constraints
from autopar.ir.graph import Op, OpGraph, OpKind, Section
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.pins import PinnedLayout
from autopar.lowering.host_copies import with_host_copies
from autopar.lowering.lower import ShardingPlan, lower
from autopar.passes.assign_stages import StagedGraph
from autopar.passes.layers import Layers, find_layers
from autopar.passes.split_scan import SplitStep
from autopar.passes.stage_graph import StageGraph, split_backward, split_stages
from autopar.runtime.cross_mesh import refined, wire_layouts
from autopar.runtime.emit import emit
from autopar.runtime.program import Node, Program, TaskKind, runs_of
from autopar.runtime.schedule import V_SHAPED, StageCosts
from autopar.runtime.simulator import Simulation, merged, simulate
from autopar.runtime.standard_schedules import PipelineSchedule, is_fitted, make_schedule
from autopar.search.inter_op.stage_costs import lowest_price
from autopar.search.inter_op.tasks import LoweredStage, StagedProgram, StageTask, assemble_pipeline
from autopar.search.intra_op.build_choice_graph import SharedTables
from autopar.search.intra_op.ilp import ROUNDS, GivenLayouts, IntraOp, ObjectiveWeights
from autopar.search.intra_op.memory_prices import MemoryPrices, priced_values, saved_values, state_values
from autopar.search.intra_op.slack import Exposure
from autopar.solver import Status

# The devices of stages: submeshes of a cluster.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submesh:
    """The devices of one stage, neighbours from `first_device` on, and their logical mesh."""

    first_device: int
    mesh: LogicalMesh


def place(group_meshes: Sequence[LogicalMesh], mesh_of_stage: Sequence[int]) -> list[Submesh]:
    """The devices of each stage: larger groups first, so that no group lies across hosts that it does not fill."""
    order = sorted(range(len(group_meshes)), key=lambda g: -group_meshes[g].num_devices)
    sizes = itertools.accumulate((group_meshes[g].num_devices for g in order), initial=0)
    first_of = dict(zip(order, sizes, strict=False))
    return [Submesh(first_device=first_of[g], mesh=group_meshes[g]) for g in mesh_of_stage]


def part_of(cluster: Cluster, num_devices: int) -> Cluster:
    """Whole hosts of a cluster, or a part of one. Raises: InvalidArgumentError for a number that is neither."""
    n = cluster.domain_devices
    if num_devices % n and n % num_devices:
        raise InvalidArgumentError(
            where=f"a stage on cluster {cluster.name}",
            expected=f"whole hosts of {n} devices, or a number that divides a host",
            got=f"{num_devices} devices",
            hint="choose a number of stages that cuts the cluster so",
        )
    if num_devices >= n:
        return cluster.submesh(num_devices // n, n)
    return cluster.submesh(1, num_devices)


def model_of(cluster: Cluster, submesh: Submesh) -> CostModel:
    """The cost model of a stage's devices, with their links."""
    return cost_model(part_of(cluster, submesh.mesh.num_devices), submesh.mesh)


def link_between(source: Submesh, target: Submesh, cluster: Cluster) -> Link:
    """The link between neighbouring submeshes: that inside a host where one host has both."""
    ends = [(s.first_device, s.first_device + s.mesh.num_devices - 1) for s in (source, target)]
    hosts = {device // cluster.domain_devices for end in ends for device in end}
    return cluster.inside_host if len(hosts) == 1 else cluster.between_hosts


# Of the thread that walks the instruction list: a run of a task, with what is sent and freed behind it.
HAND_OUT_S = 1e-4
SLICE_HOST_DEVICES = 4  # of one host of a TPU slice, which has a process of its own


def process_devices(cluster: Cluster) -> int:
    """The devices that one process has: those of a host."""
    return min(SLICE_HOST_DEVICES, cluster.devices_per_host) if cluster.torus else cluster.devices_per_host


def handed_out_s(program: Program, groups: Mapping[int, Submesh], cluster: Cluster) -> float:
    """Seconds that a step takes at least because one process hands out one task after the other, on the process that
    has most of them. `groups`: the devices of each mesh of the program.
    """
    devices = process_devices(cluster)
    runs: collections.Counter[int] = collections.Counter()
    for instruction in program.instructions:
        if parts := runs_of(instruction):
            runs.update(_processes(groups[program.pipeline.tasks[parts[0][0]].mesh], devices))
    return HAND_OUT_S * max(runs.values(), default=0)


def _processes(group: Submesh, devices: int) -> Iterable[int]:
    last = group.first_device + group.mesh.num_devices - 1
    return range(group.first_device // devices, last // devices + 1)


def least_handed_out_s(cluster: Cluster, num_stages: int, num_microbatches: int) -> float:
    """The same of any pipeline of so many stages, two or more: each has a program in every micro-batch. A backward pass
    may be one program with the forward pass of another micro-batch.
    """
    num_processes = -(-cluster.num_devices // process_devices(cluster))
    return HAND_OUT_S * num_stages * num_microbatches / min(num_processes, num_stages)


# Zero-bubble schedules fitted to the predicted seconds and bytes of the tasks of a pipeline.


def fitted_schedule(
    schedule: PipelineSchedule, staged: StagedProgram, task_s: Sequence[float], transfer_s: Sequence[float]
) -> PipelineSchedule:
    """A schedule with the lists that end the step earliest for these tasks, if it has lists to choose from.

    The same tasks, seconds and bytes give the same lists, so that a plan is restored to the program it was made from.
    """
    costs = stage_costs(staged, schedule.num_stages, task_s, transfer_s)
    # A step whose tasks take no time at all has nothing to fit to.
    if not is_fitted(schedule.name) or not sum(costs.forward_s + costs.backward_s + costs.weight_s) > 0:
        return schedule
    return make_schedule(
        schedule.name, schedule.num_groups, schedule.num_microbatches, schedule.chunks, costs, whole_step=True
    )


def stage_costs(
    staged: StagedProgram, num_stages: int, task_s: Sequence[float], transfer_s: Sequence[float]
) -> StageCosts:
    """What the tasks of one micro-batch cost, by stage. Transfers between stages that are no neighbours wait for
    nobody: what they carry is there once the neighbour is done.
    """
    pipeline = staged.pipeline
    seconds = {kind: [0.0] * num_stages for kind in TaskKind}
    maker: dict[int, TaskKind] = {}
    readers: dict[int, set[TaskKind]] = {}
    for task, each_s in zip(pipeline.tasks, task_s, strict=True):
        seconds[task.kind][task.stage] += each_s
        maker |= dict.fromkeys(task.outputs, task.kind)
        for b in task.inputs:
            readers.setdefault(b, set()).add(task.kind)
    sends = {1: [0.0] * (num_stages - 1), -1: [0.0] * (num_stages - 1)}
    for transfer, each_s in zip(pipeline.transfers, transfer_s, strict=True):
        source, target = staged.stage_of[transfer.source], staged.stage_of[transfer.target]
        if pipeline.buffers[transfer.source].repeats and target - source in sends:
            sends[target - source][min(source, target)] += each_s
        maker[transfer.target] = maker.get(transfer.source, TaskKind.BEFORE)
    held, deferred = [0] * num_stages, [0] * num_stages
    for b, buffer in enumerate(pipeline.buffers):
        reads, stage = readers.get(b, set()), staged.stage_of[b]
        if not buffer.repeats:
            continue
        if maker.get(b) is TaskKind.FORWARD and reads & {TaskKind.BACKWARD, TaskKind.WEIGHT}:
            held[stage] += buffer.nbytes
        if TaskKind.WEIGHT in reads:
            deferred[stage] += buffer.nbytes
    return StageCosts(
        forward_s=tuple(seconds[TaskKind.FORWARD]),
        backward_s=tuple(seconds[TaskKind.BACKWARD]),
        weight_s=tuple(seconds[TaskKind.WEIGHT]),
        send_s=tuple(sends[1]),
        send_back_s=tuple(sends[-1]),
        deferred=tuple(d / h if h else 1.0 for d, h in zip(deferred, held, strict=True)),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage with its decisions. Stages of equal `like` have the same decisions on differently numbered operations.
    `costs` are of its graph and model.
    """

    like: int
    first_layer: int
    stage: StageGraph
    model: CostModel
    sharding: ShardingPlan
    lowered: LoweredStage
    costs: NodeCosts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTask:
    """Runs of one mesh that are one program, see `runtime.program.Joined`, and what that costs, as `TaskCost`
    has it.
    """

    parts: tuple[Node, ...]
    seconds: float
    hidden_s: float
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedStep:
    """A whole step in stages, ready to run or to simulate.

    `step`: the step that was staged, with its scan over layers in parts where it has one. `simulated`: the instruction
    list of `simulation`, in which equal buffers are merged; `program()` is the list to execute. `submeshes[q]`: the
    devices of stage q; stages of one group of devices have the same. `task_s[i]`, `task_bytes[i]`: seconds of one run
    of task i, and its bytes on one device beside its buffers; `hidden_s[i]`: seconds of its communication within the
    mesh that overlap with computation, `waits_s[i]` those in which nothing is computed. `joined`: runs that are one
    program, in the order of the list.
    """

    step: SplitStep
    graph: OpGraph
    layers: Layers
    stages: tuple[PlannedStage, ...]
    submeshes: tuple[Submesh, ...]
    staged: StagedProgram
    schedule: PipelineSchedule
    simulated: Program
    task_s: tuple[float, ...]
    hidden_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    task_bytes: tuple[int, ...]
    transfer_s: tuple[float, ...]
    simulation: Simulation
    cluster: Cluster
    joined: tuple[JoinedTask, ...] = ()

    @property
    def step_time_s(self) -> float:
        return self.simulation.step_time_s

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Of each group of devices."""
        return tuple(self.simulation.peak_bytes)

    def program(self) -> Program:
        """The instruction list with every buffer."""
        return emit(self.staged.pipeline, self.schedule, joined=[task.parts for task in self.joined])


def default_chunks(name: str) -> int:
    """The number of stages on each group of devices, by default."""
    return 2 if name in ("interleaved", *V_SHAPED) else 1


def schedule_of(name: str, num_stages: int, num_microbatches: int, chunks: int) -> PipelineSchedule:
    """The schedule of `num_stages` stages, `chunks` of them on each group of devices."""
    return make_schedule(name, num_stages // chunks, num_microbatches, chunks)


def layers_of(graph: OpGraph) -> Layers:
    return find_layers(graph, flops_of)


def check_directions(graph: OpGraph, schedule: PipelineSchedule) -> None:
    """Raises: InvalidArgumentError for a step with a backward pass on a schedule without one."""
    if schedule.forward_only and any(op.section is Section.BACKWARD for op in graph.block.ops):
        raise InvalidArgumentError(
            where=f"schedule {schedule.name}",
            expected="a step without a backward pass",
            got="one that takes gradients",
            hint="train on another schedule, such as 1f1b; this one is for evaluation steps",
        )


def cut_stages(assigned: StagedGraph, splits_backward: bool, num_stages: int) -> list[StageGraph]:
    """The graph of each stage."""
    state = assigned.graph.donated | {i for i, _ in assigned.graph.tied}
    stages = split_stages(
        assigned.graph,
        {op.id: stage for op, stage in zip(assigned.graph.block.ops, assigned.stages, strict=True)},
        {i: assigned.homes[i] for i in state},
        num_stages,
    )
    return [split_backward(s) for s in stages] if splits_backward else stages


# Layouts of what a stage receives (by value), and of what it sends (by SEND operation).
TransferLayouts = tuple[dict[int, Layout], dict[int, Layout]]


def transfer_layouts_of(
    stages: Sequence[StageGraph], meshes: Sequence[LogicalMesh], constraints: Constraints | None = None
) -> list[TransferLayouts]:
    """The layouts in which values cross between stages, for each stage. Under constraints, the natural layouts of the
    values, split further where that is possible.
    """
    layouts: list[TransferLayouts] = [({}, {}) for _ in stages]
    for source, stage in enumerate(stages):
        for op in stage.graph.block.ops:
            if op.kind is not OpKind.SEND:
                continue
            (value,) = op.inputs
            assert isinstance(value, int), "values are sent, not literals"
            target = stage.sends[op.id]
            at = stage.graph.values[value]
            if constraints is None:
                leaves, arrives = wire_layouts(at.shape, meshes[source], meshes[target])
            else:
                ends = ((constraints.natural(at, mesh), mesh) for mesh in (meshes[source], meshes[target]))
                leaves, arrives = refined(at.shape, *ends)
            layouts[source][1][op.id] = leaves
            layouts[target][0][value] = arrives
    return layouts


def stage_problem(
    stage: StageGraph,
    costs: NodeCosts,
    transfers: TransferLayouts,
    fixed: Mapping[int, Layout] | None = None,
    constraints: Constraints | None = None,
    pins: Mapping[int, PinnedLayout] | None = None,
    paired_ops: Sequence[tuple[Op, Op]] = (),
) -> IntraOp:
    """The ILP of one stage on its mesh, over its forward, backward and update operations; pairs are decided alike.

    `costs`: of its graph on its mesh, which know other programs of these. `fixed`: the one layout of an argument (by
    value). Raises: InvalidArgumentError for a pin that a value cannot have.
    """
    received, sent = transfers
    layouts = GivenLayouts(fixed=fixed or {}, transfers=sent, arrivals=received, pins=pins or {})
    tables = SharedTables(stage.graph, costs.model, costs=costs)
    return IntraOp(stage.graph, costs.model, layouts, constraints=constraints, paired_ops=paired_ops, tables=tables)


def solve_stage(problem: IntraOp, terms: ObjectiveWeights, time_limit_s: float) -> ShardingPlan:
    """The decisions of one stage under the weights. Raises: SolverError."""
    saved = saved_values(problem.graph, problem.saved_in_host) if terms.in_flight else frozenset()
    is_short = terms.s_per_byte > lowest_price(problem.model)
    prices = MemoryPrices(
        s_per_byte=terms.s_per_byte,
        values=saved | (priced_values if is_short else state_values)(problem.graph),
        copies=dict.fromkeys((v for v, _ in saved), float(terms.in_flight)),
    )
    solution = problem.solve(
        time_limit_s=time_limit_s, prices=prices, exposure=Exposure(terms.exposed_fraction), rounds=ROUNDS
    )
    if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
        is_tight = solution.status is Status.INFEASIBLE
        raise SolverError(
            where=f"a stage on mesh {problem.model.links.mesh}",
            expected="decisions for its operations",
            got="constraints that exclude each other" if is_tight else f"none {text_of_limit(time_limit_s)}",
            hint=TOO_TIGHT if is_tight else NO_SOLUTION,
        )
    sharding = problem.decode(solution)
    return dataclasses.replace(sharding, overlapped_axes=sharding.overlapped_axes or terms.overlapped_axes)


def planned_stage(
    first_layer: int, stage: StageGraph, costs: NodeCosts, sharding: ShardingPlan, mesh_index: int, like: int
) -> PlannedStage:
    """Decisions -> instructions. `mesh_index` is the group of devices that runs the stage; `costs` are of its graph and
    its mesh, and know other programs of these.
    """
    model = costs.model
    instructions = lower(stage.graph, sharding, model.links, costs.equations)
    lowered = LoweredStage(
        stage=stage,
        lowered=with_host_copies(stage.graph, instructions, sharding),
        mesh=model.links.mesh,
        mesh_index=mesh_index,
    )
    return PlannedStage(
        like=like, first_layer=first_layer, stage=stage, model=model, sharding=sharding, lowered=lowered, costs=costs
    )


def stage_program(
    step: SplitStep,
    graph: OpGraph,
    layers: Layers,
    planned: Sequence[PlannedStage],
    submeshes: Sequence[Submesh],
    schedule: PipelineSchedule,
    cluster: Cluster,
    costs: TaskCosts | None = None,
) -> StagedStep:
    """Instructions -> tasks -> the instruction list -> its simulation.

    `costs` keeps the costs of tasks from one program of these stages to the next.
    """
    costs = costs or TaskCosts()
    staged = assemble_pipeline([p.lowered for p in planned])
    task_costs = costs.of_all(planned, staged, cluster)
    task_s, task_bytes = tuple(cost.seconds for cost in task_costs), tuple(cost.nbytes for cost in task_costs)
    transfer_s = tuple(transfer_seconds(staged, i, submeshes, cluster) for i in range(len(staged.pipeline.transfers)))
    # Equal buffers are one on the virtual clock, so that long pipelines of many micro-batches are simulated quickly.
    smaller, sent_s = merged(staged.pipeline, transfer_s)
    fitted = fitted_schedule(schedule, staged, task_s, transfer_s)
    ran = []
    for each in (schedule, fitted)[: 1 + (fitted.lists != schedule.lists)]:
        program = emit(smaller, each)
        ran.append((each, program, simulate(program, task_s, sent_s, task_bytes)))
    schedule, program, simulation = min(ran, key=lambda made: made[2].step_time_s)
    return StagedStep(
        step=step,
        graph=graph,
        layers=layers,
        stages=tuple(planned),
        submeshes=tuple(submeshes),
        staged=staged,
        schedule=schedule,
        simulated=program,
        task_s=task_s,
        hidden_s=tuple(cost.hidden_s for cost in task_costs),
        waits_s=tuple(cost.waits_s for cost in task_costs),
        task_bytes=task_bytes,
        transfer_s=transfer_s,
        simulation=with_waits(simulation, program, planned, submeshes, cluster),
        cluster=cluster,
    )


def with_waits(
    simulation: Simulation,
    program: Program,
    planned: Sequence[PlannedStage],
    submeshes: Sequence[Submesh],
    cluster: Cluster,
) -> Simulation:
    """A simulation whose step also waits until all its tasks are handed out."""
    groups = {p.lowered.mesh_index: at for p, at in zip(planned, submeshes, strict=True)}
    step_time_s = max(simulation.step_time_s, handed_out_s(program, groups, cluster))
    return dataclasses.replace(simulation, step_time_s=step_time_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskCost:
    """The cost of one run of a task on its mesh: seconds (computation, communication within the mesh, copies),
    `hidden_s` of communication that overlaps with computation, `waits_s` of what does not, and bytes beside its
    buffers.
    """

    seconds: float
    hidden_s: float
    waits_s: float
    nbytes: int


class TaskCosts:
    """The costs of tasks, computed once for all stages with the same decisions."""

    def __init__(self) -> None:
        self.known: dict[tuple, TaskCost] = {}

    def of_all(self, planned: Sequence[PlannedStage], staged: StagedProgram, cluster: Cluster) -> list[TaskCost]:
        """The cost of every task of a program, whose stages are all planned."""
        costs, positions = [], dict.fromkeys(range(len(planned)), 0)
        for task in staged.tasks:
            stage, position = planned[task.stage], positions[task.stage]
            positions[task.stage] += 1
            # Stages that do the same may still be cut into other tasks, by what they wait for.
            sizes = len(task.instructions), len(task.inputs), len(task.outputs)
            key = (stage.like, position, task.kind, task.level, *sizes)
            if key not in self.known:
                self.known[key] = task_cost(stage, task, cluster)
            costs.append(self.known[key])
        return costs


def task_cost(planned: PlannedStage, task: StageTask, cluster: Cluster) -> TaskCost:
    graph = planned.stage.graph
    ran = timed_task(planned, task)
    runs = graph.num_microbatches if task.kind.repeats else 1
    memory = task_memory(graph, task.instructions, task.inputs, task.outputs, planned.model)
    waits_s = max(0.0, ran.end_s - ran.compute_s)
    return TaskCost(
        seconds=ran.end_s / runs,
        hidden_s=ran.hidden_s / runs,
        waits_s=waits_s / runs,
        nbytes=memory.temporary_bytes,
    )


def timed_task(planned: PlannedStage, task: StageTask) -> Ran:
    """All runs of a task in a step together, on the clock of one device of its mesh."""
    block = dataclasses.replace(planned.lowered.lowered, instructions=task.instructions)
    overlap = planned.model.overlap
    if task.only_exchanges:
        overlap = overlap_of_exchanges(overlap)
    return timed(planned.stage.graph, block, planned.model, planned.costs, task.outputs, overlap)


def transfer_seconds(staged: StagedProgram, number: int, submeshes: Sequence[Submesh], cluster: Cluster) -> float:
    """Seconds of a transfer: all devices send their parts at once."""
    transfer = staged.pipeline.transfers[number]
    source, target = (submeshes[staged.stage_of[b]] for b in (transfer.source, transfer.target))
    if source.first_device == target.first_device:
        return 0.0
    link = link_between(source, target, cluster)
    return link.latency_s + transfer.nbytes / link.bytes_per_s
