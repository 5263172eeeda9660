"""Compiles the programs of a pipeline beside one another: XLA's compilers hold no lock of Python's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from autopar.common import jax_compat
from autopar.common.progress import Progress

# A compiler of a GPU or a TPU takes gigabytes for a large program.
MOST_AT_ONCE = 8


def compile_all(lowered: Sequence[Any | None], options: Sequence[Mapping[str, Any]], progress: Progress) -> list[Any]:
    """The executables of lowered programs, each under its options of XLA; None where there is none.

    Raises: the error of the first that cannot be compiled, when those that were begun are done.
    """
    at_once = min(os.cpu_count() or 1, MOST_AT_ONCE)
    programs = {i: program for i, program in enumerate(lowered) if program is not None}
    with ThreadPoolExecutor(at_once, thread_name_prefix="autopar-compile") as threads:
        compiling = {i: threads.submit(jax_compat.compiled, x, dict(options[i])) for i, x in programs.items()}
        try:
            for done, future in enumerate(as_completed(compiling.values()), start=1):
                future.result()
                progress.at(f"compiled {done} of {len(programs)} programs")
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return [compiling[i].result() if i in compiling else None for i in range(len(lowered))]
