"""Rows of a benchmark that run in processes of their own and are kept one by one: a run that is cut off goes on.

A row is a JSON object under a name. A row that failed holds `failure`, why in a line, and is run again the next time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.machine import markdown

ROOT = Path(__file__).parent.parent
Rows = dict[str, dict[str, Any]]
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
    """A process that runs `work` on one job after the other; started where there is none.

    A job that it does not survive, or that takes more than `timeout_s`, comes to {"failure": why}; the next one finds a
    new process.
    """

    def __init__(self, work: Callable[[Any], dict[str, Any]], timeout_s: float) -> None:
        self._work, self._timeout_s = work, timeout_s
        self._child: BaseProcess | None = None

    def run(self, job: Any) -> dict[str, Any]:
        if self._child is None:
            fresh = multiprocessing.get_context("spawn")
            self._pipe, other = fresh.Pipe()
            self._child = fresh.Process(target=_serve, args=(self._work, other), daemon=True)
            self._child.start()
            other.close()
        try:
            self._pipe.send(job)
            if self._pipe.poll(self._timeout_s):
                return self._pipe.recv()
            failure = f"no result after {self._timeout_s:.0f} s"
        except (EOFError, OSError):
            self._child.join()
            failure = f"process ended with {self._child.exitcode}"
        self.close()
        return {"failure": failure}

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
        self._child = None


def _serve(work: Callable[[Any], dict[str, Any]], pipe: Connection) -> None:
    with contextlib.suppress(EOFError):  # where the process that started this one has ended
        while True:
            pipe.send(work(pipe.recv()))
