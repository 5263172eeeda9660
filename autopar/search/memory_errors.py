"""The errors of steps for which no plan fits: as one program, in micro-batches, as pipelines, and of given plans."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.common.text import text_of_bytes
from autopar.errors import AutoparError, MemoryLimitError, SolverError
from autopar.ir.constraints import NO_SOLUTION, TOO_TIGHT
from autopar.plan.context import PlanningContext
from autopar.plan.plan import Plan, Trees
from autopar.plan.summary import fullest
from autopar.search.comparison import best_program, notes
from autopar.search.inter_op.pipeline_candidate import PipelineCandidate
from autopar.search.intra_op.mesh_searches import no_program_fits, state_bytes
from autopar.search.intra_op.spmd_candidate import SpmdCandidate
from autopar.search.intra_op.spmd_search import IMPOSSIBLE
from autopar.search.write_plan import plan_of

_NAMED = 5  # how many of the largest tensors an error names


def check_given_plan_fits(plan: Plan, limit_bytes: int | None) -> None:
    """Raises: MemoryLimitError for a given plan that exceeds a memory limit for which it was not made."""
    if limit_bytes is not None and not fits(plan, limit_bytes):
        raise _refusal(
            plan,
            f"the plan of {plan.record.step}",
            limit_bytes,
            "a plan is run as it is: make another one with this limit, or leave the limit out here",
        )


def fits(plan: Plan, limit_bytes: int) -> bool:
    full = fullest(plan.record, limit_bytes)
    assert full.limit_bytes is not None, "a limit was given"
    return full.peak_bytes <= full.limit_bytes


def pipeline_refusal(plan: Plan, limit_bytes: int, beside: Sequence[str] = ()) -> MemoryLimitError:
    """The error of a step whose plan in micro-batches or stages does not fit; `beside` are the other attempts."""
    pipeline = plan.record.pipeline
    assert pipeline is not None, "a plan in one program is refused before it is written down"
    ways = [f"more micro-batches (now {pipeline.num_microbatches})"]
    if len(pipeline.stages) > 1:
        ways += [] if pipeline.schedule == "1f1b" else [f'schedule="1f1b" (now "{pipeline.schedule}")']
        ways += [f"more stages (now {len(pipeline.stages)})"]
    ways += ["more devices, with state split over them (recipes.zero(3))"]
    ways += [] if "input" in pipeline.recomputed else ['recompute="input" of recipes.cut and recipes.combine']
    ways += ["a smaller optimiser state (Adafactor, bfloat16 moments)"]
    hint = "use " + ", ".join(ways[:-1]) + ", or " + ways[-1]
    return _refusal(plan, plan.record.step, limit_bytes, "; ".join([hint, *beside]))


def _refusal(plan: Plan, where: str, limit_bytes: int, hint: str) -> MemoryLimitError:
    full, pipeline = fullest(plan.record, limit_bytes), plan.record.pipeline
    if pipeline is not None:
        worst = list(dict.fromkeys(stage.first_device for stage in pipeline.stages))[full.number]
        stages = [str(q) for q, stage in enumerate(pipeline.stages) if stage.first_device == worst]
        where += f", stage {' and '.join(stages)} of {len(pipeline.stages)}"
    memory = plan.predicted.memory
    return MemoryLimitError(
        where=where,
        limit_bytes=full.limit_bytes or limit_bytes,
        needed_bytes=full.peak_bytes,
        largest=[(h.name, h.nbytes) for h in memory[full.number].largest[:_NAMED]] if memory else [],
        hint=hint,
    )


def refuse_large_state(context: PlanningContext) -> None:
    """Raises: MemoryLimitError where neither a program nor the arguments alone, split over all devices, fit."""
    refused = _program_error(context)
    if isinstance(refused, MemoryLimitError) and state_bytes(context) > context.limit_bytes:
        text = text_of_bytes(state_bytes(context))
        raise refused.beside([f"nor do stages fit: the arguments alone, split over all devices, take {text} on each"])


def no_plan_error(context: PlanningContext, trees: Trees) -> AutoparError:
    """The error of a step without a plan: the candidate nearest to fitting, and the other attempts."""
    refused, texts = _program_error(context), list(notes(context))
    if context.deadline.passed:
        texts.append(f"{context.deadline.text}: give the search more")
    if isinstance(refused, MemoryLimitError):
        return refused.beside(texts)
    pipelines = [c for c in context.candidates if isinstance(c, PipelineCandidate)]
    if pipelines:
        nearest = min(pipelines, key=lambda c: c.rank(context.limit_bytes))
        beside = () if context.request.is_built_as_asked else [str(refused)] if refused is not None else texts
        return pipeline_refusal(plan_of(context, nearest, trees), context.limit_bytes, beside)
    raised = [rejection.error for rejection in context.rejections if rejection.error is not None]
    return refused or (raised[0] if raised and context.request.names_pipeline else _no_pipeline_fits(context, texts))


def _program_error(context: PlanningContext) -> AutoparError | None:
    """The reason for which the step has no plan as one program; None where it has one, or none was searched for."""
    if best_program(context) is not None:
        return None
    ended = [r.error for r in context.rejections if isinstance(r.error, MemoryLimitError)]
    if ended:
        return ended[0]
    candidates = [c for c in context.candidates if isinstance(c, SpmdCandidate)]
    if candidates:
        return no_program_fits(context, candidates)
    refused = [rejection for rejection in context.rejections if rejection.axis_sizes]
    if not refused:
        return None
    return SolverError(
        where=context.traced.name,
        expected="a plan on one of the logical meshes",
        got=", ".join(f"{'x'.join(map(str, r.axis_sizes))}: {r.why}" for r in refused),
        hint=TOO_TIGHT if all(r.why == IMPOSSIBLE for r in refused) else NO_SOLUTION,
    )


def _no_pipeline_fits(context: PlanningContext, texts: Sequence[str]) -> SolverError:
    """The error of a step for which no pipeline exists and nothing else was tried."""
    return SolverError(
        where=f"{context.traced.name} on {context.cluster.num_devices} devices of {context.cluster.name}",
        expected=f"a pipeline that fits into {text_of_bytes(context.limit_bytes)} on each device",
        got="; ".join(texts),
        hint="use more devices, a smaller batch, or a smaller optimiser state (Adafactor, bfloat16 moments)",
    )
