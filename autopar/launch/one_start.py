"""One start of the processes of this host, from its beginning until all of them have ended."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autopar.common.launched import Reached, has_reached, say_lost
from autopar.launch.child_process import ChildProcess
from autopar.launch.first_error import Ended, first_error, how_it_ended, is_follower
from autopar.launch.restart_policy import Outcome, Stop
from autopar.launch.tagged_output import Tagger

_POLL_S = 0.05
_LOOK_S = 1.0  # how often it is looked whether another number of processes is asked for
# After a failure the others end by themselves, with an error that names who failed (runtime/processes/heartbeat.py);
# SIGTERM comes to those that have not.
SETTLE_S = 10.0
STOPPED_AFTER_S = 15.0  # before the others find it silent: they may not have joined yet, and would wait for minutes
# Those that have not joined yet are told by nothing. What fails at its beginning mostly does in all of them: so long
# they may end by themselves, with an error of their own.
OWN_ERROR_S = 1.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """What the launcher still does to end the processes, by the clock of `time.monotonic`.

    SIGTERM comes at `terminate_s`, to those that have not joined the others at `terminate_unjoined_s`.
    """

    stop: Stop
    terminate_s: float | None
    terminate_unjoined_s: float | None = None
    kill_s: float
    number: int = 0  # of the signal that somebody sent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """From SIGTERM to SIGKILL, and how long a process may be stopped; 0: for ever."""

    grace_s: float
    stopped_after_s: float


class OneStart:
    """The processes of one start. `signals` are those that the launcher has got, oldest first."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        first_process: int,
        folder: Path,
        limits: Limits,
        tagger: Tagger,
    ) -> None:
        self._folder, self._tagger = folder, tagger
        self._grace_s, self._stopped_after_s = limits.grace_s, limits.stopped_after_s
        self._ending: Ending | None = None
        self._running = [
            ChildProcess(first_process + i, command, environment, tagger) for i, environment in enumerate(environments)
        ]
        self.ended: dict[int, Ended] = {}

    def run(self, signals: deque[signal.Signals], asked_to_end: Callable[[], str | None]) -> Outcome:
        """Returns when all processes have ended. `asked_to_end` says why they should, and start in another number."""
        count, looked_s = len(self._running), time.monotonic()
        while self._running:
            now = time.monotonic()
            while signals:
                self._pass_on(signals.popleft(), now)
            self._collect(now)
            if self._ending is None and now > looked_s + _LOOK_S:
                looked_s = now
                self._end_stopped()
                if (why := asked_to_end()) is not None:
                    self._tagger.say(f"{why}: ends these with SIGTERM")
                    self._begin_ending(Stop.RESIZE, now, signal.SIGTERM)
            self._carry_out(now)
            time.sleep(_POLL_S)
        return self._outcome(count)

    def _collect(self, now: float) -> None:
        for child in list(self._running):
            ended = child.poll()
            if ended is None:
                continue
            self._running.remove(child)
            self.ended[child.process] = ended
            if (
                ended.code == 0
                or ended.by_launcher
                or (self._ending is not None and self._ending.stop is not Stop.FAILED)
            ):
                continue
            if not is_follower(ended):
                say_lost(self._folder, child.process, f"has ended: {ended.why or how_it_ended(ended.code)}")
            if self._ending is not None:
                continue
            self._ending = Ending(
                stop=Stop.FAILED,
                terminate_unjoined_s=now + OWN_ERROR_S,
                terminate_s=now + SETTLE_S,
                kill_s=now + SETTLE_S + self._grace_s,
            )

    def _end_stopped(self) -> None:
        for child in self._running:
            if self._stopped_after_s and child.stopped_s() > self._stopped_after_s:
                child.end(signal.SIGKILL, f"stopped (SIGSTOP) for {self._stopped_after_s:.0f} s")

    def _pass_on(self, number: signal.Signals, now: float) -> None:
        again = self._ending is not None and self._ending.stop is Stop.SIGNAL and number is signal.SIGINT
        for child in self._running:
            child.send(number)
        if again:  # as a user who presses Ctrl-C twice means it
            self._ending = Ending(stop=Stop.SIGNAL, terminate_s=None, kill_s=now, number=number)
        elif number in _ENDING:
            self._ending = Ending(stop=Stop.SIGNAL, terminate_s=None, kill_s=now + self._grace_s, number=number)

    def _begin_ending(self, stop: Stop, now: float, number: signal.Signals) -> None:
        for child in self._running:
            child.end(number)
        self._ending = Ending(stop=stop, terminate_s=None, kill_s=now + self._grace_s)

    def _carry_out(self, now: float) -> None:
        ending = self._ending
        if ending is None:
            return
        if ending.terminate_unjoined_s is not None and now > ending.terminate_unjoined_s:
            for child in self._running:
                if not has_reached(self._folder, child.process, Reached.JOINED):
                    child.end(signal.SIGTERM)
            self._ending = ending = dataclasses.replace(ending, terminate_unjoined_s=None)
        if ending.terminate_s is not None and now > ending.terminate_s:
            for child in self._running:
                child.end(signal.SIGKILL if child.stopped_s() else signal.SIGTERM)
            self._ending = dataclasses.replace(ending, terminate_s=None)
        elif now > ending.kill_s:
            for child in self._running:
                child.end(signal.SIGKILL)

    def _outcome(self, count: int) -> Outcome:
        ended = list(self.ended.values())
        error = first_error(ended)
        stop = self._ending.stop if self._ending is not None else Stop.DONE
        failed = [e for e in ended if e.code != 0 and not e.by_launcher and not is_follower(e)]
        code = error.code if error is not None else 0
        if code == 0 and self._ending is not None and any(e.by_launcher for e in ended):
            code = 128 + self._ending.number  # the signal came, and they did not end of it
        stepped, joined, has_checkpoint = (
            any(has_reached(self._folder, process, reached) for process in self.ended)
            for reached in (Reached.STEPPED, Reached.JOINED, Reached.CHECKPOINT)
        )
        return Outcome(
            stop=stop,
            processes=count,
            code=code,
            stepped=stepped,
            # A process that is alone does not say that a step has ended; until its number changed it made some.
            is_lost=not has_checkpoint and (stepped or (joined and stop is Stop.RESIZE)),
            is_cause=error is not None and error.printed_by == error.process,
            not_started=sum(not has_reached(self._folder, e.process, Reached.JOINED) for e in failed),
        )
