"""A long run of two processes: does memory stay flat, and what do checkpoints and the monitor cost a step?

    python -m benchmarks.soak                  # 2,000 steps
    python -m benchmarks.soak --steps 600 --keep
    python -m benchmarks.soak --alone          # without checkpoints and monitor

Blocks of 50 steps take turns: alone, followed by a monitor, and with one checkpoint. The cost of each is the ratio of
the medians of its blocks and of those alone. The resident memory of each process is read every 10 steps, when no step
is on its way; the table has the slope of a line through the last three quarters of these: the first quarter is the
warm-up. Beside it stands, for each quarter, where it is (`/proc/self/smaps`), and what glibc's malloc has handed out
(`mallinfo2`): the lowest, so that a checkpoint that is on its way does not count.
`--keep` writes benchmarks/results/soak.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
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
What may grow is memory that malloc keeps. Each thread allocates from an arena (glibc has up to 8 for each core), and a
checkpoint is written by new threads. What is free at the end of an arena other than the first is returned only when a
thread frees something there and more is free than the trim threshold, which glibc raises to up to 64 MiB; `malloc_trim`
leaves it. While a checkpoint is written, the threshold is 128 KiB (`autopar/common/free_memory.py`). Memory outside of
the arenas does not grow: the main thread's heap, Python's own, shared libraries, which are read in with the first
checkpoint.
"""

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "soak.md"
COLUMNS = ("", "seen", "aim")
PROCESSES, DEVICES = 2, 2
BLOCK, RSS_EVERY, KINDS_EVERY, WARM_BLOCKS = 50, 10, 100, 3
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


def bytes_in_use() -> int:
    """What malloc has handed out, in all arenas; 0 where the C library is another."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = MallocInfo
    info = function()
    return int(info.uordblks + info.hblkhd)


_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)")
_HEAP_BYTES = 64 << 20  # of one heap of an arena, which begins at a multiple of it (HEAP_MAX_SIZE of glibc)
KINDS = ("arenas", "the first heap", "files", "the rest")


def resident_by_kind() -> dict[str, int]:
    """Resident bytes in arenas of threads, in the heap of the main thread, in files (libraries), and in the rest."""
    mappings: list[tuple[int, str, str, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _MAPPING.fullmatch(line):
            mappings.append((int(found[1], 16), found[3], found[4], 0))
        elif line.startswith("Rss:"):
            mappings[-1] = (*mappings[-1][:3], 1024 * int(line.split()[1]))
    total = dict.fromkeys(KINDS, 0)
    for i, (start, access, name, size) in enumerate(mappings):
        # The part of an arena's heap that is not in use yet follows it, without access.
        rest = mappings[i + 1] if i + 1 < len(mappings) else (0, "", "", 0)
        is_arena = not name and start % _HEAP_BYTES == 0 and access.startswith("rw") and rest[1].startswith("---")
        kind = (
            "arenas" if is_arena else "the first heap" if name == "[heap]" else "files" if name[:1] == "/" else KINDS[3]
        )
        total[kind] += size
    return total


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
    in_use: list[int] = []
    by_kind: list[dict[str, int]] = []
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
                jax.block_until_ready((state, metrics))
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            if done % KINDS_EVERY == 0:
                in_use.append(bytes_in_use())
                by_kind.append(resident_by_kind())
        jax.block_until_ready((state, metrics))
        if block >= WARM_BLOCKS:
            seconds[kind].append(time.perf_counter() - begun_s)
    monitor.close()
    checkpoints.close()
    result = {"seconds": seconds, "resident": resident, "in_use": in_use, "by_kind": by_kind}
    (folder / f"process{jax.process_index()}.json").write_text(json.dumps(result))


def slope(resident: list[int]) -> float:
    """The growth in 100 steps, as a share of the mean, by a line through the last three quarters."""
    late = np.array(resident[len(resident) // 4 :], float)
    return float(100 / RSS_EVERY * np.polyfit(np.arange(len(late)), late, 1)[0] / late.mean())


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
        rows.append(["lowest of each quarter", quarters(resident)])
        for kind in KINDS:
            rows.append(
                [f"of it in {kind}, lowest of each quarter", quarters([row[kind] for row in result["by_kind"]])]
            )
        rows.append(["handed out by malloc, lowest of each quarter", quarters(result["in_use"])])
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
