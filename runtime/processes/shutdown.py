"""How a process ends when it waits for another one in vain: with an error, and where it stood."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from autopar.errors import ProcessLostError, ProcessMismatchError

GRACE_S = 5.0
MOST_S = 25.0


def lost_error(here: int, lost: int, what: str, at: str) -> ProcessLostError:
    return ProcessLostError(
        where=f"process {here}, {at}",
        expected=f"process {lost} to take part",
        got=f"process {lost} {what}",
        hint=f"look into the log of process {lost}; then start all processes again from the last checkpoint",
    )


def mismatch_error(here: int, other: int, what: str, at: str) -> ProcessMismatchError:
    return ProcessMismatchError(
        where=f"process {here}, {at}",
        expected="all processes to call the same steps in the same order",
        got=f"process {other} {what}",
        hint="what is called must not depend on jax.process_index()",
    )


def wait_until_stuck(is_told: Callable[[], bool]) -> str | None:
    """Where the main thread stands, once it has stood still for `GRACE_S` or `MOST_S` are over; None: it was told."""
    main, stood_still_s, at = threading.main_thread().ident, 0.0, None
    begun = time.monotonic()
    while stood_still_s < GRACE_S and time.monotonic() < begun + MOST_S:
        if is_told():
            return None
        frame = sys._current_frames().get(main or 0)
        here = (id(frame), frame.f_lasti if frame is not None else 0)
        stood_still_s = stood_still_s + 0.5 if here == at else 0.0
        at = here
        del frame  # it would keep alive what the main thread has left
        time.sleep(0.5)
    frame = sys._current_frames().get(main or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def leave(error: BaseException | None = None, stack: str = "") -> NoReturn:
    """Ends the process at once, with an error as Python prints it."""
    if error is not None:
        kind = type(error)
        text = f"Traceback (most recent call last):\n{stack}{kind.__module__}.{kind.__qualname__}: {error}\n"
        os.write(2, text.encode())

    def flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    flushing = threading.Thread(target=flush, daemon=True)  # the main thread may hold their locks for ever
    try:
        flushing.start()
        flushing.join(1.0)
    except RuntimeError:  # from 3.12 on Python starts no thread at its end; then this is the main thread itself
        flush()
    os._exit(1)
