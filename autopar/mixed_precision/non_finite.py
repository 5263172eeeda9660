"""Stops a run at a step that is not finite, with the number of the step and the first module that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autopar.calls import nan_check
from autopar.errors import NonFiniteError


def stop_if_not_finite(finite: Any, number: int, step: Callable[..., Any], *args: Any) -> None:
    """Raises: NonFiniteError where `finite` is not true, with the number of the step.

    `finite` is what `Policy.apply_if_finite` returned, so that the state among `args` is as it was before the step. The
    step runs again on it, under `jax_debug_nans`: in a program of one process the error names the operation that made
    the first NaN, or the first infinity, by its module and line. Reading `finite` waits for the step.
    """
    if bool(finite):
        return
    for look in (jax.debug_nans, jax.debug_infs):
        try:
            with look(True), nan_check.inside_too():
                step(*args)
        except NonFiniteError as error:
            raise NonFiniteError(
                where=f"step {number}, {error.where}", expected=error.expected, got=error.got, hint=error.hint
            ) from None
    raise NonFiniteError(
        where=f"step {number}", expected="finite gradients",
        got="some that are not, in a step that is finite when it runs again",
        hint="with a loss scale it was too large, and is smaller now: go on; in several processes return the norm of "
        "the gradients among the metrics, so that what is not finite shows in a result",
    )  # fmt: skip
