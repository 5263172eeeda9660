"""A way to run a step on a cluster, beside others: a row of `autopar.bench`, and what it loses to the best of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

from autopar.common.units import text_of_bytes, text_of_interval_s, text_of_s
from autopar.hardware import step_errors
from autopar.plan import rivals, summary
from autopar.plan.comparison import Comparison
from autopar.plan.report.drawing import link_loads
from autopar.plan.schema import PlanRecord

# The parts of a step in the order of bars, and the parts of `summary.shares` in each; what is in none is waiting.
PARTS = ("arithmetic", "memory", "collectives", "bubble")
_PART_OF = {
    "arithmetic at the devices' peak rate": "arithmetic",
    "matrix products below the peak rate": "arithmetic",
    "computation below the peak rate": "arithmetic",
    summary.MEMORY_BOUND: "memory",
    summary.HOST_COPIES: "memory",
    summary.COLLECTIVES: "collectives",
}


SEARCH = "search"  # the name of the way that leaves everything open


class HasRecord(Protocol):
    """A plan, which imports the page of these rows."""

    @property
    def record(self) -> PlanRecord: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One way on one cluster, at the best of the settings that it leaves open.

    `plan` is None where there is none, for the reason in `why`; one that was built though it does not fit has no step
    time. `peak_bytes` are those of the setting that comes nearest to fitting; `of_state`: of the state alone, where no
    setting makes room for more. `tokens`: of a step, 0 where the batch
    has none. `settings`: how many were seen. `planned_s`: seconds of this machine. `difference` is that from plain
    `jax.jit`, relative to the largest value of a result, and `differs` whether rounding explains less.
    """

    name: str
    cluster: str
    examples: int
    tokens: int = 0
    setting: str = ""
    plan: HasRecord | None = None
    fits: bool = False
    why: str = ""
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    of_state: bool = False
    settings: int = 1
    planned_s: float = 0.0
    measured_s: float | None = None
    quartiles_s: tuple[float, float] | None = None
    difference: float | None = None
    differs: bool = False

    @property
    def record(self) -> PlanRecord | None:
        """The plan, where it fits."""
        return self.plan.record if self.plan is not None and self.fits else None

    @property
    def step_time_s(self) -> float | None:
        return None if self.record is None else self.record.predicted.step_time_s

    @property
    def interval(self) -> str:
        """The times between which nine of ten runs are meant to lie; empty where that is not known."""
        ends_s = None if self.record is None else self.record.step_interval_s
        return "" if ends_s is None else text_of_interval_s(ends_s)

    @property
    def excess_bytes(self) -> int:
        """Bytes of a device over the limit."""
        return max(0, (self.peak_bytes or 0) - (self.limit_bytes or 0)) if self.limit_bytes else 0

    @property
    def per_s(self) -> float | None:
        """Tokens a second, or examples where there are no tokens."""
        return (self.tokens or self.examples) / self.step_time_s if self.step_time_s else None

    @property
    def why_none(self) -> str:
        """Why it is not compared."""
        if not self.excess_bytes:
            return self.why
        peak, limit = text_of_bytes(self.peak_bytes or 0), text_of_bytes(self.limit_bytes or 0)
        held = f"the state alone takes {peak}" if self.of_state else peak
        return f"does not fit: {held} a device, of {limit}, {text_of_bytes(self.excess_bytes)} over"

    def loses(self, best: BenchRow) -> str:
        """Where it loses to the best way, in a sentence; empty for what has no time, and for the best itself."""
        if self.record is None or best.record is None or self is best:
            return ""
        return Comparison(plan=best.record, other=self.record).in_short

    def is_equal_within_error(self, best: BenchRow) -> bool:
        """Whether predictions do not rank it after the best way: the ratio of the two times is below
        `step_errors.resolution`. Their intervals overlap further, but two ways share most of their error, that of the
        model on the card.
        """
        least, ratio = step_errors.resolution(), (self.step_time_s or 0.0) / (best.step_time_s or math.inf)
        return bool(least and self.interval and best.interval and self is not best and 0 < ratio < least)

    def beside(self, best: BenchRow) -> str:
        """How it compares with the best way, and between which times half of its measured steps lie."""
        told = "the fastest" if self is best else self.loses(best)
        if self.is_equal_within_error(best):
            told += "; equal within the error"
        if self.quartiles_s is None:
            return told
        first, third = map(text_of_s, self.quartiles_s)
        return f"{told}; half of the measured steps took {first} to {third}"

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values, as `json.dumps` takes them."""
        fields = (
            "name",
            "cluster",
            "setting",
            "fits",
            "peak_bytes",
            "of_state",
            "limit_bytes",
            "excess_bytes",
            "settings",
        )
        values = {field: getattr(self, field) for field in (*fields, "planned_s", "measured_s", "quartiles_s")}
        values |= {"why": "" if self.fits else self.why_none, "step_time_s": self.step_time_s}
        values |= {"tokens_per_s" if self.tokens else "examples_per_s": self.per_s, "difference": self.difference}
        if self.record is not None:
            values |= {
                "step_interval_s": self.record.step_interval_s,
                "mfu": self.record.predicted.mfu,
                "parts_s": parts(self.record),
                "sent_bytes": sent(self.record),
            }
        return values


def parts(record: PlanRecord) -> dict[str, float]:
    """The seconds of a step in four parts."""
    found = dict.fromkeys(PARTS, 0.0)
    for share in summary.shares(record):
        found[_PART_OF.get(share.name, "bubble")] += share.seconds
    return found


def setting_of(record: PlanRecord) -> str:
    """What a plan that was searched for, or asked for as it is, chose: a recipe by its name, or what it splits."""
    return rivals.chosen_recipe(record) or summary.in_short(record)


def limits(record: PlanRecord) -> str:
    """What limits a step: its parts, and what it takes under any plan."""
    least_s = record.least_step_time_s
    least = "" if not least_s else f" No plan of the step as it is written takes less than {text_of_s(least_s)}."
    return f"{summary.lost(record)}{least}"


def sent(record: PlanRecord) -> dict[str, float]:
    """Bytes that a device sends in the collectives of a step and to other stages, the mean over the devices, by where
    they go.
    """
    found: dict[str, float] = {}
    for load in link_loads(record):
        found[load.where] = found.get(load.where, 0.0) + load.sent_bytes
    return found


def ranked(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The fastest first, the search before what is as fast; then what does not fit, the nearest to fitting first, then
    what has no plan.
    """

    def rank(row: BenchRow) -> tuple[bool, float, bool, int, bool]:
        return not row.fits, row.step_time_s or 0.0, not row.excess_bytes, row.excess_bytes, row.name != SEARCH

    return sorted(rows, key=rank)
