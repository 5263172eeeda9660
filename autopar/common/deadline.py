"""The deadline of planning: created once, and passed to each search that takes time."""

from __future__ import annotations

import dataclasses
import math
import time

# The least that one solution of an integer program is given under a limit, so that there is a plan at all.
LEAST_SOLVE_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment of `time.perf_counter()`, and how long before it planning began; inf for both: none."""

    limit_s: float = math.inf
    at_s: float = math.inf

    @staticmethod
    def after(limit_s: float | None) -> Deadline:
        """So many seconds from now; None: none."""
        return Deadline() if limit_s is None else Deadline(limit_s=limit_s, at_s=time.perf_counter() + limit_s)

    @property
    def passed(self) -> bool:
        return time.perf_counter() >= self.at_s

    @property
    def left_s(self) -> float:
        """Negative once it has passed; inf without a limit."""
        return self.at_s - time.perf_counter()

    def solve_s(self, parts: int = 1) -> float:
        """Seconds for one of so many searches that are left; infinite without a limit: they end by proof or rounds."""
        if math.isinf(self.at_s):
            return math.inf
        return max((self.at_s - time.perf_counter()) / parts, LEAST_SOLVE_S)

    @property
    def text(self) -> str:
        """What is said of what was left untried."""
        return f"the {self.limit_s:g} s of time_limit_s were over"
