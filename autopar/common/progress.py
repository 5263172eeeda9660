"""A progress line while a plan is made: the current pass, what is left, and the solver's gap."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status


class Progress:
    """Shows passes on stderr where it is a terminal; keeps how long each took, in seconds, in `spent_s`."""

    def __init__(self, title: str, *, show: bool = True) -> None:
        self.title = title
        self.spent_s: dict[str, float] = {}
        console = Console(stderr=True)
        self._status: Status | None = console.status(title) if show and console.is_terminal else None

    @contextlib.contextmanager
    def pass_(self, name: str) -> Iterator[None]:
        """Runs a pass under its name."""
        begun = time.perf_counter()
        if self._status is not None:
            self._status.update(f"{self.title}: {name}")
            self._status.start()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + time.perf_counter() - begun
            if self._status is not None:
                self._status.stop()
