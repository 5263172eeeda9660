"""One stage in other numbers of micro-batches than those of the search over layers: some plans gather for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autopar.common.deadline import Deadline
from autopar.inter_op.build_stages import MicrobatchedStep
from autopar.inter_op.pipeline_candidate import PipelineCandidate, PipelineEstimate
from autopar.inter_op.stage_choice import StageChoice
from autopar.sharding.binding import Binding

# One stage is evaluated in more micro-batches if it takes at most so many times as long as the best.
WALKED_WITHIN = 1.05


class Refined(Protocol):
    """What was evaluated of one stage, and how more of it is (`PipelineEvaluator`)."""

    limit_bytes: int
    deadline: Deadline
    best: PipelineCandidate | PipelineEstimate | None
    refinements: list[PipelineEstimate]

    def refined(
        self, m: int, choice: StageChoice, name: str, binding: Binding | None = None
    ) -> PipelineEstimate | None: ...


def refine_in_other_numbers(
    evaluator: Refined, cut: Callable[[int], MicrobatchedStep | None], numbers: Sequence[int]
) -> None:
    """Evaluates what fits in fewer micro-batches while that is faster and may become the best, and what comes near the
    best in more of them: while that is faster, or until it fits.

    Each recipe and each way to recompute by itself. `cut` gives the step in a number of micro-batches, None where it
    admits none.
    """
    begun: dict[tuple[str, tuple[str, ...]], PipelineEstimate] = {}
    for found in sorted(evaluator.refinements, key=lambda found: found.rank(evaluator.limit_bytes)):
        if found.binding is None and found.choice.terms:
            continue  # whose prices are those of a number of micro-batches
        begun.setdefault((found.name, found.choice.policies), found)
    for first in begun.values():
        if first.fits(evaluator.limit_bytes) and _walk(evaluator, cut, numbers, first, -1):
            continue
        if evaluator.best is not None and first.step_time_s <= WALKED_WITHIN * evaluator.best.step_time_s:
            _walk(evaluator, cut, numbers, first, 1)


def _walk(
    evaluator: Refined,
    cut: Callable[[int], MicrobatchedStep | None],
    numbers: Sequence[int],
    first: PipelineEstimate,
    step: int,
) -> bool:
    """Whether the next number in a direction is better than the first; goes on as long as the next one is."""
    at, position = first, numbers.index(first.num_microbatches) + step
    while 0 <= position < len(numbers) and not evaluator.deadline.passed:
        microbatched = cut(numbers[position])
        if microbatched is None or len(microbatched.layers) != len(at.choice.policies):
            break
        found = evaluator.refined(numbers[position], at.choice, at.name, at.binding)
        if found is None or found.rank(evaluator.limit_bytes) >= at.rank(evaluator.limit_bytes):
            break
        if step < 0 and evaluator.best is not None and _in_one_s(at, found) > evaluator.best.step_time_s:
            return True
        at, position = found, position + step
    return at is not first


def _in_one_s(more: PipelineEstimate, fewer: PipelineEstimate) -> float:
    """Seconds in one micro-batch, if each takes off as much as the last ones did."""
    each_s = (more.step_time_s - fewer.step_time_s) / (more.num_microbatches - fewer.num_microbatches)
    return fewer.step_time_s - each_s * (fewer.num_microbatches - 1)
