"""Garbage collection during planning: made rare, since each run would traverse millions of objects."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# New objects between two collections, and collections of one generation between two of the next (`gc.set_threshold`).
# Planning makes objects that stay, next to none of them in cycles: with Python's own (700, 10, 10) a third of the time
# of planning GPT-3 goes into looking for those.
SELDOM = (100_000, 50, 50)

_lock = threading.Lock()
_inside = 0
_before = (0, 0, 0)


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Within it cycles are looked for seldom, behind it as before; it may be entered several times at once."""
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = gc.get_threshold()
            if _before[0]:  # 0: the user has turned it off
                gc.set_threshold(*(max(ours, theirs) for ours, theirs in zip(SELDOM, _before, strict=True)))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_before)
