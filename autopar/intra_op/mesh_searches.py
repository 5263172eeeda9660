"""Source of candidates: one SPMD program over all devices on each logical mesh, and the manual plans of one.

Searches on several meshes know nothing of one another, so that other processes may make them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from autopar.common.progress import Progress
from autopar.common.worker_processes import shared_job, worker_processes
from autopar.cost.cost_model import cost_model
from autopar.intra_op.baselines import MOST_AXES, baseline_candidates
from autopar.intra_op.build_choice_graph import tables_of
from autopar.intra_op.memory_refusals import cannot_fit, fits_unfused
from autopar.intra_op.mesh_choice import (
    SOURCE,
    fastest_fitting,
    logical_meshes,
    longest_s,
    not_tried,
    slower,
    worth_trying,
)
from autopar.intra_op.spmd_candidate import SpmdCandidate, timed_sharding, with_memory
from autopar.intra_op.spmd_search import LONG_STEP, search_mesh
from autopar.ir.mesh import LogicalMesh
from autopar.kernels.known import has_known_kernels
from autopar.lowering.lower import ShardingPlan
from autopar.plan.context import PlanningContext, Rejection, StepGraphs
from autopar.plan.options import WORTHWHILE
from autopar.sharding.partial_sums import Partials
from autopar.sharding.rules import RuleBook

# What a search on a mesh finds: how the step is decided, without its partial sums, and how long it takes, or why not.
Found = tuple[ShardingPlan, float] | Rejection

# The searches on meshes are shared with other processes from so many axes on, and for as many operations of the folded
# step on all meshes together: on fewer axes a search takes about as long as it takes to start a process.
SHARED_AXES, WORTH_PROCESSES = 3, 2_000


NO_PARTIALS = Partials(kept=frozenset(), operands={})


class MeshSearches:
    """The searches on meshes, each by its number, beside the results so far.

    It holds no numbers of arrays, and all that it is made of can be pickled (`common.jax_pickle`).
    """

    def __init__(self, context: PlanningContext, meshes: Sequence[LogicalMesh], time_limit_s: float) -> None:
        self.context, self.meshes, self.time_limit_s = _for_others(context), meshes, time_limit_s

    def found(self, number: int) -> Found:
        """How the step is decided on a mesh, and how long it takes, or why it is not."""
        deadline = self.context.deadline  # of one clock for all processes
        if deadline.passed:
            return not_tried(self.meshes[number], deadline.text)
        model = cost_model(self.context.cluster, self.meshes[number])
        outcome = search_mesh(self.context, model, folds=True, time_limit_s=self.time_limit_s)
        if isinstance(outcome, Rejection):
            return outcome
        return dataclasses.replace(outcome.sharding, partials=NO_PARTIALS), outcome.ran.end_s


def searched_at_once(
    context: PlanningContext, meshes: Sequence[LogicalMesh], time_limit_s: float
) -> Mapping[LogicalMesh, Found]:
    """What is found on each of these meshes where layouts are free, by as many processes as there are processors; empty
    where that is not worth it.

    `time_limit_s` of each search.
    """
    step = context.views.folded
    work = len(meshes) * len((step.graph if step is not None else context.graph).block.ops)
    if len(meshes) < 2 or len(meshes[0].axis_sizes) < SHARED_AXES or work < WORTH_PROCESSES:
        return {}
    if has_known_kernels() or not (workers := worker_processes()):
        return {}
    together = context.progress.pass_(f"{len(meshes)} meshes of {len(meshes[0].axis_sizes)} axes")
    with together, shared_job(MeshSearches(context, meshes, time_limit_s), workers) as job:
        return dict(zip(meshes, job.run("found", range(len(meshes))), strict=True))


def candidate_of(context: PlanningContext, mesh: LogicalMesh, found: Found) -> SpmdCandidate | Rejection:
    """The candidate of what was found on a mesh, beside the results that are there now."""
    model = cost_model(context.cluster, mesh)
    if isinstance(found, Rejection):  # beside the best that there was before all of them
        if found.least_s is None:
            return found
        return slower(context, model, found.least_s, found.step_time_s)
    sharding, end_s = found
    if end_s >= longest_s(context, len(mesh.axis_sizes)):
        return slower(context, model, end_s, end_s)
    sharding = dataclasses.replace(sharding, partials=context.views.partials)
    costs = tables_of(context, context.graph, model).costs
    return with_memory(context.graph, model, timed_sharding(context.graph, model, sharding, costs))[0]


def _for_others(context: PlanningContext) -> PlanningContext:
    """What searches on meshes read of a context: no arrays, no functions, and of the results the one to beat."""
    best, views = fastest_fitting(context), context.views.without_numbers()
    traced = dataclasses.replace(
        context.traced,
        jaxpr=None,
        constants=(),
        in_tree=None,
        out_tree=None,
        placements=(),
        written=(),
        callbacks=(),
        trace_again=None,
    )
    return dataclasses.replace(
        context,
        traced=traced,
        graph=views.graph,
        views=views,
        rules=RuleBook(),
        progress=Progress("", show=False),
        graphs=StepGraphs(),
        results=() if best is None else (_without_program(best),),
    )


def _without_program(best: SpmdCandidate) -> SpmdCandidate:
    """A candidate with its time, its memory and its mesh alone."""
    sharding = dataclasses.replace(
        best.sharding, partials=NO_PARTIALS, strategy={}, unreduced={}, reduced={}, copies={}
    )
    ran = dataclasses.replace(best.ran, order=(), starts_s=())
    lowered = dataclasses.replace(best.lowered, instructions=())
    return dataclasses.replace(best, sharding=sharding, lowered=lowered, ran=ran, compute_s={})


def mesh_candidates(context: PlanningContext) -> Iterator[SpmdCandidate | Rejection]:
    """The best plan on each logical mesh, or the reason for which there is none, and the baselines.

    Baselines come in front of the meshes of three axes, where a program fits already: they are on one axis or two and
    take little time, and tell whether a third axis may pay (`worth_trying`). A rejection with a MemoryLimitError ends
    the search: no mesh can have a plan that fits.
    """
    deadline = context.deadline
    may_fit = not context.request.leaves_layouts_free or context.cluster.num_devices == 1
    meshes, found = logical_meshes(context), dict[LogicalMesh, Found]()
    baselines: list[SpmdCandidate | Rejection] | None = None
    for number, (mesh, pins) in enumerate(meshes):
        candidates = [c for c in context.candidates if isinstance(c, SpmdCandidate)]
        fits = any(c.peak_bytes <= context.limit_bytes for c in candidates)
        if baselines is None and fits and len(mesh.axis_sizes) > MOST_AXES:
            baselines = list(baseline_candidates(context))
            yield from baselines
            context = context.after(baselines)
        if mesh in found:
            outcome: SpmdCandidate | Rejection = candidate_of(context, mesh, found[mesh])
        elif deadline.passed and fits:
            outcome = not_tried(mesh, deadline.text)
        elif fits and not context.may_gain:
            outcome = not_tried(mesh, context.why_no_gain)
        elif not worth_trying(mesh, context):
            outcome = not_tried(mesh, f"the axis before it gained less than {WORTHWHILE:.0%}")
        else:
            # Where nothing can fit, a search for what does takes minutes: it is asked first whether anything can, for a
            # long step at once, for others when nothing fits on the first mesh.
            slow = number > 0 or len(context.graph.block.ops) > LONG_STEP
            if slow and not may_fit and not fits and not fits_unfused(context):
                with context.progress.pass_("least memory"):
                    refusal = cannot_fit(context)
                if refusal is not None:
                    yield Rejection(source=SOURCE, why=refusal.got, error=refusal)
                    return
                may_fit = True
            time_s, folds = deadline.solve_s(len(meshes) - number), context.request.leaves_layouts_free
            if fits and folds:
                alike = [other for other, _ in meshes[number:] if len(other.axis_sizes) == len(mesh.axis_sizes)]
                found |= searched_at_once(context, alike, time_s)
            with context.progress.pass_(f"mesh {mesh}"):
                if mesh in found:
                    outcome = candidate_of(context, mesh, found[mesh])
                else:
                    model = cost_model(context.cluster, mesh)
                    outcome = search_mesh(context, model, pins, folds=folds, time_limit_s=time_s)
        if isinstance(outcome, SpmdCandidate):
            context.weighed(outcome.step_time_s, outcome.peak_bytes)
        yield outcome
        context = context.after([outcome])
    if baselines is None:
        yield from baseline_candidates(context)
