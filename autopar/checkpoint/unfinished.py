"""A program that ends while a checkpoint is being written waits for it."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 (its own end of the program comes after ours: later ones come first)
import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from autopar.common.spare_threads import ENDS_WITHOUT_THREADS, SpareThreads

logger = logging.getLogger("autopar")

HINT = "call checkpoints.close() before the program ends, or use a with block"
# Orbax writes in threads that it begins one after another. At the end of a program it began 8, for a state of 3 arrays
# as for one of 400 (orbax 0.12.8, Python 3.12).
NUM_SPARE_THREADS = 64

_waits: dict[int, Callable[[], None]] = {}
_spare: SpareThreads | None = None


def wait_at_exit(owner: Any, wait: Callable[[], None]) -> None:
    """Calls `wait` before the threads of Python's pools end, which `atexit` comes after, unless `no_wait` is called."""
    global _spare
    _register_once()
    _waits[id(owner)] = wait
    if ENDS_WITHOUT_THREADS and _spare is None:
        _spare = SpareThreads(NUM_SPARE_THREADS)


def no_wait(owner: Any) -> None:
    """Takes `wait_at_exit` back."""
    global _spare
    _waits.pop(id(owner), None)
    if not _waits and _spare is not None:
        _spare.release()
        _spare = None


@functools.cache
def _register_once() -> None:
    register: Any = threading._register_atexit  # type: ignore[attr-defined]
    register(_wait_for_all)


def _wait_for_all() -> None:
    with contextlib.nullcontext() if _spare is None else _spare.in_use():
        for wait in list(_waits.values()):
            try:
                wait()
            except Exception:  # whatever it was, the other checkpoints are waited for; orbax raises anything
                logger.exception("the last checkpoint could not be written: %s", HINT)
    if _spare is not None:
        _spare.release()
