"""The errors of steps for which no source has a candidate that fits."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.common.text import text_of_bytes
from autopar.compiler.comparison import best_program, notes
from autopar.compiler.memory_errors import pipeline_refusal
from autopar.compiler.write_plan import plan_of
from autopar.errors import AutoparError, MemoryLimitError, SolverError
from autopar.inter_op.pipeline_candidate import PipelineCandidate
from autopar.intra_op.memory_refusals import no_program_fits, state_bytes
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.intra_op.spmd_search import IMPOSSIBLE
from autopar.plan.context import PlanningContext
from autopar.plan.plan import Trees
from autopar.sharding.constraints import NO_SOLUTION, TOO_TIGHT


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
