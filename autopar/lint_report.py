"""What `autopar.lint` says of a step: rows, and their text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from autopar.common.text import PLAIN, TextFormat, text_of_bytes, text_of_count, text_of_part, text_of_s
from autopar.plan import summary
from autopar.plan.options import AS_FAST
from autopar.plan.plan import Plan
from autopar.plan.summary import fullest

COLUMNS = 110
CHANGES, SPECS = 3, 8  # that are told; specs of each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Collectives of one kind over the same axes that a line of the code causes; numbers of a step and a device."""

    kind: str
    axes: tuple[str, ...]
    line: str
    count: float
    sent_bytes: float
    time_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Seconds of a step that a device computes a line of the code, which `copies` devices compute alike."""

    line: str
    seconds: float
    copies: int = 1

    @property
    def spare_s(self) -> float:
        """The seconds that each would be spared by computing a part."""
        return self.seconds * (1 - 1 / self.copies)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """`count` alike arrays on a device, `nbytes` in all, of each of which `copies` devices hold the same part."""

    name: str
    array: str
    spec: str
    count: int
    nbytes: int
    copies: int

    @property
    def spare_bytes(self) -> int:
        """The bytes that each would be spared by holding a part."""
        return self.nbytes - self.nbytes // self.copies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the step, which was planned: what a step and the peak come to, and what that saves. `specs` are
    paths, as patterns, and the `PartitionSpec` of each. `is_sum`: it is the first few of the others together.
    """

    text: str
    step_time_s: float
    peak_bytes: int
    less_s: float
    less_bytes: int
    fits: bool
    specs: tuple[tuple[str, str], ...] = ()
    is_sum: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """What is said of a step in its author's shardings; predictions, of one device where they are of devices.

    `plan`: the step in these shardings, which is as XLA runs it where its propagation chooses what the search does.
    `search`: the plan of the search, None where there is none (`why_no_search`) or none was asked for.
    """

    plan: Plan
    cluster: str
    axes: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    collectives: tuple[Sent, ...]
    alike: tuple[Computed, ...]
    whole: tuple[Held, ...]
    peak_line: str
    largest: tuple[Held, ...]
    recomputed: tuple[str, ...]
    scores: tuple[str, ...]
    changes: tuple[Change, ...]
    without_gain: tuple[str, ...]
    search: Plan | None = None
    why_no_search: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The rows as plain values, as `json.dumps` takes them, with the plans as `Plan.to_dict` has them in short."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("plan", "search"):
            fields[name] = None if fields[name] is None else fields[name].to_dict()["summary"]
        return msgspec.to_builtins(fields)

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The report in lines."""
        if text_format.columns is None:
            text_format = dataclasses.replace(text_format, columns=COLUMNS)
        return text_format.broken([*self._opening(), *self._sections(), *self._closing()])

    __str__ = text

    def _opening(self) -> Iterator[str]:
        record, predicted = self.plan.record, self.plan.predicted
        mesh = ", ".join(f"{name}={n}" for name, n in self.axes) or "one device"
        yield f"{record.step} on {self.cluster} ({summary.devices_text(record.cluster)}), mesh {mesh}"
        full = fullest(record)
        over = (full.peak_bytes - full.limit_bytes) if full.limit_bytes else 0
        fits = f", {text_of_bytes(over)} over the limit: it does not fit" if over > 0 else ""
        yield (
            f"As it is: step {text_of_s(predicted.step_time_s)}{summary.interval_text(record)}, peak "
            f"{text_of_bytes(full.peak_bytes)} of {text_of_bytes(full.limit_bytes or 0)} a device{fits}, "
            f"MFU {text_of_part(predicted.mfu)}; {_lower(summary.sentence(record))}"
        )
        if self.search is not None:
            other, peak = self.search.record, fullest(self.search.record).peak_bytes
            yield (
                f"By the search: step {text_of_s(other.predicted.step_time_s)}{summary.interval_text(other)}, peak "
                f"{text_of_bytes(peak)}; {_lower(summary.sentence(other))}"
            )
        elif self.why_no_search:
            yield f"By the search: {self.why_no_search}"
        yield summary.lost(record)
        yield from (f"{note}." for note in self.notes)

    def _sections(self) -> Iterator[str]:
        yield from _section(
            "Collectives, by the time that the step waits for them:",
            [
                f"{text_of_s(row.time_s)}, {text_of_s(row.exposed_s)} of it exposed: {text_of_count(row.count)} "
                f"{row.kind} over {', '.join(row.axes)}, {text_of_bytes(row.sent_bytes)} sent, {row.line}"
                for row in self.collectives
            ],
            "No device sends anything.",
        )
        yield from _section(
            "Computed alike on several devices:",
            [
                f"{text_of_s(row.seconds)} on {row.copies} devices alike, {text_of_s(row.spare_s)} less in parts: "
                f"{row.line}"
                for row in self.alike
            ],
            "Nothing that takes time is computed alike on several devices.",
        )
        yield from _section(
            "Held alike by several devices, though it can be split:",
            [_held(row) + f", {row.copies} devices hold the same: {text_of_bytes(row.spare_bytes)} less in parts"
             for row in self.whole],
            "Nothing large is held alike by several devices.",
        )  # fmt: skip
        yield from _section(
            f"Memory is fullest at {self.peak_line or 'no line of the code'}, largest:", list(map(_held, self.largest))
        )
        yield from _section("Recomputed though memory is free:", self.recomputed)
        yield from _section("Attention that writes its scores to memory:", self.scores)

    def _closing(self) -> Iterator[str]:
        yield ""
        yield "Changes that pay most, each planned:" if self.changes else "No change that was planned pays."
        single = [change for change in self.changes if not change.is_sum]
        for number, change in enumerate(single[:CHANGES], 1):
            yield f"{number}. {change.text}: {self._gain(change)}"
            yield from (f"       {path}: {spec}" for path, spec in change.specs[:SPECS])
            if len(change.specs) > SPECS:
                yield f"       and {len(change.specs) - SPECS} more, which --json has"
        for change in (change for change in self.changes if change.is_sum):
            yield f"Together ({change.text}): {self._gain(change)}"
        if others := single[CHANGES:]:
            yield f"Others that pay: {'; '.join(f'{c.text} ({self._gain(c)})' for c in others)}."
        if self.without_gain:
            yield f"Planned too, without a gain: {'; '.join(self.without_gain)}."

    def _gain(self, change: Change) -> str:
        step_s, parts = self.plan.predicted.step_time_s, []
        if abs(change.less_s) > AS_FAST * step_s:
            word = "less" if change.less_s > 0 else "more"
            part = text_of_part(abs(change.less_s) / step_s)
            parts.append(f"step {text_of_s(change.step_time_s)}, {part} {word}")
        else:
            parts.append("step as fast")
        word = "less" if change.less_bytes >= 0 else "more"
        parts.append(f"peak {text_of_bytes(change.peak_bytes)}, {text_of_bytes(abs(change.less_bytes))} {word}")
        parts += [] if change.fits else ["which does not fit"]
        return ", ".join(parts)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _section(title: str, rows: Sequence[str], nothing: str = "") -> Iterator[str]:
    if rows or nothing:
        yield ""
        yield title if rows else nothing
        yield from (f"  {row}" for row in rows)


def _held(row: Held) -> str:
    times = f", {row.count}x" if row.count > 1 else ""
    return f"{text_of_bytes(row.nbytes)}: {row.name} {row.array} {row.spec}{times}"
