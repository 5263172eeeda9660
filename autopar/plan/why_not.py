"""Why another plan of a step lost: the two beside each other in numbers, by part of the step and by module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from autopar.common.text_console import PLAIN, TextConsole, TextFormat
from autopar.common.units import text_of_bytes, text_of_part, text_of_s
from autopar.plan import summary
from autopar.plan.collective_rows import by_kind, collective_rows
from autopar.plan.options import AS_FAST
from autopar.plan.schema import MemoryKind, ModuleRow, PlanRecord

COLUMNS = 100
MODULES_SHOWN = 8
NO_MODULE = "(no module)"
# Of a loss: the cause or the module that has so much of it is told. Of the step: a module that takes so much is no
# answer to the question where. Of a peak: what differs by less is alike.
MOST, ALL_OF_STEP, ALIKE = 0.5, 0.9, 0.01
TOLD_SHARE = 0.25  # of what a plan is slower by: parts from this on are told beside the largest


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """Modules that are alike, on one device in a step (of a pipeline, the mean over its devices).

    `send_s` are all seconds of its collectives, `exposed_s` those in which nothing is computed; None where one of the
    plans that are compared was saved before this was recorded.
    """

    compute_s: float = 0.0
    send_s: float = 0.0
    exposed_s: float | None = 0.0
    sent_bytes: float = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds for which the step waits for its collectives, or could where that is not recorded."""
        return self.send_s if self.exposed_s is None else self.exposed_s

    @property
    def seconds(self) -> float:
        """What the module adds to the step."""
        return self.compute_s + self.waited_s


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
class WhyNot:
    """Two plans of a step: the one that was taken, and `other`, that of a recipe or of pins.

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

    @property
    def knows_waits(self) -> bool:
        """Whether both plans say which of their collectives the step waits for."""
        return all(row.exposed_s is not None for record in (self.plan, self.other) for row in record.modules)

    def quantities(self) -> tuple[Quantity, ...]:
        """Step time, peak and bytes sent, and the parts of the step time that differ."""
        a, b = self.plan.predicted, self.other.predicted
        peaks = [summary.fullest(record).peak_bytes for record in (self.plan, self.other)]
        rows = [
            Quantity(name="step time", unit="s", plan=a.step_time_s, other=b.step_time_s),
            Quantity(name="peak of a device", unit="bytes", plan=peaks[0], other=peaks[1]),
            Quantity(name="sent by a device", unit="bytes", plan=_sent_bytes(self.plan), other=_sent_bytes(self.other)),
        ]
        return (*rows, *self.parts())

    def parts(self) -> tuple[Quantity, ...]:
        """The parts that the step time consists of."""
        own, others = ({s.name: s.seconds for s in summary.shares(record)} for record in (self.plan, self.other))
        return tuple(
            Quantity(name=name, unit="s", plan=own.get(name, 0.0), other=others.get(name, 0.0))
            for name in dict.fromkeys((*own, *others))
        )

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
        is_known = self.knows_waits
        own, others = module_costs(self.plan, is_known), module_costs(self.other, is_known)
        rows = [
            ModuleDifference(module=m, plan=own.get(m, ModuleCost()), other=others.get(m, ModuleCost()))
            for m in dict.fromkeys((*own, *others))
        ]
        return tuple(sorted(rows, key=lambda row: -row.more_s))

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
        larger = sorted((q for q in self.parts() if q.more > 0), key=lambda q: -q.more)
        told = larger[:1] + [q for q in larger[1:] if q.more >= TOLD_SHARE * self.slower_s]
        if told:
            parts = ", then ".join(f"{q.name}: {text_of_s(q.more)} more" for q in told)
            text += f" The largest part of that is {parts}."
        losing = next(iter(self.modules()), None)
        if losing is None or losing.more_s <= 0:
            return f"{text} No module takes longer."
        return (
            f"{text} Of the modules it loses the most in {losing.module}: {text_of_s(losing.more_s)} more, "
            f"{text_of_s(losing.other.compute_s - losing.plan.compute_s)} of it computing and "
            f"{text_of_s(losing.other.waited_s - losing.plan.waited_s)} {self._sends}."
        )

    @property
    def in_short(self) -> str:
        """Where the other plan, which fits, loses, in one sentence."""
        step_s = self.plan.predicted.step_time_s
        if self.is_as_fast:
            return f"as fast, {self._memory_beside}"
        if self.slower_s < 0:
            return f"{text_of_part(-self.slower_s / step_s)} faster"
        larger = sorted((q for q in self.parts() if q.more > 0), key=lambda q: -q.more)
        told = larger[:1] + [q for q in larger[1:2] if q.more >= TOLD_SHARE * self.slower_s]
        times = self.other.predicted.step_time_s / step_s
        text = f"{text_of_part(times - 1)} slower" if times < 2 else f"{times:.3g} times as long"
        if told:
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
        if part.name == summary.COLLECTIVES and self.knows_waits:
            own, others = _waits_by_kind(self.plan), _waits_by_kind(self.other)
            more = {kind: others[kind] - own.get(kind, 0.0) for kind in others}
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
        own, others = (within(module_costs(record, self.knows_waits)) for record in (self.plan, self.other))
        step_s = self.plan.predicted.step_time_s
        much = {
            path: seconds - own.get(path, 0.0)
            for path, seconds in others.items()
            if seconds - own.get(path, 0.0) >= MOST * self.slower_s and own.get(path, 0.0) < ALL_OF_STEP * step_s
        }
        innermost: tuple[str, ...] = max(much, key=lambda path: (len(path), much[path]), default=())
        return "/".join(innermost)

    @property
    def _sends(self) -> str:
        """What the seconds of collectives in the tables are."""
        return "waiting for sends" if self.knows_waits else "sending"

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
            table.add_row(*map(escape, (q.name, *map(text_of(q.unit), (q.plan, q.other, q.more)))))
        console.table(table)
        modules = self.modules()
        table = Table("module", "plan", "instead", "more", self._sends.split()[0], "sent more")
        table.columns[0].overflow = "fold"
        for row in modules[:MODULES_SHOWN]:
            sent = row.other.sent_bytes - row.plan.sent_bytes
            waiting_s = row.other.waited_s - row.plan.waited_s
            seconds = map(text_of_s, (row.plan.seconds, row.other.seconds, row.more_s, waiting_s))
            table.add_row(*map(escape, (row.module, *seconds, text_of_bytes(sent))))
        console.table(table)
        if len(modules) > MODULES_SHOWN:
            rest = sum(row.more_s for row in modules[MODULES_SHOWN:])
            console.line(f"and {len(modules) - MODULES_SHOWN} more modules, {text_of_s(rest)} more")
        if not self.knows_waits:
            console.line(
                "The times of modules include communication that computing hides; the parts of the step do not."
            )
        return console.text()

    __str__ = text


def _under(record: PlanRecord) -> str:
    """The recipe of a plan."""
    return f", under {record.recipe}" if record.recipe else ""


def text_of(unit: str) -> Any:
    """What writes a quantity of a unit."""
    return text_of_s if unit == "s" else text_of_bytes


def _at_peak(record: PlanRecord) -> dict[MemoryKind, int]:
    return record.predicted.memory[summary.fullest(record).number].at_peak


def _sent_bytes(record: PlanRecord) -> float:
    return sum(cost.sent_bytes for cost in module_costs(record, knows_waits=False).values())


def module_costs(record: PlanRecord, knows_waits: bool = True) -> dict[str, ModuleCost]:
    """What modules cost, by their names without numbers. `knows_waits`: the plan says what the step waits for."""
    out: dict[str, ModuleCost] = {}
    none = ModuleCost(exposed_s=0.0 if knows_waits else None)
    for row in record.modules:
        name = summary.folded(row.module) or NO_MODULE
        out[name] = _added(out.get(name, none), row, summary.stage_share(record, row.stage))
    return out


def within(costs: Mapping[str, ModuleCost]) -> dict[tuple[str, ...], float]:
    """Seconds of modules by path, each with all inside of it; what is in no module is left out."""
    seconds: dict[tuple[str, ...], float] = {}
    for name, cost in costs.items():
        parts = tuple(name.split("/")) if name != NO_MODULE else ()
        for depth in range(1, len(parts) + 1):
            seconds[parts[:depth]] = seconds.get(parts[:depth], 0.0) + cost.seconds
    return seconds


def _waits_by_kind(record: PlanRecord) -> dict[str, float]:
    """Seconds that the step waits for the collectives of each kind."""
    return {row.kind: row.waited_s for row in collective_rows(record, record.modules, by_kind)}


def _update_s(record: PlanRecord) -> float:
    return sum(summary.stage_share(record, row.stage) * row.update_time_s for row in record.modules)


def _added(cost: ModuleCost, row: ModuleRow, share: float) -> ModuleCost:
    exposed_s = None if cost.exposed_s is None else cost.exposed_s + share * (row.exposed_s or 0.0)
    return ModuleCost(
        compute_s=cost.compute_s + share * row.compute_time_s,
        send_s=cost.send_s + share * row.send_s,
        exposed_s=exposed_s,
        sent_bytes=cost.sent_bytes + share * sum(c.sent_bytes for c in row.collectives),
    )
