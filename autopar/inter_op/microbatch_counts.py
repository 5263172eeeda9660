"""One stage in other numbers of micro-batches than those of the search over layers: some plans gather for each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from autopar.common.progress import Deadline
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

    def least_bytes(self, m: int, choice: StageChoice) -> int: ...

    def may_gain(self, m: int, choice: StageChoice) -> bool: ...

    def refined(
        self, m: int, choice: StageChoice, name: str, binding: Binding | None = None
    ) -> PipelineEstimate | None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchCounts:
    """The numbers of micro-batches in which one stage is evaluated, in rising order. `cut` gives the step in one, None
    where it admits none. `least_s`: of the step under any plan, where no device repeats the work of another.
    """

    numbers: Sequence[int]
    cut: Callable[[int], MicrobatchedStep | None]
    num_examples: int
    num_devices: int
    least_s: float

    def admits(self, m: int, choice: StageChoice) -> bool:
        """Whether the step in m micro-batches has the layers of a choice."""
        microbatched = self.cut(m)
        return microbatched is not None and len(microbatched.layers) == len(choice.policies)

    def shared_by_most(self, m: int) -> int:
        """At most m micro-batches: those whose examples are shared out over most devices, and of these the most."""
        return max((self._sharing(n), n) for n in self.numbers if n <= m)[1]

    def take_too_long(self, m: int, best: PipelineCandidate | PipelineEstimate | None) -> bool:
        """Whether recipes take longer than the best in m micro-batches. They split nothing but examples, so that
        devices repeat the work of others where there are fewer examples.
        """
        return best is not None and self.least_s * self.num_devices / self._sharing(m) > best.step_time_s

    def _sharing(self, m: int) -> int:
        """The devices over which recipes split the examples of a micro-batch."""
        return math.gcd(self.num_examples // m, self.num_devices)


def refine_in_other_counts(evaluator: Refined, others: MicrobatchCounts) -> None:
    """Evaluates what fits in fewer micro-batches while that is faster and may become the best, and what comes near the
    best in more of them: while that is faster, or until it fits.

    Each recipe and each way to recompute by itself.
    """
    begun: dict[tuple[str, tuple[str, ...]], PipelineEstimate] = {}
    for found in sorted(evaluator.refinements, key=lambda found: found.rank(evaluator.limit_bytes)):
        if found.binding is None and found.choice.terms:
            continue  # whose prices are those of a number of micro-batches
        begun.setdefault((found.name, found.choice.policies), found)
    for first in begun.values():
        if first.fits(evaluator.limit_bytes) and _walk(evaluator, others, first, -1):
            continue
        if evaluator.best is not None and first.step_time_s <= WALKED_WITHIN * evaluator.best.step_time_s:
            _walk(evaluator, others, first, 1)


def _walk(evaluator: Refined, others: MicrobatchCounts, first: PipelineEstimate, step: int) -> bool:
    """Whether the next number in a direction is better than the first; goes on as long as the next one is."""
    at, position = first, others.numbers.index(first.num_microbatches) + step
    while 0 <= position < len(others.numbers) and not evaluator.deadline.passed:
        m = others.numbers[position]
        if at.binding is not None and others.take_too_long(m, evaluator.best):
            break
        if not evaluator.may_gain(m, at.choice) or not others.admits(m, at.choice):
            break
        if step < 0 and evaluator.least_bytes(m, at.choice) > evaluator.limit_bytes:
            break
        found = evaluator.refined(m, at.choice, at.name, at.binding)
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
