"""Threads begun ahead, for work that begins threads while the program ends, when Python may begin none any more.

Each spare thread waits for one `threading.Thread` that could not begin, and becomes it.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Whether a program that ends may begin no threads any more: Python 3.12.1 begins none, 3.11 and 3.13.0 do.
ENDS_WITHOUT_THREADS = sys.version_info >= (3, 12)
# Since 3.13 `threading` begins a thread together with the handle by which it is joined.
_HAS_HANDLES = sys.version_info >= (3, 13)
_BEGINS = "_start_joinable_thread" if _HAS_HANDLES else "_start_new_thread"


class SpareThreads:
    """Idle threads, until they are used or released."""

    def __init__(self, count: int) -> None:
        self._idle: list[_Spare] = []
        self._lock = threading.Lock()
        with contextlib.suppress(RuntimeError):  # the system may have no more threads: fewer will do
            while len(self._idle) < count:
                self._idle.append(_Spare())

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, a `threading.Thread` that Python does not begin any more runs on a spare one, while there are any."""
        module: Any = threading
        original = getattr(module, _BEGINS)

        def begin(bootstrap: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(bootstrap, *args, **kwargs)
            except RuntimeError:
                with self._lock:
                    if not self._idle:
                        raise
                    spare = self._idle.pop()
                spare.become(bootstrap)

        setattr(module, _BEGINS, begin)
        try:
            yield
        finally:
            setattr(module, _BEGINS, original)

    def release(self) -> None:
        """Ends those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for spare in idle:
            spare.end()


class _Spare:
    def __init__(self) -> None:
        self._bootstrap: Callable[[], None] | None = None
        self._told = threading.Lock()
        self._told.acquire()
        begin: Any = getattr(_thread, _BEGINS.removeprefix("_"))
        if _HAS_HANDLES:
            self._handle = _thread._ThreadHandle()  # type: ignore[attr-defined]  # private: `_HAS_HANDLES`
            begin(self._run, handle=self._handle, daemon=True)
        else:
            begin(self._run, ())

    def _run(self) -> None:
        self._told.acquire()
        if self._bootstrap is not None:
            self._bootstrap()

    def become(self, bootstrap: Any) -> None:
        """Runs what a thread (of which `bootstrap` is a method) begins with; whoever joins it waits for this one."""
        if _HAS_HANDLES:
            bootstrap.__self__._handle = self._handle
        self._bootstrap = bootstrap
        self._told.release()

    def end(self) -> None:
        self._told.release()
