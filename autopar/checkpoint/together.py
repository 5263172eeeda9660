"""What all processes do together with a folder of checkpoints: each says what it does, and all compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from autopar.common.jax_distributed import shared_store
from autopar.errors import ProcessMismatchError
from autopar.executables.multiprocess import with_process_lost_errors
from autopar.runtime.processes.agreement import exchange_in_turn


def together(call: str, folder: Path, answer: Any) -> list[Any]:
    """What each process knows, as JSON has it, in all processes; every process makes this call on this folder.

    Raises: ProcessMismatchError, in all processes alike where calls or folders differ; ProcessLostError.
    """
    if shared_store() is None or jax.process_count() == 1:
        return [answer]
    own = json.dumps([call, str(folder), answer])
    said = with_process_lost_errors(
        lambda: exchange_in_turn(
            f"Checkpointer, {call}", "autopar/checkpoint", own,
            together=f"all processes to call {call}",
            hint="call save, restore and restore_or in every process, after the same steps: each has a part of it",
        )
    )  # fmt: skip
    passed = [json.loads(text) for text in said]
    compare([(call, folder) for call, folder, _ in passed], jax.process_index())
    return [answer for _, _, answer in passed]


def compare(said: Sequence[tuple[str, str]], process: int) -> None:
    """Raises: ProcessMismatchError where (call, folder) differ between processes."""
    for i, expected, what, hint in (
        (0, "all processes to make the same call", "calls", "what is called must not depend on jax.process_index()"),
        (1, "one folder that all processes share", "folders", "each process writes its part of a checkpoint: give one "
         "folder that does not depend on the process, such as an absolute path of a shared file system"),
    ):  # fmt: skip
        other = next((p for p, own in enumerate(said) if own[i] != said[0][i]), None)
        if other is not None:
            raise ProcessMismatchError(
                where=f"Checkpointer, process {process} of {len(said)}", expected=expected,
                got=f"{what} differ: {said[0][i]} in process 0, {said[other][i]} in process {other}", hint=hint,
            )  # fmt: skip
