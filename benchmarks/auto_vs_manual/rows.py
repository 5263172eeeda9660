"""What is known of one model on one cluster under one recipe, and the file that keeps it."""

import csv
import dataclasses
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.common.units import text_of_bytes

TIE = 1e-4  # two times that differ by less count as equal; the search takes half of it for equal


class Status(enum.StrEnum):
    PLANNED = "planned"
    OUT_OF_MEMORY = "out of memory"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model on one cluster under one recipe, which may be a whole grid of attempts: the best of them.

    Attributes:
        status: Whether there is a plan that fits; `why` says what is wrong where there is none.
        cut_short: Why not all of the recipe was tried, where it was not.
        plan: The plan in short.
        peak_bytes: Of one device, predicted, of the plan or, where none fits, of the one nearest to fitting.
        limit_bytes: What a plan may use.
        sent_bytes: By each device in a step; `collectives` the same by kind, as (count, bytes).
        flops: Of all devices in a step.
        attempts: How many settings were seen, by a plan, an estimate or a bound, of which `fitting` are known to fit.
        planned_s: Seconds of this machine for all of them; what an earlier row of the same process has made already
            (the trace, graphs of micro-batches) is not in it.
        measured_s: The median step on this machine, with its quartiles; `compiled_bytes` sent and `compiled_peak_bytes`
            are those of the program that XLA made.
        measured_beside_auto: The step over the search's, the median of what they took in the same turns; None in the
            search's own row.
        measured_beside_timed: The same beside the plan that the clock chose.
        search_version: The version of costs and search (`autopar/plan/cache.py`) that made the row; None in rows of
            before 2026-11-25, which do not say it.
    """

    model: str
    cluster: str
    recipe: str
    devices: int
    status: Status
    why: str = ""
    cut_short: str = ""
    plan: str = ""
    step_time_s: float | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    sent_bytes: float | None = None
    collectives: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    mfu: float | None = None
    bubble_fraction: float | None = None
    flops: float | None = None
    attempts: int = 0
    fitting: int = 0
    planned_s: float = 0.0
    measured_s: float | None = None
    measured_quartiles_s: tuple[float, float] | None = None
    measured_beside_auto: float | None = None
    measured_beside_timed: float | None = None
    compiled_bytes: float | None = None
    compiled_peak_bytes: int | None = None
    search_version: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.cluster, self.recipe

    @property
    def over_bytes(self) -> int | None:
        """By how much the plan nearest to fitting is over the limit."""
        if self.peak_bytes is None or self.limit_bytes is None:
            return None
        return max(0, self.peak_bytes - self.limit_bytes)

    def came_to(self) -> str:
        """The time, or why there is none."""
        if self.status is Status.PLANNED and self.step_time_s is not None:
            return f"{self.step_time_s:.4g} s"
        if self.status is Status.OUT_OF_MEMORY and self.over_bytes:
            return f"out of memory, {text_of_bytes(self.over_bytes)} over"
        return f"{self.status}: {self.why}"


def row_of(stored: dict[str, Any]) -> Row:
    """A row as JSON has it."""
    quartiles = stored.get("measured_quartiles_s")
    return Row(
        **stored
        | {
            "status": Status(stored["status"]),
            "collectives": {kind: (count, sent) for kind, (count, sent) in stored["collectives"].items()},
            "measured_quartiles_s": tuple(quartiles) if quartiles else None,
        }
    )


class Rows:
    """All rows known so far, kept in a JSON file and, for other programs, in a CSV file beside it.

    Rows are keyed by model, cluster and recipe. `machines` says under which description each was made.
    """

    def __init__(self, directory: Path) -> None:
        self.json, self.csv = directory / "rows.json", directory / "rows.csv"
        self.machines: dict[str, str] = {}
        self._rows: dict[tuple[str, str, str], Row] = {}
        self._made_on: dict[tuple[str, str, str], str] = {}
        if self.json.exists():
            stored = json.loads(self.json.read_text())
            self.machines = stored["machines"]
            for fields in stored["rows"]:
                machine = fields.pop("machine")
                row = row_of(fields)
                self._rows[row.key], self._made_on[row.key] = row, machine

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def get(self, model: str, cluster: str, recipe: str) -> Row | None:
        return self._rows.get((model, cluster, recipe))

    def add(self, row: Row, description: str) -> None:
        """Keeps a row, in the place of one with the same key, and writes the files."""
        unused = str(1 + max(map(int, self.machines), default=0))  # those that no row is of any more leave gaps
        number = next((n for n, known in self.machines.items() if known == description), unused)
        self.machines[number] = description
        self._rows[row.key], self._made_on[row.key] = row, number
        self.json.parent.mkdir(parents=True, exist_ok=True)
        stored = [dataclasses.asdict(r) | {"machine": self._made_on[r.key]} for r in self._rows.values()]
        used = {n: text for n, text in self.machines.items() if n in self._made_on.values()}
        lines = ",\n".join(json.dumps(fields) for fields in stored)
        self.json.write_text(f'{{"machines": {json.dumps(used, indent=1)},\n"rows": [\n{lines}\n]}}\n')
        with self.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            names = [f.name for f in dataclasses.fields(Row)]
            writer.writerow([*names, "over_bytes"])
            for r in self._rows.values():
                writer.writerow([*(cell(getattr(r, name)) for name in names), cell(r.over_bytes)])


def cell(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, (dict, tuple)) else str(value)
