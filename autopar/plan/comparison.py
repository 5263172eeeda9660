"""Two plans of a step beside each other: quantities, parts of the step, memory, modules, collectives, values.

`plan.why_not` and `plan.diff` are its texts, `plan.compare` its page (`autopar.plan.page`). The other layouts of
`plan.explain` and the rows of `autopar.bench` say in short where they lose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from rich.markup import escape
from rich.table import Table

from autopar.common.paths import parts_of
from autopar.common.text import PLAIN, TextConsole, TextFormat, text_of_bytes, text_of_part, text_of_s
from autopar.plan import summary
from autopar.plan.modules import ALL_OF_STEP, CollectiveRow, ModuleCost, by_kind, collective_rows, module_costs, within
from autopar.plan.options import AS_FAST
from autopar.plan.schema import MemoryKind, PlannedValue, PlanRecord

COLUMNS, DIFFERENCE_COLUMNS = 100, 140
MODULES_SHOWN = 8
# Of a loss: the cause or the module that has so much of it is told. Of a peak: what differs by less is alike.
MOST, ALIKE = 0.5, 0.01
TOLD_SHARE = 0.25  # of what a plan is slower by: parts from this on are told beside the largest
ABSENT = "absent"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity under the plan and under the other one, in seconds or bytes."""

    name: str
    unit: str
    plan: float
    other: float

    @property
    def more(self) -> float:
        """How much more the other plan needs."""
        return self.other - self.plan

    @property
    def texts(self) -> tuple[str, str, str]:
        """The quantity under the plan and under the other one, and how much more that is."""
        text_of = text_of_s if self.unit == "s" else text_of_bytes
        return text_of(self.plan), text_of(self.other), text_of(self.more)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDifference:
    """A module under the plan and under the other one."""

    module: str
    plan: ModuleCost
    other: ModuleCost

    @property
    def more_s(self) -> float:
        """Seconds that the module adds more to a step of the other plan."""
        return self.other.seconds - self.plan.seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveDifference:
    """The collectives of a kind under the plan and under the other one; None where there are none."""

    kind: str
    plan: CollectiveRow | None
    other: CollectiveRow | None

    @property
    def more_s(self) -> float:
        """Seconds that a step of the other plan waits longer for them."""
        own_s, other_s = (0.0 if row is None else row.exposed_s for row in (self.plan, self.other))
        return other_s - own_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """Arguments or results that lie differently, those that are alike as one: the layouts and places as text."""

    name: str
    count: int
    plan: str
    other: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans of a step: `plan`, the one that was taken, and `other`, such as that of a recipe or of pins.

    `other` is within the memory limit, or else was planned without one.
    """

    plan: PlanRecord
    other: PlanRecord

    @property
    def excess_bytes(self) -> int:
        """Bytes of a device by which the other plan exceeds the memory limit; 0 where it fits."""
        full = summary.fullest(self.other, self.plan.memory_limit_bytes)
        return max(0, full.peak_bytes - full.limit_bytes) if full.limit_bytes else 0

    @property
    def slower_s(self) -> float:
        """Seconds that a step takes longer under the other plan."""
        return self.other.predicted.step_time_s - self.plan.predicted.step_time_s

    @property
    def is_as_fast(self) -> bool:
        """Whether the two take about the same time."""
        return abs(self.slower_s) <= AS_FAST * self.plan.predicted.step_time_s

    def quantities(self) -> tuple[Quantity, ...]:
        """Step time, memory and bytes sent, and the parts of the step time."""
        return (*self.totals(), *self.parts())

    def totals(self) -> tuple[Quantity, ...]:
        """Step time, peak, host memory where there is some, and bytes sent."""

        def total(name: str, unit: str, of: Callable[[PlanRecord], float]) -> Quantity:
            return Quantity(name=name, unit=unit, plan=of(self.plan), other=of(self.other))

        host = total("host memory", "bytes", lambda record: max(record.predicted.host_bytes, default=0))
        return (
            total("step time", "s", lambda record: record.predicted.step_time_s),
            total("peak of a device", "bytes", lambda record: summary.fullest(record).peak_bytes),
            *([host] if host.plan or host.other else []),
            total("sent by a device", "bytes", lambda record: sum(c.sent_bytes for c in _by_kind(record).values())),
        )

    def parts(self) -> tuple[Quantity, ...]:
        """The parts that the step time consists of."""
        rows = self._beside(lambda record: {part.name: part.seconds for part in summary.shares(record)}, 0.0)
        return tuple(Quantity(name=name, unit="s", plan=a, other=b) for name, a, b in rows)

    def memory(self) -> tuple[Quantity, ...]:
        """The memory at the peak by purpose, of the device that comes nearest to its limit."""
        own, others = _at_peak(self.plan), _at_peak(self.other)
        return tuple(
            Quantity(name=kind.value, unit="bytes", plan=own.get(kind, 0), other=others.get(kind, 0))
            for kind in MemoryKind
            if kind in own or kind in others
        )

    def modules(self) -> tuple[ModuleDifference, ...]:
        """Every module, layers that are alike as one, those on which the other plan loses the most first."""
        rows = self._beside(module_costs, ModuleCost())
        found = [ModuleDifference(module=module, plan=a, other=b) for module, a, b in rows]
        return tuple(sorted(found, key=lambda row: -row.more_s))

    def collectives(self) -> tuple[CollectiveDifference, ...]:
        """The collectives of each kind."""
        rows = self._beside(_by_kind, None)
        return tuple(CollectiveDifference(kind=kind, plan=a, other=b) for kind, a, b in rows)

    def values(self, *, one_by_one: bool = False) -> tuple[ValueDifference, ...]:
        """The arguments and results that lie differently, those that are alike and differ alike as one."""
        groups: dict[tuple[object, ...], list[tuple[str, PlannedValue | None, PlannedValue | None]]] = {}
        arguments = self._beside(lambda record: {value.path: value for value in record.arguments}, None)
        results = self._beside(lambda record: {value.path: value for value in record.results}, None)
        for path, a, b in (*arguments, *results):
            lies, differs = _lies(self.plan, a), _lies(self.other, b)
            if lies != differs:
                parts = parts_of(summary.folded(path))
                key = (path,) if one_by_one else (parts[0], *parts[-2:], lies[:-1], differs[:-1])
                groups.setdefault(key, []).append((path, a, b))
        return tuple(
            ValueDifference(
                name=summary.common_name([path for path, _, _ in rows]),
                count=len(rows),
                plan=_place(self.plan, [a for _, a, _ in rows]),
                other=_place(self.other, [b for _, _, b in rows]),
            )
            for rows in groups.values()
        )

    def differences(self) -> list[tuple[str, str, str]]:
        """All but parts of the step and modules that differ, value by value: the name, and what it is in both plans."""
        rows = [(v.name, v.plan, v.other) for v in self.values(one_by_one=True)]
        return [*self._differing_choices(), *rows]

    def _differing_choices(self) -> list[tuple[str, str, str]]:
        """The recipe, the mesh, totals and collectives where they differ."""
        rows = [
            ("recipe", self.plan.recipe or "none", self.other.recipe or "none"),
            ("mesh", summary.meshes_text(self.plan), summary.meshes_text(self.other)),
            *((q.name, *q.texts[:2]) for q in self.totals()),
            *((c.kind, _sent_text(c.plan), _sent_text(c.other)) for c in self.collectives()),
        ]
        return [row for row in rows if row[1] != row[2]]

    def _beside(self, of: Callable[[PlanRecord], Mapping[str, T]], absent: T) -> list[tuple[str, T, T]]:
        """What both plans have by name: the name, and what is there in each."""
        own, others = of(self.plan), of(self.other)
        return [(name, own.get(name, absent), others.get(name, absent)) for name in dict.fromkeys((*own, *others))]

    def _largest_losses(self, most: int | None = None) -> list[Quantity]:
        """The part of the step that takes the most longer, and those next to it that tell much of the loss."""
        larger = sorted((q for q in self.parts() if q.more > 0), key=lambda q: -q.more)[:most]
        return larger[:1] + [q for q in larger[1:] if q.more >= TOLD_SHARE * self.slower_s]

    @property
    def verdict(self) -> str:
        """Why the other plan lost, in one or two sentences."""
        step_s, other_s = self.plan.predicted.step_time_s, self.other.predicted.step_time_s
        if self.excess_bytes:
            full = summary.fullest(self.other, self.plan.memory_limit_bytes)
            peak, limit = full.peak_bytes, full.limit_bytes or 0
            most = max(self.memory(), key=lambda q: q.more)
            text = (
                f"It does not fit: {text_of_bytes(peak)} of the {text_of_bytes(limit)} that a device has for it, "
                f"{text_of_bytes(self.excess_bytes)} over; most of what it holds more is {most.name} "
                f"({text_of_bytes(most.more)})."
            )
            return f"{text} Without the limit a step would take {text_of_s(other_s)} ({text_of_s(step_s)} here)."
        if self.is_as_fast:
            return f"It takes {text_of_s(other_s)} a step, as the plan does{'' if not self.slower_s else ', to 0.1 %'}."
        if self.slower_s <= 0:
            faster = f"{text_of_s(-self.slower_s)} less than the plan"
            return (
                f"It takes {text_of_s(other_s)} a step, {faster}: the plan was asked for by a recipe or pins, or the "
                "search did not try this, or counts both as equal."
            )
        text = (
            f"It takes {text_of_s(other_s)} a step, {other_s / step_s:.2f} times the {text_of_s(step_s)} of the plan: "
            f"slower by {text_of_s(self.slower_s)}."
        )
        if told := self._largest_losses():
            parts = ", then ".join(f"{q.name}: {text_of_s(q.more)} more" for q in told)
            text += f" The largest part of that is {parts}."
        losing = next(iter(self.modules()), None)
        if losing is None or losing.more_s <= 0:
            return f"{text} No module takes longer."
        return (
            f"{text} Of the modules it loses the most in {losing.module}: {text_of_s(losing.more_s)} more, "
            f"{text_of_s(losing.other.compute_s - losing.plan.compute_s)} of it computing and "
            f"{text_of_s(losing.other.exposed_s - losing.plan.exposed_s)} waiting for sends."
        )

    @property
    def in_short(self) -> str:
        """Where the other plan, which fits, loses, in one sentence."""
        step_s = self.plan.predicted.step_time_s
        if self.is_as_fast:
            return f"as fast, {self._memory_beside}"
        if self.slower_s < 0:
            return f"{text_of_part(-self.slower_s / step_s)} faster"
        times = self.other.predicted.step_time_s / step_s
        text = f"{text_of_part(times - 1)} slower" if times < 2 else f"{times:.3g} times as long"
        if told := self._largest_losses(2):
            parts = [f"{text_of_s(q.more)} more {q.name}{self._cause_of(q)}" for q in told]
            text += f": {' and '.join(parts)}"
        module = self._losing_module
        return f"{text}, most in {module}" if module else text

    @property
    def _memory_beside(self) -> str:
        """How the peaks of two plans that are as fast compare."""
        own, other = (summary.fullest(record).peak_bytes for record in (self.plan, self.other))
        if abs(other - own) <= ALIKE * own:
            return "with as much memory"
        return f"with {text_of_bytes(abs(other - own))} {'less' if other < own else 'more'} memory a device"

    def _cause_of(self, part: Quantity) -> str:
        """What makes up most of what a part of the step takes more, in brackets: the kind of its collectives, or the
        update of the parameters, which each module's row has among the rest.
        """
        if part.name == summary.COLLECTIVES:
            more = {row.kind: row.more_s for row in self.collectives()}
        elif part.name == summary.MEMORY_BOUND:
            more = {"the update of the parameters": _update_s(self.other) - _update_s(self.plan)}
        else:
            return ""
        most = max(more, key=lambda name: more[name], default="")
        return f" ({most})" if most and more[most] >= MOST * part.more else ""

    @property
    def _losing_module(self) -> str:
        """The innermost module with most of the loss, with all inside of it; empty where the loss is spread, and where
        the module is the whole model.
        """
        own, others = (within(module_costs(record)) for record in (self.plan, self.other))
        step_s = self.plan.predicted.step_time_s
        much = {
            path: seconds - own.get(path, 0.0)
            for path, seconds in others.items()
            if seconds - own.get(path, 0.0) >= MOST * self.slower_s and own.get(path, 0.0) < ALL_OF_STEP * step_s
        }
        innermost: tuple[str, ...] = max(much, key=lambda path: (len(path), much[path]), default=())
        return "/".join(innermost)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values, as `json.dumps` takes them."""
        modules = [msgspec.to_builtins(dataclasses.asdict(row)) | {"more_s": row.more_s} for row in self.modules()]
        return {
            "plan": summary.sentence(self.plan),
            "instead": summary.sentence(self.other),
            "recipe": self.other.recipe,
            "verdict": self.verdict,
            "slower_s": self.slower_s,
            "excess_bytes": self.excess_bytes,
            "quantities": [msgspec.to_builtins(dataclasses.asdict(q)) for q in self.quantities()],
            "memory": [msgspec.to_builtins(dataclasses.asdict(q)) for q in self.memory()],
            "modules": modules,
        }

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The verdict, and where the two plans differ as tables."""
        console = TextConsole(COLUMNS, text_format)
        console.line(f"Instead{_under(self.other)}: {summary.sentence(self.other)}")
        console.line(self.verdict, style="bold")
        table = Table("", "plan", "instead", "more")
        for q in (*self.quantities(), *self.memory()):
            table.add_row(*map(escape, (q.name, *q.texts)))
        console.table(table)
        modules = self.modules()
        table = Table("module", "plan", "instead", "more", "waiting", "sent more")
        table.columns[0].overflow = "fold"
        for row in modules[:MODULES_SHOWN]:
            sent = row.other.sent_bytes - row.plan.sent_bytes
            waiting_s = row.other.exposed_s - row.plan.exposed_s
            seconds = map(text_of_s, (row.plan.seconds, row.other.seconds, row.more_s, waiting_s))
            table.add_row(*map(escape, (row.module, *seconds, text_of_bytes(sent))))
        console.table(table)
        if len(modules) > MODULES_SHOWN:
            rest = sum(row.more_s for row in modules[MODULES_SHOWN:])
            console.line(f"and {len(modules) - MODULES_SHOWN} more modules, {text_of_s(rest)} more")
        return console.text()

    __str__ = text

    def difference_text(self, text_format: TextFormat = PLAIN) -> str:
        """What differs as one table; arrays that are alike and differ alike are one row."""
        rows = self._differing_choices()
        rows += [(v.name if v.count == 1 else f"{v.name} ({v.count}x)", v.plan, v.other) for v in self.values()]
        if not rows:
            return "the plans are the same"
        console, table = TextConsole(DIFFERENCE_COLUMNS, text_format), Table("what", "this plan", "other plan")
        for row in rows:
            table.add_row(*map(escape, row))
        console.table(table)
        return console.text()


def _under(record: PlanRecord) -> str:
    """The recipe of a plan."""
    return f", under {record.recipe}" if record.recipe else ""


def _at_peak(record: PlanRecord) -> dict[MemoryKind, int]:
    return record.predicted.memory[summary.fullest(record).number].at_peak


def _by_kind(record: PlanRecord) -> dict[str, CollectiveRow]:
    return {row.kind: row for row in collective_rows(record, record.modules, by_kind)}


def _sent_text(row: CollectiveRow | None) -> str:
    return "none" if row is None else f"{text_of_bytes(row.sent_bytes)}, {row.count_text}{row.where_text}"


def _update_s(record: PlanRecord) -> float:
    return sum(summary.stage_share(record, row.stage) * row.update_time_s for row in record.modules)


def _lies(record: PlanRecord, value: PlannedValue | None) -> tuple[object, ...]:
    """What tells places of values apart; last the stage, which layers that are alike do not have in common."""
    if value is None:
        return (ABSENT, None)
    sizes = summary.stage_mesh(record, value.stage).axis_sizes
    return (sizes, value.layout), value.in_host, value.stages, record.pipeline is not None, value.stage


def _place(record: PlanRecord, values: Sequence[PlannedValue | None]) -> str:
    present = [value for value in values if value is not None]
    return summary.place(record, present) if present else ABSENT
