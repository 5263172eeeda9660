"""Pipelines that are compared: built ones, and estimates of those that are not built."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from autopar.frontend.recompute_in_scans import Recompute
from autopar.ir.binding import Binding
from autopar.ir.pins import PinsOnMesh
from autopar.plan.context import Rejection
from autopar.plan.schema import CandidateRecord
from autopar.search.inter_op.decide_stages import Round, StageChoice
from autopar.search.inter_op.staged import StagedStep

SOURCE = "pipelines"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEstimate:
    """What a pipeline of one stage comes to by its estimate, and what it takes to build it. `rounds`: of decisions;
    `least_s`: what others of the same recomputation in as many micro-batches take at least.
    """

    num_microbatches: int
    choice: StageChoice
    step_time_s: float
    peak_bytes: int
    to_beat_s: float
    binding: Binding | None = None
    name: str = ""
    on_mesh: StageChoice | None = None  # the choice on the mesh of the binding
    rounds: tuple[Round, ...] = ()
    least_s: float = 0.0

    def first_to_build(self, limit_bytes: int, error: float) -> Round | None:
        """The first round of decisions that may fit, peaks being estimated with this relative error; where none fits by
        the estimate, the smallest.
        """
        if not self.fits(limit_bytes):
            return min(self.rounds, key=lambda each: each.peak_bytes, default=None)
        may_fit = (each for each in self.rounds if max(each.peak_bytes) <= (1 + error) * limit_bytes)
        return next(may_fit, None)

    @property
    def text(self) -> str:
        return text_of(self.num_microbatches, self.on_mesh or self.choice, self.name)

    @property
    def record(self) -> CandidateRecord:
        return record_of(self, SOURCE)

    def fits(self, limit_bytes: int) -> bool:
        return self.peak_bytes <= limit_bytes

    def rank(self, limit_bytes: int) -> tuple[bool, float]:
        return not self.fits(limit_bytes), self.step_time_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCandidate:
    """A pipeline, built and simulated, and the pipelines that were compared with it."""

    staged: StagedStep
    choice: StageChoice
    weighed: tuple[CandidateRecord, ...]
    hoist_casts: bool
    pins: PinsOnMesh | None = None
    name: str = ""
    source: str = SOURCE

    @property
    def num_microbatches(self) -> int:
        return self.staged.graph.num_microbatches

    @property
    def step_time_s(self) -> float:
        return self.staged.step_time_s

    @property
    def peak_bytes(self) -> int:
        return max(self.staged.peak_bytes)

    @property
    def text(self) -> str:
        return text_of(self.num_microbatches, self.choice, self.name)

    @property
    def record(self) -> CandidateRecord:
        """The pipeline as one row of the plan's record."""
        return record_of(self, self.source)

    @property
    def in_short(self) -> PipelineEstimate:
        """What it came to, without the tasks and the instructions of the pipeline, which take much memory."""
        return PipelineEstimate(
            num_microbatches=self.num_microbatches, choice=self.choice, step_time_s=self.step_time_s,
            peak_bytes=self.peak_bytes, to_beat_s=math.inf, name=self.name,
        )  # fmt: skip

    def fits(self, limit_bytes: int) -> bool:
        return self.peak_bytes <= limit_bytes

    def rank(self, limit_bytes: int) -> tuple[bool, float]:
        """The sort key: candidates that fit first, then the faster."""
        return not self.fits(limit_bytes), self.step_time_s


def record_of(made: PipelineEstimate | PipelineCandidate, source: str) -> CandidateRecord:
    is_as_written = len(made.choice.first_layers) == 1 and {*made.choice.policies} == {Recompute.NOTHING.value}
    return CandidateRecord(
        source=source, text=made.text, step_time_s=made.step_time_s, peak_bytes=made.peak_bytes,
        num_microbatches=made.num_microbatches if is_as_written else None,
    )  # fmt: skip


def text_of(num_microbatches: int, choice: StageChoice, name: str) -> str:
    return choice.text(num_microbatches) + (f", {name}" if name else "")


def retry_without_hoisted_casts(
    search: Callable[[bool], tuple[Sequence[PipelineCandidate | Rejection], bool]], limit_bytes: int
) -> Sequence[PipelineCandidate | Rejection]:
    """The results of a search, best first, with cheap copies of the state hoisted out of the micro-batches; without
    hoisting, where the results do not fit and the search says that this may help.

    Args:
        search: Searches with or without hoisting; returns the results, and whether a search without hoisting may help.
    """
    candidates, may_help = search(True)
    best = candidates[0]
    if not may_help or (isinstance(best, PipelineCandidate) and best.fits(limit_bytes)):
        return candidates
    without_casts, _ = search(False)
    best_without = without_casts[0]
    if isinstance(best_without, Rejection):
        return candidates
    if isinstance(best, Rejection):
        return without_casts
    return min((best, candidates), (best_without, without_casts), key=lambda pair: pair[0].rank(limit_bytes))[1]
