"""Checks of the arguments of recipes."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import InvalidArgumentError
from autopar.runtime.pipeline.standard_schedules import SCHEDULES


def check_number(
    where: str, number: object, *, expected: str = "a positive whole number", hint: str = "1 cuts nothing"
) -> int:
    """The number. Raises: InvalidArgumentError for what is no positive whole number."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise InvalidArgumentError(where=where, expected=expected, got=repr(number), hint=hint)
    return number


def check_zero_stage(where: str, stage: object) -> None:
    """Raises: InvalidArgumentError for what is no stage of ZeRO."""
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise InvalidArgumentError(
            where=where,
            expected="0, 1, 2 or 3",
            got=repr(stage),
            hint="0 keeps the whole state on every device",
        )


def check_gather(where: str, gather: object, stage: int, gathers: Sequence[str]) -> None:
    """Raises: InvalidArgumentError for a time to gather parameters that there is not, or not in this stage of ZeRO."""
    if gather not in gathers or (gather == "ahead" and stage == 0):
        raise InvalidArgumentError(
            where=where,
            expected=f"{' or '.join(map(repr, gathers))}, the second with zero=1, 2 or 3",
            got=f"{gather!r} with zero={stage}",
            hint="leave it out to gather after the update",
        )


def check_sequence(where: str, kind: object, kinds: Sequence[str]) -> None:
    """Raises: InvalidArgumentError for a way to split positions that is not one of the kinds."""
    if kind not in kinds:
        raise InvalidArgumentError(
            where=where, expected=" or ".join(map(repr, kinds)), got=repr(kind), hint="leave it out"
        )


def check_schedule(where: str, name: object) -> None:
    """Raises: InvalidArgumentError for a name that is not known."""
    if name not in SCHEDULES:
        raise InvalidArgumentError(
            where=where, expected=f"one of {', '.join(SCHEDULES)}", got=repr(name), hint="1f1b is always possible"
        )
