"""Who decides on the next start of the processes: this launcher, or that of node rank 0 for all hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from autopar.launch.placement import Placement, on_one_host
from autopar.launch.restart_policy import Outcome, Policy, next_start, why_not_again
from autopar.launch.size_file import SizeFile


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
