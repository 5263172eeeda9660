"""A launcher as a process of its own, whose output can be read while it runs."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.common.launched import VARIABLES

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """A launcher that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Launcher:
    """A running launcher; it and what it started end with the block."""

    def __init__(self, *arguments: Any, limit_s: float = LIMIT_S, **variables: str) -> None:
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory()  # goes with this object: output is read after the end too
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        # The flags of these tests give a process eight devices.
        environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "XLA_FLAGS")}
        self._begun = time.monotonic()
        with self._files[0].open("w") as stdout, self._files[1].open("w") as stderr:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "autopar.launch", *map(str, arguments)],
                cwd=ROOT,
                env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables,
                stdout=stdout,
                stderr=stderr,
            )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.wait()

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        return self._popen.wait(self._limit_s)


def launch(*arguments: Any, limit_s: float = LIMIT_S, **variables: str) -> Ended:
    with Launcher(*arguments, limit_s=limit_s, **variables) as launcher:
        code = launcher.wait()
        return Ended(code, launcher.stdout, launcher.stderr, launcher.seconds)


def wait_for(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come to it"
        time.sleep(0.02)
