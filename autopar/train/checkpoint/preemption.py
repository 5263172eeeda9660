"""The end of a program: a scheduler's SIGTERM becomes a checkpoint and a clean end.

Threads are begun ahead, for work that begins threads while the program ends, when Python may begin none any more. Each
spare thread waits for one `threading.Thread` that could not begin, and becomes it.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax

from autopar.common import jax_distributed
from autopar.common.jax_distributed import SharedStore

# The step after which all processes of a program end, once one of them is told to.
#
# JAX has such an agreement (`multihost_utils.reached_preemption_sync_point`), but the call that asks for it waits with
# Python's lock held, and with it the relay through which the processes talk
# (`autopar.runtime.coordinator`): a process that is told to end at the wrong moment waits for itself.


_PREFIX = "autopar/end"
# How often a process looks whether another one was told to end: a scheduler leaves half a minute or more.
POLL_S = 0.5
# Between two looks for the other processes' steps, while this one does not go on.
_AGREEING_S = 0.02

logger = logging.getLogger("autopar")


class CommonEnd:
    """Lets processes that ask after each of the same steps end after the same one.

    A thread watches the store. When this process or another is told to end, each process holds its next question back
    and writes how many it has asked; when all have, the step after the furthest one is the last. No process waits for
    another's main thread, which may itself wait for a step that this process has not begun. Where one does not answer
    in time, all go on, that one too.
    """

    def __init__(self, store: SharedStore, process: int, processes: int, *, number: int, timeout_s: float = 30) -> None:
        """`number`: of this agreement in the program, the same in all processes."""
        self._store, self._process, self._processes, self._timeout_s = store, process, processes, timeout_s
        self._told_key = f"{_PREFIX}/told/"
        self._steps_key, self._last_key = f"{_PREFIX}/{number}/steps/", f"{_PREFIX}/{number}/last"
        self._asked = 0
        self._step: int | None = None
        self._last: int | None = None
        self._lock = threading.Lock()
        # A queue, which a signal's handler may fill while another one, that it interrupts, does.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._watch, name="autopar: common end", daemon=True).start()

    def tell(self) -> None:
        """This process is to end; from a signal's handler too."""
        self._wake.put(None)

    def close(self) -> None:
        self._closed = True
        self._wake.put(None)

    def reached(self, step_number: int) -> bool:
        """Whether the program ends after this step. A step may be asked about twice, and steps may go back."""
        with self._lock:
            self._asked += step_number != self._step
            self._step = step_number
            return self._last is not None and self._asked >= self._last

    def _watch(self) -> None:
        try:
            while not self._is_woken() and not self._store.below(self._told_key):
                pass
            if not self._closed:
                self._store.set(f"{self._told_key}{self._process}", "")
                self._agree()
        except jax.errors.JaxRuntimeError as error:  # process 0 is gone: the heartbeat ends this one
            logger.debug("no agreement on the last step: %s", error)

    def _is_woken(self) -> bool:
        try:
            self._wake.get(timeout=POLL_S)
        except queue.Empty:
            return False
        return True

    def _agree(self) -> None:
        with self._lock:
            self._store.set(f"{self._steps_key}{self._process}", str(self._asked))
            until_s = time.monotonic() + self._timeout_s
            while len(asked := self._store.below(self._steps_key)) < self._processes and time.monotonic() < until_s:
                time.sleep(_AGREEING_S)
            missing = sorted({*range(self._processes)} - {*map(int, asked)})
            # What the first process finds holds for all: one that answers after another has given up ends with none.
            found = "" if missing else str(1 + max(map(int, asked.values())))
            if last := self._store.set_once(self._last_key, found):
                self._last = int(last)
            else:
                late = f"processes {missing} do not answer" if missing else "this process answered too late"
                logger.warning("told to end, but %s: all go on", late)


# The exit status of a process that a shell saw ended by SIGTERM.
EXIT_STATUS = 128 + signal.SIGTERM

_numbers = itertools.count()


class Preempted(SystemExit):
    """Raised by `Checkpointer.save` after SIGTERM, when the state is on disk: the program ends with status 143.

    `except autopar.checkpoint.Preempted` may do more before the end. `step_number` is that of the checkpoint.
    """

    def __init__(self, step_number: int) -> None:
        super().__init__(EXIT_STATUS)
        self.step_number = step_number


class PreemptionNotice:
    """Whether this program was told to end.

    A handler of this class receives the signal, from its making in the main thread until `close`, in place of JAX's. In
    a program of several processes all learn of it, and end after the same step.
    """

    def __init__(self) -> None:
        self._arrived = False
        self._earlier: Callable[[int, FrameType | None], Any] | int | None = None
        self._listens = False
        self._common_end: CommonEnd | None = None
        process, processes = jax_distributed.process_of_distributed()
        if (store := jax_distributed.shared_store()) is not None and (processes or 1) > 1:
            self._common_end = CommonEnd(store, process, processes, number=next(_numbers))
        if threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGTERM, self._arrive)
            self._listens = True

    def reached(self, step_number: int) -> bool:
        """Whether the program is to end after this step. Every process asks after every step."""
        return self._arrived if self._common_end is None else self._common_end.reached(step_number)

    def close(self) -> None:
        """Gives the signal back to the Python handler that had it; where it was JAX's own, to the system."""
        if self._listens and signal.getsignal(signal.SIGTERM) == self._arrive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._earlier is None else self._earlier)
        self._listens = False
        if self._common_end is not None:
            self._common_end.close()

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived = True
        if self._common_end is not None:
            self._common_end.tell()
        if callable(self._earlier):
            self._earlier(number, frame)


# Whether a program that ends may begin no threads any more: Python 3.12.1 begins none, 3.11 and 3.13.0 do.
ENDS_WITHOUT_THREADS = sys.version_info >= (3, 12)
# Since 3.13 `threading` begins a thread together with the handle by which it is joined.
_HAS_HANDLES = sys.version_info >= (3, 13)
_BEGINS = "_start_joinable_thread" if _HAS_HANDLES else "_start_new_thread"


class SpareThreads:
    """Idle threads, until they are used or released."""

    def __init__(self, count: int) -> None:
        self._idle: list[_Spare] = []
        self._lock = threading.Lock()
        with contextlib.suppress(RuntimeError):  # the system may have no more threads: fewer will do
            while len(self._idle) < count:
                self._idle.append(_Spare())

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, a `threading.Thread` that Python does not begin any more runs on a spare one, while there are any."""
        module: Any = threading
        original = getattr(module, _BEGINS)

        def begin(bootstrap: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(bootstrap, *args, **kwargs)
            except RuntimeError:
                with self._lock:
                    if not self._idle:
                        raise
                    spare = self._idle.pop()
                spare.become(bootstrap)

        setattr(module, _BEGINS, begin)
        try:
            yield
        finally:
            setattr(module, _BEGINS, original)

    def release(self) -> None:
        """Ends those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for spare in idle:
            spare.end()


class _Spare:
    def __init__(self) -> None:
        self._bootstrap: Callable[[], None] | None = None
        self._told = threading.Lock()
        self._told.acquire()
        begin: Any = getattr(_thread, _BEGINS.removeprefix("_"))
        if _HAS_HANDLES:
            self._handle = _thread._ThreadHandle()  # type: ignore[attr-defined]  # private: `_HAS_HANDLES`
            begin(self._run, handle=self._handle, daemon=True)
        else:
            begin(self._run, ())

    def _run(self) -> None:
        self._told.acquire()
        if self._bootstrap is not None:
            self._bootstrap()

    def become(self, bootstrap: Any) -> None:
        """Runs what a thread (of which `bootstrap` is a method) begins with; whoever joins it waits for this one."""
        if _HAS_HANDLES:
            bootstrap.__self__._handle = self._handle
        self._bootstrap = bootstrap
        self._told.release()

    def end(self) -> None:
        self._told.release()
