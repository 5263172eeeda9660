"""The checked arguments of `Checkpointer.save`: the number of the step, the position of the data, the plan."""

from __future__ import annotations

import json
import operator
from typing import Any, Protocol

from autopar.checkpoint.targets import PlannedStep
from autopar.errors import InvalidArgumentError
from autopar.plan.plan import Plan


class HasPosition(Protocol):
    """Batches with a position that JSON can hold: those of `autopar.data.shard`, or any other with these methods."""

    def position(self) -> Any: ...

    def restore(self, position: Any) -> None: ...


def checked_step_number(step_number: Any) -> int:
    """A number of steps. Raises: InvalidArgumentError."""
    if not hasattr(step_number, "__index__") or operator.index(step_number) < 0:
        raise InvalidArgumentError(
            where="save(step_number, ...)",
            expected="the number of steps done, a whole number from 0",
            got=repr(step_number)[:40],
            hint="such as save(i + 1, state) after step i",
        )
    return operator.index(step_number)


def position_of(data: HasPosition) -> Any:
    """Raises: InvalidArgumentError for a position that JSON cannot hold."""
    position = data.position()
    try:
        return json.loads(json.dumps(position, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            where="save(data=...)",
            expected="a position of numbers, texts, lists and dictionaries, as JSON has them",
            got=f"{position!r:.60} ({error})",
            hint="convert numbers of numpy and jax: int(x)",
        ) from error


def plan_of(plan: Plan | PlannedStep | None) -> Plan | None:
    """Raises: InvalidArgumentError for what is neither a plan nor a step."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if not hasattr(plan, "latest_plan"):
        raise InvalidArgumentError(
            where="save(plan=...)",
            expected="a plan, or a step made by autopar.parallelize",
            got=type(plan).__name__,
            hint="such as plan=train_step",
        )
    return plan.latest_plan
