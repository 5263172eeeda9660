"""The values of the page of two plans side by side."""

from __future__ import annotations

import dataclasses

from autopar.plan import summary
from autopar.plan.report.data import Token, tokens_of
from autopar.plan.schema import PlannedValue, PlanRecord
from autopar.plan.summary import Share
from autopar.plan.why_not import ModuleDifference, Quantity, WhyNot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanColumn:
    """What one of the plans is."""

    step: str
    cluster: str
    sentence: str
    step_time_s: float
    peak_bytes: int
    limit_bytes: int | None
    shares: tuple[Share, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentDifference:
    """Arguments that lie differently, layers that are alike as one. An absent one has no tokens."""

    pattern: str
    count: int
    plan: tuple[Token, ...]
    other: tuple[Token, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompareData:
    """The page of two plans."""

    columns: tuple[PlanColumn, PlanColumn]
    verdict: str
    quantities: tuple[Quantity, ...]
    memory: tuple[Quantity, ...]
    modules: tuple[ModuleDifference, ...]
    knows_waits: bool
    arguments: tuple[ArgumentDifference, ...]


def compare_data(plan: PlanRecord, other: PlanRecord) -> CompareData:
    """The values of two plans side by side."""
    found = WhyNot(plan=plan, other=other)
    return CompareData(
        columns=(_column(plan), _column(other)),
        verdict=found.verdict,
        quantities=found.quantities(),
        memory=found.memory(),
        modules=found.modules(),
        knows_waits=found.knows_waits,
        arguments=_arguments(plan, other),
    )


def _column(record: PlanRecord) -> PlanColumn:
    full = summary.fullest(record)
    return PlanColumn(
        step=record.step,
        cluster=record.cluster.name,
        sentence=summary.sentence(record),
        step_time_s=record.predicted.step_time_s,
        peak_bytes=full.peak_bytes,
        limit_bytes=full.limit_bytes,
        shares=summary.shares(record),
    )


def _arguments(plan: PlanRecord, other: PlanRecord) -> tuple[ArgumentDifference, ...]:
    others = {value.path: value for value in other.arguments}
    own = {value.path: value for value in plan.arguments}
    groups: dict[tuple[str, str, str], int] = {}
    for path in dict.fromkeys((*own, *others)):
        lies, differs = _lies(plan, own.get(path)), _lies(other, others.get(path))
        if lies != differs:
            key = (summary.path_of(summary.folded(path)), lies, differs)
            groups[key] = groups.get(key, 0) + 1
    return tuple(
        ArgumentDifference(pattern=pattern, count=count, plan=tokens_of(lies), other=tokens_of(differs))
        for (pattern, lies, differs), count in groups.items()
    )


def _lies(record: PlanRecord, value: PlannedValue | None) -> str:
    """The layout on the devices of its stage; which stage that is follows from the stages of the plan."""
    if value is None:
        return ""
    layout = value.layout.text(summary.stage_mesh(record, value.stage))
    parts = f" in {len(value.stages)} parts on stages" if value.stages else ""
    return layout + parts + (" in host memory" if value.in_host else "")
