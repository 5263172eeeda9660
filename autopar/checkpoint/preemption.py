"""Preemption: a scheduler's SIGTERM becomes a checkpoint and a clean end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from autopar.common import jax_distributed

# The exit status of a process that a shell saw ended by SIGTERM.
EXIT_STATUS = 128 + signal.SIGTERM


class Preempted(SystemExit):
    """Raised by `Checkpointer.save` after SIGTERM, when the state is on disk: the program ends with status 143.

    `except autopar.checkpoint.Preempted` may do more before the end. `step_number` is that of the checkpoint.
    """

    def __init__(self, step_number: int) -> None:
        super().__init__(EXIT_STATUS)
        self.step_number = step_number


class PreemptionNotice:
    """Whether this program was told to end.

    In a program of several processes JAX receives the signal, and all processes learn of it at the same step. In one
    process a handler of this class does, from its making in the main thread until `close`.
    """

    def __init__(self) -> None:
        self._arrived = False
        self._earlier: Callable[[int, FrameType | None], Any] | int | None = None
        self._listens = False
        if not jax_distributed.has_preemption_service() and threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGTERM, self._arrive)
            self._listens = True

    def reached(self, step_number: int) -> bool:
        """Whether the program is to end after this step. Every process asks after every step."""
        return self._arrived or jax_distributed.reached_preemption(step_number)

    def close(self) -> None:
        """Gives the signal back to whoever had it."""
        if self._listens and signal.getsignal(signal.SIGTERM) == self._arrive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._earlier is None else self._earlier)
        self._listens = False

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived = True
        if callable(self._earlier):
            self._earlier(number, frame)
