"""Comparison of candidates: the choice of the plan, and the reason for which each other candidate lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.common.text import text_of_bytes, text_of_s
from autopar.plan.context import Candidate, PlanningContext
from autopar.plan.options import AS_FAST, NEARLY_EQUAL
from autopar.search.inter_op.pipeline_candidate import PipelineCandidate
from autopar.search.intra_op.spmd_candidate import SpmdCandidate


def best_program(context: PlanningContext) -> SpmdCandidate | None:
    """The fastest program without stages that fits; of nearly equal ones that on the mesh with the fewest axes."""
    fitting = [c for c in context.fitting if isinstance(c, SpmdCandidate)]
    fastest_s = min((c.step_time_s for c in fitting), default=0.0)
    equal = [c for c in fitting if c.step_time_s <= fastest_s * (1 + NEARLY_EQUAL)]
    return min(equal, key=lambda c: (len(c.sharding.mesh.axis_sizes), c.step_time_s), default=None)


def choose(context: PlanningContext) -> SpmdCandidate | PipelineCandidate | None:
    """The plan: the best program, or a pipeline that is faster. None where nothing fits."""
    program = best_program(context)
    fitting = [c for c in context.fitting if isinstance(c, PipelineCandidate)]
    pipeline = min(fitting, key=lambda c: c.step_time_s, default=None)
    if program is None or pipeline is None:
        return program or pipeline
    return pipeline if pipeline.step_time_s < program.step_time_s else program


def near(chosen: Candidate, candidates: Iterable[Candidate], limit_bytes: int, tolerance: float) -> list[Candidate]:
    """The other candidates that fit and take at most `tolerance` times as long, fastest first; none for 1."""
    if tolerance <= 1:
        return []
    longest_s = tolerance * chosen.step_time_s
    fitting = [c for c in candidates if c is not chosen and c.peak_bytes <= limit_bytes]
    return sorted((c for c in fitting if c.step_time_s <= longest_s), key=lambda c: c.step_time_s)


def why_lost(step_time_s: float, peak_bytes: int, chosen_s: float, limit_bytes: int) -> str:
    """The reason for which a candidate is not the plan, which takes `chosen_s`."""
    if peak_bytes > limit_bytes:
        return f"over the memory limit by {text_of_bytes(peak_bytes - limit_bytes)}"
    if abs(step_time_s - chosen_s) > AS_FAST * chosen_s:
        return f"{'slower' if step_time_s > chosen_s else 'faster'} by {text_of_s(abs(step_time_s - chosen_s))}"
    return f"as fast to {NEARLY_EQUAL:.3%}, on a mesh of more axes" if step_time_s < chosen_s else "as fast"


def notes(context: PlanningContext) -> Sequence[str]:
    """The texts on searched pipelines for the notes of a plan in one program, and for errors."""
    texts = [rejection.why for rejection in context.rejections if rejection.is_note]
    pipelines = [c for c in context.candidates if isinstance(c, PipelineCandidate)]
    if pipelines:
        best = min(pipelines, key=lambda c: c.rank(context.limit_bytes))
        if not best.fits(context.limit_bytes):
            texts.append(f"the pipeline nearest to fitting needs {text_of_bytes(best.peak_bytes)} on a device")
        elif len(best.choice.first_layers) > 1:  # one stage is a program, beside faster ones
            texts.append(f"the best pipeline would take {text_of_s(best.step_time_s)} ({best.text})")
    return texts
