"""A run of two processes that saves each step: `restarted.py FOLDER WHAT`, under `python -m autopar.launch`.

With `killed`, process 0 is killed in the middle of its first start; with `near`, too, where the folder has every fifth
step, and another one on the same machine each; with `alone`, process 1 stops saving; with `twice`, another run of one
process wants the folder in the meantime.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import autopar

LAST = 12


def another_run(folder):
    text = "import sys\nfrom autopar.checkpoint import Checkpointer\nCheckpointer(sys.argv[1]).save(100, {'n': 1})"
    return subprocess.run([sys.executable, "-c", text, folder], capture_output=True, text=True, check=False).stderr


def main(folder, what):
    autopar.initialize()
    import jax
    import jax.numpy as jnp

    me, is_first = jax.process_index(), os.environ["AUTOPAR_RESTART"] == "0"
    checkpoints = autopar.checkpoint.Checkpointer(Path(folder) / "run", keep=None, every=5 if what == "near" else 1)
    near = autopar.checkpoint.Checkpointer(Path(folder) / "memory", keep=1, on_preemption=False)
    newest = max(near, checkpoints, key=lambda found: found.latest() or 0)
    state, start = newest.restore_or(lambda: {"n": jnp.int32(0)})
    train = autopar.parallelize(lambda state, batch: ({"n": state["n"] + batch.sum()}, {}), batch="global")
    for i in range(start, LAST):
        state, _ = train(state, jnp.array([1, 0]))
        if what == "near":
            near.save(i + 1, state)
        if what != "alone" or me == 0 or i < 5:
            checkpoints.save(i + 1, state)
        if what in ("killed", "near") and i == 6 and is_first and me == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "twice" and i == 6 and me == 0:
            (Path(folder) / "another").write_text(another_run(str(Path(folder) / "run")))
    near.close()
    checkpoints.close()
    (Path(folder) / f"end{me}").write_text(json.dumps([start, int(state["n"])]))


if __name__ == "__main__":
    main(*sys.argv[1:])
