"""Memory that the C library keeps of what was freed."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from typing import Any

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Free memory at the end of a heap that is given back: by default (DEFAULT_TRIM_THRESHOLD), and the most to which glibc
# raises that by itself while a program runs, twice the size up to which it takes blocks from heaps
# (DEFAULT_MMAP_THRESHOLD_MAX).
_GIVEN_BACK_BYTES = 128 << 10
_LARGEST_BLOCK_BYTES = 32 << 20
# By which a user sets these, which then stay.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")

_lock = threading.Lock()
_num_at_work = 0


class GivingBack:
    """From its beginning to its `end`, glibc returns freed memory to the system; without effect on other C libraries.

    Each thread allocates from one of many arenas. What is free at the end of an arena other than the first goes back
    only when something is freed there and more than a threshold is free, and glibc raises this threshold to up to 64
    MiB; `malloc_trim` leaves it. Work that new threads do again and again thus makes resident memory grow until each
    arena has seen the most that it ever needs. Here the threshold is low while such work is done. Afterwards it is at
    glibc's own maximum, as in any program that frees large blocks, so that what a step frees is used by the next one.
    """

    def __init__(self) -> None:
        global _num_at_work
        self._is_at_work = True
        with _lock:
            _num_at_work += 1
            if _num_at_work == 1:
                _set(_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
                _set(_TRIM_THRESHOLD, _GIVEN_BACK_BYTES)

    def end(self) -> None:
        """Also returns what is free between blocks in use. A second call does nothing."""
        global _num_at_work
        with _lock:
            if not self._is_at_work:
                return
            self._is_at_work = False
            _num_at_work -= 1
            if _num_at_work == 0:
                _set(_TRIM_THRESHOLD, 2 * _LARGEST_BLOCK_BYTES)
        give_back_free_memory()


def give_back_free_memory() -> None:
    """Has glibc return what is free between blocks in use; nothing where the C library is another one."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = None if _is_set_by_user() else _function("mallopt")
    if mallopt is not None:
        mallopt(parameter, value)


@functools.cache
def _is_set_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _VARIABLES)


@functools.cache
def _function(name: str) -> Any:
    """A function of glibc; None where the C library is another one, which may have some of that name."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None
