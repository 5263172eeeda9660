"""Preemption: a scheduler's SIGTERM becomes a checkpoint and a clean end."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from autopar.checkpoint.common_end import CommonEnd
from autopar.common import jax_distributed

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
