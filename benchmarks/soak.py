"""A long run of two processes: does memory stay flat, and what do checkpoints and the monitor cost a step?

    python -m benchmarks.soak                  # 2,000 steps
    python -m benchmarks.soak --steps 600 --keep
    python -m benchmarks.soak --alone          # without checkpoints and monitor

Blocks of 50 steps take turns: alone, followed by a monitor, and with one checkpoint. The cost of each is the ratio of
the medians of its blocks and of those alone. The resident memory of each process is read every 100 steps; the table has
the slope of a line through the last three quarters of these: the first quarter is the warm-up. Beside it stands what
glibc's malloc has handed out and what it keeps (`mallinfo2`), the lowest in each quarter, so that a checkpoint that is
on its way does not count: a leak grows in the first, the second is memory that was given back and is used again.
`--keep` writes benchmarks/results/soak.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks.machine import description, markdown

WHAT_GROWS = """
What grows is memory that malloc keeps. Each thread allocates from an arena (glibc has up to 8 for each core), a
checkpoint is written by new threads, and an arena keeps what its largest checkpoint needed: resident memory grows until
all arenas have seen one. What is handed out stays what it is from the fourth checkpoint on, the first that removes one,
and so do the numbers of threads and of arrays of JAX. `MALLOC_ARENA_MAX=2` in the environment bounds what is kept.
"""

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "soak.md"
COLUMNS = ("", "seen", "aim")
PROCESSES, DEVICES = 2, 2
BLOCK, RSS_EVERY, WARM_BLOCKS = 50, 100, 3
ALONE, MONITOR, CHECKPOINT = "alone", "monitor", "checkpoint"
WIDTH, LAYERS, BATCH = 512, 4, 512


def create(key: jax.Array) -> dict:
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in jax.random.split(key, LAYERS)]
    return {"params": params, "moments": [jnp.zeros_like(p) for p in params]}


def train(state: dict, batch: jax.Array) -> tuple[dict, dict]:
    def loss_of(params: list) -> jax.Array:
        x = batch
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    moments = [0.9 * m + g for m, g in zip(state["moments"], gradients, strict=True)]
    return {"params": [p - 0.01 * m for p, m in zip(state["params"], moments, strict=True)], "moments": moments}, {
        "loss": loss
    }


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    )


def malloc_bytes() -> tuple[int, int]:
    """(what malloc has handed out, what it keeps for later), in all arenas; zeros where the C library is another."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0, 0
    function.restype = MallocInfo
    info = function()
    return info.uordblks + info.hblkhd, info.fordblks


def child(folder: Path, steps: int, alone: bool) -> None:
    """One process of the run."""
    autopar.initialize()
    step = autopar.parallelize(train, plan=autopar.recipes.zero(3), cache_dir=None, show_progress=False)
    examples = np.random.default_rng(0).normal(size=(8 * BATCH, WIDTH)).astype(np.float32)
    data = autopar.data.shard(examples, step, batch_size=BATCH, seed=0, epochs=None)
    checkpoints = autopar.checkpoint.Checkpointer(folder / "checkpoints", every=BLOCK, on_preemption=False)
    monitor = autopar.Monitor(step, log=folder / "logs", every=10, terminal=False)
    state, done = step.init(create, jax.random.key(0)), 0
    seconds: dict[str, list[float]] = {ALONE: [], MONITOR: [], CHECKPOINT: []}
    resident: list[int] = []
    malloc: list[tuple[int, int]] = []
    kinds = (ALONE,) if alone else (ALONE, MONITOR, ALONE, CHECKPOINT)
    for block in range(steps // BLOCK):
        kind = kinds[block % len(kinds)]
        begun_s = time.perf_counter()
        for _ in range(BLOCK):
            state, metrics = step(state, next(data))
            done += 1
            if kind == MONITOR:
                monitor(done, metrics)
            # In the middle of a block, so that what is written in the background falls into the same one.
            if kind == CHECKPOINT and done % BLOCK == BLOCK // 2:
                checkpoints.save(done, state, plan=step, data=data, force=True)
            if done % RSS_EVERY == 0:
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
                malloc.append(malloc_bytes())
        jax.block_until_ready((state, metrics))
        if block >= WARM_BLOCKS:
            seconds[kind].append(time.perf_counter() - begun_s)
    monitor.close()
    checkpoints.close()
    result = {"seconds": seconds, "resident": resident, "malloc": malloc}
    (folder / f"process{jax.process_index()}.json").write_text(json.dumps(result))


def slope(resident: list[int]) -> float:
    """The growth between two samples, as a share of the mean, by a line through the last three quarters."""
    late = np.array(resident[len(resident) // 4 :], float)
    return float(np.polyfit(np.arange(len(late)), late, 1)[0] / late.mean())


def quarters(sizes: list[int]) -> str:
    """The lowest of each quarter of a run."""
    return ", ".join(f"{1e-6 * min(part):.0f}" for part in np.array_split(np.array(sizes), 4)) + " MB"


def measured(steps: int, alone: bool) -> list[list[str]]:
    with tempfile.TemporaryDirectory(prefix="autopar-soak-") as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
        launcher = [sys.executable, "-m", "autopar.launch", "--processes", str(PROCESSES)]
        command = [*launcher, "--devices-per-process", str(DEVICES), __file__, "--child", folder, "--steps", str(steps)]
        command += ["--alone"] * alone
        subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        results = [json.loads((Path(folder) / f"process{i}.json").read_text()) for i in range(PROCESSES)]
    medians = {kind: statistics.median(s) for kind, s in results[0]["seconds"].items() if s}
    rows = [
        [f"steps of {PROCESSES} processes of {DEVICES} devices", str(steps), "2,000"],
        ["a step alone", f"{1e3 * medians[ALONE] / BLOCK:.1f} ms", ""],
    ]
    for kind, text, aim in (
        (CHECKPOINT, "a checkpoint every 50 steps costs", "under 5 %"),
        (MONITOR, "the monitor costs", "under 1 %"),
    ):
        if kind in medians:
            rows.append([text, f"{medians[kind] / medians[ALONE] - 1:+.1%}", aim])
    for i, result in enumerate(results):
        resident = result["resident"]
        text = f"{1e-6 * resident[-1]:.0f} MB, {slope(resident):+.3%} in 100 steps"
        rows.append([f"resident memory of process {i}", text, "under 0.1 %"])
        in_use, kept = zip(*result["malloc"], strict=True)
        rows.append([f"handed out by malloc in process {i}, by quarters", quarters(in_use)])
        rows.append([f"kept by malloc in process {i}, by quarters", quarters(kept)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without checkpoints and monitor")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.steps, options.alone)
        return
    before = description()
    text = markdown(COLUMNS, measured(options.steps, options.alone))
    print(text)
    if options.keep:
        head = f"# A long run\n\n`python -m benchmarks.soak --steps {options.steps} --keep`. {before}\n\n"
        RESULTS.write_text(head + text + "\n" + WHAT_GROWS)


if __name__ == "__main__":
    main()
