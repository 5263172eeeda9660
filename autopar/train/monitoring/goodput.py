"""The use of a run's time: steps that count, and what is lost to each other activity, over all restarts.

Goodput is the time of the steps that the run keeps divided by all time since it first began, as in Google's ML Goodput
Measurement. Steps that a restart repeats, and the time between the end of one process and the start of the next, are
lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from autopar.errors import InvalidArgumentError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RUNS_FILE = "runs.jsonl"
REPEATED, BETWEEN_RUNS, OTHER = "repeated steps", "between runs", "other"


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part of a training run: `steps` that ended from `first_step` on, of `step_time_s` each.

    `began_s` and `last_s` are times of the system's clock; `spent_s` are the seconds of other activities by name.
    """

    began_s: float
    last_s: float
    first_step: int
    steps: int
    step_time_s: float
    spent_s: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """`fraction` of `total_s` was spent in steps that the run keeps; `lost_s` is the rest by cause."""

    fraction: float
    total_s: float
    lost_s: Mapping[str, float]


def goodput(runs: Sequence[RunRecord]) -> Goodput:
    """The goodput of runs that went on from one another, in the order in which they began."""
    total_s = max(runs[-1].last_s - runs[0].began_s, 1e-9)
    lost: dict[str, float] = {}
    kept_s = 0.0
    for i, run in enumerate(runs):
        if i + 1 < len(runs):
            lost[BETWEEN_RUNS] = lost.get(BETWEEN_RUNS, 0.0) + max(runs[i + 1].began_s - run.last_s, 0.0)
        # A later run repeats what lies behind its first step; one that ended before a step repeats nothing.
        repeated_from = min((later.first_step for later in runs[i + 1 :] if later.steps), default=None)
        kept = run.steps if repeated_from is None else min(max(repeated_from - run.first_step, 0), run.steps)
        kept_s += kept * run.step_time_s
        if kept < run.steps:
            lost[REPEATED] = lost.get(REPEATED, 0.0) + (run.steps - kept) * run.step_time_s
        for name, spent_s in run.spent_s.items():
            lost[name] = lost.get(name, 0.0) + spent_s
    rest_s = total_s - kept_s - sum(lost.values())
    if rest_s > 0:
        lost[OTHER] = rest_s
    largest_first = dict(sorted(lost.items(), key=lambda item: -item[1]))
    return Goodput(fraction=min(kept_s / total_s, 1.0), total_s=total_s, lost_s=largest_first)


class RunsFile:
    """The runs of a folder, a line of JSON each; that of this run is written anew at each report.

    The file is replaced as a whole, with the lines of others as they are by then, while the folder is locked: neither a
    kill nor another monitor on the same folder loses a line. Where a file system has no locks, a line that another
    monitor replaced by an older one is mended at the next report. `earlier` are the runs that were there at first.

    Raises: InvalidArgumentError for a file of another kind, OSError for a folder that cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RUNS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._run = uuid.uuid4().hex  # what this run's line begins with, whatever it says by now
        with _locked(folder):
            lines = _whole_lines(self._path)
            self.earlier = tuple(_record(line, number, self._path) for number, line in enumerate(lines, 1))
            self._seen = len(lines)
            self._replace(lines)  # what cannot be written is said now, not after hours

    def write(self, run: RunRecord) -> bool:
        """Whether another monitor has added a line since the last call. Raises: OSError."""
        line = msgspec.json.encode({"run": self._run} | msgspec.structs.asdict(run)) + b"\n"
        with self._lock, _locked(self._path.parent):
            lines = _whole_lines(self._path)
            own = [one.startswith(f'{{"run":"{self._run}"'.encode()) for one in lines]
            lines = [line if is_own else one for one, is_own in zip(lines, own, strict=True)]
            self._replace(lines if any(own) else [*lines, line])
            num_others = own.count(False)
            is_shared, self._seen = num_others > self._seen, num_others
        return is_shared

    def _replace(self, lines: Sequence[bytes]) -> None:
        new = self._path.with_name(f".{RUNS_FILE}.{os.getpid()}.{id(self)}")
        try:
            new.write_bytes(b"".join(lines))
            os.replace(new, self._path)
        finally:
            new.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder against other monitors; without effect where the system or the file system has no such lock, or
    where another one, stopped as it wrote, does not let it go.
    """
    if fcntl is None:
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # what is written says so
        yield
        return
    try:
        for _ in range(100):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file; a last one that a kill cut off is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _record(line: bytes, number: int, path: Path) -> RunRecord:
    """Raises: InvalidArgumentError."""
    try:
        return msgspec.json.decode(line, type=RunRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            where=f"{path}, line {number}",
            expected="a run of autopar.Monitor",
            got=repr(line[:60]),
            hint="give the monitor another folder, or remove the file",
        ) from error


def now_s() -> float:
    """The system's clock, which goes on between processes."""
    return time.time()
