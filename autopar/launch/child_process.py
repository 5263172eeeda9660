"""One process that the launcher started: it ends when the launcher does, whatever ends that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.launch.first_error import Ended
from autopar.launch.tagged_output import OutputOfProcess, Tagger

_OUTPUT_S = 2.0  # for the last lines of a process that has ended, where others of its group still hold its output
# Asks Linux to kill this process with its parent, and becomes the program. In a Python of its own, and not between fork
# and exec of the launcher, where other threads may hold locks for ever.
_BECOME = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class ChildProcess:
    """A running process, in a process group of its own, so that it gets the signals of a terminal once."""

    def __init__(self, process: int, command: Sequence[str], environment: Mapping[str, str], tagger: Tagger) -> None:
        self.process = process
        self._by_launcher, self._why = False, ""
        self._stopped_since_s: float | None = None
        # Started from the main thread: the signal comes with the end of the thread that started the process.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        streams = self._popen.stdout, self._popen.stderr
        assert streams[0] is not None, "a pipe"
        assert streams[1] is not None, "a pipe"
        self._output = OutputOfProcess(process, streams[0], streams[1], tagger)
        self._ended: Ended | None = None

    def poll(self) -> Ended | None:
        """How it ended; None while it runs."""
        if self._ended is None and (code := self._popen.poll()) is not None:
            ended_s = time.monotonic()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)  # what it has started and left
            self._output.join(_OUTPUT_S)
            self._ended = Ended(
                process=self.process,
                code=code,
                time_s=ended_s,
                why=self._why,
                by_launcher=self._by_launcher and not self._why and -code in (signal.SIGTERM, signal.SIGKILL),
                stderr=self._output.last_of_stderr,
            )
        return self._ended

    def stopped_s(self) -> float:
        """How long it has been seen to be stopped, as SIGSTOP does: then SIGTERM does not reach it."""
        try:
            state = Path(f"/proc/{self._popen.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            state = ""
        now = time.monotonic()
        if state != "T":  # under a debugger it is another one
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now
        return now - self._stopped_since_s if self._stopped_since_s is not None else 0.0

    def send(self, number: signal.Signals) -> None:
        """Sends a signal that somebody else sent the launcher."""
        if self.poll() is None:
            self._popen.send_signal(number)

    def end(self, number: signal.Signals, why: str = "") -> None:
        """Sends a signal of the launcher's own, to the whole group where it is SIGKILL.

        `why` is what the process itself has done; without it another one has failed, or somebody ends them all.
        """
        if self.poll() is not None:
            return
        self._by_launcher, self._why = True, why
        if number is signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.send_signal(number)
