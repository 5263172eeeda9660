"""Rows of a benchmark that run in processes of their own and are kept one by one: a run that is cut off goes on.

A row is a JSON object under a name. A row that failed holds `failure`, why in a line, and is run again the next time.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.machine import markdown

ROOT = Path(__file__).parent.parent
Rows = dict[str, dict[str, Any]]
_LOOKS_S, _STARVES_S = 5.0, 0.1  # how often a process is looked at, and what it uses of the processor while it works
_SHOWN_CHARACTERS = 4000  # of what a process that failed has written


def load(path: Path) -> Rows:
    """The kept rows by name; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, rows: Rows) -> None:
    """Replaces the file as a whole, so that a run that dies meanwhile leaves the old rows or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(rows, indent=1) + "\n")
    written.replace(path)


def is_done(row: Mapping[str, Any] | None) -> bool:
    return row is not None and not row.get("failure")


def in_fresh_process(
    module: str, arguments: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What `python -m module arguments` prints as its last line, a JSON object; or {"failure": why it did not}.

    What a process that fails has written to its stderr goes to this one's.
    """
    command = [sys.executable, "-m", module, *arguments]
    given = {**os.environ, **(environment or {})}
    try:
        child = subprocess.run(
            command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"more than {timeout_s:.0f} s"}
    if child.returncode:
        print(child.stderr[-_SHOWN_CHARACTERS:], file=sys.stderr, flush=True)
        said = [line for line in child.stderr.splitlines() if line and not line.startswith(" ")]
        return {"failure": (said or [f"died with status {child.returncode}"])[-1][:200]}
    return json.loads(child.stdout.splitlines()[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """Rows that are kept one by one, in a file of JSON, and a table of them beside it.

    `cells` are those of the row of a name, among all rows; `head` is what the page says above the table; `order` has
    the names as the table has them, before others that are kept.
    """

    path: Path
    head: str
    columns: Sequence[str]
    order: Sequence[str]
    cells: Callable[[str, Rows], Sequence[str]]

    def rows(self) -> Rows:
        return load(self.path)

    def write(self, rows: Rows) -> None:
        rows = {name: rows[name] for name in dict.fromkeys((*self.order, *rows)) if name in rows}
        keep(self.path, rows)
        table = markdown(self.columns, [self.cells(name, rows) for name in rows])
        self.path.with_suffix(".md").write_text(f"{self.head}\n\n{table}\n")

    def make(self, names: Iterable[str], made: Callable[[str], dict[str, Any]], again: bool = False) -> Rows:
        """Makes the rows that are not there, or all; each is kept at once and printed. Returns all."""
        for name in names:
            rows = self.rows()
            if again or not is_done(rows.get(name)):
                rows[name] = made(name)
                self.write(rows)
            print(" | ".join(self.cells(name, rows)), flush=True)
        return self.rows()


class JobProcess:
    """A process `python -m module arguments` that reads `jobs` and gives each an `answer`; started where there is none.

    A job that it does not survive, that takes more than `timeout_s` of the processor, or none of it for so long, is
    answered by {"failure": why}; the next one finds a new process. Processes that it starts do not count.
    """

    def __init__(self, module: str, arguments: Sequence[str], timeout_s: float) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def run(self, job: Any) -> dict[str, Any]:
        child = self._child if self._child is not None else self._start()
        assert child.stdin is not None
        try:
            child.stdin.write(base64.b64encode(pickle.dumps(job)).decode() + "\n")
            child.stdin.flush()
            line = self._line_of(child)
        except (queue.Empty, BrokenPipeError):
            line = ""
        if line:
            return json.loads(line)
        said = f"process ended with {child.wait()}" if _ends(child) else f"no result after {self._timeout_s:.0f} s"
        self.close()
        return {"failure": said}

    def _line_of(self, child: subprocess.Popen[str]) -> str:
        """Its next line. Raises: queue.Empty. What other programs take of the machine does not count."""
        begun_s = seen_s = processor_s(child.pid)
        idle_since_s = time.monotonic()
        while True:
            try:
                return self._lines.get(timeout=_LOOKS_S)
            except queue.Empty:
                now_s, clock_s = processor_s(child.pid), time.monotonic()
                if now_s > seen_s + _STARVES_S:
                    seen_s, idle_since_s = now_s, clock_s
                if now_s - begun_s > self._timeout_s or clock_s - idle_since_s > self._timeout_s:
                    raise

    def _start(self) -> subprocess.Popen[str]:
        self._child = subprocess.Popen(
            self._command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._lines = queue.Queue()
        threading.Thread(target=_forward, args=(self._child.stdout, self._lines), daemon=True).start()
        return self._child

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = None


def processor_s(pid: int) -> float:
    """Seconds of the processor that all threads of a process have used; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ends(child: subprocess.Popen[str]) -> bool:
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        return False
    return True


def _forward(lines: IO[str], to: queue.Queue[str]) -> None:
    for line in lines:
        if line.startswith("{"):
            to.put(line)
    to.put("")


def jobs() -> Iterator[Any]:
    """What `JobProcess.run` of the process that started this one is given."""
    for line in sys.stdin:
        yield pickle.loads(base64.b64decode(line))


def answer(found: Mapping[str, Any]) -> None:
    print(json.dumps(found), flush=True)
