"""The compiler, on one page: a traced step and a cluster in, a plan out; a plan and a mesh in, a function out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from autopar import memory
from autopar.building import build_graph
from autopar.cluster import Cluster
from autopar.costs import flops_of
from autopar.emission import Emitter
from autopar.errors import (
    AutoparError,
    BatchMismatchError,
    MemoryLimitError,
    PlanMismatchError,
    SolverError,
    UnsupportedError,
)
from autopar.graph import OpGraph, OpKind
from autopar.intra_op import CostModel, IntraOp, MemoryPrices, ShardingPlan
from autopar.jax_compat import jax_version
from autopar.layout import Layout
from autopar.lowering import LoweredBlock, lower
from autopar.memory_steps import compiler_for
from autopar.mesh import LogicalMesh, factorisations, orderings
from autopar.pipeline_search import Found, asked_pipeline, cut_layers, recomputed, search_pipelines
from autopar.pipelining import (
    PipelineOptions,
    Staged,
    Submesh,
    cut_stages,
    model_of,
    schedule_of,
    stage_program,
)
from autopar.plan import Plan, Trees
from autopar.prediction import compute_times_s, memory_program, predicted_collectives
from autopar.progress import Progress
from autopar.record import FORMAT_VERSION, Decisions, MeshTrial, PlanRecord
from autopar.recording import (
    decisions_of,
    module_rows,
    pipeline_record,
    place_names,
    planned_values,
    predicted,
    replicated_notes,
    sharding_plan_of,
    stage_rows,
    staged_predicted,
    staged_values,
    together,
)
from autopar.resharding import MeshLinks
from autopar.rules import RuleBook
from autopar.scan_cutting import cut_scans
from autopar.solver import Status
from autopar.staging import TracedStep

# Plans whose times differ by less count as equal: costs are not known better, and fewer axes are easier to read.
NEARLY_EQUAL = 0.005
GAIN_OF_AN_AXIS = 0.01  # what a second axis must gain over one for three to be tried
# Steps on more devices than this run as pipelines only (of one stage too): a single program over all of them cuts no
# batch, so that it needs more memory, and its search costs more.
WHOLE_UP_TO = 64
# Where a pipeline is searched for although a single program fits: the share of the step that is lost to sending and to
# work done twice, and how long the step must be, so that handing out tasks (about 0.1 ms each) does not matter.
LOST_BETWEEN_HOSTS, LOST_INSIDE_HOST, LEAST_PIPELINE_S = 0.1, 0.3, 5e-3
# Where memory is short: how many prices of a byte are tried, the first one (as a part of the step's time divided by the
# peak), and by how much it rises until a plan fits. The first is low: where compute decides the time, bytes are cheap.
MEMORY_ROUNDS, FIRST_PRICE, PRICE_RISE = 14, 1e-4, 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What may be asked of the search.

    `max_mesh_axes` bounds the logical meshes that are tried, `axis_sizes` names the only one. `fixed` gives argument
    leaves (by number) a layout that they must have.
    """

    memory_limit_bytes: int | None = None
    time_limit_s: float = 20.0
    max_mesh_axes: int = 3
    axis_sizes: tuple[int, ...] | None = None
    fixed: tuple[tuple[int, Layout], ...] = ()
    pipeline: PipelineOptions = dataclasses.field(default_factory=PipelineOptions)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The best plan found on one mesh, lowered, with its exact memory and time.

    `shared_out_s` is what the step would take if nothing were sent and every operation split over all devices.
    """

    model: CostModel
    sharding: ShardingPlan
    lowered: LoweredBlock
    program: memory.Program
    estimate: memory.MemoryEstimate
    stands_for: dict[int, tuple[int, Any]]
    step_time_s: float
    shared_out_s: float


def make_plan(
    traced: TracedStep, trees: Trees, cluster: Cluster, options: PlanOptions, rules: RuleBook, progress: Progress
) -> Plan:
    """Traced step -> graph -> the best plan as one program, and as a pipeline where that may pay -> the faster one.

    Raises: MemoryLimitError when nothing fits; UnsupportedError; SolverError; what cutting into micro-batches and
    stages raises, where they were asked for.
    """
    with progress.pass_("graph"):
        graph = build_graph(traced, rules)
    limit_bytes = options.memory_limit_bytes or cluster.device.memory_bytes
    asked = options.pipeline
    if asked.num_stages is not None:
        found = asked_pipeline(traced, cluster, asked, limit_bytes, cost_model, rules, progress, options.time_limit_s)
        return staged_plan(traced, trees, graph, cluster, limit_bytes, found, progress)
    best: Candidate | AutoparError | None = None
    trials: list[MeshTrial] = []
    if not asked.is_asked and cluster.num_devices <= WHOLE_UP_TO:
        best = whole_step(traced, graph, cluster, limit_bytes, options, trials, progress)
    notes: list[str] = []
    if asked.is_asked or (may_pay(best, cluster) and not options.fixed and options.axis_sizes is None):
        to_beat_s = best.step_time_s if isinstance(best, Candidate) else math.inf
        found, reason = searched_pipeline(traced, graph, cluster, options, limit_bytes, rules, progress, to_beat_s)
        if found is not None and found.staged.simulation.step_time_s < to_beat_s:
            return staged_plan(traced, trees, graph, cluster, limit_bytes, found, progress)
        notes.append(reason)
    if not isinstance(best, Candidate):
        raise best or no_pipeline_fits(traced, cluster, limit_bytes, notes)
    with progress.pass_("record"):
        return Plan(record(traced, graph, cluster, limit_bytes, best, trials, notes), trees)


def whole_step(
    traced: TracedStep,
    graph: OpGraph,
    cluster: Cluster,
    limit_bytes: int,
    options: PlanOptions,
    trials: list[MeshTrial],
    progress: Progress,
) -> Candidate | AutoparError:
    """The best candidate that runs the step as one program over all devices, or why none can.

    Adds to `trials` what was tried.
    """
    candidates: list[Candidate] = []
    for mesh in logical_meshes(cluster, options):
        if not worth_trying(mesh, candidates, limit_bytes):
            status = f"not tried: the axis before it gained less than {GAIN_OF_AN_AXIS:.0%}"
            trials.append(MeshTrial(axis_sizes=mesh.axis_sizes, step_time_s=None, peak_bytes=None, status=status))
            continue
        with progress.pass_(f"mesh {mesh}"):
            fitting_s = [c.step_time_s for c in candidates if c.estimate.peak_bytes <= limit_bytes]
            found = search(graph, cost_model(cluster, mesh), limit_bytes, options, min(fitting_s, default=math.inf))
        trials.append(trial(found))
        if isinstance(found, Candidate):
            candidates.append(found)
    return choose(traced, graph, candidates, trials, limit_bytes)


def may_pay(best: Candidate | AutoparError | None, cluster: Cluster) -> bool:
    """Whether a pipeline may beat a plan that runs the step as one program: where that does not fit, or where sending
    and work done twice take long enough to be worth the trouble of handing out many tasks.
    """
    if not isinstance(best, Candidate):
        return cluster.num_devices > 1
    lost = 1 - best.shared_out_s / best.step_time_s if best.step_time_s else 0.0
    least = LOST_BETWEEN_HOSTS if cluster.num_hosts > 1 else LOST_INSIDE_HOST
    return best.step_time_s > LEAST_PIPELINE_S and lost > least


def searched_pipeline(
    traced: TracedStep,
    graph: OpGraph,
    cluster: Cluster,
    options: PlanOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
    to_beat_s: float,
) -> tuple[Found | None, str]:
    """(the best pipeline that fits, why there is none).

    Raises: what cutting into micro-batches raises, where a pipeline was asked for.
    """
    try:
        found = search_pipelines(
            traced,
            cluster,
            options.pipeline,
            limit_bytes,
            cost_model,
            rules,
            progress,
            options.time_limit_s,
            to_beat_s,
            graph,
        )
    except (UnsupportedError, BatchMismatchError) as error:
        if options.pipeline.is_asked:
            raise
        return None, f"no pipeline was weighed: {error.where}: {error.got}"
    if isinstance(found, str):
        return None, f"no pipeline: {found}"
    peak_bytes = max(found.staged.simulation.peak_bytes)
    if peak_bytes > limit_bytes:
        return None, f"the pipeline nearest to fitting needs {peak_bytes / 1e9:.3g} GB on a device"
    weighed = found.weighed[0]
    return found, f"the best pipeline would take {found.staged.simulation.step_time_s:.3g} s ({weighed.text})"


def no_pipeline_fits(traced: TracedStep, cluster: Cluster, limit_bytes: int, notes: Sequence[str]) -> SolverError:
    """The error of a step for which no pipeline could be had and nothing else was tried."""
    return SolverError(
        where=f"{traced.name} on {cluster.num_devices} devices of {cluster.name}",
        expected=f"a pipeline that fits into {limit_bytes / 1e9:.3g} GB on each device",
        got="; ".join(notes),
        hint="use more devices, a smaller batch, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )


def staged_plan(
    traced: TracedStep,
    trees: Trees,
    graph: OpGraph,
    cluster: Cluster,
    limit_bytes: int,
    found: Found,
    progress: Progress,
) -> Plan:
    """A pipeline as a plan."""
    with progress.pass_("record"):
        return Plan(staged_record(traced, graph, cluster, limit_bytes, found), trees)


def staged_record(traced: TracedStep, graph: OpGraph, cluster: Cluster, limit_bytes: int, found: Found) -> PlanRecord:
    """Writes down a pipeline."""
    staged, choice = found.staged, found.choice
    arguments, results = staged_values(traced, staged)
    flops = sum(flops_of(op) * op.count for op in graph.ops() if op.kind is OpKind.EQUATION)
    reports = [planned.sharding.report for planned in staged.stages]
    return PlanRecord(
        format_version=FORMAT_VERSION,
        step=traced.name,
        fingerprint=traced.fingerprint,
        cluster=cluster,
        axis_sizes=(),
        memory_limit_bytes=limit_bytes,
        arguments=tuple(arguments),
        results=tuple(results),
        decisions=Decisions(layouts=(), strategies=(), of_op={}, raw={}, placed={}, copies=()),
        predicted=staged_predicted(staged, flops),
        solver=together(reports),
        modules=tuple(row for planned in staged.stages for row in stage_rows(planned)),
        tried=(),
        notes=notes_of(traced, graph),
        pipeline=pipeline_record(staged, choice.policies, choice.chunks),
        weighed=found.weighed,
    )


def worth_trying(mesh: LogicalMesh, candidates: Sequence[Candidate], limit_bytes: int) -> bool:
    """Whether a mesh of three axes may pay: where two axes gained next to nothing over one, a third is not tried.

    The search on it costs more than all others together. Where no plan fits yet, everything is tried.
    """
    num_axes = len(mesh.axis_sizes)
    if num_axes < 3:
        return True

    def fastest_s(axes: int) -> float:
        fitting = [c for c in candidates if c.estimate.peak_bytes <= limit_bytes]
        return min((c.step_time_s for c in fitting if len(c.model.links.mesh.axis_sizes) == axes), default=math.inf)

    before, last = fastest_s(num_axes - 2), fastest_s(num_axes - 1)
    return math.isinf(before) or math.isinf(last) or last < before * (1 - GAIN_OF_AN_AXIS)


def choose(
    traced: TracedStep, graph: OpGraph, candidates: Sequence[Candidate], trials: Sequence[MeshTrial], limit_bytes: int
) -> Candidate | AutoparError:
    """The fastest candidate that fits; of nearly equal ones that on the mesh with the fewest axes.

    Where none fits a MemoryLimitError, where there is none a SolverError comes back.
    """
    if not candidates:
        return SolverError(
            where=traced.name,
            expected="a plan on one of the logical meshes",
            got=", ".join(f"{'x'.join(map(str, t.axis_sizes))}: {t.status}" for t in trials),
            hint="give the search more time (time_limit_s)",
        )
    fitting = [c for c in candidates if c.estimate.peak_bytes <= limit_bytes]
    if not fitting:
        return no_plan_fits(traced, graph, candidates, limit_bytes)
    fastest_s = min(c.step_time_s for c in fitting)
    return next(c for c in fitting if c.step_time_s <= fastest_s * (1 + NEARLY_EQUAL))


def logical_meshes(cluster: Cluster, options: PlanOptions) -> tuple[LogicalMesh, ...]:
    """The factorisations of the device count; the orders of their axes too where links differ."""
    if options.axis_sizes is not None:
        return (LogicalMesh(axis_sizes=options.axis_sizes),)
    found: dict[LogicalMesh, None] = {}
    for mesh in factorisations(cluster.num_devices, options.max_mesh_axes):
        for ordered in orderings(mesh):
            if len(set(cluster.axis_links(ordered.axis_sizes))) > 1 or ordered == mesh:
                found[ordered] = None
    return tuple(found)


def cost_model(cluster: Cluster, mesh: LogicalMesh) -> CostModel:
    name = cluster.device.name
    platform = "cpu" if name == "CPU" else "tpu" if name.startswith("TPU") else "gpu"
    return CostModel(
        device=cluster.device,
        links=MeshLinks(
            mesh=mesh,
            links=cluster.axis_links(mesh.axis_sizes),
            scatters_by_all_reduce=platform == "tpu",
        ),
        compiler=compiler_for(platform, jax_version()),
    )


def search(
    graph: OpGraph, model: CostModel, limit_bytes: int, options: PlanOptions, to_beat_s: float = math.inf
) -> Candidate | MeshTrial:
    """The fastest plan on one mesh, within the memory limit where that can be had, else the smallest found.

    The ILP is solved without memory first. Where the exact estimate of its plan is over the limit, bytes get a price:
    those of the values that are alive where memory is short in any plan seen. The price rises until a plan fits, and is
    then halved towards the cheapest plan that fits (the Lagrangian relaxation of formula (4)). The first solution's
    bound holds for all of them, and where it is not below `to_beat_s`, the time of a plan that fits on another mesh, no
    price is tried. The whole search takes `options.time_limit_s` at most, but for its last solution.

    Returns the reason, as a trial, when the time limit passed without any plan.
    """
    deadline = time.perf_counter() + options.time_limit_s
    first_argument = len(graph.constants)
    fixed = {graph.block.inputs[first_argument + i]: layout for i, layout in options.fixed}
    intra_op = IntraOp(graph, model, fixed)
    free = intra_op.solve(time_limit_s=options.time_limit_s)
    if free.status not in (Status.OPTIMAL, Status.FEASIBLE):
        status = f"no plan after {free.wall_s:.1f} s ({free.status.value})"
        return MeshTrial(axis_sizes=model.links.mesh.axis_sizes, step_time_s=None, peak_bytes=None, status=status)
    best = evaluated(graph, model, intra_op.decode(free))
    if best.estimate.peak_bytes <= limit_bytes or best.step_time_s >= to_beat_s:
        return best
    crowding = crowded(best, limit_bytes)
    s_per_byte, too_low, fits_at = best.step_time_s / best.estimate.peak_bytes * FIRST_PRICE, 0.0, None
    for _ in range(MEMORY_ROUNDS):
        if time.perf_counter() > deadline:
            break
        prices = MemoryPrices(s_per_byte=s_per_byte, values=crowding)
        solution = intra_op.solve(time_limit_s=max(deadline - time.perf_counter(), 1.0), prices=prices)
        if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
            break
        cost = intra_op.cost(solution.choice)
        told = dataclasses.replace(
            solution, status=Status.FEASIBLE, objective=cost, bound=free.bound, gap=(cost - free.bound) / cost
        )
        candidate = evaluated(graph, model, intra_op.decode(told))
        fits = candidate.estimate.peak_bytes <= limit_bytes
        if (not fits, rank(candidate, fits)) < (fits_at is None, rank(best, fits_at is not None)):
            best = candidate
        if fits:
            fits_at = s_per_byte
        else:
            too_low = s_per_byte
            crowding |= crowded(candidate, limit_bytes)
        s_per_byte = (
            s_per_byte * PRICE_RISE if fits_at is None else (fits_at * max(too_low, fits_at / PRICE_RISE)) ** 0.5
        )
        if fits_at is not None and s_per_byte > 0.8 * fits_at:
            break
    return best


def rank(candidate: Candidate, fits: bool) -> float:
    """What is better when smaller: time among plans that fit, memory among those that do not."""
    return candidate.step_time_s if fits else float(candidate.estimate.peak_bytes)


def crowded(candidate: Candidate, limit_bytes: int) -> frozenset[tuple[int, str]]:
    """The values, with their states, that are alive while the memory is over the limit."""
    ranges = memory.live_ranges(candidate.program, candidate.model.compiler)
    nbytes = candidate.program.nbytes
    change: dict[int, int] = {}
    for r in ranges:
        size = int(r.share * nbytes[r.value])
        change[r.start] = change.get(r.start, 0) + size
        change[r.stop] = change.get(r.stop, 0) - size
    positions = sorted(change)
    over, live = [], 0
    for position, after in zip(positions, [*positions[1:], positions[-1] + 1], strict=True):
        live += change[position]
        if live > limit_bytes:
            over.append((position, after))
    found = set()
    for r in ranges:
        if r.value in candidate.stands_for and any(r.start < stop and start < r.stop for start, stop in over):
            value, (_, state) = candidate.stands_for[r.value]
            found.add((value, state))
    return frozenset(found)


def evaluated(graph: OpGraph, model: CostModel, sharding: ShardingPlan) -> Candidate:
    """Lowers decisions and reads off what they will do."""
    lowered = lower(graph, sharding, model.links)
    program, stands_for = memory_program(graph, lowered, model)
    seconds = compute_times_s(graph, lowered, model)
    collective_s = sum(use.time_s for use in predicted_collectives(graph, lowered, model))
    split = {op: s.split / model.links.mesh.num_devices for op, s in sharding.strategy.items()}
    least = 1 / model.links.mesh.num_devices
    return Candidate(
        model=model,
        sharding=sharding,
        lowered=lowered,
        program=program,
        estimate=memory.estimate(program, model.compiler),
        stands_for=stands_for,
        step_time_s=sum(seconds.values()) + collective_s,
        shared_out_s=sum(t * split.get(op, least) for op, t in seconds.items()),
    )


def record(
    traced: TracedStep,
    graph: OpGraph,
    cluster: Cluster,
    limit_bytes: int,
    best: Candidate,
    trials: Sequence[MeshTrial],
    notes: Sequence[str],
) -> PlanRecord:
    """Writes down the chosen candidate."""
    arguments, results = planned_values(traced, graph, best.lowered)
    names = place_names(graph, best.stands_for, made_by(graph), best.sharding.mesh)
    flops = sum(flops_of(op) * op.count for op in graph.ops() if op.kind is OpKind.EQUATION)
    made = predicted(graph, best.lowered, best.model, best.estimate, names, flops)
    return PlanRecord(
        format_version=FORMAT_VERSION,
        step=traced.name,
        fingerprint=traced.fingerprint,
        cluster=cluster,
        axis_sizes=best.sharding.mesh.axis_sizes,
        memory_limit_bytes=limit_bytes,
        arguments=tuple(arguments),
        results=tuple(results),
        decisions=decisions_of(best.sharding),
        predicted=made,
        solver=best.sharding.report,
        modules=module_rows(graph, best.lowered, best.model, made.collectives),
        tried=tuple(trials),
        notes=(*notes_of(traced, graph), *notes),
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


def trial(candidate: Candidate | MeshTrial) -> MeshTrial:
    if isinstance(candidate, MeshTrial):
        return candidate
    return MeshTrial(
        axis_sizes=candidate.sharding.mesh.axis_sizes,
        step_time_s=candidate.step_time_s,
        peak_bytes=candidate.estimate.peak_bytes,
        status=candidate.sharding.report.status,
    )


def made_by(graph: OpGraph) -> dict[int, str]:
    """Module and primitive that make each value, for messages."""
    return {v: f"{op.module}/{op.primitive}".lstrip("/") for op in graph.ops() for v in op.outputs}


def no_plan_fits(
    traced: TracedStep, graph: OpGraph, candidates: Sequence[Candidate], limit_bytes: int
) -> MemoryLimitError:
    """The error that says by how much the smallest plan is over, and what holds the memory."""
    least = min(candidates, key=lambda c: c.estimate.peak_bytes)
    names = place_names(graph, least.stands_for, made_by(graph), least.sharding.mesh)
    largest = [(names.get(v, "a temporary value"), n) for v, n in least.estimate.at_peak[:5]]
    return MemoryLimitError(
        where=f"{traced.name} on mesh {least.sharding.mesh}",
        limit_bytes=limit_bytes,
        needed_bytes=least.estimate.peak_bytes,
        largest=largest,
        hint="use more devices, a smaller batch or gradient accumulation, jax.checkpoint around the layers whose "
        "activations are named here, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A step under a plan: the flat function (constants first, then arguments), and what it was made from."""

    function: Callable[..., list[Any]]
    graph: OpGraph
    lowered: LoweredBlock


def make_staged(traced: TracedStep, plan: Plan, rules: RuleBook) -> Staged:
    """Traced step and plan with a pipeline -> graph -> stages -> instructions -> tasks and the list that runs them.

    Raises: PlanMismatchError when the plan was made for another step or other shapes.
    """
    check_plan(plan, traced)
    made = plan.record.pipeline
    assert made is not None, "a plan without a pipeline is one function"
    cut = cut_layers(cut_scans(traced, made.scan_parts, rules), made.num_microbatches, rules)
    layers = cut.layers
    graph = recomputed(cut, made.recomputed)
    schedule = schedule_of(made.schedule, len(made.stages), made.num_microbatches, made.chunks)
    first_layers = [s.first_layer for s in made.stages]
    stages = cut_stages(graph, layers, first_layers, schedule.splits_backward, len(made.stages))
    submeshes = [Submesh(first_device=s.first_device, mesh=LogicalMesh(axis_sizes=s.axis_sizes)) for s in made.stages]
    models = [model_of(plan.cluster, cost_model, s.mesh) for s in submeshes]
    shardings = [
        sharding_plan_of(s.decisions, s.solver, at.mesh, stage.graph)
        for s, at, stage in zip(made.stages, submeshes, stages, strict=True)
    ]
    return stage_program(
        cut.step, graph, layers, first_layers, stages, models, shardings, submeshes, schedule, plan.cluster
    )


def make_function(traced: TracedStep, plan: Plan, mesh: Mesh, rules: RuleBook) -> Made:
    """Traced step and plan -> graph -> instructions -> function on global arrays.

    Raises: PlanMismatchError when the plan was made for another step or other shapes.
    """
    check_plan(plan, traced)
    graph = build_graph(traced, rules)
    model = cost_model(plan.cluster, plan.mesh)
    sharding = sharding_plan_of(plan.record.decisions, plan.record.solver, plan.mesh, graph)
    lowered = lower(graph, sharding, model.links)
    emitter = Emitter(graph, mesh)
    return Made(function=lambda *args: emitter(lowered, args), graph=graph, lowered=lowered)


def check_plan(plan: Plan, traced: TracedStep) -> None:
    """Raises: PlanMismatchError when a plan was not made for this step."""
    if plan.record.fingerprint == traced.fingerprint:
        return
    raise PlanMismatchError(
        where=f"plan of {plan.record.step}",
        expected=f"a plan for {traced.name} as it is traced now (fingerprint {traced.fingerprint[:12]})",
        got=f"fingerprint {plan.record.fingerprint[:12]}",
        hint="the step, the shapes of its arguments or its closed-over constants have changed: plan again",
    )
