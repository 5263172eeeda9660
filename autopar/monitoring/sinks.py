"""Where the rows of a monitor go: the terminal, TensorBoard, a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from autopar.common.units import text_of_bytes, text_of_s
from autopar.errors import MissingPackageError
from autopar.monitoring.goodput import Goodput
from autopar.monitoring.row import MonitorRow


class Sink(Protocol):
    def write(self, row: MonitorRow) -> None: ...

    def close(self, goodput: Goodput) -> None: ...


class Terminal:
    """A line for each row, on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def write(self, row: MonitorRow) -> None:
        self._console.print(line_of(row), soft_wrap=True)

    def close(self, goodput: Goodput) -> None:
        self._console.print(summary_of(goodput), soft_wrap=True)


class TensorBoard:
    """Event files for TensorBoard in a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                where="autopar.Monitor(log=...)",
                expected="tensorboardX, which writes files for TensorBoard",
                got=str(error),
                hint="pip install tensorboardX",
            ) from error
        self._writer: Any = SummaryWriter(str(folder), write_to_disk=True)

    def write(self, row: MonitorRow) -> None:
        for name, value in row.scalars().items():
            self._writer.add_scalar(name, value, row.step)

    def close(self, goodput: Goodput) -> None:
        self._writer.close()


class Callback:
    """Calls a function with the step and its scalars: `lambda step, values: wandb.log(values, step=step)`."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
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
