"""Where the rows of a monitor go: the terminal, TensorBoard, a function of the user's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from autopar.common.units import text_of_bytes, text_of_s
from autopar.errors import MissingPackageError
from autopar.monitoring.goodput import Goodput
from autopar.monitoring.row import MonitorRow

logger = logging.getLogger("autopar")


class Guard:
    """Lets a log fail without the training run: says its first error, once, and tries again with the next row."""

    def __init__(self, what: str, *, is_users_code: bool = False) -> None:
        self.what, self._is_users_code, self._has_said = what, is_users_code, False

    def __call__(self, write: Callable[..., object], *args: Any) -> None:
        try:
            write(*args)
        except Exception as error:
            if not self._has_said:
                self._has_said = True
                text = "%s has failed: %s: %s; training goes on, each row tries it again, and this is said once"
                logger.warning(text, self.what, type(error).__name__, error, exc_info=self._is_users_code)


class Sink(Protocol):
    @property
    def guard(self) -> Guard: ...

    def write(self, row: MonitorRow) -> None: ...

    def close(self, goodput: Goodput) -> None: ...


class Terminal:
    """A line for each row, on stderr."""

    def __init__(self) -> None:
        self.guard = Guard("Monitor(terminal=True)")
        self._console = Console(stderr=True, highlight=False)

    def write(self, row: MonitorRow) -> None:
        self._console.print(line_of(row), soft_wrap=True)

    def close(self, goodput: Goodput) -> None:
        self._console.print(summary_of(goodput), soft_wrap=True)


class TensorBoard:
    """Event files for TensorBoard in a folder. Raises: MissingPackageError, OSError.

    Written at once, in the thread of the caller: the queue of tensorboardX's `SummaryWriter` fills for ever once its
    own thread has died of an error.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.summary import scalar
        except ImportError as error:
            raise MissingPackageError(
                where="autopar.Monitor(log=...)",
                expected="tensorboardX, which writes files for TensorBoard",
                got=str(error),
                hint="pip install tensorboardX",
            ) from error
        self.guard = Guard(f"Monitor(log={str(folder)!r})")
        self._open = lambda: EventsWriter(str(folder / "events"))
        self._event, self._scalar = Event, scalar
        self._file: Any = self._open()

    def write(self, row: MonitorRow) -> None:
        if self._file is None:  # the last one may end in a part of an event, behind which nothing is read
            self._file = self._open()
        file, self._file = self._file, None
        for name, value in row.scalars().items():
            file.write_event(self._event(wall_time=time.time(), step=row.step, summary=self._scalar(name, value)))
        file.flush()
        self._file = file

    def close(self, goodput: Goodput) -> None:
        if self._file is not None:
            self._file.close()


class Callback:
    """Calls a function with the step and its scalars: `lambda step, values: wandb.log(values, step=step)`."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
        self.guard = Guard("Monitor(callback=...)", is_users_code=True)
        self._function = function

    def write(self, row: MonitorRow) -> None:
        self._function(row.step, row.scalars())

    def close(self, goodput: Goodput) -> None:
        pass


def line_of(row: MonitorRow) -> str:
    """A row as one line of text."""
    parts = [f"step {row.step}"]
    parts += [f"{name} {value:.5g}" for name, value in row.metrics.items()]
    if row.step_time_s is not None:
        predicted = "" if row.predicted_s is None else f" (predicted {text_of_s(row.predicted_s)})"
        parts.append(f"{text_of_s(row.step_time_s)}{predicted}")
    if row.tokens_per_s is not None:
        parts.append(f"{row.tokens_per_s:,.0f} tokens/s")
    elif row.examples_per_s is not None:
        parts.append(f"{row.examples_per_s:,.1f} examples/s")
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    if row.memory_bytes is not None:
        parts.append(f"memory {text_of_bytes(row.memory_bytes)}")
    parts.append(f"goodput {row.goodput.fraction:.1%}")
    return "  ".join(parts)


def summary_of(goodput: Goodput) -> str:
    """`goodput 71.2% of 246 s; lost: planning 31 s, compiling 22 s`, of what is at least a hundredth."""
    causes = [f"{name} {text_of_s(s)}" for name, s in goodput.lost_s.items() if s >= 0.01 * goodput.total_s]
    lost = f"; lost: {', '.join(causes)}" if causes else ""
    return f"goodput {goodput.fraction:.1%} of {text_of_s(goodput.total_s)}{lost}"
