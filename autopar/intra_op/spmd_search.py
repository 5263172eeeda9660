"""The search for one SPMD program over all devices: the fastest plan that fits, over all logical meshes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from autopar.common.deadline import SOLVE_S
from autopar.common.progress import Progress
from autopar.cost import peak_memory
from autopar.cost.cost_model import EXPOSED_FRACTION, LEAST_EXPOSED_FRACTION, CostModel, cost_model
from autopar.cost.overlap import timed
from autopar.cost.prediction import allocation_s, compute_times_s, memory_program, place_names
from autopar.errors import AutoparError, MemoryLimitError, SolverError
from autopar.hardware.cluster import Cluster
from autopar.intra_op.ilp import IntraOp, MemoryPrices
from autopar.ir.graph import OpGraph
from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh, factorisations, orderings
from autopar.ir.traced_step import TracedStep
from autopar.lowering.decisions import ShardingPlan
from autopar.lowering.host_offload import with_host_copies
from autopar.lowering.instructions import LoweredBlock
from autopar.lowering.lower import lower
from autopar.plan.options import PlanOptions
from autopar.plan.schema import MeshTrial
from autopar.sharding.constraints import TOO_TIGHT, Binding
from autopar.sharding.parallelisms import data_axis
from autopar.sharding.pins import PinsOnMesh, on_meshes
from autopar.sharding.semantics import annotate_semantics
from autopar.solver import Solution, Status

# Plans whose times differ by less count as equal: costs are not known better, and fewer axes are easier to read.
NEARLY_EQUAL = 0.005
GAIN_OF_AN_AXIS = 0.01  # what a second axis must gain over one for three to be tried
# Where memory is short: how many prices of a byte are tried, the first one (as a part of the step's time divided by the
# peak), and by how much it rises until a plan fits. The first is low: where compute decides the time, bytes are cheap.
MEMORY_ROUNDS, FIRST_PRICE, PRICE_RISE = 14, 1e-4, 5.0
IMPOSSIBLE = "impossible"  # what is said of a mesh on which constraints leave nothing
LONG_STEP = 5_000  # operations; whatever is done to a longer step takes long
# Where nothing can fit, a search for what does takes minutes: for a long step, and after so much time, it is first
# asked whether anything can.
SLOW_SEARCH_S = 10.0
# Stages of ZeRO, 0 for plain data parallelism, that are tried beside what the search finds by itself: such plans send
# parameters and gradients only, all of which may hide, and an objective that adds up what is sent thinks less of them.
ZERO_STAGES = (0, 1, 3)
# What may count of a send that computing can hide: how much of it does depends on what else is sent.
EXPOSED_FRACTIONS = (EXPOSED_FRACTION, LEAST_EXPOSED_FRACTION)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpmdCandidate:
    """The best plan found on one mesh, lowered, with its exact memory and time.

    `shared_out_s` is what the step would take if nothing were sent and every operation split over all devices; `sends`
    whether anything is.
    """

    model: CostModel
    sharding: ShardingPlan
    lowered: LoweredBlock
    program: peak_memory.MemoryProgram
    estimate: peak_memory.MemoryEstimate
    stands_for: dict[int, tuple[int, Any]]
    step_time_s: float
    shared_out_s: float
    sends: bool
    pins: PinsOnMesh | None = None


def search_spmd(
    traced: TracedStep,
    graph: OpGraph,
    cluster: Cluster,
    limit_bytes: int,
    options: PlanOptions,
    trials: list[MeshTrial],
    progress: Progress,
    within: float = 1.0,
) -> tuple[SpmdCandidate, ...] | AutoparError:
    """The best candidate that runs the step as one program over all devices, or why none can. Behind it come the others
    that fit and take at most `within` times as long, the fastest first; 1 is for none.

    Adds to `trials` what was tried.
    """
    candidates: list[SpmdCandidate] = []
    begun_s, may_fit = time.perf_counter(), not options.is_free or cluster.num_devices == 1
    meshes = logical_meshes(traced, graph, cluster, options)
    for number, (mesh, pins) in enumerate(meshes):
        if options.deadline.passed and any(c.estimate.peak_bytes <= limit_bytes for c in candidates):
            status = f"not tried: {options.deadline.text}"
            trials.append(MeshTrial(axis_sizes=mesh.axis_sizes, step_time_s=None, peak_bytes=None, status=status))
            continue
        if not worth_trying(mesh, candidates, limit_bytes):
            status = f"not tried: the axis before it gained less than {GAIN_OF_AN_AXIS:.0%}"
            trials.append(MeshTrial(axis_sizes=mesh.axis_sizes, step_time_s=None, peak_bytes=None, status=status))
            continue
        slow = len(graph.block.ops) > LONG_STEP or time.perf_counter() - begun_s > SLOW_SEARCH_S
        slow = slow or (number > 0 and options.deadline.passed)
        if slow and not may_fit and all(c.estimate.peak_bytes > limit_bytes for c in candidates):
            with progress.pass_("least memory"):
                refusal = cannot_fit(traced, graph, cluster, limit_bytes, options.deadline.solve_s())
            if refusal is not None:
                return refusal
            may_fit = True
        with progress.pass_(f"mesh {mesh}"):
            fitting_s = [c.step_time_s for c in candidates if c.estimate.peak_bytes <= limit_bytes]
            to_beat_s = min(fitting_s, default=math.inf)
            time_s = options.deadline.solve_s(len(meshes) - number)
            found = search(graph, cost_model(cluster, mesh), limit_bytes, options, to_beat_s, pins, time_s)
        trials.append(trial(found))
        if isinstance(found, SpmdCandidate):
            candidates.append(found)
    sends = any(c.model.overlap.kinds and c.sends for c in candidates)
    if options.is_free and sends and not options.deadline.passed:
        with progress.pass_("data parallelism"):
            fitting_s = [c.step_time_s for c in candidates if c.estimate.peak_bytes <= limit_bytes]
            candidates += known_plans(graph, cluster, limit_bytes, options, trials, min(fitting_s, default=math.inf))
    best = choose(traced, graph, candidates, trials, limit_bytes)
    return best if isinstance(best, AutoparError) else (best, *near(best, candidates, limit_bytes, within))


def check_state_fits(traced: TracedStep, graph: OpGraph, cluster: Cluster, limit_bytes: int) -> None:
    """Raises: MemoryLimitError for a step whose arguments are more than the memory of all devices: then nothing fits,
    stages neither.
    """
    given = [graph.values[v] for v in graph.block.inputs]
    needed_bytes = state_bytes(graph, cluster)
    if needed_bytes <= limit_bytes:
        return
    largest = sorted(given, key=lambda v: -v.nbytes)[:5]
    raise MemoryLimitError(
        where=f"the state of {traced.name}, split over all {cluster.num_devices} devices of {cluster.name}",
        limit_bytes=limit_bytes,
        needed_bytes=needed_bytes,
        largest=[(v.name or "a constant", v.nbytes // cluster.num_devices) for v in largest],
        hint="use more devices, a smaller model, a smaller optimiser state (Adafactor, bfloat16 moments), or keep that "
        'in the memory of the hosts: plan=autopar.recipes.zero(2, offload="optimizer")',
    )


def state_bytes(graph: OpGraph, cluster: Cluster) -> int:
    """The least that the arguments take on each device, in stages too."""
    return -(-sum(graph.values[v].nbytes for v in graph.block.inputs) // cluster.num_devices)


def cannot_fit(
    traced: TracedStep, graph: OpGraph, cluster: Cluster, limit_bytes: int, time_limit_s: float
) -> MemoryLimitError | None:
    """The error of a step that needs too much memory even if every value of it were split over all devices.

    What is searched quickly is searched all the same, for the least that it needs: plans split few steps so well.
    """
    model = cost_model(cluster, LogicalMesh(axis_sizes=(1,)))
    intra_op = IntraOp(graph, model)
    alone = evaluated(graph, model, intra_op.decode(intra_op.solve(time_limit_s=time_limit_s)))
    if alone.estimate.peak_bytes <= limit_bytes * cluster.num_devices:
        return None
    where = f"{traced.name}, if every value were split over all {cluster.num_devices} devices of {cluster.name}"
    return out_of_memory(where, graph, alone, limit_bytes, cluster.num_devices)


def known_plans(
    graph: OpGraph,
    cluster: Cluster,
    limit_bytes: int,
    options: PlanOptions,
    trials: list[MeshTrial],
    to_beat_s: float,
) -> list[SpmdCandidate]:
    """The best plans that are data parallelism of some kind, or keep state as FSDP does. Adds to `trials` what was
    tried.
    """
    whole = LogicalMesh(axis_sizes=(cluster.num_devices,))
    model = cost_model(cluster, whole)
    tried: list[tuple[str, SpmdCandidate | MeshTrial]] = []
    along_largest = state_along_largest(graph, whole)
    if along_largest:
        fixed = dataclasses.replace(options, fixed=along_largest)
        time_s = options.deadline.solve_s()
        found = search(graph, model, limit_bytes, fixed, to_beat_s, time_limit_s=time_s)
        tried.append(("state along its largest dimension", found))
    named = annotate_semantics(graph)
    for name, binding in known_bindings():
        if options.deadline.passed:
            break
        bound, time_s = dataclasses.replace(options, binding=binding), options.deadline.solve_s()
        tried.append((name, search(named, model, limit_bytes, bound, to_beat_s, time_limit_s=time_s)))
    trials += [dataclasses.replace(trial(found), name=name) for name, found in tried]
    return [found for _, found in tried if isinstance(found, SpmdCandidate)]


def known_bindings() -> list[tuple[str, Binding]]:
    """Data parallelism and the stages of ZeRO that are tried, by name."""
    return [
        (f"ZeRO-{zero}" if zero else "data parallelism", Binding(axes=(data_axis(zero),), sizes=(None,)))
        for zero in ZERO_STAGES
    ]


def state_along_largest(graph: OpGraph, mesh: LogicalMesh) -> tuple[tuple[int, Layout], ...]:
    """Each array of the state, by its number among the arguments, split over a mesh of one axis along the largest
    dimension that divides.
    """
    found = []
    for position in sorted(graph.donated):
        shape = graph.values[graph.block.inputs[position]].shape
        for d in sorted(range(len(shape)), key=lambda d: -shape[d]):
            layout = Layout(tuple((0,) if e == d else () for e in range(len(shape))))
            if layout.fits(shape, mesh):
                found.append((position - len(graph.constants), layout))
                break
    return tuple(found)


def logical_meshes(
    traced: TracedStep, graph: OpGraph, cluster: Cluster, options: PlanOptions
) -> list[tuple[LogicalMesh, PinsOnMesh | None]]:
    """What the options name, else the distinct meshes of the cluster; each with the pins on it, where there are any.

    Raises: InvalidArgumentError for pins that name nothing, or that hold on no mesh.
    """
    if options.pins is not None:
        found = options.pins.found(traced, graph)
        return [(at.mesh, at) for at in on_meshes(found, cluster, options.max_mesh_axes, options.binding, graph)]
    if options.binding is not None:
        return [(options.binding.on(cluster.num_devices)[0], None)]
    if options.axis_sizes is not None:
        return [(LogicalMesh(axis_sizes=options.axis_sizes), None)]
    return [(mesh, None) for mesh in distinct_meshes(cluster, options.max_mesh_axes)]


def distinct_meshes(cluster: Cluster, max_axes: int) -> tuple[LogicalMesh, ...]:
    """The factorisations of the device count; of axes on different links every order."""
    found: dict[LogicalMesh, None] = {}
    for mesh in factorisations(cluster.num_devices, max_axes):
        for ordered in orderings(mesh):
            if len(set(cluster.axis_links(ordered.axis_sizes))) > 1 or ordered == mesh:
                found[ordered] = None
    return tuple(found)


def worth_trying(mesh: LogicalMesh, candidates: Sequence[SpmdCandidate], limit_bytes: int) -> bool:
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
    traced: TracedStep,
    graph: OpGraph,
    candidates: Sequence[SpmdCandidate],
    trials: Sequence[MeshTrial],
    limit_bytes: int,
) -> SpmdCandidate | AutoparError:
    """The fastest candidate that fits; of nearly equal ones that on the mesh with the fewest axes.

    Where none fits a MemoryLimitError, where there is none a SolverError comes back.
    """
    if not candidates:
        impossible = bool(trials) and all(t.status == IMPOSSIBLE for t in trials)
        return SolverError(
            where=traced.name,
            expected="a plan on one of the logical meshes",
            got=", ".join(f"{'x'.join(map(str, t.axis_sizes))}: {t.status}" for t in trials),
            hint=TOO_TIGHT if impossible else "give the search more time (time_limit_s)",
        )
    fitting = [c for c in candidates if c.estimate.peak_bytes <= limit_bytes]
    if not fitting:
        return no_plan_fits(traced, graph, candidates, limit_bytes)
    fastest_s = min(c.step_time_s for c in fitting)
    equal = [c for c in fitting if c.step_time_s <= fastest_s * (1 + NEARLY_EQUAL)]
    return min(equal, key=lambda c: (len(c.model.links.mesh.axis_sizes), c.step_time_s))


def near(
    best: SpmdCandidate, candidates: Sequence[SpmdCandidate], limit_bytes: int, within: float
) -> list[SpmdCandidate]:
    """Those beside the best that fit and take at most `within` times as long, the fastest first; none for 1."""
    if within <= 1:
        return []
    longest_s = within * best.step_time_s
    fitting = [c for c in candidates if c is not best and c.estimate.peak_bytes <= limit_bytes]
    return sorted((c for c in fitting if c.step_time_s <= longest_s), key=lambda c: c.step_time_s)


def search(
    graph: OpGraph,
    model: CostModel,
    limit_bytes: int,
    options: PlanOptions,
    to_beat_s: float = math.inf,
    pins: PinsOnMesh | None = None,
    time_limit_s: float = SOLVE_S,
) -> SpmdCandidate | MeshTrial:
    """The fastest plan on one mesh, within the memory limit where that can be had, else the smallest found.

    The ILP is solved without memory first. Its objective adds up what is computed and sent, an upper bound of the time
    with overlap that plans are compared by; on platforms with overlap, and without a recipe, it is solved again with a
    part of what computing can hide (`slack`, `EXPOSED_FRACTIONS`), and the search goes on from the fastest plan. Where
    the exact estimate of that one is over the limit, bytes get a price: those of the values that are alive where memory
    is short in any plan seen. The price rises until a plan fits, and is then halved towards the cheapest plan that fits
    (the Lagrangian relaxation of formula (4)). Where the plan without prices does not beat `to_beat_s`, the time of a
    plan that fits on another mesh, none is tried. The whole search takes `time_limit_s` at most, but for its last
    solution.

    Returns the reason, as a trial, when the time limit passed without any plan.
    """
    deadline = time.perf_counter() + time_limit_s
    first_argument = len(graph.constants)
    fixed = {graph.block.inputs[first_argument + i]: layout for i, layout in options.fixed}
    constraints = options.binding.on(model.links.mesh.num_devices)[1] if options.binding is not None else None
    pinned = pins.layouts(graph) if pins is not None else None
    in_host = frozenset(graph.block.inputs[first_argument + i] for i in options.in_host)
    intra_op = IntraOp(graph, model, fixed, constraints=constraints, pins=pinned, in_host=in_host)
    free = intra_op.solve(time_limit_s=time_limit_s)
    if free.status not in (Status.OPTIMAL, Status.FEASIBLE):
        status = f"no plan after {free.wall_s:.1f} s ({free.status.value})"
        if free.status is Status.INFEASIBLE:
            status = IMPOSSIBLE
        return MeshTrial(axis_sizes=model.links.mesh.axis_sizes, step_time_s=None, peak_bytes=None, status=status)
    best = dataclasses.replace(evaluated(graph, model, intra_op.decode(free)), pins=pins)
    exposed_fraction = 1.0
    # A recipe means the plan that its source describes, which does not count on what is hidden.
    hides = model.overlap.kinds and options.binding is None and best.sends
    for count in EXPOSED_FRACTIONS if hides else ():
        hidden = intra_op.solve(time_limit_s=max(deadline - time.perf_counter(), 1.0), exposed_fraction=count)
        if hidden.status in (Status.OPTIMAL, Status.FEASIBLE):
            candidate = evaluated(graph, model, intra_op.decode(_told(hidden, intra_op, free)))
            if candidate.step_time_s < best.step_time_s:
                best, exposed_fraction = dataclasses.replace(candidate, pins=pins), count
    if best.estimate.peak_bytes <= limit_bytes or best.step_time_s >= to_beat_s:
        return best
    crowding = over_limit_values(best, limit_bytes)
    s_per_byte, too_low, fits_at = best.step_time_s / best.estimate.peak_bytes * FIRST_PRICE, 0.0, None
    for _ in range(MEMORY_ROUNDS):
        if time.perf_counter() > deadline:
            break
        prices = MemoryPrices(s_per_byte=s_per_byte, values=crowding)
        left_s = max(deadline - time.perf_counter(), 1.0)
        solution = intra_op.solve(time_limit_s=left_s, prices=prices, exposed_fraction=exposed_fraction)
        if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
            break
        candidate = dataclasses.replace(
            evaluated(graph, model, intra_op.decode(_told(solution, intra_op, free))), pins=pins
        )
        fits = candidate.estimate.peak_bytes <= limit_bytes
        if (not fits, rank(candidate, fits)) < (fits_at is None, rank(best, fits_at is not None)):
            best = candidate
        if fits:
            fits_at = s_per_byte
        else:
            too_low = s_per_byte
            crowding |= over_limit_values(candidate, limit_bytes)
        s_per_byte = (
            s_per_byte * PRICE_RISE if fits_at is None else (fits_at * max(too_low, fits_at / PRICE_RISE)) ** 0.5
        )
        if fits_at is not None and s_per_byte > 0.8 * fits_at:
            break
    return best


def _told(solution: Solution, intra_op: IntraOp, free: Solution) -> Solution:
    """A solution under another objective, with the cost that it has under the search's own, and the bound of that."""
    cost = intra_op.cost(solution.choice)
    return dataclasses.replace(
        solution, status=Status.FEASIBLE, objective=cost, bound=free.bound, gap=_gap(cost, free.bound)
    )


def rank(candidate: SpmdCandidate, fits: bool) -> float:
    """What is better when smaller: time among plans that fit, memory among those that do not."""
    return candidate.step_time_s if fits else float(candidate.estimate.peak_bytes)


def over_limit_values(candidate: SpmdCandidate, limit_bytes: int) -> frozenset[tuple[int, str]]:
    """The values, with their states, that are alive while the memory is over the limit."""
    ranges = peak_memory.live_ranges(candidate.program, candidate.model.compiler)
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


def evaluated(graph: OpGraph, model: CostModel, sharding: ShardingPlan) -> SpmdCandidate:
    """Lowers decisions and reads off what they will do."""
    lowered = with_host_copies(graph, lower(graph, sharding, model.links), sharding.in_host, model.links.mesh)
    program, stands_for = memory_program(graph, lowered, model)
    estimate = peak_memory.estimate(program, model.compiler)
    seconds = compute_times_s(graph, lowered, model)
    ran = timed(graph, lowered, model)
    split = {op: s.split / model.links.mesh.num_devices for op, s in sharding.strategy.items()}
    least = 1 / model.links.mesh.num_devices
    return SpmdCandidate(
        model=model,
        sharding=sharding,
        lowered=lowered,
        program=program,
        estimate=estimate,
        stands_for=stands_for,
        step_time_s=ran.end_s + allocation_s(estimate, model),
        sends=ran.send_s > 0,
        shared_out_s=sum(t * split.get(op, least) for op, t in seconds.items()),
    )


def _gap(cost: float, bound: float) -> float:
    """How far a cost may be above the best, as a part of it; on one device nothing is chosen and the cost is zero."""
    return (cost - bound) / cost if cost else 0.0


def trial(candidate: SpmdCandidate | MeshTrial) -> MeshTrial:
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
    traced: TracedStep, graph: OpGraph, candidates: Sequence[SpmdCandidate], limit_bytes: int
) -> MemoryLimitError:
    """The error that says by how much the smallest plan is over, and what holds the memory."""
    least = min(candidates, key=lambda c: c.estimate.peak_bytes)
    return out_of_memory(f"{traced.name} on mesh {least.sharding.mesh}", graph, least, limit_bytes)


def out_of_memory(
    where: str, graph: OpGraph, found: SpmdCandidate, limit_bytes: int, shared_by: int = 1
) -> MemoryLimitError:
    """The error of a plan that does not fit, of whose bytes each device has so small a share."""
    names = place_names(graph, found.stands_for, made_by(graph), found.sharding.mesh)
    return MemoryLimitError(
        where=where,
        limit_bytes=limit_bytes,
        needed_bytes=-(-found.estimate.peak_bytes // shared_by),
        largest=[(names.get(v, "a temporary value"), n // shared_by) for v, n in found.estimate.at_peak[:5]],
        hint="use more devices, a smaller batch or gradient accumulation, jax.checkpoint around the layers whose "
        "activations are named here, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )
