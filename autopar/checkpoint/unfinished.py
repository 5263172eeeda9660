"""A program that ends while a checkpoint is being written waits for it."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 (its own end of the program comes after ours: later ones come first)
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("autopar")

# Orbax writes in threads that it begins one after another, and from Python 3.12 on a program that ends begins none.
HINT = "call checkpoints.close() before the program ends, or use a with block"

_waits: dict[int, Callable[[], None]] = {}


def wait_at_exit(owner: Any, wait: Callable[[], None]) -> None:
    """Calls `wait` before the threads of Python's pools end, which `atexit` comes after, unless `no_wait` is called."""
    _register_once()
    _waits[id(owner)] = wait


def no_wait(owner: Any) -> None:
    """Takes `wait_at_exit` back."""
    _waits.pop(id(owner), None)


@functools.cache
def _register_once() -> None:
    register: Any = threading._register_atexit  # type: ignore[attr-defined]
    register(_wait_for_all)


def _wait_for_all() -> None:
    for wait in list(_waits.values()):
        try:
            wait()
        except Exception:
            logger.exception("the last checkpoint could not be written: %s", HINT)
