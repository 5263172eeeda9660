"""The rows of `autopar.bench`: ways to run a step on a cluster, and where each loses to the best of them.

As text they are a table with bars, shares of the step and a sentence each; `autopar.plan.page` has their page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

from rich.markup import escape
from rich.table import Table

from autopar.common.text import (
    TextConsole,
    text_of_bytes,
    text_of_count,
    text_of_interval_s,
    text_of_part,
    text_of_s,
)
from autopar.hardware import step_errors
from autopar.plan import rivals, summary
from autopar.plan.comparison import Comparison
from autopar.plan.drawing import BETWEEN, INSIDE, link_loads
from autopar.plan.rivals import advice_and_notes
from autopar.plan.schema import PlanRecord

# The parts of a step in the order of bars, and the parts of `summary.shares` in each; what is in none is waiting.
PARTS = ("arithmetic", "memory", "collectives", "bubble")
_PART_OF = {
    summary.AT_PEAK_RATE: "arithmetic",
    summary.PRODUCTS: "arithmetic",
    summary.MEMORY_BOUND: "memory",
    summary.HOST_COPIES: "memory",
    summary.COLLECTIVES: "collectives",
}


SEARCH = "search"  # the name of the way that leaves everything open
BAR_COLUMNS, MEASURED_BAR_COLUMNS, INTERVAL_COLUMNS = 24, 16, 12
NAME_COLUMNS, MEASURED_NAME_COLUMNS = 28, 22  # of a way: recipes with many arguments take several lines
MARKS = dict(zip(PARTS, "#=~.", strict=True))
COLOURS = dict(zip(PARTS, ("green", "yellow", "red", "bright_black"), strict=True))


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


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterRows:
    """The rows of one cluster, ranked."""

    rows: tuple[BenchRow, ...]

    @property
    def ways(self) -> list[BenchRow]:
        """Those that fit, the fastest first."""
        return [row for row in self.rows if row.fits]

    @property
    def others(self) -> list[BenchRow]:
        """Those that do not fit, or have no plan."""
        return [row for row in self.rows if not row.fits]

    @property
    def best(self) -> BenchRow | None:
        """The fastest; None where nothing fits."""
        return next(iter(self.ways), None)

    @property
    def longest_s(self) -> float:
        """The step time of the slowest."""
        return max((row.step_time_s or 0.0 for row in self.ways), default=0.0)

    @property
    def advice(self) -> tuple[str, ...]:
        """What limits the fastest, and what could be changed."""
        record = None if self.best is None else self.best.record
        return () if record is None else (limits(record), *advice_and_notes(record))

    @property
    def error(self) -> str:
        """The least difference by which predictions rank the ways."""
        least = step_errors.resolution() if self.best is not None and self.best.interval else None
        if least is None:
            return "predictions do not rank ways that differ by a few percent"
        return f"nearer than {text_of_part(least - 1)} is equal within the error, that of ratios of published runs"


def by_cluster(rows: Sequence[BenchRow]) -> list[ClusterRows]:
    """Ranked rows of several clusters, those of each together."""
    return [ClusterRows(tuple(own)) for own in summary.grouped(rows, lambda row: row.cluster).values()]


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


def write(console: TextConsole, step: str, cluster: ClusterRows) -> None:
    """The rows of one cluster."""
    first, best = cluster.rows[0], cluster.best
    tokens = f", {first.tokens:,} tokens" if first.tokens else ""
    hosts = "" if best is None or best.record is None else f" ({summary.devices_text(best.record.cluster)})"
    console.line(f"{step} on {first.cluster}{hosts}: a batch of {first.examples:,} examples{tokens}", style="bold")
    if best is not None and best.record is not None:
        console.table(_speeds(cluster, best))
        legend = ", ".join(f"{MARKS[part]} {part}" for part in PARTS)
        console.line(f"Bars are seconds of a step: {legend}.")
        if memory := summary.memory_text(best.record):
            console.line(memory)
        console.table(_shares(cluster.ways))
        _write_numbers(console, cluster)
        console.line(f"What limits {best.name}, the fastest, and what could be changed:")
        limiting, *changes = cluster.advice
        for text in (limiting, *(f"{text}." for text in changes)):
            console.line(f"- {text[:1].upper()}{text[1:]}")
        console.line(f"Beside it ({cluster.error}):")
    for row in cluster.rows:
        setting = f", {row.setting}" if row.setting else ""
        told = row.why_none if best is None or not row.fits else row.beside(best)
        console.line(f"{row.name}{setting}: {told}{f' ({row.why})' if row.fits and row.why else ''}")


def _write_numbers(console: TextConsole, cluster: ClusterRows) -> None:
    """How far the numbers of ways that were run are from those of plain `jax.jit`."""
    checked = [row for row in cluster.rows if row.difference is not None]
    if not checked:
        return
    worst = max(checked, key=lambda row: row.difference or 0.0)
    found = f"at most {worst.difference:.2e} of a leaf's largest value from plain jax.jit ({worst.name})"
    if not worst.difference:
        found = "those of plain jax.jit, to the last bit"
    console.line(f"{'Numbers differ' if any(row.differs for row in checked) else 'Numbers'}: {found}.")


def line_of(row: BenchRow) -> str:
    """A row in one line, as it is told while others are still planned. A refusal took no planning worth a number."""
    told = f"{text_of_s(row.step_time_s)} a step" if row.step_time_s is not None else row.why_none
    setting = f" ({row.setting})" if row.setting else ""
    seen = f"{row.settings} settings in " if row.settings > 1 else ""
    planned = f" (planned {seen}{text_of_s(row.planned_s)})" if row.plan is not None else ""
    return f"{row.name}{setting} on {row.cluster}: {told}{planned}"


def speed(row: BenchRow) -> str:
    """`326,000 tokens/s`."""
    return f"{text_of_count(row.per_s or 0.0)} {'tokens' if row.tokens else 'examples'}/s"


def _speeds(cluster: ClusterRows, best: BenchRow) -> Table:
    rows = cluster.ways
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    measured = any(row.measured_s is not None for row in rows)
    has_intervals = any(row.interval for row in rows)
    columns = (MEASURED_BAR_COLUMNS if measured else BAR_COLUMNS) - (INTERVAL_COLUMNS if has_intervals else 0)
    table.add_column("", overflow="fold", max_width=MEASURED_NAME_COLUMNS if measured else NAME_COLUMNS)
    between = (f"in {10 * step_errors.LEVEL:.0f} of 10",) if has_intervals else ()
    for name in (
        "step",
        *between,
        *(("measured",) if measured else ()),
        "",
        f"{'tokens' if best.tokens else 'examples'}/s",
    ):
        table.add_column(name, no_wrap=True)
    table.add_column("MFU", justify="right")
    table.add_column("peak of a device", no_wrap=True)
    for row in rows:
        assert row.record is not None, "what fits has a plan"
        peak = f"{text_of_bytes(row.peak_bytes or 0)} of {text_of_bytes(row.limit_bytes or 0)}"
        cells = [escape(row.name), text_of_s(row.step_time_s or 0.0)]
        cells += [row.interval] if has_intervals else []
        cells += ["" if row.measured_s is None else text_of_s(row.measured_s)] if measured else []
        cells += [
            _bar(row, cluster.longest_s, columns),
            text_of_count(row.per_s or 0.0),
            text_of_part(row.record.predicted.mfu),
            peak,
        ]
        table.add_row(*cells)
    return table


def _bar(row: BenchRow, longest_s: float, columns: int) -> str:
    """The step in parts: each ends where the sum so far does, so that the bar is as long as the step."""
    if row.record is None or not longest_s:
        return ""
    text, done, total_s = "", 0, 0.0
    for part, seconds in parts(row.record).items():
        total_s += seconds
        end = round(columns * total_s / longest_s)
        text += f"[{COLOURS[part]}]{MARKS[part] * (end - done)}[/]"
        done = max(done, end)
    return text


def _shares(rows: Sequence[BenchRow]) -> Table:
    """What the step consists of, and what it sends where."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("share of the step", overflow="fold", max_width=NAME_COLUMNS)
    for name in (*PARTS, f"sent {INSIDE}", BETWEEN):
        table.add_column(name, justify="right")
    for row in rows:
        assert row.record is not None, "what fits has a plan"
        shares, sizes = parts(row.record), sent(row.record)
        cells = [
            text_of_part(shares[part] / row.step_time_s) if row.step_time_s and shares[part] else "" for part in PARTS
        ]
        cells += [text_of_bytes(sizes[where]) if where in sizes else "" for where in (INSIDE, BETWEEN)]
        table.add_row(escape(row.name), *cells)
    return table
