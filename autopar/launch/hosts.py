"""Who decides on the next start of the processes: this launcher, or that of node rank 0 for all hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from autopar.launch.placement import Placement, on_one_host
from autopar.launch.restart_policy import Outcome, Policy, next_start


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
    """This host alone. `size_file` has the number of processes that is wanted."""

    def __init__(self, processes: int, policy: Policy, size_file: Path | None) -> None:
        self._processes, self._policy, self._size_file = processes, policy, size_file
        self._outcomes: list[Outcome] = []

    def next(self, outcome: Outcome | None, is_interrupted: Callable[[], bool]) -> Start | int | None:
        delay_s = 0.0
        if outcome is not None:
            self._outcomes.append(outcome)
            following = next_start(self._policy, self._outcomes, requested(self._policy, self._size_file))
            if isinstance(following, int):
                return following
            self._processes, delay_s = following.processes, following.delay_s
        return Start(placement=on_one_host(len(self._outcomes), self._processes), delay_s=delay_s)

    def asked_to_end(self) -> str | None:
        wanted = requested(self._policy, self._size_file)
        if wanted is None or wanted == self._processes:
            return None
        return f"{wanted} processes are asked for instead of {self._processes}"

    def close(self) -> None:
        pass


def requested(policy: Policy, size_file: Path | None) -> int | None:
    """The number of processes that the file asks for, as far as it is allowed; None where it asks for none."""
    if size_file is None:
        return None
    try:
        return policy.clamped(int(size_file.read_text()))
    except (OSError, ValueError):  # not there, or just being written
        return None
