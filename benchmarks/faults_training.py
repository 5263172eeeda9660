"""The program that `benchmarks.faults` disturbs: trains a small model, saves its state, and goes on from there.

    python -m autopar.launch --processes 2 benchmarks/faults_training.py FOLDER STEPS

The batch of a step is a function of its number, so that losses do not depend on restarts, and the same in any number of
processes. Process 0 writes `losses`, a line for each step that it sees: number, loss, number of processes, restart.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import autopar

sys.path.insert(0, str(Path(__file__).parents[1]))

EVERY = 5  # steps from one save to the next
STEP_S = 0.05  # at least; so that a process can be lost in each part of a step
SAVE_S = 0.1  # likewise
ROWS = 16


class Saved:
    """The state on disk; its interface is that of `autopar.checkpoint.Checkpointer`, which can take its place."""

    def __init__(self, folder: Path) -> None:
        self._file, self._saving = folder / "state.npz", folder / "saving"

    def save(self, step_number: int, state: dict[str, Any]) -> None:
        """All processes call it; the first one writes."""
        whole = multihost_utils.process_allgather(state, tiled=True) if jax.process_count() > 1 else state
        if jax.process_index() == 0:
            self._saving.touch()
            new = self._file.with_suffix(".new.npz")
            np.savez(new, step=step_number, **{name: np.asarray(leaf) for name, leaf in whole.items()})
            time.sleep(SAVE_S)
            os.replace(new, self._file)
            self._saving.unlink()

    def restore(self) -> tuple[dict[str, Any], int] | None:
        """The last state and the number of steps that made it; None where there is none."""
        if not self._file.exists():
            return None
        with np.load(self._file) as found:
            arrays = {name: found[name] for name in found.files}
        return arrays, int(arrays.pop("step"))


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    autopar.initialize(initialization_timeout=60)
    from tests.small_steps import mlp_batch, mlp_state, mlp_step

    plan = autopar.recipes.zero(3)  # each step gathers the state from all processes, and sums gradients over them
    options = {"batch": "global", "cache_dir": str(folder / "cache"), "show_progress": False}
    step = autopar.parallelize(mlp_step, plan=plan, **options)
    saved = Saved(folder)
    state, start = saved.restore() or (step.init(mlp_state, jax.random.key(0)), 0)
    restart = int(os.environ["AUTOPAR_RESTART"])
    for i in range(start, steps):
        state, metrics = step(state, mlp_batch(ROWS, seed=i))
        loss = float(metrics["loss"])
        if jax.process_index() == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{i} {loss.hex()} {jax.process_count()} {restart}\n")
        time.sleep(STEP_S)
        is_preempted = jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(i)
        if (i + 1) % EVERY == 0 or is_preempted:
            saved.save(i + 1, state)
        if is_preempted:  # SIGTERM has come; in the same step of all processes
            return


if __name__ == "__main__":
    main()
