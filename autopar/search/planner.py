"""The planner: from a traced step, a cluster and a request to the best plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from autopar.common import jax_compat
from autopar.common.progress import Deadline, Progress
from autopar.common.text import text_of_bytes, text_of_s
from autopar.cost.compiler_options import check_options, options_of
from autopar.cost.cost_model import cost_model
from autopar.errors import BatchMismatchError, InvalidArgumentError, MemoryLimitError, SolverError, UnsupportedError
from autopar.frontend.callbacks import any_callbacks
from autopar.frontend.saved_names import checked_names, saving
from autopar.hardware.cluster import Cluster
from autopar.ir.binding import Binding, with_groups
from autopar.ir.parallelisms import data_axis
from autopar.ir.pins import Pin, PinsOnMesh, joined, on_meshes, pins_in_code
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import ShardingsInCode, TracedStep
from autopar.ops.attention.checks import check_attention
from autopar.ops.attention.match import check_blockwise
from autopar.ops.kernels.islands import check_islands
from autopar.passes.accumulation import check_patterns
from autopar.passes.saved_arrays import offloaded_by_policy
from autopar.passes.smaller_step import num_examples
from autopar.passes.split_scan import divisors
from autopar.plan import summary
from autopar.plan.context import Candidate, PlanningContext, Rejection, StepGraphs
from autopar.plan.options import AS_WRITTEN, Effort, PlanRequest
from autopar.plan.plan import Plan, Trees
from autopar.plan.schema import PinRecord, PinsRecord, PlanRecord
from autopar.search.comparison import best_program, choose, near, notes
from autopar.search.inter_op.evaluate import PEAK_ERROR, held_too_much
from autopar.search.inter_op.pipeline_candidate import SOURCE as PIPELINES
from autopar.search.inter_op.pipeline_candidate import PipelineCandidate, PipelineEstimate
from autopar.search.inter_op.requested import (
    estimated_in_time,
    estimated_one_stage,
    one_stage_candidates,
    requested_pipelines,
)
from autopar.search.inter_op.search import pipeline_candidates
from autopar.search.inter_op.staged import least_handed_out_s
from autopar.search.inter_op.truncated_model import ESTIMATE_ERROR
from autopar.search.intra_op.mesh_searches import (
    baseline_candidates,
    check_state_fits,
    leanest_bindings,
    mesh_candidates,
)
from autopar.search.intra_op.spmd_candidate import SpmdCandidate
from autopar.search.intra_op.spmd_search import LONG_STEP, search_mesh
from autopar.search.memory_errors import no_plan_error, refuse_large_state
from autopar.search.memory_fallbacks import last_resort
from autopar.search.plans_in_memory import Plans, plans_in_memory
from autopar.search.saved_names import fastest_saving
from autopar.search.step_ways import StepWays, as_requested, has_rings, least_s_of, stacked_step, whole_graph
from autopar.search.write_plan import plan_of

# Source of candidates: the layouts that the step's code names, as one program on the code's own mesh.


IN_CODE = "shardings in the code"
NAME_IN_CODE = "as the code has it"


def with_pins_of_code(context: PlanningContext) -> PlanningContext:
    """The context with the layouts of the code as pins, where they were asked for.

    Raises: InvalidArgumentError for layouts that no mesh has, and for requests beside which they cannot be kept.
    """
    request = context.request
    if request.constraints is not ShardingsInCode.PINS:
        return context
    pins = pins_in_code(context.graph, context.cluster.num_devices, is_wish=False)
    if pins is None:
        return context
    conflict = _conflict(request)
    if conflict:
        raise InvalidArgumentError(
            where="Search(constraints='pins')",
            expected="one program, whose layouts only the code and autopar.constrain name",
            got=f"{conflict}, and {pins.in_code[0][1].pattern}",
            hint="leave that out, or take Search(constraints='advice') or 'ignore'",
        )
    return dataclasses.replace(context, request=dataclasses.replace(request, pins=joined(request.pins, pins)))


def _conflict(request: PlanRequest) -> str:
    """What a request has that layouts of the code cannot be kept beside; empty for nothing."""
    found = {
        "stages or micro-batches": not request.admits_one_program,
        "a recipe with mesh axes of its own": request.binding is not None,
        "layouts of another step": bool(request.fixed) or request.axis_sizes is not None,
    }
    return next((text for text, is_there in found.items() if is_there), "")


def advised(context: PlanningContext) -> list[SpmdCandidate | Rejection]:
    """The program that keeps the layouts of the code wherever it can; nothing where the code names none, or where they
    are no advice.

    It is planned on the code's mesh, and completely, whatever is known to be faster: the plan says what it costs.
    """
    if context.request.constraints is not ShardingsInCode.ADVICE or not context.graph.written:
        return []
    conflict = _conflict(context.request) or ("pins" if context.request.pins is not None else "")
    if conflict:
        return [_not_weighed(f"the request has {conflict}")]
    if context.deadline.passed:
        return [_not_weighed(context.deadline.text)]
    try:
        pins = pins_in_code(context.graph, context.cluster.num_devices, is_wish=True)
        if pins is None:
            return []
        found = dataclasses.replace(pins.found(context.traced, context.graph), is_wish=True)
        meshes = on_meshes(found, context.cluster, context.request.max_mesh_axes, None, context.graph)
    except InvalidArgumentError as error:
        return [_not_weighed(f"{error.where}: expected {error.expected}, got {error.got}")]
    fewest = min(len(at.mesh.axis_sizes) for at in meshes)
    fresh = dataclasses.replace(context, results=(), to_beat_s=float("inf"))
    outcomes: list[SpmdCandidate | Rejection] = []
    with context.progress.pass_(IN_CODE):
        for at in (at for at in meshes if len(at.mesh.axis_sizes) == fewest):
            model, time_s = cost_model(context.cluster, at.mesh), context.deadline.solve_s()
            outcome = search_mesh(fresh, model, at, folds=True, time_limit_s=time_s)
            if isinstance(outcome, SpmdCandidate):
                outcomes.append(dataclasses.replace(outcome, source=IN_CODE, name=NAME_IN_CODE))
            else:
                outcomes.append(dataclasses.replace(outcome, source=IN_CODE))
    return outcomes


def _not_weighed(why: str) -> Rejection:
    return Rejection(source=IN_CODE, why=f"the author's sharding was not weighed: {why}", is_note=True)


def advice_note(context: PlanningContext, chosen: Candidate) -> list[str]:
    """What the layouts of the code cost beside the plan."""
    ours = [c for c in context.candidates if isinstance(c, SpmdCandidate) and c.source == IN_CODE]
    if not ours:
        return []
    best = min(ours, key=lambda c: (c.peak_bytes > context.limit_bytes, c.step_time_s))
    assert best.pins is not None, "what is planned from layouts of the code has them"
    kept, given = num_kept(best, best.pins, context)
    text = f"the author's sharding ({kept} of {given} values as written) costs {text_of_s(best.step_time_s)}"
    others = [c.step_time_s for c in context.candidates if c not in ours and c.peak_bytes <= context.limit_bytes]
    if chosen in ours:
        free = f"; the search's own takes {text_of_s(min(others))}" if others else ""
        return [f"{text} and is the plan{free}"]
    if best.peak_bytes > context.limit_bytes:
        text = f"{text} and is over the memory limit by {text_of_bytes(best.peak_bytes - context.limit_bytes)}"
    return [f"{text}; the plan takes {text_of_s(chosen.step_time_s)}"]


def num_kept(candidate: SpmdCandidate, pins: PinsOnMesh, context: PlanningContext) -> tuple[int, int]:
    """How many values lie as the code has it, and of how many it says so."""
    reduced = candidate.sharding.reduced
    wanted = pins.layouts(context.graph)
    kept = sum(pin.allows(reduced[v]) for v, pin in wanted.items() if v in reduced)
    return kept, len(pins.pinned.in_code)


# The cost of pins: the predicted step time with them and without them.

# So many pins are priced alone too: each takes another search on one mesh.
PRICED_ALONE = 4


def price_of_pins(context: PlanningContext, chosen: SpmdCandidate | PipelineCandidate) -> PinsRecord:
    """Searches again without pins, over all meshes; for one program also with each pin alone, on the plan's mesh."""
    pins = chosen.pins
    assert pins is not None, "a plan with pins knows their axes"
    fresh = dataclasses.replace(context, results=(), to_beat_s=float("inf"))
    without = dataclasses.replace(fresh.silent(), request=dataclasses.replace(context.request, pins=None))
    with context.progress.pass_("price of the pins"):
        if isinstance(chosen, PipelineCandidate):
            return _record(pins, chosen.step_time_s, _free_stages_s(without), {})
        free = best_program(without.after(mesh_candidates(without)))
        alone = _alone_s(fresh, chosen, pins)
    return _record(pins, chosen.step_time_s, free.step_time_s if free is not None else None, alone)


def _alone_s(context: PlanningContext, chosen: SpmdCandidate, pins: PinsOnMesh) -> dict[Pin, float]:
    """The step time with each pin alone, on the mesh of the plan, where that plan fits."""
    several = pins.pinned.pins.every
    if len(several) == 1:
        return {several[0]: chosen.step_time_s}
    alone = {}
    for pin in several if len(several) <= PRICED_ALONE else ():
        only = dataclasses.replace(pins, pinned=pins.pinned.only(pin))
        candidate = search_mesh(context, chosen.model, only, time_limit_s=context.deadline.solve_s())
        if isinstance(candidate, SpmdCandidate) and candidate.peak_bytes <= context.limit_bytes:
            alone[pin] = candidate.step_time_s
    return alone


def _free_stages_s(context: PlanningContext) -> float | None:
    """The step time of the same stages without pins; None where they do not fit, or have no plan."""
    try:
        (free,) = requested_pipelines(context)
    except SolverError:
        return None
    return free.step_time_s if free.fits(context.limit_bytes) else None


def _record(pins: PinsOnMesh, step_time_s: float, free_s: float | None, alone: Mapping[Pin, float]) -> PinsRecord:
    rows = []
    for pin in pins.pinned.pins.every:
        count, of = pins.pinned.num_named(pin)
        rows.append(PinRecord(pattern=pin.pattern, spec=pin.text, count=count, of=of, alone_s=alone.get(pin)))
    return PinsRecord(pins=tuple(rows), step_time_s=step_time_s, free_step_time_s=free_s)


# A batch that devices do not divide: planned with its examples split unevenly too, and the faster plan taken.


def uneven_parts(traced: TracedStep, request: PlanRequest, num_devices: int) -> int:
    """Over how many devices a request may split the examples of a step, where these are more and do not divide; else 0.

    Layouts that are asked for, and micro-batches, are in equal parts.
    """
    has_layouts = request.pins is not None or bool(request.fixed)
    if has_layouts or request.names_pipeline or traced.uneven_over or request.followed_stages is not None:
        return 0
    dims = ((i, traced.example_dim(i)) for i in traced.batch)
    sizes = {traced.in_avals[i].shape[dim] for i, dim in dims if dim is not None}
    parts = num_devices if request.binding is None else request.binding.example_parts(num_devices)
    (examples,) = sizes if len(sizes) == 1 else (0,)
    return parts if examples > parts and examples % parts else 0


def faster_split(
    traced: TracedStep,
    request: PlanRequest,
    num_devices: int,
    plans_of: Callable[[TracedStep, PlanRequest], Plans],
    least_s: Callable[[TracedStep], float],
) -> Plans:
    """The plans of a step with its examples split unevenly, or in equal parts, whichever are faster; under a recipe
    that splits examples, the former. `plans_of` makes those of a step as it is split, `least_s` is the time that no
    plan of it takes less than.

    Raises: as `plans_of`; MemoryLimitError where neither fits.
    """
    parts = uneven_parts(traced, request, num_devices)
    if not parts:
        return plans_of(traced, request)
    uneven = dataclasses.replace(traced, uneven_over=parts)
    if request.binding is not None:
        return plans_of(uneven, request)
    deadline, refused = Deadline.after(request.time_limit_s), None
    plans: Plans = ()
    try:
        plans = plans_of(traced, request)
    except MemoryLimitError as error:
        refused = error
    if plans and deadline.passed:
        return plans
    left_s = None if request.time_limit_s is None else deadline.left_s
    bound_s = least_s(uneven) if plans else 0.0
    if plans and bound_s >= plans[0].predicted.step_time_s:
        return _with_split_note(plans, f"over {parts} devices no step takes less than {text_of_s(bound_s)}")
    try:
        others = plans_of(uneven, dataclasses.replace(request, time_limit_s=left_s))
    except MemoryLimitError:
        if refused is not None:
            raise refused from None
        return plans
    step_s = others[0].predicted.step_time_s
    if not plans or step_s < plans[0].predicted.step_time_s:
        return others
    return _with_split_note(plans, f"over {parts} devices a step takes {text_of_s(step_s)}")


def _with_split_note(plans: Plans, takes: str) -> Plans:
    """The plans, of which a note of the best on a batch that lies whole has the time in uneven parts."""
    notes = plans[0].record.notes
    why = f"{summary.BATCH_WHOLE}: with its examples split unevenly {takes}"
    kept = [why if note.startswith(summary.BATCH_WHOLE) else note for note in notes]
    best = dataclasses.replace(plans[0], record=dataclasses.replace(plans[0].record, notes=tuple(kept)))
    return (best, *plans[1:])


# The sources of candidates in order, and the requests and steps to which each applies.

# Of programs on more devices than this only the baselines are tried: a program over all of them cuts no batch, so that
# it needs more memory, and its search over meshes takes minutes (GPT-3 on 1,024).
WHOLE_UP_TO = 64
# Where a pipeline is searched for although a single program fits: the share of the step that is lost to sending and to
# work done twice. A bound then leaves out what no pipeline can gain (`least_pipeline_s`).
LOST = 0.1
NOT_WORTH_SEARCHING = Rejection(
    source=PIPELINES, why="not searched: the program without stages sends and waits too little"
)


def ask_sources(context: PlanningContext) -> PlanningContext:
    """The context with the results of all sources: one program, then pipelines, as far as they may pay.

    Requested stages or micro-batches under a recipe or pins are built without a search. Raises: MemoryLimitError for a
    step that exceeds the memory of all devices; InvalidArgumentError.
    """
    request = context.request
    if request.is_built_as_asked:
        context = context.after(advised(context))
        return context.after(requested_pipelines(_for_stages(context)))
    if request.leaves_layouts_free and not request.in_host and len(context.graph.block.ops) > LONG_STEP:
        check_state_fits(context)
    context = _bound(context)
    in_one_program = admits_one_program(context.traced, context.cluster, request)
    if in_one_program:
        context = _with_one_program(context)
        refuse_large_state(context)
    elif request.admits_one_program:
        context = context.after(baseline_candidates(context))
    if request.admits_one_program or context.traced.stacked_over:
        context = _in_fewest_microbatches(context)
    if in_one_program and request.defer_stages and not context.program_fits:
        return context
    best = best_program(context)
    beaten_s = best.step_time_s if best is not None else math.inf
    context = dataclasses.replace(context, to_beat_s=min(beaten_s, context.fastest_s, request.to_beat_s))
    context = context.after(_pipelines_that_may_pay(context, best))
    if not context.candidates and not in_one_program:
        context = context.after(one_stage_candidates(_for_stages(context)))
    return context


def _with_one_program(context: PlanningContext) -> PlanningContext:
    """The context with programs without stages, which are searched for once for all requests that allow the same."""
    alike = dataclasses.replace(context.request, defer_stages=False, to_beat_s=math.inf, time_limit_s=None)

    def results() -> tuple[Candidate | Rejection, ...]:
        searched = context.after(mesh_candidates(context))
        return searched.after(advised(searched)).results

    what = "one program", alike, context.limit_bytes, context.keep_tolerance, context.cluster
    return dataclasses.replace(context, results=context.graphs.of(context.traced, what, results))


def _for_stages(context: PlanningContext) -> PlanningContext:
    """The context for stages, which cut the graph of the step without stacks: several stages update each its own
    layers, and a single one that was asked for stacks what is left of the update.
    """
    if not context.traced.stacked_over and not context.traced.uneven_over:
        return context
    plain = dataclasses.replace(context.traced, stacked_over=0, uneven_over=0)
    views = whole_graph(plain, context.rules, context.graphs)
    request = context.request
    is_single = request.is_built_as_asked and (request.num_stages or 1) * (request.chunks or 1) == 1
    traced = context.traced if is_single else plain
    return dataclasses.replace(context, traced=traced, views=views, graph=views.graph)


def _in_fewest_microbatches(context: PlanningContext) -> PlanningContext:
    """The context with one stage under ZeRO in the fewest micro-batches that fit, where no program fits. It takes
    seconds: a quick search ends with it, ways to write a step that differ in what is computed again are compared by it,
    and others have to beat it. Its update comes after the micro-batches, with the stacks that the search over stages
    does without.
    """
    request, traced = context.request, context.traced
    is_asked = traced.stacked_over > 0 or admits_one_program(traced, context.cluster, request)
    is_free = request.leaves_layouts_free and not request.names_pipeline and not request.in_host
    is_even = not traced.uneven_over and not any_callbacks(traced.jaxpr)
    if not is_asked or not is_free or not is_even or context.fastest_s < math.inf:
        return context
    alike = dataclasses.replace(request, defer_stages=False, to_beat_s=math.inf, time_limit_s=None)
    what = "fewest micro-batches", alike, context.limit_bytes, context.keep_tolerance, context.cluster
    return context.after(context.graphs.of(traced, what, lambda: tuple(_one_stage_that_fits(context))))


def _one_stage_that_fits(context: PlanningContext) -> Iterator[Candidate | Rejection]:
    num_devices, source = context.cluster.num_devices, "one stage in the fewest micro-batches"
    try:
        examples = num_examples(context.traced)
        binding = with_groups(Binding(axes=(data_axis(3),), sizes=(None,)), context.views.annotated, num_devices)
        least = 2.0  # in one, it is a program
        for number in divisors(examples // num_devices) if examples % num_devices == 0 else ():
            if number < least or context.deadline.passed:
                continue
            request = dataclasses.replace(context.request, binding=binding, num_stages=1, num_microbatches=number)
            asked = _for_stages(dataclasses.replace(context, request=request))
            found: PipelineEstimate | PipelineCandidate | None = estimated_one_stage(asked, keeps=True)
            if found is None or found.peak_bytes <= (1 + PEAK_ERROR) * context.limit_bytes:
                (found,) = requested_pipelines(asked)
                if found.fits(context.limit_bytes):
                    name = "ZeRO-3" if num_devices > 1 else ""
                    found = dataclasses.replace(found, source=source, name=name)
                    yield from _with_baselines(asked, found)
                    return
            # Twice as many micro-batches need half of the memory at least.
            least = number * found.peak_bytes / context.limit_bytes
    except (UnsupportedError, BatchMismatchError, InvalidArgumentError, SolverError) as error:
        yield Rejection(source=source, why=f"{error.where}: {error.got}")


def _with_baselines(context: PlanningContext, zero: PipelineCandidate) -> Iterator[PipelineCandidate | Rejection]:
    """One stage under ZeRO-3; where the search ends with it, beside data parallelism and other stages of ZeRO in as
    many micro-batches by their estimates, as far as the state leaves room, of which the fastest is built where it is
    faster.
    """
    if context.after([zero]).may_gain_by_stages:
        yield dataclasses.replace(zero, weighed=(zero.record,))
        return
    best: PipelineEstimate | PipelineCandidate = zero
    weighed, fastest = [best], None
    first, _ = estimated_in_time(context, zero.hoist_casts)
    graph = context.views.annotated
    state = [graph.block.inputs[position] for position in sorted(graph.donated)]
    for nbytes, name, plain in leanest_bindings(context.cluster, graph, state):
        if nbytes > context.limit_bytes:
            yield held_too_much(zero.source, zero.num_microbatches, name, nbytes)
            continue
        binding = with_groups(plain, graph, context.cluster.num_devices)
        # All of them compute as much in these micro-batches.
        may_gain = first is None or first.least_s < (1 - ESTIMATE_ERROR) * best.step_time_s
        if binding == context.request.binding or not may_gain or context.deadline.passed:
            continue
        request = dataclasses.replace(context.request, binding=binding)
        asked = dataclasses.replace(context, request=request, to_beat_s=best.step_time_s)
        found, _ = estimated_in_time(asked, zero.hoist_casts)
        if found is None:
            continue
        found = dataclasses.replace(found, name=name)
        weighed.append(found)
        if found.rank(context.limit_bytes) < best.rank(context.limit_bytes):
            best, fastest = found, dataclasses.replace(asked, to_beat_s=math.inf)
    yield dataclasses.replace(zero, weighed=tuple(c.record for c in weighed if c is zero or c is not best))
    if fastest is not None:
        (built,) = requested_pipelines(fastest)
        built = dataclasses.replace(built, source=zero.source, name=best.name)
        yield dataclasses.replace(built, weighed=(built.record,))


def admits_one_program(traced: TracedStep, cluster: Cluster, request: PlanRequest) -> bool:
    """Whether the step is searched for as one program over all devices."""
    few = cluster.num_devices <= WHOLE_UP_TO
    return request.admits_one_program and (not request.leaves_layouts_free or few or any_callbacks(traced.jaxpr))


def _bound(context: PlanningContext) -> PlanningContext:
    """The context of a recipe for one program, with the purposes of values in its graph."""
    binding = context.request.binding
    if binding is None:
        return context
    graph = context.views.annotated
    binding.check(graph, context.cluster.num_devices)
    if binding.shares_sequences:
        check_attention(graph)
    return dataclasses.replace(context, graph=graph)


def searched_pipelines(context: PlanningContext) -> list[Candidate | Rejection]:
    """The pipelines of the search over stages, or the reason for which the step has none."""
    try:
        return list(pipeline_candidates(_for_stages(context)))
    except (UnsupportedError, BatchMismatchError) as error:
        why = f"no pipeline was weighed: {error.where}: {error.got}"
        return [Rejection(source=PIPELINES, why=why, is_note=True, error=error)]


def pipeline_may_pay(best: SpmdCandidate | None, cluster: Cluster) -> bool:
    """Whether a pipeline may be faster than one program: where no program fits (on one device a pipeline is the step in
    micro-batches), or where communication and duplicated work take long, and longer than the fewest tasks of a pipeline
    are handed out in.
    """
    if best is None:
        return True
    if best.step_time_s <= least_handed_out_s(cluster, 2, 1):
        return False
    return 1 - best.shared_out_s / best.step_time_s > LOST


def _pipelines_that_may_pay(context: PlanningContext, best: SpmdCandidate | None) -> list[Candidate | Rejection]:
    """The pipelines of the search, where the request names them, or where they may be faster than one program."""
    request = context.request
    if context.traced.uneven_over:
        return []  # micro-batches and stages hold equal parts
    if request.admits_one_program and not request.leaves_layouts_free:
        return []  # stages would not have the layouts that were asked for
    is_known = context.fastest_s < math.inf
    if is_known and not context.may_gain_by_stages:
        return [Rejection(source=PIPELINES, why=f"not searched: {context.why_no_gain}")]
    in_one_program = admits_one_program(context.traced, context.cluster, request)
    # On more devices what is known are baselines, which may be many times slower than stages.
    if is_known and in_one_program and request.effort is Effort.QUICK:
        why = "not searched: Search(effort='quick') takes one program or one stage where one fits"
        return [Rejection(source=PIPELINES, why=why)]
    thorough = request.effort is Effort.THOROUGH and context.cluster.num_devices > 1
    if in_one_program and not thorough and not pipeline_may_pay(best, context.cluster):
        return [NOT_WORTH_SEARCHING]
    if best is not None and context.deadline.passed:
        why = f"no pipeline was searched for: {context.deadline.text}"
        return [Rejection(source=PIPELINES, why=why, is_note=True)]
    return searched_pipelines(context)


# The part of a device's memory that is left where no limit is given: predictions come within it of what XLA's CPU
# compiler allocates, of which 1 % in the median of 37 models, and more than 10 % in four, is lost between buffers.
MEMORY_MARGIN = 0.1


def make_plan(
    traced: TracedStep,
    trees: Trees,
    cluster: Cluster,
    request: PlanRequest,
    rules: RuleBook,
    progress: Progress,
    graphs: StepGraphs | None = None,
) -> Plan:
    """The best plan. `graphs` are shared by plans of the same step under several requests. Raises: as `make_plans`."""
    return make_plans(traced, trees, cluster, request, rules, progress, graphs=graphs)[0]


@jax_compat.no_mesh_set()
def make_plans(
    traced: TracedStep,
    trees: Trees,
    cluster: Cluster,
    request: PlanRequest,
    rules: RuleBook,
    progress: Progress,
    keep_tolerance: float = 1.0,
    graphs: StepGraphs | None = None,
) -> tuple[Plan, ...]:
    """Traced step -> graph -> candidates of every source -> the best of them, as a plan.

    The best plan is followed by other plans that fit and take at most `keep_tolerance` times as long, fastest first:
    none for 1, a recipe, pins, or a requested number of stages. For them, pipelines are searched for even if they are
    unlikely to pay; this does not change the best plan.

    Raises: MemoryLimitError when nothing fits; UnsupportedError; SolverError; errors of requested micro-batches and
    stages.
    """
    check_request(request, cluster)
    if request.remat != AS_WRITTEN:
        return _plans_saving(traced, trees, cluster, request, rules, progress, keep_tolerance)
    platform = cluster.device.platform
    check_options(options_of(request.compiler_options, platform), platform)
    shared = graphs or StepGraphs()

    def plans_of(step: TracedStep, asked: PlanRequest) -> tuple[Plan, ...]:
        context = planning_context(step, cluster, asked, rules, progress, keep_tolerance, shared)

        def plan_under(other: PlanRequest) -> Plan:
            return make_plan(step, trees, cluster, other, rules, progress, shared)

        return _plans_of(with_pins_of_code(context), trees, plan_under)

    def plans_with(asked: PlanRequest) -> tuple[Plan, ...]:
        def least_s(step: TracedStep) -> float:
            return least_s_of(as_requested(step, asked, cluster, rules, shared), cluster, rules, shared)

        return faster_split(traced, asked, cluster.num_devices, plans_of, least_s)

    ways = StepWays(traced=traced, request=request, cluster=cluster, rules=rules, graphs=shared)
    in_stages = cluster.num_devices > WHOLE_UP_TO and not admits_one_program(traced, cluster, request)
    in_stages = in_stages and not request.names_pipeline and request.time_limit_s is None
    return plans_in_memory(request, ways, plans_with, cluster.num_devices, within=ways.within, in_stages=in_stages)


def _plans_of(context: PlanningContext, trees: Trees, plan_under: Callable[[PlanRequest], Plan]) -> tuple[Plan, ...]:
    """`make_plans` of a step whose examples are split as it says; `plan_under` makes its plan under another request."""
    if offloaded_by_policy(context.graph):
        check_host_link(context.cluster)
    refused: MemoryLimitError | None = None
    try:
        context = ask_sources(context)
    except MemoryLimitError as error:
        refused = error
    chosen = choose(context) if refused is None else None
    if chosen is None:
        is_alone = not context.request.defer_stages and context.request.to_beat_s == math.inf
        plan, why = last_resort(context, plan_under) if is_alone else (None, [])
        if plan is not None:
            return (plan,)
        none_fits = refused or no_plan_error(context, trees)
        raise none_fits.beside(why) if isinstance(none_fits, MemoryLimitError) and why else none_fits
    told = [*_notes(context), *advice_note(context, chosen)]
    plan = plan_of(context, chosen, trees, told)
    if chosen.pins is not None and context.request.pins is not None:
        plan = _with_pins(plan, context, chosen)
    others = near(chosen, _all_candidates(context), context.limit_bytes, context.keep_tolerance)
    plans = [plan]
    for other in others:
        made = plan_of(context, other, trees, _notes(context))
        if not any(_is_same_program(made.record, known.record) for known in plans):
            plans.append(made)
    return tuple(plans)


def _is_same_program(first: PlanRecord, second: PlanRecord) -> bool:
    """Whether two plans of a step decide the same: the search and a recipe may come to one program."""
    parts = ("axis_sizes", "decisions", "pipeline")
    return all(getattr(first, part) == getattr(second, part) for part in parts)


def _plans_saving(
    traced: TracedStep,
    trees: Trees,
    cluster: Cluster,
    request: PlanRequest,
    rules: RuleBook,
    progress: Progress,
    keep_tolerance: float,
) -> tuple[Plan, ...]:
    """The plans of a step of which `jax.checkpoint` saves the requested names, or those with which it is fastest."""

    def plans(step: TracedStep, time_limit_s: float | None) -> tuple[Plan, ...]:
        as_it_is = dataclasses.replace(request, remat=AS_WRITTEN, time_limit_s=time_limit_s)
        return make_plans(step, trees, cluster, as_it_is, rules, progress, keep_tolerance)

    if not isinstance(request.remat, str):
        return plans(saving(traced, checked_names(traced, request.remat)), request.time_limit_s)
    return fastest_saving(traced, cluster, rules, plans, Deadline.after(request.time_limit_s))


def planning_context(
    traced: TracedStep,
    cluster: Cluster,
    request: PlanRequest,
    rules: RuleBook,
    progress: Progress,
    keep_tolerance: float = 1.0,
    graphs: StepGraphs | None = None,
) -> PlanningContext:
    """The input of the sources of candidates: the step's graph, and the request in numbers."""
    deadline = Deadline.after(request.time_limit_s)
    graphs = graphs or StepGraphs()
    with progress.pass_("graph"):
        traced = as_requested(traced, request, cluster, rules, graphs)
        least_s = least_s_of(traced, cluster, rules, graphs)
    with progress.pass_("stacks"):
        traced = stacked_step(traced, cluster.num_devices, rules, graphs)
        views = whole_graph(traced, rules, graphs)
        graph = views.graph
    check_patterns(traced, graph)
    check_islands(graph, cluster.num_devices)
    if has_rings(request):
        check_blockwise(graph)
    of_stage, left = divmod(cluster.num_devices, request.num_stages or 1)
    if request.binding is not None and request.pins is None and not left:
        request = dataclasses.replace(request, binding=with_groups(request.binding, views.annotated, of_stage))
    progress.bounded(least_s, deadline)
    return PlanningContext(
        traced=traced,
        graph=graph,
        views=views,
        cluster=cluster,
        request=request,
        limit_bytes=request.memory_limit_bytes or int((1 - MEMORY_MARGIN) * cluster.device.memory_bytes),
        rules=rules,
        progress=progress,
        deadline=deadline,
        keep_tolerance=keep_tolerance if request.leaves_layouts_free else 1.0,
        least_s=least_s,
        graphs=graphs,
    )


def _all_candidates(context: PlanningContext) -> tuple[Candidate, ...]:
    """All candidates; with a tolerance also the pipelines that were not worth a search."""
    searches = context.keep_tolerance > 1 and context.cluster.num_devices > 1 and not context.deadline.passed
    if searches and NOT_WORTH_SEARCHING in context.rejections:
        context = context.after(searched_pipelines(context))
    return context.candidates


def _notes(context: PlanningContext) -> list[str]:
    texts = list(notes(context))
    if context.request.pins is not None and context.request.binding is None:
        texts.append("pins keep the step in one program: stages were not searched for, but may be asked for")
    if context.request.pins is not None and (unused := context.request.pins.unused):
        texts.append(f"no pin has {' or '.join(unused)} of axis_sizes: the search chose what that mesh axis splits")
    return texts


def _with_pins(plan: Plan, context: PlanningContext, chosen: SpmdCandidate | PipelineCandidate) -> Plan:
    """The plan with the cost of its pins."""
    assert chosen.pins is not None, "a plan with pins knows their axes"
    cost = price_of_pins(context, chosen)
    return dataclasses.replace(plan, record=dataclasses.replace(plan.record, pinned=cost))


def check_request(request: PlanRequest, cluster: Cluster) -> None:
    """Raises: InvalidArgumentError for options that exclude each other, and for offloading over an unknown link."""
    named_without_stages = request.num_stages is None and (request.schedule is not None or request.chunks is not None)
    if request.pins is not None and named_without_stages:
        raise InvalidArgumentError(
            where="constrain",
            expected="a number of stages, or none at all: under pins none is searched for",
            got=f"schedule {request.schedule} without a number of stages",
            hint="name the stages: constrain(pins, recipe=autopar.recipes.pipeline(2, ...))",
        )
    binding = request.binding
    offloads_by_recipe = binding is not None and (binding.offloads_optimizer or binding.offloads_activations)
    if bool(request.in_host) or offloads_by_recipe:
        check_host_link(cluster)


def check_host_link(cluster: Cluster) -> None:
    """Raises: InvalidArgumentError for a cluster whose devices have an unknown link to the memory of their hosts."""
    if cluster.device.host_link_bytes_per_s is None:
        raise InvalidArgumentError(
            where=f"offload on cluster {cluster.name}",
            expected="a rate of the link between a device and the memory of its host",
            got=f"none for {cluster.device.name}",
            hint="give it: dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, "
            "host_link_bytes_per_s=...))",
        )
