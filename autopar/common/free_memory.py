"""Memory that the C library keeps of what was freed."""

from __future__ import annotations

import ctypes
import sys


def give_back_free_memory() -> None:
    """Has glibc return what it keeps of freed memory to the system; nothing where the C library is another one.

    Each thread allocates from one of many arenas, and an arena keeps what its largest use needed. Work that new threads
    do again and again thus makes resident memory grow until all arenas have seen it.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
