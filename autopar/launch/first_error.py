"""Which process failed first, and with what: the others mostly fail because of it."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence

MOST_LINES = 60  # of an error that are shown
_WITHOUT_TRACEBACK = 8  # last lines shown of a process that printed none
RECENT_S = 10.0  # what was printed longer before the end of a process has nothing to do with it
_TRACEBACK = "Traceback (most recent call last):"
_CHAINS = ("The above exception was the direct cause", "During handling of the above exception")
_FOLLOWS = re.compile(r"ProcessLostError: .*got process (\d+) (.*)")
# What JAX's client and collectives say of a connection to a process that has ended, within a hundredth of a second and
# before anybody knows which one it is: JAX's service, Gloo (CPU devices; it may abort the process), NCCL.
_CONNECTION_IS_LOST = re.compile(
    r"the JAX distributed service detected fatal errors|instance of 'gloo::"
    r"|Gloo \w+ failed: .*(Connection (reset|closed)|Broken pipe|[Tt]imed out)"
    r"|remote process exited or there was a network error"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended. `code` is negative for a signal; `time_s` and those of the lines are of one clock.

    `by_launcher`: the launcher ended it because another one had failed. `why`: it ended it for something of its own.
    """

    process: int
    code: int
    time_s: float
    by_launcher: bool = False
    why: str = ""
    stderr: tuple[tuple[float, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstError:
    """The process that failed first. `code` is its exit code as a shell has it, `what` a line.

    `lines` are its error; of a process that was stopped, that of another one, `printed_by`.
    """

    process: int
    code: int
    what: str
    lines: tuple[str, ...]
    printed_by: int


def first_error(ended: Sequence[Ended]) -> FirstError | None:
    """The first failure among processes that have all ended; None where none failed.

    A process whose error names another one follows. Where all that failed follow, the one they name is the first.
    """
    failed = sorted((e for e in ended if e.code != 0 and not e.by_launcher), key=_time_of_error)
    named = [e for e in failed if follows(e) is not None]
    causes = [e for e in failed if not is_follower(e)] or ([] if named else failed)
    if causes:
        first, code = causes[0], causes[0].code
        return FirstError(
            process=first.process,
            code=shell_code(code),
            what=first.why or how_it_ended(code),
            lines=_error(first),
            printed_by=first.process,
        )
    if named:
        process, what = follows(named[0]) or (0, "")
        own = next((e for e in ended if e.process == process), None)
        code = named[0].code if own is None or own.by_launcher or own.code == 0 else own.code
        says = f"{what}, says process {named[0].process}"
        lines = _error(named[0])
        return FirstError(process=process, code=shell_code(code), what=says, lines=lines, printed_by=named[0].process)
    return None


def report(error: FirstError, ended: Sequence[Ended]) -> list[str]:
    """The first error, on top, and one line on the others."""
    others = sorted((e for e in ended if e.process != error.process), key=lambda e: e.process)
    said = [f"{e.process} {_how_another_ended(e)}" for e in others]
    lines = [
        f"process {error.process} failed first: {error.what}",
        *(f"  [{error.printed_by}] {line}" for line in error.lines),
    ]
    return [*lines, *([f"the others: {', '.join(said)}"] if said else [])]


def _how_another_ended(ended: Ended) -> str:
    if not ended.by_launcher:
        return how_it_ended(ended.code)
    own = _error(ended) if _start_of_error(ended) is not None and not is_follower(ended) else ()
    return f"ended by the launcher after an error of its own ({own[-1].strip()})" if own else "ended by the launcher"


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def shell_code(code: int) -> int:
    """The exit code of a process that was killed by a signal as shells have it."""
    return 128 - code if code < 0 else code


def follows(ended: Ended) -> tuple[int, str] | None:
    """The process that this one's error says is lost, and what it says of it; None where it names none, or itself."""
    for _, line in reversed(ended.stderr):
        if named := _FOLLOWS.search(line):
            return None if int(named[1]) == ended.process else (int(named[1]), named[2])
    return None


def is_follower(ended: Ended) -> bool:
    """Whether it failed because of another process, which it may not name."""
    if follows(ended) is not None:
        return True
    return any(_CONNECTION_IS_LOST.search(line) for _, line in ended.stderr)


def _time_of_error(ended: Ended) -> float:
    start = _start_of_error(ended)
    return ended.stderr[start][0] if start is not None else ended.time_s


def _error(ended: Ended) -> tuple[str, ...]:
    """Its traceback, else what it printed shortly before its end."""
    start = _start_of_error(ended)
    if start is None:
        recent = [line for time_s, line in ended.stderr if ended.time_s - time_s <= RECENT_S]
        if not recent and ended.stderr:
            return (f"(it printed nothing on stderr in the {ended.time_s - ended.stderr[-1][0]:.0f} s before)",)
        return tuple(recent[-_WITHOUT_TRACEBACK:])
    error = [line for _, line in ended.stderr[start:]]
    if len(error) > MOST_LINES:  # the cause is at its end
        error = [error[0], "  ...", *error[-MOST_LINES:]]
    age_s = ended.time_s - ended.stderr[start][0]
    return (*([f"(printed {age_s:.0f} s before its end)"] if age_s > RECENT_S else []), *error)


def _start_of_error(ended: Ended) -> int | None:
    """The number of the first line of the last traceback, with those that it came from.

    What a signal killed did not end of an error that it had logged before. An exception may come long before the end of
    its process, which waits until the others know.
    """
    lines = [line for _, line in ended.stderr]
    starts = [i for i, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts or (ended.code < 0 and ended.time_s - ended.stderr[starts[-1]][0] > RECENT_S):
        return None
    start = starts.pop()
    while starts and any(line.startswith(_CHAINS) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return start
