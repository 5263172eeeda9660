"""A plan as plain values, for programs: what `print(plan)` says, and the record without what only machines replay."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from autopar.plan import collective_rows, rivals, summary
from autopar.plan.device_limits import fullest
from autopar.plan.schema import PlanRecord

# The decisions are numbers of operations, of use to `Plan.load` only; the timeline is `Plan.trace`'s.
LEFT_OUT = ("decisions", "timeline")


def dict_of(record: PlanRecord) -> dict[str, Any]:
    """Dictionaries, lists, text and numbers, as `json.dumps` takes them. `summary` is what the plan prints."""
    return {
        "summary": {
            "sentence": summary.sentence(record),
            "devices": summary.num_devices(record),
            "step_time_s": record.predicted.step_time_s,
            "peak_bytes": fullest(record).peak_bytes,
            "memory_limit_bytes": record.memory_limit_bytes,
            "shares": _dicts(summary.shares(record)),
            "costliest_collectives": _dicts(collective_rows.costliest(record)),
            "stages": _dicts(summary.stage_groups(record)),
            "arguments": _dicts(summary.state_groups(record)),
            "baselines": _dicts(rivals.rivals(record)),
            "advantage": rivals.advantage(record),
            "recipe": record.recipe,
            "tensor_parallelism": rivals.tensor_parallelism(record),
        },
        "plan": _without(msgspec.to_builtins(record)),
    }


def _dicts(rows: Any) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(dataclasses.asdict(row)) for row in rows]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(inner) for name, inner in value.items() if name not in LEFT_OUT}
    return [_without(inner) for inner in value] if isinstance(value, list) else value
