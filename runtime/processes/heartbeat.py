"""Heartbeat failure detection for the processes of a program.

jax ends all processes when one has been silent for its heartbeat timeout (100 s unless `jax.distributed.initialize` is
told otherwise), or at once, with a C++ stack and nothing else, when process 0 is gone. This is quicker, names the
process, and lets Python say so:

(1) Every process writes a sign of life each second: how many steps it has begun and ended, how much joint work (steps,
    moves of rows), whether it stands still, and whether it is ending.
(2) Process 0 finds one lost that is silent for `LOST_AFTER_S`, that ended on an exception, that ended before a step
    that another has begun, or that is alive but stuck (`progress`); and tells all. The others find process 0 lost where
    its store does not answer for as long, or where the link to it breaks (`coordinator_relay`, after
    `autopar.distributed.initialize`). Under `python -m autopar.launch` all hear from it who has ended.
(3) Every process that hears of it logs it, and raises `ProcessLostError` at its next step. One that hangs in a wait,
    where no exception reaches it, is ended after `GRACE_S`, with the error and where it stood; so is, after `MOST_S`,
    one that computes on.
(4) A process that ends on an exception tells the others, and does not stay in jax's own barrier for them. One that ends
    as it should waits for what is sent to it, then in that barrier, and is watched, and watches, until it has left it.
    From then on nobody needs anything of another, and XLA's clients are not destroyed: a client's destructor waits for
    the processes at the other ends of its connections, for ever where one of them is stopped.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import time
from typing import Any, NoReturn

import jax

from autopar.common import jax_distributed
from autopar.common.jax_distributed import SharedStore
from autopar.common.launched import Reached, lost_by_launcher, say_reached
from autopar.errors import AutoparError
from autopar.runtime.processes.coordinator_relay import CoordinatorLink, when_service_goes
from autopar.runtime.processes.progress import (
    ALIVE,
    Sign,
    Steps,
    Stillness,
    behind,
    differing,
    is_mismatch,
    stuck,
    stuck_after_s,
)
from autopar.runtime.processes.shutdown import GRACE_S, leave, lost_error, mismatch_error, wait_until_stuck

logger = logging.getLogger("autopar")

BEAT_S = 1.0
LOST_AFTER_S = 20.0  # a process that holds Python's lock this long in one call is taken for dead
_ALIVE, _FAILED, _ENDED = "alive", "failed", "ended"
_PREFIX = "autopar/alive/"
_VERDICT = "autopar/lost"
_WARN_EVERY_S = 30.0  # of a process that is behind


class Watch:
    """Shows that this process is there, and knows when another is not, from the start of the program to its end.

    `others` are known to take part from now on: `autopar.distributed.initialize` has met them. Else they are looked for
    as soon as they show themselves.
    """

    def __init__(
        self,
        store: SharedStore,
        process: int,
        others: frozenset[int] = frozenset(),
        link: CoordinatorLink | None = None,
    ) -> None:
        self._store, self._process, self._lost_after_s = store, process, LOST_AFTER_S
        self._joint, self._met, self._beats, self._state = 0, 0, 0, _ALIVE
        self._steps, self._stillness, self._stuck_after_s = Steps(), Stillness(), stuck_after_s()
        begun = time.monotonic()
        self._seen: dict[int, tuple[str, float]] = dict.fromkeys(others, ("", begun))
        self._last_signs: dict[int, tuple[str, str, str]] = {}
        self._answered, self._differ_since, self._warn_at = begun, begun, begun + self._stuck_after_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_told, self._lost_at, self._has_stepped = False, begun, False
        self.lost: AutoparError | None = None
        if process == 0:
            # Each wait for a key that nobody has written takes memory for good (`SharedStore.wait_for`).
            store.set(_VERDICT, "")
        runs = (self._show, self._look)
        self._threads = [threading.Thread(target=run, name="autopar liveness", daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()
        if link is not None:
            link.when_lost(lambda: self._link_broke(link))
        elif process != 0:
            when_service_goes(jax_distributed.coordinator_address(), self._service_went)
        atexit.register(self._end)

    def begin_step(self, name: str, fingerprint: str) -> None:
        """Counts a step; `fingerprint` is the same in all processes that call it. Raises: ProcessLostError."""
        self._steps.begin(name, fingerprint)
        self.begin_joint_work()

    def await_result(self, array: Any) -> None:
        """`array` is there when this process's devices have done the last step; None where it has no such."""
        self._steps.await_result(array)

    def begin_meeting(self, name: str, key: str) -> None:
        """Counts what all processes agree upon before they go on; `key` is the same in all."""
        self._met += 1
        self._steps.note(name, key)

    def begin_joint_work(self) -> None:
        """Counts what all processes have to do together, such as a step, or moving rows. Raises: ProcessLostError."""
        self._joint += 1
        self.check()

    def check(self) -> None:
        """Raises: ProcessLostError."""
        if self.lost is not None:
            self._is_told = True
            raise self.lost

    def ahead(self) -> list[int]:
        """The processes that have begun more joint work than this one, or have ended."""
        return sorted(p for p, s in self._signs().items() if s.joint > self._joint or s.state != _ALIVE)

    def blame(self, error: BaseException) -> NoReturn:
        """Raises what made jax fail: the loss of a process, as soon as it is known, or else the error itself.

        Raises: ProcessLostError.
        """
        self._await_verdict()
        if self.lost is None and (late := self._one_behind()) is not None:
            self.lost = self._error_of(*late)
        if self.lost is None:
            raise error
        self._is_told = True
        raise self.lost from error

    def _one_behind(self) -> tuple[int, str] | None:
        """Another process for which this one may have waited in vain."""
        try:
            late = behind(self._signs())
        except jax.errors.JaxRuntimeError:
            return None
        return None if late is None or late[0] == self._process else late

    def _await_verdict(self) -> None:
        deadline = time.monotonic() + self._lost_after_s + 3 * BEAT_S
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(0.1)

    # The threads

    def _show(self) -> None:
        """Shows signs of life. Writing one may wait for ever, where process 0 is stopped."""
        while not self._is_over():
            try:
                self._beat()
            except jax.errors.JaxRuntimeError:
                return  # the other thread finds the same
            self._stop.wait(BEAT_S / 2)

    def _beat(self) -> None:
        self._steps.look()
        self._stillness.look()
        if self._steps.ended > 0 and not self._has_stepped:
            self._has_stepped = True
            say_reached(Reached.STEPPED)
        with self._lock:
            self._beats += 1
            beats = self._beats
        steps = self._steps
        sign = Sign(
            beats=beats,
            steps=steps.begun,
            joint=self._joint,
            state=self._state,
            met=self._met,
            ended=steps.ended,
            last_ended_s=steps.last_ended_s,
            longest_s=steps.longest_s,
            still_s=self._stillness.seconds,
            recent=steps.recent,
            name=steps.name,
            where=self._stillness.where,
        )
        self._store.set(f"{_PREFIX}{self._process}", sign.text())

    def _signs(self) -> dict[int, Sign]:
        return {int(process): Sign.read(text) for process, text in self._store.below(_PREFIX).items()}

    def _look(self) -> None:
        """Looks for who is lost."""
        while not self._is_over():
            try:
                verdict = lost_by_launcher()
                if verdict is not None and self._process == 0:
                    self._store.set(_VERDICT, verdict)  # for other hosts
                verdict = verdict or (self._judge() if self._process == 0 else self._look_at_the_judge())
                # Read after the sign of process 0, which writes its verdict before it fails of it.
                verdict = self._store.wait_for(_VERDICT, BEAT_S / 2) or verdict
            except jax.errors.JaxRuntimeError as error:
                if self._is_over_soon():
                    return
                verdict = f"0 does not answer any more ({str(error).splitlines()[0][:100]})"
            if verdict is not None:
                self._hear(verdict)
                return
            self._stop.wait(BEAT_S / 2)

    def _is_over(self) -> bool:
        return self._stop.is_set() or jax_distributed.shared_store() is None  # after `jax.distributed.shutdown`

    def _is_over_soon(self) -> bool:
        """The same, some time after all have left jax's barrier, where this process ends."""
        if self._state != _ALIVE:
            self._stop.wait(GRACE_S)
        return self._is_over()

    def _judge(self) -> str | None:
        """The verdict, `number of the process, what is known`, when one is lost."""
        signs, now = self._signs(), time.monotonic()
        furthest = max((sign.steps for sign in signs.values()), default=0)
        verdict = None
        for process in sorted(self._seen.keys() | signs.keys()):
            sign = signs.get(process)
            beats = str(sign.beats) if sign is not None else ""
            if self._seen.get(process, (None, 0.0))[0] != beats:
                self._seen[process] = (beats, now)
            silent_s = now - self._seen[process][1]
            state, steps = (sign.state, sign.steps) if sign is not None else (_ALIVE, 0)
            if state == _FAILED:
                verdict = f"{process} ended on an exception in or after step {steps}"
            elif state == _ENDED and steps < furthest:
                verdict = f"{process} ended after step {steps}, before step {furthest} that others have begun"
            elif silent_s > self._lost_after_s and process != self._process:
                verdict = f"{process} has shown no sign of life for {silent_s:.0f} s, since step {steps}"
        if verdict is None and self._stuck_after_s:
            found = self._differing_for_long(signs, now) or stuck(signs, self._stuck_after_s)
            verdict = None if found is None else f"{found[0]} {found[1]}"
            self._warn_of_one_behind(signs, now)
        if verdict is not None:
            self._store.set(_VERDICT, verdict)
        return verdict

    def _differing_for_long(self, signs: dict[int, Sign], now: float) -> tuple[int, str] | None:
        """What differs, once those that wait for one another have had the time to say more about it."""
        found = differing(signs)
        if found is None:
            self._differ_since = now
        return found if now > self._differ_since + GRACE_S else None

    def _warn_of_one_behind(self, signs: dict[int, Sign], now: float) -> None:
        late = behind(signs)
        if late is None:
            self._warn_at = now + self._stuck_after_s
        elif now > self._warn_at:
            logger.warning("process %d %s; the others wait for it", *late)
            self._warn_at = now + _WARN_EVERY_S

    def _look_at_the_judge(self) -> str | None:
        """The verdict on process 0, which does not judge any more once it has ended."""
        now = time.monotonic()
        sign = self._store.wait_for(f"{_PREFIX}0", BEAT_S / 2)
        if sign is not None or (self._beats > 0 and self._store.wait_for(f"{_PREFIX}{self._process}", BEAT_S / 2)):
            self._answered = time.monotonic()
        shown = Sign.read(sign) if sign is not None else Sign()
        if now - self._answered > self._lost_after_s:
            return f"0 has not answered for {now - self._answered:.0f} s"
        if shown.state == _FAILED:
            return f"0 ended on an exception in or after step {shown.steps}"
        if shown.state == _ENDED and shown.steps < self._steps.begun:
            return f"0 has ended after step {shown.steps}"
        return None

    def _link_broke(self, link: CoordinatorLink) -> None:
        if self._is_over_soon():
            return
        if self._state == _FAILED:
            leave()  # its error is printed, and its main thread may wait for an answer of process 0 for ever
        self._hear(f"0 {link.lost}")

    def _service_went(self, why: str) -> None:
        if self._state == _ALIVE and not self._is_over():
            self._hear(f"0 {why}")

    def _hear(self, verdict: str) -> None:
        number, text = verdict.split(" ", 1)
        process, is_alive = int(number), text.startswith(ALIVE) or is_mismatch(text)
        with self._lock:
            if (process == self._process and not is_alive) or self._state == _FAILED or self.lost is not None:
                return
            self._lost_at = time.monotonic()
            self.lost = self._error_of(process, text)
        logger.error("%s: %s", type(self.lost).__name__, self.lost)
        where = wait_until_stuck(lambda: self._is_told or self._is_over())
        if where is None:
            return  # the main thread ends with the error by itself
        logger.error("process %d waits in vain: ended", self._process)
        self._stay_until_heard()
        leave(self.lost, where)

    def _error_of(self, process: int, text: str) -> AutoparError:
        at = f"step {self._steps.begun}"
        return (mismatch_error if is_mismatch(text) else lost_error)(self._process, process, text, at)

    def _stay_until_heard(self) -> None:
        """Process 0 keeps what is told: it stays until all have had the time to hear it."""
        if self._process == 0:
            time.sleep(max(0.0, self._lost_at + 4 * BEAT_S - time.monotonic()))

    # The end

    def _end(self) -> None:
        error = getattr(sys, "last_value", None)  # what Python has just printed on its way out
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._await_verdict()
        if error is None and self.lost is None and not self._is_over():
            jax_distributed.await_arrays()  # before the others may end
        self._state = _FAILED if error is not None else _ENDED
        if self.lost is not None:
            error, self._is_told = None if self._is_told else self.lost, True
            self._stay_until_heard()
            leave(error)
        if self._is_over():
            return
        if not self._say_so(linger=error is not None):
            leave()  # jax would wait minutes for the others, and then for the one that is lost
        jax.distributed.shutdown()  # here, while the others are watched
        jax_distributed.never_destroy_clients()
        # Python aborts threads that are in C++ when it ends.
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * BEAT_S)

    def _say_so(self, linger: bool) -> bool:
        """Tells the others that this process ends, and whether jax's own end, which waits for all, can follow.

        After an exception it can where the others end too. Process 0 keeps what is told: it stays until they know.
        """
        try:
            self._beat()
            deadline = time.monotonic() + (GRACE_S if linger else 0.0)
            while time.monotonic() < deadline:
                if self._process == 0:
                    self._judge()
                if all(sign.state != _ALIVE for sign in self._signs().values()):
                    return True
                time.sleep(BEAT_S / 4)
        except jax.errors.JaxRuntimeError:
            return False  # process 0 is gone: nobody is left to be told
        return not linger


@functools.cache
def the_watch() -> Watch | None:
    """The watch of this process, begun by the first who asks; None in a program of one process."""
    store = jax_distributed.shared_store()
    if store is None or jax.process_count() == 1:
        return None
    return watch_from_the_start() or Watch(store, jax.process_index())


_from_the_start: list[Watch] = []


def watch_from_the_start() -> Watch | None:
    """The watch that `autopar.distributed.initialize` has begun."""
    return _from_the_start[0] if _from_the_start else None


def begin_watch(store: SharedStore, process: int, num_processes: int, link: CoordinatorLink | None) -> None:
    """Begins the watch of a program that all of its processes have joined."""
    others = frozenset(range(num_processes)) - {process}
    _from_the_start.append(Watch(store, process, others, link))
