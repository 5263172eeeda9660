"""Many steps in one process of which no result is read: memory stays as it is, and the devices go on.

    python -m benchmarks.many_steps                      20,000 steps of each way to run a small step
    python -m benchmarks.many_steps --steps 2000         fewer
    python -m benchmarks.many_steps --keep               also keeps the table in results/many_steps.md

Each way runs in a process of its own, on 8 virtual CPU devices: one program on all of them, four micro-batches, two
stages with four micro-batches, and the same state with metrics that are all kept, as a loop does that looks at them at
the end of an epoch. Resident memory is read after 1 % of the steps, after a quarter, half and all of them.
"""

import os

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # before jax starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import autopar
from benchmarks.machine import description, markdown
from benchmarks.overhead import mlp, mlp_step

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "many_steps.md"
WAYS = ("one program", "micro-batches", "two stages", "one program, metrics kept")
MOST_GROWTH = 1.05  # of memory, from 1 % of the steps to the last
COLUMNS = ("way", "steps", "start, MB", "quarter, MB", "half, MB", "end, MB", "end / start", "a step, ms")


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(way: str, steps: int) -> dict[str, float]:
    """Megabytes at start, quarter, half and end, and seconds per step."""
    recipes = {
        "micro-batches": autopar.recipes.pipeline(1, num_microbatches=4),
        "two stages": autopar.recipes.pipeline(2, "1f1b", num_microbatches=4),
    }
    state, batch = mlp(32, 4, 64)
    step = autopar.parallelize(
        mlp_step,
        plan=recipes.get(way, autopar.recipes.data_parallel()),
        cluster=autopar.Cluster.local(8),
        cache_dir=None,
        show_progress=False,
    )
    state, _ = step(state, batch)
    batch = step.put_batch(batch)
    found, kept = {}, []
    marks = {max(1, steps // 100): "start", steps // 4: "quarter", steps // 2: "half", steps: "end"}
    begun = time.perf_counter()
    for i in range(1, steps + 1):
        state, metrics = step(state, batch)
        if way.endswith("kept"):
            kept.append(metrics)
        if i in marks:
            found[marks[i]] = resident_mb()
    jax.block_until_ready((state, kept))
    found["step_s"] = (time.perf_counter() - begun) / steps
    return found


def row(way: str, steps: int) -> tuple[list[str], bool]:
    """The table's row of a way, run in a process of its own, and whether its memory stayed as it was."""
    command = [sys.executable, "-m", "benchmarks.many_steps", "--way", way, "--steps", str(steps)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if child.returncode:
        print(child.stderr[-2000:], file=sys.stderr)
        return [way, str(steps), "", "", "", "", f"ended with {child.returncode}", ""], False
    found = json.loads(child.stdout.splitlines()[-1])
    growth = found["end"] / found["start"]
    sizes = [f"{found[at]:.1f}" for at in ("start", "quarter", "half", "end")]
    flat = growth <= MOST_GROWTH or way.endswith("kept")
    cells = [way, f"{steps:,}", *sizes, f"{growth:.3f}{'' if flat else f' (not <= {MOST_GROWTH})'}"]
    return [*cells, f"{found['step_s'] * 1e3:.2f}"], flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--way", choices=WAYS, help="run one way in this process, and print what was measured as JSON")
    parser.add_argument("--keep", action="store_true", help=f"keep the table in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(run(arguments.way, arguments.steps)))
        return 0
    rows, all_flat = [], True
    for way in WAYS:
        cells, flat = row(way, arguments.steps)
        print(" | ".join(cells), flush=True)
        rows.append(cells)
        all_flat = all_flat and flat
    table = Table(*COLUMNS)
    for cells in rows:
        table.add_row(*cells)
    Console(width=140).print(table)
    if arguments.keep:
        RESULTS.write_text(
            "# Many steps of which no result is read\n\n"
            f"`python -m benchmarks.many_steps --steps {arguments.steps} --keep`, an MLP of 4 layers of width 32, 8 "
            f"virtual CPU devices.\n\n{description()}\n\n{markdown(COLUMNS, rows)}\n\n"
            "Start is after 1 % of the steps. Where the metrics are kept, the growth is theirs: one array on 8 devices "
            "a step.\n"
        )
    return 0 if all_flat else 1


if __name__ == "__main__":
    sys.exit(main())
