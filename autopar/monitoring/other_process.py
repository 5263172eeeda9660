"""A monitor in a process that does not report."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import jax

from autopar.common import jax_distributed

logger = logging.getLogger("autopar")

_MONITORS = "autopar/monitors/"
_REPORTS = "0"


def say_there_is_one() -> None:
    """Process 0 says to the others that it has a monitor."""
    store = jax_distributed.shared_store()
    if store is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store.set(_MONITORS + _REPORTS, "")


class OtherProcess:
    """Says once that process 0 reports, where process 0 has no monitor; else nobody would."""

    def __init__(self) -> None:
        self._has_looked = False
        self._first: Any = None  # an array

    def called(self, metrics: Any) -> None:
        """Looks as soon as the first step has ended: before, process 0 may be on its way to its monitor."""
        if self._has_looked:
            return
        if self._first is None:
            arrays = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)]
            self._first = min(arrays, key=lambda array: array.size, default=None)
        elif self._first.is_deleted() or self._first.is_ready():
            self.look()

    def look(self) -> None:
        if self._has_looked:
            return
        self._has_looked, self._first = True, None
        store = jax_distributed.shared_store()
        if store is None:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone: others say so
            if _REPORTS not in store.below(_MONITORS):
                logger.warning(
                    "Monitor in process %d: process 0 alone writes rows, its log and its callback, and it has no "
                    "Monitor; make one in every process, or in process 0",
                    jax.process_index(),
                )
