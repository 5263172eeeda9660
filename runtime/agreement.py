"""What all processes of a program must do alike: that they call the same step, and run it under the plan of process 0.

A search with a time limit can end differently in two processes; so process 0 plans, and the others take its plan.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable

import jax

from autopar import jax_compat
from autopar.errors import AutoparError, ProcessMismatchError
from autopar.jax_compat import SharedStore
from autopar.runtime.liveness import BEAT_S, Watch, the_watch

# Agreements are numbered: the first of each process is about the same step, and so on.
_numbers = itertools.count()


def agree(name: str, fingerprint: str, make: Callable[[], bytes]) -> bytes:
    """The bytes that process 0 makes, in all processes, after a look whether all of them mean the same.

    Every process must come here with its steps in the same order. An error of process 0 is raised in all.

    Raises: ProcessMismatchError, ProcessLostError, and what `make` raises.
    """
    store, watch = jax_compat.shared_store(), the_watch()
    if store is None or watch is None:
        return make()
    key = f"autopar/agreed/{next(_numbers)}"
    store.set(f"{key}/of/{jax.process_index()}", json.dumps([name, fingerprint]))
    _compare(store, watch, f"{key}/of/", name)
    if jax.process_index() != 0:
        return _received(_wait(store, watch, f"{key}/made"), name)
    try:
        made = make()
    except Exception as error:  # whatever it is, the others must hear of it: they wait
        store.set(f"{key}/made", f"failed {type(error).__name__}: {error}")
        raise
    store.set(f"{key}/made", "made " + base64.b64encode(zlib.compress(made)).decode())
    return made


def _compare(store: SharedStore, watch: Watch, prefix: str, name: str) -> None:
    """Raises: ProcessMismatchError, in all processes alike."""
    said = {p: tuple(json.loads(_wait(store, watch, f"{prefix}{p}"))) for p in range(jax.process_count())}
    differing = [p for p, what in said.items() if what != said[0]]
    if not differing:
        return
    names = ", ".join(f"process {p}: {said[p][0]} ({said[p][1][:8]})" for p in (0, *differing[:3]))
    raise ProcessMismatchError(
        where=f"{name}, process {jax.process_index()} of {jax.process_count()}",
        expected="the same step with the same options and shapes in all processes",
        got=f"another one in process {', '.join(map(str, differing))} than in process 0 ({names})",
        hint="run the same program in all processes; what a step does must not depend on jax.process_index()",
    )


def _wait(store: SharedStore, watch: Watch, key: str) -> str:
    while (found := store.wait_for(key, BEAT_S)) is None:
        watch.check()
    return found


def _received(text: str, name: str) -> bytes:
    word, rest = text.split(" ", 1)
    if word == "failed":
        raise AutoparError(
            where=name, expected="a plan from process 0", got=rest, hint="process 0 has raised this: see its log"
        )
    return zlib.decompress(base64.b64decode(rest))
