"""The output of several processes as one: whole lines, each behind the number of its process."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

MOST_KEPT_LINES = 400  # of the end of each process's output: where its error is looked for
MOST_LINE_BYTES = 1 << 16  # a longer line is written in parts, so that no process fills the launcher's memory
_READ_BYTES = 1 << 16


class LineSplitter:
    """Splits what arrives in pieces into lines, without their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, data: bytes) -> Iterator[bytes]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        yield from whole
        while len(self._rest) > MOST_LINE_BYTES:
            yield self._rest[:MOST_LINE_BYTES]
            self._rest = self._rest[MOST_LINE_BYTES:]

    def end(self) -> Iterator[bytes]:
        """The last line, where it has no end."""
        if self._rest:
            yield self._rest
        self._rest = b""


def tagged(process: int, line: bytes) -> bytes:
    return b"[%d] %s\n" % (process, line.removesuffix(b"\r"))


class Tagger:
    """Writes the lines of all processes to this process's own output; a line is one write."""

    def __init__(self, write: Callable[[int, bytes], object] | None = None) -> None:
        self._lock = threading.Lock()
        self._write = write or _write_all

    def write(self, to: int, process: int, line: bytes) -> None:
        """Writes to the file descriptor `to`."""
        with self._lock:
            self._write(to, tagged(process, line))

    def say(self, text: str) -> None:
        """A line of the launcher itself, on stderr."""
        with self._lock:
            self._write(2, f"autopar.launch: {text}\n".encode())


def _write_all(to: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(to, data) :]
    except BrokenPipeError:
        pass  # nobody reads: the processes go on


class OutputOfProcess:
    """Reads stdout and stderr of a process until both end, and keeps the end of stderr with its times."""

    def __init__(self, process: int, stdout: IO[bytes], stderr: IO[bytes], tagger: Tagger) -> None:
        self._process, self._tagger = process, tagger
        self._kept: collections.deque[tuple[float, str]] = collections.deque(maxlen=MOST_KEPT_LINES)
        self._threads = [
            threading.Thread(target=self._follow, args=(end, to), name=f"output of process {process}", daemon=True)
            for end, to in ((stdout, 1), (stderr, 2))
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def last_of_stderr(self) -> tuple[tuple[float, str], ...]:
        """(time by `time.monotonic`, line) of the last lines."""
        return tuple(self._kept)

    def _follow(self, end: IO[bytes], to: int) -> None:
        splitter = LineSplitter()
        with end:
            while data := os.read(end.fileno(), _READ_BYTES):
                self._take(to, splitter.lines(data))
        self._take(to, splitter.end())

    def _take(self, to: int, lines: Iterator[bytes]) -> None:
        for line in lines:
            if to == 2:
                self._kept.append((time.monotonic(), line.decode(errors="replace")))
            self._tagger.write(to, self._process, line)
