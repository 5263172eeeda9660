"""Who of the processes of a program is still there: each shows a sign of life, process 0 looks who has gone silent.

jax ends all processes when one has been silent for its heartbeat timeout (100 s unless `jax.distributed.initialize` is
told otherwise), or at once when process 0 is gone. This is quicker, names the process, and lets Python say so:

(1) Every process writes a sign of life each second, with the number of steps it has begun and whether it is ending.
(2) Process 0 finds one lost that is silent for `LOST_AFTER_S`, that ended on an exception, or that ended before a step
    that another has begun; and tells all.
(3) Every process that hears of it logs it, and raises `ProcessLostError` at its next step. One that hangs in a wait,
    where no exception reaches it, is ended after `GRACE_S`.
(4) A process that ends on an exception tells the others, and does not stay in jax's own barrier for them.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from typing import NoReturn

import jax

from autopar import jax_compat
from autopar.errors import ProcessLostError
from autopar.jax_compat import SharedStore

logger = logging.getLogger("autopar")

BEAT_S = 1.0
LOST_AFTER_S = 20.0  # a process that holds Python's lock this long in one call is taken for dead
GRACE_S = 5.0
_ALIVE, _FAILED, _ENDED = "alive", "failed", "ended"
_PREFIX = "autopar/alive/"
_VERDICT = "autopar/lost"


class Watch:
    """Shows that this process is there, and knows when another is not. One thread, from the first step to the end."""

    def __init__(self, store: SharedStore, process: int, lost_after_s: float) -> None:
        self._store, self._process, self._lost_after_s = store, process, lost_after_s
        self._steps, self._beats, self._state = 0, 0, _ALIVE
        self._seen: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._told = False
        self.lost: ProcessLostError | None = None
        self._thread = threading.Thread(target=self._run, name="autopar liveness", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def begin_step(self) -> None:
        """Counts a step. Raises: ProcessLostError."""
        self._steps += 1
        self.check()

    def check(self) -> None:
        """Raises: ProcessLostError."""
        if self.lost is not None:
            self._told = True
            raise self.lost

    def ahead(self) -> list[int]:
        """The processes that have begun more steps than this one."""
        signs = {int(process): int(text.split()[1]) for process, text in self._store.below(_PREFIX).items()}
        return sorted(process for process, steps in signs.items() if steps > self._steps)

    def blame(self, error: BaseException) -> NoReturn:
        """Raises what made jax fail: the loss of a process, as soon as it is known, or else the error itself.

        Raises: ProcessLostError.
        """
        self._await_verdict()
        if self.lost is None:
            raise error
        self._told = True
        raise self.lost from error

    def _await_verdict(self) -> None:
        deadline = time.monotonic() + self._lost_after_s + 3 * BEAT_S
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(0.1)

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._beat()
                verdict = self._judge() if self._process == 0 else self._look_at_the_judge()
                verdict = verdict or self._store.wait_for(_VERDICT, BEAT_S / 2)
            except jax.errors.JaxRuntimeError as error:
                verdict = f"0 does not answer any more ({str(error).splitlines()[0][:100]})"
            if verdict is not None:
                self._hear(verdict)
                return
            self._stop.wait(BEAT_S / 2)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"{_PREFIX}{self._process}", f"{self._beats} {self._steps} {self._state}")

    def _judge(self) -> str | None:
        """The verdict, `number of the process, what is known`, when one is lost."""
        signs = {int(process): text.split() for process, text in self._store.below(_PREFIX).items()}
        now = time.monotonic()
        furthest = max((int(steps) for _, steps, _ in signs.values()), default=0)
        verdict = None
        for process, (beats, steps, state) in sorted(signs.items()):
            if self._seen.get(process, ("", 0.0))[0] != beats:
                self._seen[process] = (beats, now)
            silent_s = now - self._seen[process][1]
            if state == _FAILED:
                verdict = f"{process} ended on an exception in or after step {steps}"
            elif state == _ENDED and int(steps) < furthest:
                verdict = f"{process} ended after step {steps}, before step {furthest} that others have begun"
            elif state == _ALIVE and silent_s > self._lost_after_s:
                verdict = f"{process} has shown no sign of life for {silent_s:.0f} s, since step {steps}"
        if verdict is not None:
            self._store.set(_VERDICT, verdict)
        return verdict

    def _look_at_the_judge(self) -> str | None:
        """The verdict on process 0, which does not judge any more once it has ended."""
        _, steps, state = (self._store.wait_for(f"{_PREFIX}0", BEAT_S / 2) or f"0 0 {_ALIVE}").split()
        if state == _FAILED:
            return f"0 ended on an exception in or after step {steps}"
        if state == _ENDED and int(steps) < self._steps:
            return f"0 has ended after step {steps}"
        return None

    def _hear(self, verdict: str) -> None:
        process, text = verdict.split(" ", 1)
        if int(process) == self._process or self._state != _ALIVE:
            return
        self.lost = ProcessLostError(
            where=f"process {self._process}, step {self._steps}",
            expected=f"process {process} to take part",
            got=f"process {process} {text}",
            hint=f"look into the log of process {process}; then start all processes again from the last checkpoint",
        )
        logger.error("%s", self.lost)
        main, stood_still_s, at = threading.main_thread().ident, 0.0, None
        while stood_still_s < GRACE_S and not self._told and not self._stop.is_set():
            frame = sys._current_frames().get(main or 0)
            here = (id(frame), frame.f_lasti if frame is not None else 0)
            stood_still_s = stood_still_s + 0.5 if here == at else 0.0
            at = here
            self._stop.wait(0.5)
        if not self._told and not self._stop.is_set():
            logger.error("process %d waits for process %s in vain: ended", self._process, process)
            _leave()

    # The end

    def _end(self) -> None:
        error = getattr(sys, "last_value", None)  # what Python has just printed on its way out
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._await_verdict()
        self._state = _FAILED if error is not None else _ENDED
        together = self.lost is None and self._say_so(linger=error is not None)
        self._stop.set()
        self._thread.join(2 * BEAT_S)
        if not together:
            _leave()  # jax would wait minutes for the others, and then for the one that is lost

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
                states = [text.split()[2] for text in self._store.below(_PREFIX).values()]
                if all(state != _ALIVE for state in states):
                    return True
                time.sleep(BEAT_S / 4)
        except jax.errors.JaxRuntimeError:
            return False  # process 0 is gone: nobody is left to be told
        return not linger


def _leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@functools.cache
def the_watch() -> Watch | None:
    """The watch of this process, begun by the first who asks; None in a program of one process."""
    store = jax_compat.shared_store()
    if store is None or jax.process_count() == 1:
        return None
    return Watch(store, jax.process_index(), LOST_AFTER_S)
