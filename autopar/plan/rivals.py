"""The recipes that were weighed beside a plan, and how much faster it is than they are."""

from __future__ import annotations

import dataclasses

from autopar.common.units import text_of_s
from autopar.plan.schema import PlanRecord

BASELINES = "baselines"  # the source of candidates whose names are those of recipes
DATA_PARALLEL = "data parallelism"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A recipe that was weighed beside the plan. `step_time_s` is None where it has none, for the reason in `why`."""

    name: str
    step_time_s: float | None
    why: str


def rivals(record: PlanRecord) -> tuple[Rival, ...]:
    """The recipes that were weighed beside the plan, by name: data parallelism and stages of ZeRO."""
    found = {r.text: (r.step_time_s, r.why) for r in record.rejected if r.source == BASELINES and r.text}
    for trial in record.tried:
        if trial.name:
            found.setdefault(trial.name, (trial.step_time_s, trial.status))
    return tuple(Rival(name=name, step_time_s=s, why=why) for name, (s, why) in found.items())


def chosen_recipe(record: PlanRecord) -> str:
    """The name of the recipe that the search found to be the best plan, or nothing."""
    step_s = record.predicted.step_time_s
    own = (t for t in record.tried if t.name and (t.axis_sizes, t.step_time_s) == (record.axis_sizes, step_s))
    return next((trial.name for trial in own), "")


def advantage(record: PlanRecord) -> str:
    """How much faster the plan is than data parallelism, and than the best recipe, as far as they were weighed."""
    weighed, own, step_s = rivals(record), chosen_recipe(record), record.predicted.step_time_s
    if not weighed:
        return "Neither data parallelism nor another recipe was weighed beside it: plan.why_not(recipe) does that."
    others = [r for r in weighed if r.name != own]
    parts = [f"The fastest found is a standard plan: {own}"] if own else []
    for rival in (r for r in others if r.name == DATA_PARALLEL):
        parts.append(_against(rival, step_s))
    timed = [(r.step_time_s, r) for r in others if r.step_time_s is not None and r.name != DATA_PARALLEL]
    if timed:
        best = min(timed, key=lambda item: item[0])[1]
        parts.append(f"{_against(best, step_s)}, the next best of the baselines")
    elif others and not parts:
        parts += [f"{_against(others[0], step_s)}: plan.why_not(recipe) does that"]
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _against(rival: Rival, step_s: float) -> str:
    if rival.step_time_s is None:
        return f"not compared with {rival.name} ({rival.why})"
    if rival.step_time_s < step_s:
        return f"{rival.name} would take {text_of_s(rival.step_time_s)} ({rival.why})"
    return f"{rival.step_time_s / step_s:.2f}x as fast as {rival.name} ({text_of_s(rival.step_time_s)})"
