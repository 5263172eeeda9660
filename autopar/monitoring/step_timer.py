"""Step times from the ends of steps: medians, and the time that devices wait between two steps."""

from __future__ import annotations

import collections
import dataclasses
import statistics

from autopar.monitoring.completions import Completion

# From this share of the time between two steps on, something else that the loop did makes it no step's time. A call
# that does nothing, as that of a checkpointer in most steps, takes less.
INTERRUPTION = 0.01
# The steps whose median is the time of a step of the run.
KEPT_STEPS = 1000
WAITING_FOR_DATA, WAITING_FOR_PYTHON = "waiting for data", "waiting for Python"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeenSteps:
    """What was seen of some steps. `step_s`, from end to end, and `idle_s` are medians, `data_s` is a mean.

    None: no step followed another one without interruption; nobody said when steps were called.
    """

    last: Completion
    step_s: float | None
    data_s: float
    idle_s: float | None


class StepTimer:
    """Collects the ends of steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.waited_s: dict[str, float] = {}
        self._since: list[Completion] = []
        self._intervals_s: list[float] = []
        self._idle_s: list[float] = []
        self._busy_s: collections.deque[float] = collections.deque(maxlen=KEPT_STEPS)
        self._last: Completion | None = None

    @property
    def num_since_row(self) -> int:
        return len(self._since)

    @property
    def productive_s(self) -> float:
        """The median of the time that devices work on a step, over the latest steps; 0 before there is one."""
        return statistics.median(self._busy_s) if self._busy_s else 0.0

    def add(self, ended: Completion) -> None:
        last, self._last = self._last, ended
        self.num_steps += 1
        self._since.append(ended)
        if last is None:
            return
        interval_s = ended.ended_s - last.ended_s
        if ended.call.other_s > INTERRUPTION * interval_s:
            return
        self._intervals_s.append(interval_s)
        idle_s = 0.0
        if ended.call.called_s is not None:
            idle_s = max(0.0, ended.call.called_s - last.ended_s)
            self._idle_s.append(idle_s)
            for_data_s = min(idle_s, ended.call.data_s)
            self._wait(WAITING_FOR_DATA, for_data_s)
            self._wait(WAITING_FOR_PYTHON, idle_s - for_data_s)
        self._busy_s.append(interval_s - idle_s)

    def take(self) -> SeenSteps:
        """The steps since the last call of this."""
        assert self._since, "there is no row without a step"
        seen = SeenSteps(
            last=self._since[-1],
            step_s=statistics.median(self._intervals_s) if self._intervals_s else None,
            data_s=statistics.fmean(c.call.data_s for c in self._since),
            idle_s=statistics.median(self._idle_s) if self._idle_s else None,
        )
        self._since, self._intervals_s, self._idle_s = [], [], []
        return seen

    def _wait(self, cause: str, seconds: float) -> None:
        self.waited_s[cause] = self.waited_s.get(cause, 0.0) + seconds
