"""A search for a plan as it runs: its deadline, its progress line, and garbage collection, made rare."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.status import Status

from autopar.common.text import text_of_s

# The least that one solution of an integer program is given under a limit, so that there is a plan at all.
LEAST_SOLVE_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment of `time.perf_counter()`, and how long before it planning began; inf for both: none."""

    limit_s: float = math.inf
    at_s: float = math.inf

    @staticmethod
    def after(limit_s: float | None) -> Deadline:
        """So many seconds from now; None: none."""
        return Deadline() if limit_s is None else Deadline(limit_s=limit_s, at_s=time.perf_counter() + limit_s)

    @property
    def passed(self) -> bool:
        return time.perf_counter() >= self.at_s

    @property
    def left_s(self) -> float:
        """Negative once it has passed; inf without a limit."""
        return self.at_s - time.perf_counter()

    def solve_s(self, parts: int = 1) -> float:
        """Seconds for one of so many searches that are left; infinite without a limit: they end by proof or rounds."""
        if math.isinf(self.at_s):
            return math.inf
        return max((self.at_s - time.perf_counter()) / parts, LEAST_SOLVE_S)

    @property
    def text(self) -> str:
        """What is said of what was left untried."""
        return f"the {self.limit_s:g} s of time_limit_s were over"


# New objects between two collections, and collections of one generation between two of the next (`gc.set_threshold`).
# Planning makes objects that stay, next to none of them in cycles: with Python's own (700, 10, 10) a third of the time
# of planning GPT-3 goes into looking for those.
SELDOM = (100_000, 50, 50)

_lock = threading.Lock()
_inside = 0
_before = (0, 0, 0)


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
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


BETWEEN_LINES_S = 30.0  # of a log
logger = logging.getLogger("autopar")


class _Line(Protocol):
    def show(self, text: str) -> None: ...

    def hide(self) -> None: ...


class Progress:
    """Shows passes on stderr where it is a terminal, or below the cell of a notebook; elsewhere the logger "autopar"
    has the line at level INFO every `BETWEEN_LINES_S`.

    Keeps how long each pass took, in seconds, in `spent_s`. `total_s` counts a pass within another one once.
    """

    def __init__(self, title: str, *, show: bool = True) -> None:
        self.title = title
        self.spent_s: dict[str, float] = {}
        self.total_s, self._depth = 0.0, 0
        self._line = _line() if show else None
        self._pass, self._num_weighed, self._best_s, self._least_s, self._deadline = "", 0, math.inf, 0.0, Deadline()

    def within(self, name: str) -> Progress:
        """Progress of a part of the pass, which counts anew what it weighs, in the place of this line."""
        part = Progress(f"{self.title}: {', '.join(filter(None, (self._pass, name)))}", show=False)
        part._line = self._line
        return part

    def bounded(self, least_s: float, deadline: Deadline) -> None:
        """The time that the step takes under any plan, and the end of the search."""
        self._least_s, self._deadline = least_s, deadline

    def weighed(self, step_time_s: float, *, fits: bool) -> None:
        """One more candidate was evaluated."""
        self._num_weighed += 1
        if fits:
            self._best_s = min(self._best_s, step_time_s)
        self._update()

    def at(self, name: str) -> None:
        """What the pass is at, such as the third of its programs."""
        self._pass = name
        self._update()

    @contextlib.contextmanager
    def pass_(self, name: str) -> Iterator[None]:
        """Runs a pass under its name."""
        begun, before, self._depth = time.perf_counter(), self._pass, self._depth + 1
        self.at(name)
        try:
            yield
        finally:
            spent_s, self._depth, self._pass = time.perf_counter() - begun, self._depth - 1, before
            self.spent_s[name] = self.spent_s.get(name, 0.0) + spent_s
            self.total_s += spent_s if self._depth == 0 else 0.0
            if self._line is not None and self._depth == 0:
                self._line.hide()

    @property
    def text(self) -> str:
        """The line."""
        parts = [": ".join(filter(None, (self.title, self._pass)))]
        if self._num_weighed:
            parts.append(f"{self._num_weighed} weighed")
        if self._best_s < math.inf:
            least = f", none can take less than {text_of_s(self._least_s)}" if self._least_s else ""
            parts.append(f"best {text_of_s(self._best_s)} a step{least}")
        if self._deadline.left_s < math.inf:
            parts.append(f"{max(0.0, self._deadline.left_s):.0f} s left")
        return "; ".join(parts)

    def _update(self) -> None:
        if self._line is not None:
            self._line.show(self.text)


def _line() -> _Line:
    """The place of the line."""
    console = Console(stderr=True)
    if console.is_jupyter:
        return _InNotebook()
    return _OnTerminal(console) if console.is_terminal else _InLog()


class _OnTerminal:
    def __init__(self, console: Console) -> None:
        self._status = Status("", console=console)

    def show(self, text: str) -> None:
        self._status.update(text.replace("[", r"\["))
        self._status.start()

    def hide(self) -> None:
        self._status.stop()


class _InLog:
    """A line of the log now and then, so that a long search is seen to go on where no line can change."""

    def __init__(self) -> None:
        self._told_s = time.perf_counter()

    def show(self, text: str) -> None:
        now_s = time.perf_counter()
        if now_s - self._told_s >= BETWEEN_LINES_S:
            self._told_s = now_s
            logger.info("%s", text)

    def hide(self) -> None:
        """Lines of a log stay."""


class _InNotebook:
    """Text below the cell that changes in place. Rich would need ipywidgets for it."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import display

        shown = {"text/plain": text}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def hide(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)
