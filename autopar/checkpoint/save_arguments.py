"""The checked arguments of `Checkpointer`: the folder, the number of the step, the step, the plan, the data."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any, Protocol

from autopar.checkpoint.targets import PlannedStep
from autopar.errors import InvalidArgumentError
from autopar.plan.plan import Plan


class HasPosition(Protocol):
    """Batches with a position that JSON can hold: those of `autopar.data.shard`, or any other with these methods."""

    def position(self) -> Any: ...

    def restore(self, position: Any) -> None: ...


def checked_folder(folder: str | Path) -> Path:
    """The absolute path of a folder, which may not exist yet. Raises: InvalidArgumentError."""
    path = Path(folder).absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise InvalidArgumentError(
            where=f"Checkpointer({str(folder)!r})",
            expected="a folder, or a path where one can be made",
            got=f"a file, {there}",
            hint="give a folder of its own to each run: Checkpointer('runs/a')",
        )
    return path


def check_restoring(where: str, *, step: Any, data: Any, create: Any = None) -> None:
    """Raises: InvalidArgumentError for a step that is none, data without a position, a state in place of `create`."""
    if step is not None and not (hasattr(step, "latest_plan") and hasattr(step, "state_places")):
        raise InvalidArgumentError(
            where=f"{where}(step=...)",
            expected="a step made by autopar.parallelize",
            got=type(step).__name__,
            hint="pass what parallelize returned, or leave step out",
        )
    _check_has(where, data, "restore")
    if create is not None and not callable(create):
        raise InvalidArgumentError(
            where=f"{where}(create, ...)",
            expected="the function that makes the state",
            got=type(create).__name__,
            hint=f"pass the function and its arguments, and do not call it: {where}(create, key)",
        )


def _check_has(where: str, data: Any, method: str) -> None:
    if data is not None and not callable(getattr(data, method, None)):
        raise InvalidArgumentError(
            where=f"{where}(data=...)",
            expected="an object with position() and restore(position)",
            got=f"{type(data).__name__}, without {method}",
            hint="pass what autopar.data.shard returned, or an object with both methods; or leave data out",
        )


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
    """Raises: InvalidArgumentError for a position that JSON cannot hold, and for data without one."""
    _check_has("save", data, "position")
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
