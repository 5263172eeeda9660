"""The program that `benchmarks.faults` disturbs: trains a small model, saves its state, and goes on from there.

    python -m autopar.launch --processes 2 benchmarks/faults_training.py FOLDER STEPS

The examples come from `autopar.data.shard`: a run goes on from the same one only if the position in the data was saved
and restored. Process 0 writes `losses`, a line for each step that it sees: number, loss, number of processes, restart;
while a checkpoint is written there is a file `saving`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

import autopar

sys.path.insert(0, str(Path(__file__).parents[1]))

EVERY = 5  # steps from one save to the next
STEP_S = 0.05  # at least; so that a process can be lost in each part of a step
SAVE_S = 0.1  # in which `saving` is there: the checkpoint is written in the background
ROWS = 16
EXAMPLES = 100  # no whole number of batches


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    autopar.initialize(initialization_timeout=60)
    from tests.small_steps import mlp_batch, mlp_state, mlp_step

    plan = autopar.recipes.zero(3)  # each step gathers the state from all processes, and sums gradients over them
    step = autopar.parallelize(mlp_step, plan=plan, cache_dir=str(folder / "cache"), show_progress=False)
    examples = jax.tree.map(np.asarray, mlp_batch(EXAMPLES, seed=0))
    data = autopar.data.shard(examples, step, batch_size=ROWS, seed=1, epochs=None)
    checkpoints = autopar.checkpoint.Checkpointer(folder / "checkpoints", every=EVERY)
    state, start = checkpoints.restore_or(mlp_state, jax.random.key(0), step=step, data=data)
    restart, saving = int(os.environ["AUTOPAR_RESTART"]), folder / "saving"
    for i in range(start, steps):
        state, metrics = step(state, next(data))
        loss = float(metrics["loss"])
        if jax.process_index() == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{i} {loss.hex()} {jax.process_count()} {restart}\n")
        time.sleep(STEP_S)
        saves = (i + 1) % EVERY == 0
        if saves and jax.process_index() == 0:
            saving.touch()
        checkpoints.save(i + 1, state, plan=step, data=data)  # ends the program after SIGTERM
        if saves:
            time.sleep(SAVE_S)
            saving.unlink(missing_ok=True)
    checkpoints.close()


if __name__ == "__main__":
    main()
