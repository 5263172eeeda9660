"""The modules of a plan, repeated layers and stages that are alike as one: their costs, and rows of collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from autopar.common.text import LEAST_S, text_of_count
from autopar.plan.schema import ModuleRow, PlanRecord, PredictedCollective
from autopar.plan.summary import exposed_s, first_device, folded, grouped, num_stages, stage_share, stages_text

NO_MODULE = "(no module)"
# Of the step: a module that takes so much is no answer to the question where.
ALL_OF_STEP = 0.9
COSTLIEST_SHOWN = 3
# What the collectives of a row have in common: kind, axes, module; empty where they differ.
Key = tuple[str, tuple[str, ...], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """Some modules on one device in a step; of a pipeline, the mean over its devices.

    `send_s` are all seconds of their collectives, `exposed_s` those in which nothing is computed.
    """

    compute_s: float = 0.0
    send_s: float = 0.0
    exposed_s: float = 0.0
    sent_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """What the modules add to the step."""
        return self.compute_s + self.exposed_s


def cost_of(record: PlanRecord, rows: Sequence[ModuleRow]) -> ModuleCost:
    """What some modules cost together."""
    shares = [(stage_share(record, row.stage), row) for row in rows]
    return ModuleCost(
        compute_s=sum(share * row.compute_time_s for share, row in shares),
        send_s=sum(share * row.send_s for share, row in shares),
        exposed_s=exposed_s(record, rows),
        sent_bytes=sum(share * sum(c.sent_bytes for c in row.collectives) for share, row in shares),
    )


def module_costs(record: PlanRecord) -> dict[str, ModuleCost]:
    """What modules cost, by their names without numbers."""
    alike = grouped(record.modules, lambda row: folded(row.module) or NO_MODULE)
    return {name: cost_of(record, rows) for name, rows in alike.items()}


def within(costs: Mapping[str, ModuleCost]) -> dict[tuple[str, ...], float]:
    """Seconds of modules by path, each with all inside of it; what is in no module is left out."""
    seconds: dict[tuple[str, ...], float] = {}
    for name, cost in costs.items():
        parts = tuple(name.split("/")) if name != NO_MODULE else ()
        for depth in range(1, len(parts) + 1):
            seconds[parts[:depth]] = seconds.get(parts[:depth], 0.0) + cost.seconds
    return seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Collectives of one kind over the same axes in modules that are alike.

    `stages` have them: each of their devices at least `least` and at most `most` in a step. `count` and the other
    numbers are means over all devices of the plan, so that seconds are parts of the step. `exposed_s`: of `time_s`,
    what the step waits for.
    """

    kind: str
    axes: tuple[str, ...]
    module: str
    stages: tuple[int, ...]
    least: float
    most: float
    is_everywhere: bool
    count: float
    sent_bytes: float
    time_s: float
    exposed_s: float

    @property
    def count_text(self) -> str:
        """`1,536`; `12 to 16` where devices have different numbers."""
        least, most = text_of_count(self.least), text_of_count(self.most)
        return most if least == most else f"{least} to {most}"

    @property
    def where_text(self) -> str:
        """The stages, where not all devices have some."""
        return "" if self.is_everywhere else f" in {stages_text(self.stages)}"


@dataclasses.dataclass(slots=True)
class _Sum:
    """A row while it is added up: its stages, and the number of each group of devices."""

    stages: set[int] = dataclasses.field(default_factory=set)
    counts: dict[int, float] = dataclasses.field(default_factory=dict)
    count: float = 0.0
    sent_bytes: float = 0.0
    time_s: float = 0.0
    exposed_s: float = 0.0

    def add(self, c: PredictedCollective, stage: int, group: int, share: float) -> None:
        self.stages.add(stage)
        self.counts[group] = self.counts.get(group, 0.0) + c.count
        self.count += share * c.count
        self.sent_bytes += share * c.sent_bytes
        self.time_s += share * c.time_s
        self.exposed_s += share * c.exposed_s


def by_module(c: PredictedCollective, module: str) -> Key:
    return c.kind, c.axes, folded(module)


def by_axes(c: PredictedCollective, module: str) -> Key:
    return c.kind, c.axes, ""


def by_kind(c: PredictedCollective, module: str) -> Key:
    return c.kind, (), ""


def costliest(record: PlanRecord, most: int = COSTLIEST_SHOWN) -> tuple[CollectiveRow, ...]:
    """The collectives that the step waits for the longest, those of repeated layers together."""
    return collectives_of(record, record.modules)[:most]


def collectives_of(record: PlanRecord, modules: Sequence[ModuleRow]) -> tuple[CollectiveRow, ...]:
    """The collectives of some modules, those of repeated layers together: by what the step waits for, then by time."""

    def rank(row: CollectiveRow) -> tuple[float, float]:
        return -row.exposed_s if row.exposed_s >= LEAST_S else 0.0, -row.time_s

    return tuple(sorted(collective_rows(record, modules, by_module), key=rank))


def collective_rows(
    record: PlanRecord, modules: Sequence[ModuleRow], key_of: Callable[[PredictedCollective, str], Key]
) -> tuple[CollectiveRow, ...]:
    """The collectives of some modules in order of appearance, those with one key as one row."""
    sums: dict[Key, _Sum] = {}
    for row in modules:
        share, group = stage_share(record, row.stage), first_device(record, row.stage)
        for c in row.collectives:
            sums.setdefault(key_of(c, row.module), _Sum()).add(c, row.stage, group, share)
    groups = {first_device(record, stage) for stage in range(num_stages(record))}
    return tuple(
        CollectiveRow(
            kind=kind,
            axes=axes,
            module=module,
            stages=tuple(sorted(total.stages)),
            least=min(total.counts.values()),
            most=max(total.counts.values()),
            is_everywhere=total.counts.keys() == groups,
            count=total.count,
            sent_bytes=total.sent_bytes,
            time_s=total.time_s,
            exposed_s=total.exposed_s,
        )
        for (kind, axes, module), total in sums.items()
    )
