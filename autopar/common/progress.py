"""A progress line while a plan is made: the current pass, what is left, and the solver's gap."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status


class Progress:
    """Shows passes on stderr where it is a terminal; keeps how long each took, in seconds, in `spent_s`.

    `total_s` counts a pass within another one once.
    """

    def __init__(self, title: str, *, show: bool = True) -> None:
        self.title = title
        self.spent_s: dict[str, float] = {}
        self.total_s, self._depth = 0.0, 0
        console = Console(stderr=True)
        self._status: Status | None = console.status(title) if show and console.is_terminal else None

    @contextlib.contextmanager
    def pass_(self, name: str) -> Iterator[None]:
        """Runs a pass under its name."""
        begun, self._depth = time.perf_counter(), self._depth + 1
        if self._status is not None:
            self._status.update(f"{self.title}: {name}")
            self._status.start()
        try:
            yield
        finally:
            spent_s, self._depth = time.perf_counter() - begun, self._depth - 1
            self.spent_s[name] = self.spent_s.get(name, 0.0) + spent_s
            self.total_s += spent_s if self._depth == 0 else 0.0
            if self._status is not None:
                self._status.stop()
