"""A batch size on a cluster: a row of `autopar.fit`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """A batch size on a cluster. Where it does not fit it has no step time, and `peak_bytes` are those of the plan that
    comes nearest. `step_interval_s`: as of its plan. `price`: of a million examples, where the cluster has one.
    """

    cluster: str
    batch: int
    fits: bool
    peak_bytes: int
    limit_bytes: int
    step_time_s: float | None = None
    step_interval_s: tuple[float, float] | None = None
    price: float | None = None

    @property
    def example_s(self) -> float | None:
        """Seconds of an example."""
        return None if self.step_time_s is None else self.step_time_s / self.batch
