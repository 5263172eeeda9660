"""The rows of `autopar.bench` as text: a table with bars, shares of the step, and where each way loses."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from autopar.common.text_console import TextConsole
from autopar.common.units import text_of_bytes, text_of_count, text_of_part, text_of_s
from autopar.hardware import step_errors
from autopar.plan import summary
from autopar.plan.bench_row import PARTS, BenchRow, limits, parts, sent
from autopar.plan.report.drawing import BETWEEN, INSIDE
from autopar.plan.rivals import advice_and_notes

BAR_COLUMNS, MEASURED_BAR_COLUMNS, INTERVAL_COLUMNS = 24, 16, 12
NAME_COLUMNS, MEASURED_NAME_COLUMNS = 28, 22  # of a way: recipes with many arguments take several lines
MARKS = dict(zip(PARTS, "#=~.", strict=True))
COLOURS = dict(zip(PARTS, ("green", "yellow", "red", "bright_black"), strict=True))


def write(console: TextConsole, step: str, rows: Sequence[BenchRow], best: BenchRow | None) -> None:
    """The rows of one cluster, ranked."""
    first = rows[0]
    tokens = f", {first.tokens:,} tokens" if first.tokens else ""
    hosts = "" if best is None or best.record is None else f" ({summary.devices_text(best.record.cluster)})"
    console.line(f"{step} on {first.cluster}{hosts}: a batch of {first.examples:,} examples{tokens}", style="bold")
    if best is not None:
        console.table(_speeds([row for row in rows if row.fits], best))
        legend = ", ".join(f"{MARKS[part]} {part}" for part in PARTS)
        console.line(f"Bars are seconds of a step: {legend}.")
        if best.record is not None and (memory := summary.memory_text(best.record)):
            console.line(memory)
        console.table(_shares([row for row in rows if row.fits]))
        if checked := [row for row in rows if row.difference is not None]:
            worst = max(checked, key=lambda row: row.difference or 0.0)
            found = f"at most {worst.difference:.2e} of a leaf's largest value from plain jax.jit ({worst.name})"
            if not worst.difference:
                found = "those of plain jax.jit, to the last bit"
            console.line(f"{'Numbers differ' if any(row.differs for row in checked) else 'Numbers'}: {found}.")
    if best is not None and best.record is not None:
        console.line(f"What limits {best.name}, the fastest, and what could be changed:")
        for text in (limits(best.record), *(f"{text}." for text in advice_and_notes(best.record))):
            console.line(f"- {text[:1].upper()}{text[1:]}")
        console.line(f"Beside it ({error_text(best)}):")
    for row in rows:
        setting = f", {row.setting}" if row.setting else ""
        told = row.why_none if best is None or not row.fits else row.beside(best)
        console.line(f"{row.name}{setting}: {told}{f' ({row.why})' if row.fits and row.why else ''}")


def line_of(row: BenchRow) -> str:
    """A row in one line, as it is told while others are still planned. A refusal took no planning worth a number."""
    told = f"{text_of_s(row.step_time_s)} a step" if row.step_time_s is not None else row.why_none
    setting = f" ({row.setting})" if row.setting else ""
    seen = f"{row.settings} settings in " if row.settings > 1 else ""
    planned = f" (planned {seen}{text_of_s(row.planned_s)})" if row.plan is not None else ""
    return f"{row.name}{setting} on {row.cluster}: {told}{planned}"


def error_text(best: BenchRow) -> str:
    """The least difference by which predictions rank ways."""
    least = step_errors.resolution() if best.interval else None
    if least is None:
        return "predictions do not rank ways that differ by a few percent"
    return f"nearer than {text_of_part(least - 1)} is equal within the error, that of ratios of published runs"


def speed(row: BenchRow) -> str:
    """`326,000 tokens/s`."""
    return f"{text_of_count(row.per_s or 0.0)} {'tokens' if row.tokens else 'examples'}/s"


def _speeds(rows: Sequence[BenchRow], best: BenchRow) -> Table:
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
    longest_s = max(row.step_time_s or 0.0 for row in rows)
    for row in rows:
        assert row.record is not None, "what fits has a plan"
        peak = f"{text_of_bytes(row.peak_bytes or 0)} of {text_of_bytes(row.limit_bytes or 0)}"
        cells = [escape(row.name), text_of_s(row.step_time_s or 0.0)]
        cells += [row.interval] if has_intervals else []
        cells += ["" if row.measured_s is None else text_of_s(row.measured_s)] if measured else []
        cells += [
            _bar(row, longest_s, columns),
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
