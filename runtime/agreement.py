"""Agreement between processes: all call the same step, and run it under the plan of process 0.

A search with a time limit can end differently in two processes. So process 0 plans, and the others take its plan.
"""

from __future__ import annotations

import base64
import collections
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.common import jax_distributed
from autopar.common.jax_distributed import SharedStore
from autopar.errors import AutoparError, ProcessMismatchError, UnsupportedError
from autopar.runtime.heartbeat import BEAT_S, Watch, the_watch

# Agreements are numbered: the first of each process is about the same step, and so on; so is what is said of a subject.
_numbers = itertools.count()
_turns: collections.Counter[str] = collections.Counter()

TOGETHER = "all processes to plan together, and to pass batches of new shapes in the same call"
SAME_ROWS = "pass as many rows in all processes: drop or pad the rest of an epoch in all of them"


def agree(name: str, fingerprint: str, make: Callable[[], bytes]) -> bytes:
    """The bytes that process 0 makes, in all processes, after a look whether all of them mean the same.

    Every process must come here with its steps in the same order. An error of process 0 is raised in all.

    Raises: ProcessMismatchError, ProcessLostError, and what `make` raises.
    """
    store, watch = jax_distributed.shared_store(), the_watch()
    if store is None or watch is None:
        return make()
    key = f"autopar/agreed/{next(_numbers)}"
    _compare([(called, digits) for called, digits in said_by_all(name, "autopar/agreed/of", [name, fingerprint])], name)
    if jax.process_index() != 0:
        return _received(_wait(store, watch, f"{key}/made", name, TOGETHER, SAME_ROWS), name)
    try:
        made = make()
    except Exception as error:  # whatever it is, the others must hear of it: they wait
        store.set(f"{key}/made", f"failed {type(error).__name__}: {error}")
        raise
    store.set(f"{key}/made", f"made {_packed(made)}")
    return made


def said_by_all(name: str, subject: str, said: Any, *, together: str = TOGETHER, hint: str = SAME_ROWS) -> list[Any]:
    """What each process says of a subject, as JSON has it, in all processes, by their numbers.

    All processes come to a subject equally often; what was said before is forgotten. `together` and `hint` are those of
    the error where another process does not come: what all have to do.

    Raises: ProcessMismatchError where another process goes on without it, ProcessLostError, UnsupportedError where the
    processes share no store.
    """
    store, watch = jax_distributed.shared_store(), the_watch()
    if store is None or watch is None:
        raise UnsupportedError(
            where=f"{name}, process {jax.process_index()} of {jax.process_count()}",
            expected="processes that jax.distributed.initialize brought together",
            got="no coordination service",
            hint="call jax.distributed.initialize at the start of the program, in all processes",
        )
    number, here = _turns[subject], jax.process_index()
    _turns[subject] += 1
    key = f"{subject}/{number}"
    watch.begin_meeting(name, key)
    store.set(f"{key}/{here}", _packed(json.dumps(said).encode()))
    texts = [_wait(store, watch, f"{key}/{p}", name, together, hint) for p in range(jax.process_count())]
    if number > 0:  # all that have answered now have read what was said before
        store.delete(f"{subject}/{number - 1}/{here}")
    return [json.loads(_unpacked(text)) for text in texts]


def meet(name: str) -> None:
    """Returns when all processes have called it as often as this one.

    Raises: ProcessLostError, ProcessMismatchError.
    """
    said_by_all(name, "autopar/met", None)


def _compare(said: Sequence[tuple[str, str]], name: str) -> None:
    """Raises: ProcessMismatchError, in all processes alike."""
    differing = [p for p, what in enumerate(said) if what != said[0]]
    if not differing:
        return
    names = ", ".join(f"process {p}: {said[p][0]} ({said[p][1][:8]})" for p in (0, *differing[:3]))
    raise ProcessMismatchError(
        where=f"{name}, process {jax.process_index()} of {jax.process_count()}",
        expected="the same step with the same options and shapes in all processes",
        got=f"another one in process {', '.join(map(str, differing))} than in process 0 ({names})",
        hint="run the same program in all processes; what a step does must not depend on jax.process_index()",
    )


def _wait(store: SharedStore, watch: Watch, key: str, name: str, together: str, hint: str) -> str:
    while (found := store.wait_for(key, BEAT_S)) is None:
        watch.check()
        ahead = watch.ahead()
        if ahead and (found := store.wait_for(key, BEAT_S)) is None:
            raise ProcessMismatchError(
                where=f"{name}, process {jax.process_index()} of {jax.process_count()}",
                expected=together,
                got=f"process {', '.join(map(str, ahead))} has begun another step, or ended, meanwhile",
                hint=hint,
            )
    return found


def _received(text: str, name: str) -> bytes:
    word, rest = text.split(" ", 1)
    if word == "failed":
        raise AutoparError(
            where=name, expected="a plan from process 0", got=rest, hint="process 0 has raised this: see its log"
        )
    return _unpacked(rest)


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
