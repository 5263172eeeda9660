"""`PlanningContext`, which all sources of candidates read, and their results: candidates, and rejections with
reasons.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from autopar.common.deadline import Deadline
from autopar.common.progress import Progress
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import PlanRequest
from autopar.plan.schema import RejectionRecord
from autopar.sharding.rules import RuleBook


class Candidate(Protocol):
    """One way to run the step, worked out to its last instruction. `peak_bytes` on the device that needs most."""

    @property
    def source(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def step_time_s(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A way to run the step that is not taken, and why.

    Attributes:
        source: The source of candidates that has it.
        text: The way in short; empty where the whole source has nothing.
        why: The reason, in numbers where there are any.
        axis_sizes: Its logical mesh, of a step in one program.
        is_note: Whether the plan's notes tell it too.
        error: What the source raised, or what is to be raised where nothing else is found.
    """

    source: str
    why: str
    text: str = ""
    axis_sizes: tuple[int, ...] = ()
    step_time_s: float | None = None
    peak_bytes: int | None = None
    is_note: bool = False
    error: AutoparError | None = dataclasses.field(default=None, compare=False)

    @property
    def record(self) -> RejectionRecord:
        """What a plan keeps of it."""
        return RejectionRecord(
            source=self.source, text=self.text, why=self.why, step_time_s=self.step_time_s, peak_bytes=self.peak_bytes
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """What a search reads: the step, the hardware, the request, and what was found before.

    Attributes:
        limit_bytes: Memory of one device that a plan may use.
        deadline: When `request.time_limit_s` is over.
        keep_tolerance: Candidates that take at most so many times as long as the best are wanted too; 1: none.
        to_beat_s: Step time of the best plan so far; slower candidates need not be worked out.
        found: What earlier sources yielded.
    """

    traced: TracedStep
    graph: OpGraph
    cluster: Cluster
    request: PlanRequest
    limit_bytes: int
    rules: RuleBook
    progress: Progress
    deadline: Deadline = dataclasses.field(default_factory=Deadline)
    keep_tolerance: float = 1.0
    to_beat_s: float = math.inf
    found: tuple[Candidate | Rejection, ...] = ()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(found for found in self.found if not isinstance(found, Rejection))

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        return tuple(found for found in self.found if isinstance(found, Rejection))

    @property
    def fastest_s(self) -> float:
        """Step time of the fastest candidate so far that fits; inf: there is none."""
        return min((c.step_time_s for c in self.candidates if c.peak_bytes <= self.limit_bytes), default=math.inf)

    def after(self, found: Iterable[Candidate | Rejection]) -> PlanningContext:
        """The context of the sources behind one that yielded this."""
        return dataclasses.replace(self, found=(*self.found, *found))

    def silent(self) -> PlanningContext:
        """The context of a search beside the plan's own, without lines of progress."""
        return dataclasses.replace(self, progress=Progress("", show=False))


Source = Callable[[PlanningContext], Iterable[Candidate | Rejection]]
