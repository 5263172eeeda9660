"""Whether the processes are started again after they have ended, how many and how soon, and which host decides it."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from autopar.train.launch.placement import Placement, on_one_host

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


class Stop(enum.Enum):
    """Why all processes of a start have ended."""

    DONE = "done"
    FAILED = "failed"
    SIGNAL = "signal"  # somebody has ended the launcher
    RESIZE = "resize"  # another number of processes was asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a start of the processes ended.

    `code` is the exit code of the first that failed. `stepped`: a step has ended since the start. `not_started` counts
    processes that ended before they had joined the others, by themselves. `is_cause`: `code` is of one that failed
    by itself, not because of another one. `is_lost`: on this host steps have been made, and no checkpoint.
    """

    stop: Stop
    processes: int
    code: int = 0
    stepped: bool = False
    not_started: int = 0
    is_cause: bool = False
    is_lost: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """At most `restarts` starts after failures; with `elastic` of at least so many processes and at most so many."""

    restarts: int = 0
    elastic: tuple[int, int] | None = None

    def clamped(self, processes: int) -> int:
        """A number of processes that is asked for, as far as it is allowed."""
        assert self.elastic is not None, "without elastic the number stays"
        return min(max(processes, self.elastic[0]), self.elastic[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Again:
    """A next start."""

    processes: int
    delay_s: float


def next_start(policy: Policy, outcomes: list[Outcome], requested: int | None) -> Again | int:
    """The next start, or the exit code of the launcher. `requested`: the number of processes that is asked for now.

    The same number starts again, unless another one is asked for. With `elastic`, processes that did not even start
    are left out of the next start: their place may have no memory or no device any more.
    """
    last = outcomes[-1]
    if last.stop is Stop.DONE:
        return 0
    if last.stop is Stop.SIGNAL:
        return last.code
    processes = last.processes
    if policy.elastic is not None:
        processes = policy.clamped(requested if requested is not None else processes - last.not_started)
    if last.stop is Stop.RESIZE:
        return Again(processes=processes, delay_s=0.0)
    if sum(outcome.stop is Stop.FAILED for outcome in outcomes) > policy.restarts:
        return last.code
    return Again(processes=processes, delay_s=backoff_s(outcomes))


def why_not_again(policy: Policy, last: Outcome) -> str:
    """What there is to say where `next_start` is an exit code; empty where nothing was to start again."""
    if last.stop is not Stop.FAILED or not policy.restarts:
        return ""
    return f"the restarts are used up (--restarts {policy.restarts}): ends with exit code {last.code}"


def backoff_s(outcomes: list[Outcome]) -> float:
    """Doubles with each failure in a row that came before a step had ended."""
    in_a_row = 0
    for outcome in reversed(outcomes):
        if outcome.stop is not Stop.FAILED or outcome.stepped:
            break
        in_a_row += 1
    return min(FIRST_BACKOFF_S * 2.0 ** max(0, in_a_row - 1), LONGEST_BACKOFF_S)


# The size file of `--elastic`: how many processes are wanted, in a file that somebody writes at any time.


_READ_BYTES = 100
_NUMBER = re.compile(rb"[+-]?[0-9]{1,9}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A number of processes within the limits. `why_not` says what was asked for where that is without."""

    processes: int
    why_not: str = ""


class SizeFile:
    """Reads the file at `path`. What is no number leaves the number as it is, and is told to `say`, once."""

    def __init__(self, path: Path, policy: Policy, say: Callable[[str], object]) -> None:
        assert policy.elastic is not None, "checked with the arguments"
        self._path, self._policy, self._limits, self._say = path, policy, policy.elastic, say
        self._last = self._said = ""

    def wanted(self, processes: int) -> Wanted | None:
        """The number that is asked for, as far as it is allowed; None where none is. `processes`: how many run."""
        found = self._read()
        if isinstance(found, str):
            # Said at the second look: a file that is just being written is empty, or has a part of its text.
            self._tell(f"{found}; expected a number of processes, such as {processes}: it stays at {processes}")
            return None
        if found is None:
            self._last = self._said = ""
            return None
        allowed = self._policy.clamped(found)
        if allowed == found:
            self._last = self._said = ""
            return Wanted(processes=found)
        why_not = f"{found} are asked for, and --elastic allows {self._limits[0]} to {self._limits[1]}"
        if allowed == processes:
            self._tell(f"{why_not}: it stays at {processes}")
        return Wanted(processes=allowed, why_not=why_not)

    def _read(self) -> int | str | None:
        """The number, what is wrong, or None where there is no file yet."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_READ_BYTES)
        except FileNotFoundError:
            return None if self._path.parent.is_dir() else f"there is no folder {self._path.parent}"
        except OSError as error:
            return f"it cannot be read ({error.strerror})"
        if _NUMBER.fullmatch(data.strip()):
            return int(data)
        return f"read {data[:40].decode(errors='backslashreplace')!r}"

    def _tell(self, text: str) -> None:
        if text == self._last and text != self._said:
            self._say(f"--size-file {self._path}: {text}")
            self._said = text
        self._last = text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The next start on this host, after some seconds."""

    placement: Placement
    delay_s: float


class Hosts(Protocol):
    """The hosts of a program, as one launcher sees them."""

    def next(self, outcome: Outcome | None, is_interrupted: Callable[[], bool]) -> Start | int | None:
        """What follows on the last start of this host: the next, or the launcher's exit code.

        `outcome` is None before the first. None where `is_interrupted` came first: somebody ends this launcher.
        """

    def asked_to_end(self) -> str | None:
        """Why the processes that run now are to end and start in another number; None where they are not."""

    def close(self) -> None: ...


class OneHost:
    """This host alone. `size_file` has the number of processes that is wanted. `say` tells the user."""

    def __init__(self, processes: int, policy: Policy, size_file: Path | None, say: Callable[[str], object]) -> None:
        self._processes, self._policy, self._say = processes, policy, say
        self._size_file = None if size_file is None else SizeFile(size_file, policy, say)
        self._outcomes: list[Outcome] = []

    def next(self, outcome: Outcome | None, is_interrupted: Callable[[], bool]) -> Start | int | None:
        delay_s = 0.0
        if outcome is not None:
            self._outcomes.append(outcome)
            wanted = None if self._size_file is None else self._size_file.wanted(self._processes)
            following = next_start(self._policy, self._outcomes, None if wanted is None else wanted.processes)
            if isinstance(following, int):
                if why := why_not_again(self._policy, outcome):
                    self._say(why)
                return following
            self._processes, delay_s = following.processes, following.delay_s
        return Start(placement=on_one_host(len(self._outcomes), self._processes), delay_s=delay_s)

    def asked_to_end(self) -> str | None:
        wanted = None if self._size_file is None else self._size_file.wanted(self._processes)
        if wanted is None or wanted.processes == self._processes:
            return None
        asked = f"{wanted.why_not}: {wanted.processes}" if wanted.why_not else f"{wanted.processes} are asked for"
        return f"{asked} instead of {self._processes} processes"

    def close(self) -> None:
        pass
