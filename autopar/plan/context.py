"""`PlanningContext`, the input of all sources of candidates, and their results: candidates and rejections."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol, TypeVar

from autopar.common.progress import Deadline, Progress
from autopar.common.text import text_of_s
from autopar.errors import AutoparError, MemoryLimitError
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.passes.fold_step import GraphViews
from autopar.plan.options import WORTHWHILE, Effort, PlanRequest
from autopar.plan.rivals import BASELINES
from autopar.plan.schema import CandidateRecord

T = TypeVar("T")


class StepGraphs:
    """Graphs of steps, by the step and by what else they depend on. One search makes its own; plans of the same step
    under many requests share one.
    """

    def __init__(self) -> None:
        # With the jaxpr, so that its id stays its own.
        self._made: dict[Hashable, tuple[Any, Any]] = {}

    def of(self, traced: TracedStep, what: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns for a step; `what` names all else that the result depends on."""
        options = (
            traced.attention_kernel,
            traced.scan_recompute,
            traced.per_microbatch,
            traced.expert_load,
            traced.row_blocks,
            traced.stacked_over,
            traced.uneven_over,
        )
        key = id(traced.jaxpr), *options, what
        if key not in self._made:
            self._made[key] = traced.jaxpr, make()
        return self._made[key][1]


class Candidate(Protocol):
    """One way to run the step, lowered to instructions. `peak_bytes`: on the device with the highest peak.
    `num_microbatches`: of a pipeline, which one stage in micro-batches is too; None for a program.
    """

    @property
    def num_microbatches(self) -> int | None: ...

    @property
    def source(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def record(self) -> CandidateRecord: ...

    @property
    def step_time_s(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A way to run the step that lost, with the reason.

    Attributes:
        source: The source of candidates that has it.
        text: The way in short; empty where the whole source has nothing.
        why: The reason, in numbers where there are any.
        axis_sizes: Its logical mesh, for a step in one program.
        is_note: Whether the plan's notes include it.
        least_s: The least time of a way that was left for that before its time was computed.
        error: The error of the source, which is raised where nothing else is found.
    """

    source: str
    why: str
    text: str = ""
    axis_sizes: tuple[int, ...] = ()
    step_time_s: float | None = None
    peak_bytes: int | None = None
    is_note: bool = False
    least_s: float | None = None
    error: AutoparError | None = dataclasses.field(default=None, compare=False)

    @property
    def record(self) -> CandidateRecord:
        """The rejection as a plan records it."""
        name = self.text if self.source == BASELINES else ""
        return CandidateRecord(
            source=self.source, text=self.text, why=self.why, step_time_s=self.step_time_s, peak_bytes=self.peak_bytes,
            axis_sizes=self.axis_sizes, name=name,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """The input of a search: the step, the hardware, the request, and the results of earlier sources.

    Attributes:
        limit_bytes: Memory of one device that a plan may use.
        deadline: The end of `request.time_limit_s`.
        keep_tolerance: Candidates that take at most this many times as long as the best are wanted too; 1: none.
        to_beat_s: Step time of the best plan so far; slower candidates need no evaluation.
        least_s: Time that a step takes under any plan.
        results: The candidates and rejections of earlier sources.
        views: The graph with its repeated layers folded, and annotated.
        graphs: Graphs that plans of the same step under other requests share.
    """

    traced: TracedStep
    graph: OpGraph
    views: GraphViews
    cluster: Cluster
    request: PlanRequest
    limit_bytes: int
    rules: RuleBook
    progress: Progress
    deadline: Deadline = dataclasses.field(default_factory=Deadline)
    keep_tolerance: float = 1.0
    to_beat_s: float = math.inf
    least_s: float = 0.0
    results: tuple[Candidate | Rejection, ...] = ()
    graphs: StepGraphs = dataclasses.field(default_factory=StepGraphs)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(result for result in self.results if not isinstance(result, Rejection))

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        return tuple(result for result in self.results if isinstance(result, Rejection))

    @property
    def weighed_one_program(self) -> bool:
        """Whether the step was searched for as one program without stages, or is known to need too much memory so."""
        refused = any(isinstance(rejection.error, MemoryLimitError) for rejection in self.rejections)
        return refused or any(candidate.num_microbatches is None for candidate in self.candidates)

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if candidate.peak_bytes <= self.limit_bytes)

    @property
    def program_fits(self) -> bool:
        """Whether a program without stages fits, of those that were found."""
        return any(candidate.num_microbatches is None for candidate in self.fitting)

    @property
    def fastest_s(self) -> float:
        """Step time of the fastest candidate so far that fits; inf: there is none."""
        return min((candidate.step_time_s for candidate in self.fitting), default=math.inf)

    @property
    def may_gain(self) -> bool:
        """Whether another plan may be faster than the best so far by as much as is looked for."""
        return self.may_gain_on(self.fastest_s)

    def may_gain_on(self, step_time_s: float) -> bool:
        """Whether another plan may be faster than one of this time by as much as is looked for."""
        wants_others = self.keep_tolerance > 1
        return wants_others or self.least_s < step_time_s * (1 - self.request.effort.least_gain)

    @property
    def may_gain_by_stages(self) -> bool:
        """Whether stages and micro-batches may be faster than the best so far by as much as their search is worth."""
        return self.keep_tolerance > 1 or self.stages_may_beat(self.fastest_s)

    def stages_may_beat(self, step_time_s: float) -> bool:
        """Whether stages and micro-batches may be faster than a plan by as much as their search is worth: by 1 % on up
        to eight devices, by 3 % on 64 and more, where it takes minutes, and in between by the logarithm.
        """
        worth = self.request.effort.least_gain
        if self.request.effort is not Effort.THOROUGH:
            worth = max(worth, WORTHWHILE * min(max(math.log2(self.cluster.num_devices) * 2 / 3 - 1, 1), 3))
        return self.least_s < step_time_s * (1 - worth)

    @property
    def why_no_gain(self) -> str:
        """What is said of what was not tried for that."""
        share = 1 - self.least_s / self.fastest_s if self.fastest_s else 0.0
        return f"no plan can take less than {text_of_s(self.least_s)}, {max(share, 0.0):.1%} below the best so far"

    def after(self, results: Iterable[Candidate | Rejection]) -> PlanningContext:
        """The context for the next source, with these results added."""
        return dataclasses.replace(self, results=(*self.results, *results))

    def weighed(self, step_time_s: float, peak_bytes: int) -> None:
        """Shows a candidate in the progress line."""
        self.progress.weighed(step_time_s, fits=peak_bytes <= self.limit_bytes)

    def silent(self) -> PlanningContext:
        """The context of an auxiliary search, without progress lines."""
        return dataclasses.replace(self, progress=Progress("", show=False))
