"""A plan on one screen: at most `LINES` lines of `COLUMNS` columns, whatever the step.

On a narrower terminal the lines are broken, and there are more of them.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from autopar.common.text import PLAIN, TextConsole, TextFormat, text_of_bytes, text_of_s
from autopar.ir.layout import axes_text
from autopar.plan import modules, rivals, summary
from autopar.plan.rivals import advice
from autopar.plan.schema import PlanRecord
from autopar.plan.summary import StageGroup, StateGroup

COLUMNS, LINES = 100, 40
STAGES_SHOWN, STATE_SHOWN, NOTES_SHOWN = 5, 7, 2
NAME_COLUMNS = 43
GAP = 2  # columns between those of a table
BATCH = "batch"  # the kind of arguments that hold examples
SENTENCE_LINES, NUMBERS_LINES, ADVICE_LINES, TENSOR_LINES, LEGEND_LINES, NOTE_LINES = 3, 2, 2, 2, 2, 1
FIRST_NOTE_LINES = 4
ENDING = "plan.explain(name): one of these; .why_not(recipe): another way; .table(): all; .report('plan.html')"


def screen(record: PlanRecord, text_format: TextFormat = PLAIN) -> str:
    """The plan in short."""
    page = _Page(text_format)
    first = [note for note in record.notes if note.startswith(summary.BATCH_WHOLE)]
    lines = [
        *page.wrapped(_choice(record), SENTENCE_LINES, style="bold"),
        *(line for note in first for line in page.wrapped(f"note: {note}", FIRST_NOTE_LINES)),
        *page.wrapped(_numbers(record), NUMBERS_LINES),
        *page.wrapped(summary.lost(record), SENTENCE_LINES),
        *page.wrapped(_advice(record), ADVICE_LINES),
        *page.wrapped(rivals.advantage(record), SENTENCE_LINES),
        *page.wrapped(rivals.tensor_parallelism(record), TENSOR_LINES),
    ]
    lines += _stages(page, summary.stage_groups(record))
    lines += page.wrapped(_legend(record), LEGEND_LINES)
    lines += _collectives(page, record)
    lines += _state(page, summary.state_groups(record), summary.splits_batch(record))
    if record.pinned is not None:
        free_s = record.pinned.free_step_time_s
        without = "no plan was found without them" if free_s is None else f"{text_of_s(free_s)} without them"
        lines += page.wrapped(
            f"{len(record.pinned.pins)} pin(s) on {summary.stage_mesh(record, 0)}: {without}", NOTE_LINES
        )
    lines += _notes(page, [note for note in record.notes if note not in first], LINES - len(lines) - NOTE_LINES)
    lines += page.wrapped(ENDING, NOTE_LINES, style="dim")
    assert len(lines) <= LINES or page.columns < COLUMNS, f"{len(lines)} lines are more than a screen"
    return "\n".join(line.rstrip() for line in lines)


@dataclasses.dataclass(frozen=True, slots=True)
class _Page:
    """The place of the lines."""

    text_format: TextFormat

    @property
    def columns(self) -> int:
        return self.text_format.width(COLUMNS)

    def wrapped(self, text: str, most: int, *, style: str = "", placeholder: str = " ...") -> list[str]:
        """A paragraph of at most so many lines of `COLUMNS` columns, or as much on narrower ones."""
        most = math.ceil(most * max(1.0, COLUMNS / self.columns))
        lines = textwrap.wrap(text, self.columns, max_lines=most, placeholder=placeholder, break_on_hyphens=False)
        return [self.text_format.styled(line, style) for line in lines]

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
        """A table without lines, one line a row where there is the width for it."""
        style = "bold" if self.text_format.color else ""
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=style)
        is_narrow = self.columns < COLUMNS
        for name in columns:
            table.add_column(escape(name), no_wrap=not is_narrow, overflow="fold" if is_narrow else "ellipsis")
        for row in rows:
            table.add_row(*map(escape, row))
        console = TextConsole(COLUMNS, self.text_format)
        console.table(table)
        return console.text().splitlines()

    def table_with_names(self, columns: Sequence[str], rows: Sequence[Sequence[str]], at: int) -> list[str]:
        """A table with names in the column `at`: long ones lose their first parts where the others need the width."""
        widths = [max(map(len, column)) + GAP for column in zip(columns, *rows, strict=True)]
        room = min(NAME_COLUMNS, COLUMNS - sum(widths) + widths[at])
        return self.table(columns, [(*row[:at], _shortened(row[at], room), *row[at + 1 :]) for row in rows])


def _legend(record: PlanRecord) -> str:
    """The sizes of the mesh axes, and how a layout is read; nothing on one device."""
    first = next((s for s in range(summary.num_stages(record)) if summary.stage_mesh(record, s).num_devices > 1), None)
    if first is None:
        return ""
    mesh = summary.stage_mesh(record, first)
    axis = mesh.axis_names[0]
    layout = f'Layout P("{axis}", None): dimension 0 split over axis {axis}, dimension 1 not split.'
    if record.pipeline is not None:
        return (
            f"{layout} What stands before or after the layers counts as one. Means: over all devices. Arguments: on "
            "the device with the most."
        )
    return f"Mesh {mesh}. {layout}"


def _choice(record: PlanRecord) -> str:
    """The sentence on the choice, with as many groups of unlike stages as there is room to describe."""
    opening = f"Plan of {record.step} on {summary.where(record.cluster)}:"
    for named in range(summary.SPLITS_NAMED, 0, -1):
        text = f"{opening} {summary.sentence(record, named)}"
        if len(textwrap.wrap(text, COLUMNS, break_on_hyphens=False)) <= SENTENCE_LINES:
            break
    return text


def _notes(page: _Page, notes: Sequence[str], room: int) -> list[str]:
    """The first notes, each whole where there is room for it, and how many more there are."""
    lines: list[str] = []
    shown = notes[:NOTES_SHOWN]
    for i, note in enumerate(shown):
        behind = len(shown) - i - 1 + (len(notes) > NOTES_SHOWN)  # at least a line for each of the others
        left = max(room - len(lines) - behind, NOTE_LINES) if page.columns >= COLUMNS else len(note)
        lines += page.wrapped(f"note: {note}", left, style="dim", placeholder=" ... (whole: plan.table())")
    return lines + _rest(len(notes) - len(shown), "note", ": plan.table()")


def _numbers(record: PlanRecord) -> str:
    """Step time, memory and arithmetic."""
    predicted = record.predicted
    full = summary.fullest(record)
    memory = f"peak {text_of_bytes(full.peak_bytes)} a device"
    if full.limit_bytes:
        of_limit = full.peak_bytes / full.limit_bytes
        memory += f", {of_limit:.0%} of the {text_of_bytes(full.limit_bytes)} available"
    host = f"; {text_of_bytes(max(predicted.host_bytes))} a device in host memory" if predicted.host_bytes else ""
    step = f"Step {text_of_s(predicted.step_time_s)} predicted{summary.interval_text(record)}"
    return f"{step}; {memory}{host}; {summary.flops_text(predicted)}."


def _advice(record: PlanRecord) -> str:
    """What stands out, as a sentence."""
    text = "; ".join(advice(record))
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _stages(page: _Page, groups: Sequence[StageGroup]) -> list[str]:
    if not groups:
        return []
    rows = []
    for g in groups[:STAGES_SHOWN]:
        rows.append(
            (
                str(g.first) if g.first == g.last else f"{g.first}-{g.last}",
                str(g.layers),
                str(g.mesh).replace(" x ", ", "),
                ", ".join(g.recomputed),
                f"{text_of_s(g.forward_s)} + {text_of_s(g.backward_s)}",
                str(g.in_flight),
                text_of_bytes(g.peak_bytes),
            )
        )
    lines = page.table(("stage", "layers", "mesh", "recomputes", "forward + backward", "in flight", "peak"), rows)
    return [*lines, *_rest(len(groups) - len(rows), "group", " of stages")]


def _collectives(page: _Page, record: PlanRecord) -> list[str]:
    found = modules.costliest(record)
    if not found:
        return ["No collectives."]
    rows = [
        (
            f"{c.count_text} {c.kind} over {axes_text(c.axes)}{c.where_text}",
            c.module or modules.NO_MODULE,
            text_of_bytes(c.sent_bytes),
            text_of_s(c.time_s),
            text_of_s(c.exposed_s),
        )
        for c in found
    ]
    numbers = ["sent a device", "time", "exposed"]
    if record.pipeline is not None:
        numbers = ["mean sent", "mean time", "mean exposed"]
    return page.table_with_names(("most exposed collectives", "module", *numbers), rows, 1)


def _state(page: _Page, groups: Sequence[StateGroup], splits_batch: bool) -> list[str]:
    """The largest groups, and always the largest array of the batch and the one that is split the most: an array that
    is small beside what is done with it may be whole on every device while the batch is split.
    """
    batch = [g for g in groups if g.kind == BATCH]
    told = {batch[0], max(batch, key=lambda g: g.shards)} if batch else set()
    # Where the state is split in part, the largest that is.
    told |= set([g for g in groups if g.kind != BATCH and g.shards > 1][:1])
    largest = [g for g in groups if g not in told][: STATE_SHOWN - len(told)]
    shown = [g for g in groups if g in told or g in largest]
    rows = [
        (
            summary.path_of(g.name),
            g.kind,
            g.count_text,
            f"{'x'.join(map(str, g.shape)) or 'scalar'} {g.dtype}",
            g.lies,
            text_of_bytes(g.device_bytes),
        )
        for g in shown
    ]
    lines = page.table_with_names(("arguments, with those alike", "kind", "n", "shape", "layout", "a device"), rows, 0)
    rest = sum(g.device_bytes for g in groups if g not in shown)
    lines += _rest(len(groups) - len(rows), "group", f" of arguments, {text_of_bytes(rest)}")
    whole = [summary.path_of(g.name) for g in shown if g.kind == BATCH and g.shards == 1 and splits_batch]
    if whole:
        lines += page.wrapped(f"{' and '.join(whole)}: whole on every device, of which each takes its own part.", 1)
    return lines


def _rest(number: int, noun: str, of_what: str) -> list[str]:
    return [f"and {number} more {noun}{'s' * (number > 1)}{of_what}"] if number > 0 else []


def _shortened(name: str, columns: int) -> str:
    """A name without its first parts, where it is longer: the end is a pattern for the same arrays or module."""
    parts = name.split("/")
    while len(parts) > 1 and len("/".join(parts)) > columns:
        parts = parts[1:]
    return "/".join(parts)
