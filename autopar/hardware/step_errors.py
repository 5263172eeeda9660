"""Intervals of predicted step times, from the errors of predictions of published runs.

An error is the logarithm of published over predicted time. `step_errors.json` has those of each device and kind of
step, and those of ratios of two runs of one model on one device; `python -m benchmarks.ledger --keep` writes it.

Intervals are the jackknife's: the distance of each error from the median of the others says how far the next one may
lie from the median of all (Barber et al., "Predictive inference with the jackknife+", 2021; here with one center). They
lie around the median, so that the interval of a device whose steps come out too fast is above the prediction.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from autopar.hardware.kinds import DeviceKind, Platform

LEVEL = 0.9  # of intervals: the part of runs whose times lie inside
LEAST_ROWS = 9  # errors of one device and kind of step; of fewer the farthest does not reach the level
ONE_PROGRAM, PIPELINE = "one program", "pipeline"
TABLE = Path(__file__).with_suffix(".json")


class StepErrors(msgspec.Struct, frozen=True, kw_only=True):
    """`errors`: by name of a device, then by kind of step. `ratios`: differences of two errors, without their sign."""

    errors: Mapping[str, Mapping[str, Sequence[float]]]
    ratios: Sequence[float]

    def like(self, device: str, kind: str) -> list[float]:
        """The errors of a device's steps of a kind; where they are fewer than `LEAST_ROWS`, those of all devices."""
        own = self.errors.get(device, {}).get(kind, ())
        return list(own) if len(own) >= LEAST_ROWS else [e for of in self.errors.values() for e in of.get(kind, ())]


@functools.cache
def kept() -> StepErrors:
    """The table of the package."""
    return msgspec.json.decode(TABLE.read_bytes(), type=StepErrors)


def quantile(distances: Sequence[float]) -> float | None:
    """The distance that one more stays below with a probability of `LEVEL`; None of too few."""
    rank = math.ceil((len(distances) + 1) * LEVEL)
    return sorted(distances)[rank - 1] if rank <= len(distances) else None


def interval(errors: Sequence[float]) -> tuple[float, float] | None:
    """(lowest, highest) of the next error; None of fewer than `LEAST_ROWS`."""
    if len(errors) < LEAST_ROWS:
        return None
    others = [statistics.median([*errors[:i], *errors[i + 1 :]]) for i in range(len(errors))]
    width = quantile([abs(e - median) for e, median in zip(errors, others, strict=True)])
    assert width is not None, "enough errors reach the level"
    return statistics.median(errors) - width, statistics.median(errors) + width


def step_interval_s(step_time_s: float, device: DeviceKind, kind: str) -> tuple[float, float] | None:
    """The times between which a step that is predicted lies at `LEVEL`, in seconds; None for virtual devices of a CPU,
    of which no run is published.
    """
    found = None if device.platform is Platform.CPU else interval(kept().like(device.name, kind))
    return None if found is None else (step_time_s * math.exp(found[0]), step_time_s * math.exp(found[1]))


@functools.cache
def resolution() -> float | None:
    """The ratio of two predicted steps of one model on one cluster from which on the slower one is slower at `LEVEL`:
    most of the error of a step is that of its model on its device, which the two share. None of too few such ratios.
    """
    width = quantile(kept().ratios)
    return None if width is None else math.exp(width)
