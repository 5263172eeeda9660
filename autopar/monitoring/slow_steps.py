"""Steps that take longer than predicted: how much, and where the time goes."""

from __future__ import annotations

import dataclasses

from autopar.common.units import text_of_count, text_of_s

# From this ratio of measured to predicted on, a step is called slow: predictions hold within 10 % on calibrated devices
# (benchmarks/results/published_steps.md), so that twice this is no error of the model's.
SLOW = 1.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a usual step: from end to end, predicted, waiting for its batch, devices without work before it.

    `idle_s` includes `data_s`; None where nobody said when steps were called.
    """

    step_s: float
    predicted_s: float
    data_s: float
    idle_s: float | None


def slow_lane(times: StepTimes) -> str | None:
    """The lane in which a slow step loses most: "data", "host" or "devices"; None for a step as fast as predicted."""
    if times.step_s < SLOW * times.predicted_s:
        return None
    excess_s = times.step_s - times.predicted_s
    if times.idle_s is not None and times.idle_s >= excess_s / 2:
        return "data" if times.data_s >= times.idle_s / 2 else "host"
    return "devices"


def warning_text(times: StepTimes, lane: str) -> str:
    """One sentence for the lane."""
    ratio = times.step_s / times.predicted_s
    idle = "" if times.idle_s is None else text_of_s(times.idle_s)
    causes = {
        "data": f"the devices wait {idle} a step for the next batch; prefetch more, or make batches faster",
        "host": f"the devices wait {idle} a step for the loop; read the metrics of an earlier step, and less often, "
        "and take batches from monitor.batches(data), which tells the wait for them apart",
        "devices": "the programs on the devices take longer than predicted; step.profile(state, batch) says which "
        "modules and collectives do, and python -m autopar measure calibrates the predictions",
    }
    step, predicted = text_of_s(times.step_s), text_of_s(times.predicted_s)
    times_slower = text_of_count(float(f"{ratio:.2g}"))
    return f"a step takes {step}, {times_slower} times the predicted {predicted}: {causes[lane]}"
