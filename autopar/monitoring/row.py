"""One row of a monitor: what it saw of the steps since the row before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.monitoring.goodput import Goodput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MonitorRow:
    """What was seen up to a step. A value that is not known is None.

    Attributes:
        step_time_s: The median of the steps since the row before that followed another one directly.
        predicted_s: The step time of the plan.
        mfu: The model's operations over what the devices do at their peak rate in the step's time.
        memory_bytes: The highest peak of this process's devices, where their runtime counts it.
        data_s: The mean wait of the loop for a batch.
        idle_s: The median of the time that devices have no work after the step before.
    """

    step: int
    metrics: Mapping[str, float]
    step_time_s: float | None
    predicted_s: float | None
    examples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    memory_bytes: int | None
    data_s: float
    idle_s: float | None
    goodput: Goodput

    def scalars(self) -> dict[str, float]:
        """The numbers under names for loggers: metrics as they are called, the rest below `autopar/`."""
        own = {
            "step_time_s": self.step_time_s,
            "predicted_step_time_s": self.predicted_s,
            "examples_per_s": self.examples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "data_wait_s": self.data_s,
            "idle_s": self.idle_s,
            "goodput": self.goodput.fraction,
        }
        known = {f"autopar/{name}": float(value) for name, value in own.items() if value is not None}
        return dict(self.metrics) | known
