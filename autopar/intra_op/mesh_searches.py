"""Source of candidates: one SPMD program over all devices on each logical mesh, and the manual plans of one."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.cost_model import cost_model
from autopar.intra_op.baselines import MOST_AXES, baseline_candidates
from autopar.intra_op.memory_refusals import cannot_fit, fits_unfused
from autopar.intra_op.mesh_choice import (
    SOURCE,
    logical_meshes,
    not_tried,
    worth_trying,
)
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.intra_op.spmd_search import LONG_STEP, search_mesh
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import WORTHWHILE


def mesh_candidates(context: PlanningContext) -> Iterator[SpmdCandidate | Rejection]:
    """The best plan on each logical mesh, or the reason for which there is none, and the baselines.

    Baselines come in front of the meshes of three axes, where a program fits already: they are on one axis or two and
    take little time, and tell whether a third axis may pay (`worth_trying`). A rejection with a MemoryLimitError ends
    the search: no mesh can have a plan that fits.
    """
    deadline = context.deadline
    may_fit = not context.request.leaves_layouts_free or context.cluster.num_devices == 1
    meshes = logical_meshes(context)
    baselines: list[SpmdCandidate | Rejection] | None = None
    for number, (mesh, pins) in enumerate(meshes):
        candidates = [c for c in context.candidates if isinstance(c, SpmdCandidate)]
        fits = any(c.peak_bytes <= context.limit_bytes for c in candidates)
        if baselines is None and fits and len(mesh.axis_sizes) > MOST_AXES:
            baselines = list(baseline_candidates(context))
            yield from baselines
            context = context.after(baselines)
        if deadline.passed and fits:
            outcome: SpmdCandidate | Rejection = not_tried(mesh, deadline.text)
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
            with context.progress.pass_(f"mesh {mesh}"):
                model = cost_model(context.cluster, mesh)
                outcome = search_mesh(context, model, pins, folds=folds, time_limit_s=time_s)
        if isinstance(outcome, SpmdCandidate):
            context.weighed(outcome.step_time_s, outcome.peak_bytes)
        yield outcome
        context = context.after([outcome])
    if baselines is None:
        yield from baseline_candidates(context)
