"""The table of thresholds and weights of the planner, results/thresholds.md, as `tests/test_thresholds.py` reads it.

Every number of the planner's packages that decides between plans, or how long is searched, has a row there: a new one
is written by hand, with what it decides and what it was chosen by. Facts about hardware are no thresholds: they stand
with their sources in `autopar/hardware`.
"""

import dataclasses
import importlib
from pathlib import Path

from benchmarks.machine import kept_rows

RESULTS = Path(__file__).parent / "results" / "thresholds.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
    """A constant: its module under autopar and its name."""

    key: str

    @property
    def value(self) -> float:
        module, _, name = self.key.rpartition(".")
        return getattr(importlib.import_module(f"autopar.{module}"), name)


def thresholds() -> list[Threshold]:
    """The rows of the table."""
    return [Threshold(key=row[0].strip("`")) for row in kept_rows(RESULTS)]
