"""Fifty training steps as people write them, in every usual way of running them, against plain `jax.jit`.

    python -m benchmarks.everyday --processes 2 --keep                  what the rows do not have yet, and the table
    python -m benchmarks.everyday --steps nanogpt vit --devices 4 --again
    python -m benchmarks.everyday --ways "free search" "zero(3)"
    python -m benchmarks.everyday --plan dgx-h100:1 tpu-v5p:2x2x2 --batches 1 3 5 13     plans only
    python -m benchmarks.everyday --show                                the table of the rows that there are

Steps run in processes of their own, so that one that crashes or hangs is a row and not the end. Each row is a line of
JSON in benchmarks/results/everyday.jsonl as soon as it is made; of lines for one job the last counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.everyday import STEPS
from benchmarks.everyday.rows import append, load, page
from benchmarks.everyday.running import DEVICES, FAILED, HANG, WAYS, Bench, Job, Row, jobs_of, run
from benchmarks.machine import CHEAP_COMPILATION
from benchmarks.row_processes import JobProcess, answer, jobs

RESULTS = Path(__file__).parent.parent / "results" / "everyday.jsonl"
TIMEOUT_S = 900.0  # of one job, also on a machine that does much else
# What another process or another way of running has compiled is found again; the folder is one of the run.
COMPILE_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": "",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
UNITS_IN_A_PROCESS = 24  # the first plan of a process derives the rules of sharding, for ten seconds


def work() -> None:
    """Reads jobs, writes rows; the bench of the last step is kept for the next job."""
    kept: dict[tuple[str, int], Bench] = {}

    def bench_of(step: str, key: int) -> Bench:
        if (step, key) not in kept:
            for other in [k for k in kept if k[0] != step]:
                del kept[other]
            kept[step, key] = Bench(step, key)
        return kept[step, key]

    for job in jobs():
        row = run(job, bench_of)
        answer({"kind": row.kind, "said": row.said, "processor_s": row.processor_s})


def run_all(units: Sequence[Sequence[Job]], processes: int, done: Callable[[Row], None]) -> None:
    """Runs jobs, the jobs of a unit one after the other in one process."""
    todo: queue.Queue[Sequence[Job]] = queue.Queue()
    for unit in units:
        todo.put(unit)

    def take() -> None:
        process = JobProcess("benchmarks.everyday", ["--worker"], TIMEOUT_S)
        try:
            for number in itertools.count(1):
                for job in todo.get_nowait():
                    found = process.run(job)
                    if "failure" in found:
                        kind = HANG if found["failure"].startswith("no result") else "crash"
                        found = {"kind": kind, "said": found["failure"]}
                    done(Row(job=job, **found))
                if number % UNITS_IN_A_PROCESS == 0:
                    process.close()
        except queue.Empty:
            pass
        finally:
            process.close()

    threads = [threading.Thread(target=take) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def units_of(args: argparse.Namespace) -> list[list[Job]]:
    if args.plan:
        return [
            [Job(step=step, cluster=cluster, batch=batch) for cluster in args.plan for batch in args.batches]
            for step in args.steps
        ]
    return [jobs_of(step, devices, args.ways) for step in args.steps for devices in args.devices]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS), metavar="STEP")
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--ways", "--recipes", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--plan", nargs="+", metavar="CLUSTER", help="plan for these clusters and run nothing")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 1, 3, 5, 13], help="sizes of batches, for --plan")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=RESULTS, help="where rows are read from and added to")
    parser.add_argument("--again", action="store_true", help="also what there are rows of that did not fail")
    parser.add_argument("--keep", action="store_true", help="writes the table beside the rows")
    parser.add_argument("--show", action="store_true", help="runs nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
        return 0
    have = {} if args.again else {key for key, row in load(args.rows).items() if row.kind not in FAILED}
    units = [] if args.show else [[job for job in unit if job.key not in have] for unit in units_of(args)]
    lock = threading.Lock()

    def done(row: Row) -> None:
        with lock:
            append(args.rows, row)
            print(f"{row.kind:8} {row.job.key} {row.processor_s:.0f} s {row.said}", flush=True)

    with tempfile.TemporaryDirectory(prefix="everyday-") as cache:
        for name, value in COMPILE_ONCE.items():
            os.environ.setdefault(name, value or cache)
        run_all([unit for unit in units if unit], args.processes, done)
    rows = load(args.rows)
    text = page(list(rows.values()))
    if args.keep:
        args.rows.with_suffix(".md").write_text(text)
    else:
        print(text)
    return 1 if any(row.kind in FAILED for row in rows.values()) else 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("AUTOPAR_PLANNING_PROCESSES", "1")
    os.environ.setdefault("XLA_FLAGS", f"{CHEAP_COMPILATION} --xla_force_host_platform_device_count={max(DEVICES)}")
    sys.exit(main())
