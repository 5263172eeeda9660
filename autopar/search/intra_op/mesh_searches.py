"""Source of candidates: one SPMD program over all devices on each logical mesh, and the manual plans of one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

from autopar.cost.cost_model import cost_model
from autopar.cost.xla_program import place_names
from autopar.errors import InvalidArgumentError, MemoryLimitError
from autopar.hardware.cluster import Cluster
from autopar.ir.binding import Binding, bytes_on_each_device, with_groups
from autopar.ir.graph import Block, OpGraph, read_by
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.parallelisms import data_axis, replica_axis, tensor_axis
from autopar.ir.pins import PinsOnMesh
from autopar.lowering.host_copies import with_host_copies
from autopar.lowering.lower import lower
from autopar.ops.attention.kernels import Kernel
from autopar.ops.attention.match import large_scores
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import WORTHWHILE, Effort, PlanRequest
from autopar.plan.rivals import BASELINES, DATA_PARALLEL, TENSOR_PARALLEL, tensor_group
from autopar.search.intra_op.ilp import IntraOp
from autopar.search.intra_op.spmd_candidate import ProgramMemory, SpmdCandidate, memory_of, unfold
from autopar.search.intra_op.spmd_search import (
    LONG_STEP,
    SOURCE,
    MeshSearch,
    begin_on_mesh,
    logical_meshes,
    not_tried,
    search_mesh,
    worth_trying,
)

# The errors of steps that exceed the memory of all devices: by their arguments, or as one program.


def state_bytes(context: PlanningContext) -> int:
    """The least bytes of the arguments on each device, for one program and for stages."""
    graph = context.graph
    return -(-sum(graph.values[v].nbytes for v in graph.block.inputs) // context.cluster.num_devices)


def check_state_fits(context: PlanningContext) -> None:
    """Raises: MemoryLimitError for a step whose arguments exceed the memory of all devices, in stages too."""
    graph, cluster, needed_bytes = context.graph, context.cluster, state_bytes(context)
    if needed_bytes <= context.limit_bytes:
        return
    largest = sorted((graph.values[v] for v in graph.block.inputs), key=lambda v: -v.nbytes)[:5]
    raise MemoryLimitError(
        where=f"the state of {context.traced.name}, split over all {cluster.num_devices} devices of {cluster.name}",
        limit_bytes=context.limit_bytes,
        needed_bytes=needed_bytes,
        largest=[(v.name or "a constant", v.nbytes // cluster.num_devices) for v in largest],
        hint="use more devices, a smaller model, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )


def fits_unfused(context: PlanningContext) -> bool:
    """Whether every value of the step could be written to memory, in program order, if all were split over all devices:
    then fused kernels need no more, and `cannot_fit`, which lowers the whole step to find out, need not be asked.
    """
    return _unfused_bytes(context.graph, context.graph.block) <= context.limit_bytes * context.cluster.num_devices


def _unfused_bytes(graph: OpGraph, block: Block) -> int:
    """The most bytes alive at once in a block whose every value is written to memory; of a loop, its body with it."""
    nbytes = {v: graph.values[v].nbytes for v in (*block.inputs, *(v for op in block.ops for v in op.outputs))}
    last = {v: i for i, op in enumerate(block.ops) for v in read_by(op)}
    freed: dict[int, list[int]] = {}
    for i, op in enumerate(block.ops):
        for v in op.outputs:
            last.setdefault(v, i)
    for v in {*last} & {*nbytes} - {*block.inputs} - {atom for atom in block.outputs if isinstance(atom, int)}:
        freed.setdefault(last[v], []).append(v)
    live = most = sum(nbytes[v] for v in block.inputs)
    for i, op in enumerate(block.ops):
        live += sum(nbytes[v] for v in op.outputs)
        most = max(most, live + max((_unfused_bytes(graph, inner) for inner in op.blocks), default=0))
        live -= sum(nbytes[v] for v in freed.get(i, ()))
    return most


def cannot_fit(context: PlanningContext) -> MemoryLimitError | None:
    """The error of a step that needs too much memory even if every value of it were split over all devices."""
    graph, cluster, step = context.graph, context.cluster, context.views.folded
    model = cost_model(cluster, LogicalMesh(axis_sizes=(1,)))
    intra_op = IntraOp(step.graph if step is not None else graph, model)
    sharding = intra_op.decode(intra_op.solve(time_limit_s=context.deadline.solve_s()))
    if step is not None:
        sharding = unfold(sharding, context.views.partials, graph, step)
    alone = memory_of(graph, with_host_copies(graph, lower(graph, sharding, model.links), sharding), model)
    if alone.estimate.peak_bytes <= context.limit_bytes * cluster.num_devices:
        return None
    where = f"{context.traced.name}, if every value were split over all {cluster.num_devices} devices of {cluster.name}"
    return _out_of_memory(context, where, graph, alone, sharding.mesh, cluster.num_devices)


def no_program_fits(context: PlanningContext, candidates: Sequence[SpmdCandidate]) -> MemoryLimitError:
    """The error for the smallest plan: the bytes over the limit, and the values that hold the memory."""
    least = min(candidates, key=lambda c: c.peak_bytes)
    where = f"{context.traced.name} on mesh {least.sharding.mesh}"
    memory = memory_of(context.graph, least.lowered, least.model)
    return _out_of_memory(context, where, context.graph, memory, least.sharding.mesh)


def _out_of_memory(
    context: PlanningContext, where: str, graph: OpGraph, memory: ProgramMemory, mesh: LogicalMesh, shared_by: int = 1
) -> MemoryLimitError:
    """The error of a plan that does not fit, whose bytes are shared by `shared_by` devices."""
    made_by = {v: f"{op.place}/{op.primitive}".lstrip("/") for op in graph.ops() for v in op.outputs}
    names = place_names(graph, memory.stands_for, made_by, mesh)
    return MemoryLimitError(
        where=where,
        limit_bytes=context.limit_bytes,
        needed_bytes=-(-memory.estimate.peak_bytes // shared_by),
        largest=[(names.get(v, "a temporary value"), n // shared_by) for v, n in memory.estimate.at_peak[:5]],
        hint=f"use more devices, a smaller batch, {_smaller(context)}jax.checkpoint around layers whose activations "
        "are named here, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )


def _smaller(context: PlanningContext) -> str:
    """The options of a step that let it need less at once, as far as they are not taken."""
    number = context.request.num_microbatches or 1
    cut = f"gradient accumulation (num_microbatches={2 * number} or more, of Search or of the recipe), "
    has_scores = context.traced.attention_kernel != Kernel.BLOCKS.name and bool(large_scores(context.views.annotated))
    return cut + ("Search(attention='blockwise') (scores are not kept), " if has_scores else "")


# Source of candidates: manual plans of one program, namely data and tensor parallelism and the stages of ZeRO.


# Stages of ZeRO, 0 for plain data parallelism, that are tried beside what the search finds by itself: such plans send
# parameters and gradients only, all of which may hide, and an objective that adds up what is sent thinks less of them.
ZERO_STAGES = (0, 1, 3)
MOST_AXES = 2  # of the meshes of these plans
ALONG_LARGEST = "FSDP along the largest dimensions"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A manual plan by its name: its mesh, and the request that binds it. `is_told`: evaluated however slow it is, for
    the plan says what it would cost.
    """

    name: str
    mesh: LogicalMesh
    request: PlanRequest
    is_told: bool = False


def baseline_candidates(
    context: PlanningContext, memory: _LeastMemory | None = None
) -> Iterator[SpmdCandidate | Rejection]:
    """Every manual plan, each as one constrained program that is priced like what the search finds by itself: made to
    fit, or of a long step where nothing can fit as it is. `memory`: what is known of that.
    """
    if not context.request.leaves_layouts_free or context.cluster.num_devices == 1:
        return
    if not context.may_gain:
        yield Rejection(source=BASELINES, text="data parallelism and ZeRO", why=f"not tried: {context.why_no_gain}")
        return
    memory, refusal = memory or _LeastMemory(context), None
    is_long = len(context.graph.block.ops) > LONG_STEP
    for baseline in _baselines(context):
        if isinstance(baseline, Baseline):
            refusal = memory.refusal(context) if is_long and not context.deadline.passed else refusal
            found = _searched(context, baseline, may_fit=refusal is None)
        else:
            found = baseline
        yield found
        context = context.after([found])  # the next ones are of use where they are faster than this too
    if refusal is not None:
        yield refusal  # how much is needed at least, where no pipeline fits either


def _searched(context: PlanningContext, baseline: Baseline, *, may_fit: bool) -> SpmdCandidate | Rejection:
    name, deadline = baseline.name, context.deadline
    if deadline.passed:
        return Rejection(source=BASELINES, text=name, why=f"not tried: {deadline.text}")
    tolerance = math.inf if baseline.is_told else context.keep_tolerance
    bound = dataclasses.replace(context, request=baseline.request, keep_tolerance=tolerance)
    with context.progress.pass_(TENSOR_PARALLEL if baseline.is_told else DATA_PARALLEL):
        model = cost_model(context.cluster, baseline.mesh)
        found = search_mesh(bound, model, folds=True, time_limit_s=deadline.solve_s(), may_fit=may_fit)
    if isinstance(found, Rejection):
        return dataclasses.replace(found, source=BASELINES, text=name)
    context.weighed(found.step_time_s, found.peak_bytes)
    return dataclasses.replace(found, source=BASELINES, name=name)


def _baselines(context: PlanningContext) -> Iterator[Baseline | Rejection]:
    """The state split along its largest dimensions as FSDP does, data parallelism and ZeRO, on a mesh of one axis; ZeRO
    inside of each host alone, on a mesh of two; and tensor parallelism. Once a program fits, a quick search has those
    on one axis alone.
    """
    cluster, request = context.cluster, context.request
    is_quick = request.effort is Effort.QUICK and context.fastest_s < math.inf
    row = LogicalMesh(axis_sizes=(cluster.num_devices,))
    if along_largest := state_along_largest(context.graph, row):
        fixed = dataclasses.replace(request, fixed=along_largest)
        yield Baseline(name=ALONG_LARGEST, mesh=row, request=fixed)
    for name, binding in baseline_bindings(cluster):
        if is_quick and len(binding.axes) > 1:
            continue
        binding = with_groups(binding, context.views.annotated, cluster.num_devices)
        mesh, _ = binding.on(cluster.num_devices)
        yield Baseline(name=name, mesh=mesh, request=dataclasses.replace(request, binding=binding))
    if not is_quick:
        yield _tensor_parallelism(context)


def _tensor_parallelism(context: PlanningContext) -> Baseline | Rejection:
    """Tensor parallelism inside of each host, data parallelism between them."""
    cluster, size = context.cluster, tensor_group(context.cluster)
    name = f"{TENSOR_PARALLEL} over {size}"
    graph, binding = context.views.annotated, Binding(axes=(data_axis(), tensor_axis()), sizes=(None, size))
    try:
        binding.check(graph, cluster.num_devices)
    except InvalidArgumentError as error:
        return Rejection(source=BASELINES, text=name, why=f"not tried: {error.got}")
    binding = with_groups(binding, graph, cluster.num_devices)
    mesh, _ = binding.on(cluster.num_devices)
    request = dataclasses.replace(context.request, binding=binding)
    return Baseline(name=name, mesh=mesh, request=request, is_told=True)


def baseline_bindings(cluster: Cluster) -> list[tuple[str, Binding]]:
    """Data parallelism and the stages of ZeRO that are tried, by name; of several hosts also over each host alone; none
    on one device, which shares nothing.
    """
    if cluster.num_devices == 1:
        return []
    found = [
        (f"ZeRO-{zero}" if zero else DATA_PARALLEL, Binding(axes=(data_axis(zero),), sizes=(None,)))
        for zero in ZERO_STAGES
    ]
    inside = cluster.domain_devices
    if cluster.num_domains > 1 and inside > 1:
        found += [
            (
                f"ZeRO-{zero} in groups of {inside}",
                Binding(axes=(replica_axis(), data_axis(zero)), sizes=(None, inside)),
            )
            for zero in ZERO_STAGES
            if zero
        ]
    return found


def leanest_bindings(cluster: Cluster, graph: OpGraph, held: Collection[int]) -> list[tuple[int, str, Binding]]:
    """Those of `baseline_bindings`, each after the least bytes of some values of an annotated graph on each device, the
    leanest first.
    """
    found = []
    for name, binding in baseline_bindings(cluster):
        mesh, constraints = binding.on(cluster.num_devices)
        in_host = constraints.in_host(graph)
        values = (graph.values[v] for v in held if v not in in_host)
        found.append((int(bytes_on_each_device(values, mesh, constraints)), name, binding))
    return sorted(found, key=lambda recipe: recipe[0])


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


def mesh_candidates(context: PlanningContext) -> Iterator[SpmdCandidate | Rejection]:
    """The best plan on each logical mesh, or the reason for which there is none, and the baselines.

    Baselines come in front of the meshes of three axes, where a program fits already: they are on one axis or two and
    take little time, and tell whether a third axis may pay (`worth_trying`). A rejection with a MemoryLimitError ends
    the search: no mesh can have a plan that fits.
    """
    meshes = logical_meshes(context)
    few = [each for each in meshes if len(each[0].axis_sizes) <= MOST_AXES]
    many = [each for each in meshes if len(each[0].axis_sizes) > MOST_AXES]
    searches = _MeshSearches(context, len(meshes))
    baselines: list[SpmdCandidate | Rejection] | None = None
    for group in (few, many):
        if group is many and many and searches.context.program_fits:
            baselines = list(baseline_candidates(searches.context, searches.memory))
            yield from baselines
            searches.context = searches.context.after(baselines)
        for outcome in searches.on(group):
            yield outcome
            if isinstance(outcome, Rejection) and outcome.error is not None:
                return
    if baselines is None:
        yield from baseline_candidates(searches.context, searches.memory)


class _LeastMemory:
    """Whether a program can fit at all, which is asked at most once."""

    def __init__(self, context: PlanningContext) -> None:
        self.is_known = not context.request.leaves_layouts_free or context.cluster.num_devices == 1
        self.has_begun = False
        self.refused: Rejection | None = None

    def refusal(self, context: PlanningContext) -> Rejection | None:
        """Where nothing can fit, a search for what does takes minutes: it is asked first whether anything can, for a
        long step at once, for others when nothing fits on the first mesh.
        """
        slow = self.has_begun or len(context.graph.block.ops) > LONG_STEP
        self.has_begun = True
        if slow and not (self.is_known or context.program_fits or fits_unfused(context)):
            with context.progress.pass_("least memory"):
                error = cannot_fit(context)
            self.is_known = True
            self.refused = Rejection(source=SOURCE, why=error.got, error=error) if error is not None else None
        return self.refused


class _MeshSearches:
    """Searches on several meshes. `context`: with what they found; `num_left`: the meshes without an outcome."""

    def __init__(self, context: PlanningContext, num_left: int) -> None:
        self.context, self.num_left = context, num_left
        self.folds = context.request.leaves_layouts_free
        self.memory = _LeastMemory(context)

    def on(self, meshes: Sequence[tuple[LogicalMesh, PinsOnMesh | None]]) -> Iterator[SpmdCandidate | Rejection]:
        """The outcome on each of these meshes.

        An evaluation on the whole step takes ten times as long as a bound on the folded one: where layers are folded
        all meshes are bounded first, and that of the least bound is evaluated first, which spares others theirs. None
        is begun any more once one may be as fast as any plan can be, or no time is left. On three axes, whose tables
        are large, each is evaluated before the next one is begun.
        """
        few = all(len(mesh.axis_sizes) <= MOST_AXES for mesh, _ in meshes)
        bounds_first = self.folds and few and len(meshes) > 1 and self.context.views.folded is not None
        asks_first = not bounds_first or len(self.context.graph.block.ops) > LONG_STEP  # which is asked anyway
        left, begun = list(meshes), list[MeshSearch]()
        while left or begun:
            late = self.context.deadline.passed
            first = min(begun, key=lambda search: 0.0 if late else search.at_least_s, default=None)
            if first is not None and (not left or late or not self.context.may_gain_on(first.at_least_s)):
                begun.remove(first)
                outcome = self.evaluated(first)
            else:
                mesh, pins = left.pop(0)
                search = self.begun(mesh, pins, asks=asks_first)
                if isinstance(search, MeshSearch) and bounds_first:
                    begun.append(search)
                    continue
                outcome = search.outcome() if isinstance(search, MeshSearch) else search
            self.num_left -= 1
            if isinstance(outcome, SpmdCandidate):
                self.context.weighed(outcome.step_time_s, outcome.peak_bytes)
            self.context = self.context.after([outcome])
            yield outcome

    def begun(self, mesh: LogicalMesh, pins: PinsOnMesh | None, *, asks: bool) -> MeshSearch | Rejection:
        """The search on a mesh, begun, or why there is none; `asks`: as `evaluated` does whether anything can fit."""
        if why := self.why_not(mesh):
            return not_tried(mesh, why)
        if asks and (refusal := self.memory.refusal(self.context)) is not None:
            return refusal
        context, time_s = self.context, self.context.deadline.solve_s(self.num_left)
        with context.progress.pass_(f"mesh {mesh}"):
            return begin_on_mesh(
                context, cost_model(context.cluster, mesh), pins, folds=self.folds, time_limit_s=time_s
            )

    def evaluated(self, search: MeshSearch) -> SpmdCandidate | Rejection:
        """The outcome of a search that was begun."""
        context, mesh = self.context, search.intra_op.model.links.mesh
        if why := self.why_not(mesh):
            return not_tried(mesh, why)
        if (refusal := self.memory.refusal(context)) is not None:
            return refusal
        with context.progress.pass_(f"mesh {mesh}"):
            return search.going_on(context, context.deadline.solve_s(self.num_left)).outcome()

    def why_not(self, mesh: LogicalMesh) -> str:
        """Why a mesh is not tried; empty where it is."""
        context, fits = self.context, self.context.program_fits
        if context.deadline.passed and fits:
            return context.deadline.text
        if fits and not context.may_gain:
            return context.why_no_gain
        if not worth_trying(mesh, context):
            return f"it splits no axis of the best mesh of two, or the second gained less than {WORTHWHILE:.0%}"
        return ""
