"""The planner: from a traced step, a cluster and a request to the best plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.attention.match import check_blockwise
from autopar.common import jax_compat
from autopar.common.deadline import Deadline
from autopar.common.progress import Progress
from autopar.compiler.advice import advice_note, with_pins_of_code
from autopar.compiler.comparison import choose, near, notes, rejections
from autopar.compiler.memory_fallbacks import last_resort
from autopar.compiler.no_plan import no_plan_error
from autopar.compiler.padding import stored_step
from autopar.compiler.pin_costs import price_of_pins
from autopar.compiler.saved_names import fastest_saving
from autopar.compiler.sources import NOT_WORTH_SEARCHING, ask_sources, searched_pipelines
from autopar.compiler.uneven_batch import faster_split
from autopar.compiler.whole_graph import stacked_step, whole_graph
from autopar.compiler.write_plan import plan_of
from autopar.cost.compiler_options import check_options, options_of
from autopar.cost.least_time import least_time_s
from autopar.errors import InvalidArgumentError, MemoryLimitError
from autopar.frontend.saved_names import checked_names, saving
from autopar.hardware.cluster import Cluster
from autopar.inter_op.pipeline_candidate import PipelineCandidate
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.ir.traced_step import TracedStep
from autopar.kernels.islands import check_islands
from autopar.microbatch.accumulation import check_patterns
from autopar.passes.saved_arrays import offloaded_by_policy
from autopar.plan.context import Candidate, PlanningContext
from autopar.plan.options import AS_WRITTEN, Attention, PlanRequest
from autopar.plan.plan import Plan, Trees
from autopar.plan.schema import PlanRecord
from autopar.plan.step_graphs import StepGraphs
from autopar.sharding.head_groups import splits_heads, with_heads
from autopar.sharding.rules import RuleBook

# The part of a device's memory that is left where no limit is given: predictions come within it of what XLA's CPU
# compiler allocates, of which 1 % in the median of 37 models, and more than 10 % in four, is lost between buffers
# (`benchmarks/memory_study.py`).
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
        with progress.pass_("prepare the state"):
            step = stored_step(as_requested(step, asked), cluster, asked, rules, shared)
        context = planning_context(step, cluster, asked, rules, progress, keep_tolerance, shared)

        def plan_under(other: PlanRequest) -> Plan:
            return make_plan(step, trees, cluster, other, rules, progress, shared)

        return _plans_of(with_pins_of_code(context), trees, plan_under)

    return faster_split(traced, request, cluster.num_devices, plans_of)


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
        plan, why = last_resort(context, plan_under)
        if plan is not None:
            return (plan,)
        none_fits = refused or no_plan_error(context, trees)
        raise none_fits.beside(why) if isinstance(none_fits, MemoryLimitError) and why else none_fits
    told = [*_notes(context), *advice_note(context, chosen)]
    plan = plan_of(context, chosen, trees, told, rejections(context, chosen))
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


def as_requested(traced: TracedStep, request: PlanRequest) -> TracedStep:
    """The step with its attention and the modules that are taken per micro-batch as a request has them."""
    blockwise = _has_rings(request) or request.attention is Attention.BLOCKWISE
    return dataclasses.replace(traced, blockwise_attention=blockwise, per_microbatch=request.per_microbatch)


def _has_rings(request: PlanRequest) -> bool:
    return request.binding is not None and request.binding.blockwise_attention


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
    traced = as_requested(traced, request)
    deadline = Deadline.after(request.time_limit_s)
    graphs = graphs or StepGraphs()
    with progress.pass_("graph"):
        plain = whole_graph(traced, rules, graphs)
    least_s = graphs.of(traced, ("least time", cluster), lambda: least_time_s(plain.graph, cluster))
    with progress.pass_("stacks"):
        traced = stacked_step(traced, cluster.num_devices, rules, graphs)
        views = whole_graph(traced, rules, graphs)
        graph = views.graph
    check_patterns(traced, graph)
    check_islands(graph, cluster.num_devices)
    if _has_rings(request):
        check_blockwise(graph)
    if request.binding is not None and request.pins is None and splits_heads(request.binding):
        request = dataclasses.replace(request, binding=with_heads(request.binding, views.annotated))
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
    """The plan with the names of its mesh axes in the pins, and the cost of the pins."""
    assert chosen.pins is not None, "a plan with pins knows their axes"
    cost = price_of_pins(context, chosen)
    record = dataclasses.replace(plan.record, axis_names=chosen.pins.names, pinned=cost)
    return dataclasses.replace(plan, record=record)


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
    if request.pins is not None and (request.fixed or request.axis_sizes is not None):
        raise InvalidArgumentError(
            where="constrain",
            expected="pins, or a step to follow",
            got="both",
            hint="leave out follow, and pin the state as that step has it: step.plan(...).record.arguments",
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
