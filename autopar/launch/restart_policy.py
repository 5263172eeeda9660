"""Whether the processes are started again after they have ended, how many, and how soon."""

from __future__ import annotations

import dataclasses
import enum

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
