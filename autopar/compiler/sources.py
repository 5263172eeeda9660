"""The sources of candidates in order, and the requests and steps to which each applies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopar.attention.checks import check_attention
from autopar.compiler.advice import advised
from autopar.compiler.comparison import best_program
from autopar.compiler.no_plan import refuse_large_state
from autopar.compiler.whole_graph import whole_graph
from autopar.errors import BatchMismatchError, UnsupportedError
from autopar.frontend.callbacks import any_callbacks
from autopar.hardware.cluster import Cluster
from autopar.inter_op.handing_out import least_handed_out_s
from autopar.inter_op.pipeline_candidate import SOURCE as PIPELINES
from autopar.inter_op.requested import one_stage_candidates, requested_pipelines
from autopar.inter_op.search import pipeline_candidates
from autopar.intra_op.memory_refusals import check_state_fits
from autopar.intra_op.mesh_searches import mesh_candidates
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.intra_op.spmd_search import LONG_STEP
from autopar.microbatch.smaller_step import num_examples
from autopar.passes.split_scan import divisors
from autopar.plan.context import Candidate, PlanningContext, Rejection
from autopar.plan.options import Effort
from autopar.sharding.binding import Binding
from autopar.sharding.parallelisms import data_axis

# Steps on more devices than this run as pipelines only (of one stage too): a single program over all of them cuts no
# batch, so that it needs more memory, and its search costs more.
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
    if admits_one_program(context):
        context = context.after(mesh_candidates(context))
        context = context.after(advised(context))
        refuse_large_state(context)
    best = best_program(context)
    context = context.after(_stage_with_stacks(context))
    if best is not None or context.fastest_s < math.inf:
        beaten_s = best.step_time_s if best is not None else math.inf
        context = dataclasses.replace(context, to_beat_s=min(beaten_s, context.fastest_s))
    context = context.after(_pipelines_that_may_pay(context, best))
    if not context.candidates and not admits_one_program(context):
        context = context.after(one_stage_candidates(_for_stages(context)))
    return context


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


def _stage_with_stacks(context: PlanningContext) -> Iterator[Candidate | Rejection]:
    """One stage under ZeRO in the fewest micro-batches that fit, where no program fits: the update that comes after
    them has stacks, which the search over stages does without.
    """
    request, traced = context.request, context.traced
    is_free = request.leaves_layouts_free and not request.names_pipeline and not request.in_host
    if not traced.stacked_over or not is_free or context.fastest_s < math.inf or any_callbacks(traced.jaxpr):
        return
    binding, source = Binding(axes=(data_axis(3),), sizes=(None,)), "one stage with stacks"
    for number in divisors(num_examples(traced) // context.cluster.num_devices)[1:]:
        if context.deadline.passed:
            return
        asked = dataclasses.replace(request, binding=binding, num_stages=1, num_microbatches=number)
        try:
            found = list(requested_pipelines(_for_stages(dataclasses.replace(context, request=asked))))
        except (UnsupportedError, BatchMismatchError) as error:
            yield Rejection(source=source, why=f"{error.where}: {error.got}")
            return
        yield from (dataclasses.replace(candidate, source=source, name="ZeRO-3") for candidate in found)
        if any(candidate.fits(context.limit_bytes) for candidate in found):
            return


def admits_one_program(context: PlanningContext) -> bool:
    """Whether the step may run as one program over all devices."""
    if not context.request.admits_one_program:
        return False
    few = context.cluster.num_devices <= WHOLE_UP_TO
    return not context.request.leaves_layouts_free or few or any_callbacks(context.traced.jaxpr)


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
    if best.step_time_s <= least_handed_out_s(cluster, 2, 1, has_backward=False):
        return False
    if cluster.parts:
        return True  # one program is as slow as the slowest devices
    return 1 - best.shared_out_s / best.step_time_s > LOST


def _pipelines_that_may_pay(context: PlanningContext, best: SpmdCandidate | None) -> list[Candidate | Rejection]:
    """The pipelines of the search, where the request names them, or where they may be faster than one program."""
    request = context.request
    if context.traced.uneven_over:
        return []  # micro-batches and stages hold equal parts
    if request.admits_one_program and not request.leaves_layouts_free:
        return []  # stages would not have the layouts that were asked for
    # One micro-batch is what the best program has too; fewer pipelines have it than any number of them.
    if best is not None and request.admits_one_program:
        quick = request.effort is Effort.QUICK and context.fastest_s < math.inf
        if not context.may_gain or quick:
            untried = "effort='quick' takes one program where one fits" if context.may_gain else context.why_no_gain
            return [Rejection(source=PIPELINES, why=f"not searched: {untried}")]
    thorough = request.effort is Effort.THOROUGH and context.cluster.num_devices > 1
    if request.admits_one_program and not thorough and not pipeline_may_pay(best, context.cluster):
        return [NOT_WORTH_SEARCHING]
    if best is not None and context.deadline.passed:
        why = f"no pipeline was searched for: {context.deadline.text}"
        return [Rejection(source=PIPELINES, why=why, is_note=True)]
    return searched_pipelines(context)
