"""How much memory is new in each step on virtual CPU devices, beside what plans predict.

    python -m benchmarks.fresh_memory                      the table
    python -m benchmarks.fresh_memory --models gpt moe     of these small models (as of benchmarks.auto_vs_manual)
    python -m benchmarks.fresh_memory --keep               also keeps it in results/fresh_memory.md

A page that the allocator has given back is new when it is written to again: the kernel clears it, which takes longer
than whatever is computed on it. So minor page faults of this process are counted, step by step, for plans whose tasks
need temporary values of different sizes: the whole batch in one program, micro-batches, stages. What a step is
predicted to wait for memory, times the measured rate of new memory, is what is predicted to be new. Each plan has a
process of its own: what an earlier program left at the top of the heap may keep the allocator from giving back. Then it
has another one, whose allocator gives nothing back: how much less its steps take is what new memory costs.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # before jax starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import resource
import statistics
import sys
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import jax

import autopar
from autopar import recipes
from autopar.common.units import text_of_bytes
from autopar.recipes import Recipe
from benchmarks.auto_vs_manual.models import models
from benchmarks.machine import description, markdown

RESULTS = Path(__file__).parent / "results" / "fresh_memory.md"
SMALL = ("gpt", "moe", "t5", "unet", "wide-resnet")
# Of glibc: nothing is taken from the system alone, and what is free goes back when there is more of it than this.
KEEPS_ALL = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}
PLANS: dict[str, Recipe] = {
    "data parallel": recipes.data_parallel(),
    "zero 3": recipes.zero(3),
    **{f"{m} micro-batches": recipes.pipeline(1, num_microbatches=m) for m in (1, 2, 4)},
    **{f"2 stages, {m} micro-batches": recipes.pipeline(2, num_microbatches=m) for m in (1, 2, 4)},
}
WARM, COUNTED = 3, 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """One plan of one model: bytes on each device that were new in each step, and as predicted; seconds of a step, and
    how many processors had work meanwhile; seconds of a step where the allocator keeps all memory.
    """

    model: str
    plan: str
    new_bytes: tuple[float, ...]
    predicted_bytes: float
    measured_s: float
    predicted_s: float
    cores: float
    kept_s: float = 0.0

    @property
    def median_bytes(self) -> float:
        return statistics.median(self.new_bytes)


def counted(model: str, name: str, cluster: autopar.Cluster) -> Counted:
    """Runs a plan a few steps."""
    case = models()[f"{model}-small"].build()
    step = autopar.parallelize(case.step, cluster=cluster, cache_dir=None, show_progress=False, plan=PLANS[name])
    state, batch = step.init(case.init, jax.random.key(0)), step.put_batch(case.batch(0))
    predicted = step.plan(state, batch).predicted
    new_bytes, took_s, cores = [], [], []
    for _ in range(WARM + COUNTED):
        faults, begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        processor_s = time.process_time()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        took_s.append(time.perf_counter() - begun)
        cores.append((time.process_time() - processor_s) / took_s[-1])
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        new_bytes.append(pages * resource.getpagesize() / cluster.num_devices)
    return Counted(
        model=model,
        plan=name,
        new_bytes=tuple(new_bytes[WARM:]),
        predicted_bytes=predicted.allocation_time_s * (cluster.device.fresh_bytes_per_s or 0.0),
        measured_s=statistics.median(took_s[WARM:]),
        predicted_s=predicted.step_time_s,
        cores=statistics.median(cores[WARM:]),
    )


def in_a_process(model: str, name: str, cluster: autopar.Cluster, allocator: dict[str, str]) -> Counted:
    """`counted` in a new process, with so much more in its environment, which an allocator reads when it starts."""
    context = multiprocessing.get_context("spawn")
    with (
        unittest.mock.patch.dict(os.environ, allocator),
        concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=context) as pool,
    ):
        return pool.submit(counted, model, name, cluster).result()


def report(rows: list[Counted], command: str) -> Iterator[str]:
    yield "# New memory in each step\n"
    yield f"`{command}`\n"
    yield f"{description()}\n"
    yield "MB on each of 8 virtual devices that were new in a step: median, least and most, and predicted; how many"
    yield "processors had work, in the median; and a step in a process whose allocator gives nothing back.\n"
    yield markdown(
        ("model", "plan", "new", "least", "most", "predicted", "step, ms", "predicted, ms", "cores", "kept, ms"),
        [
            (
                row.model, row.plan,
                *(f"{n / 1e6:.1f}" for n in (row.median_bytes, min(row.new_bytes), max(row.new_bytes))),
                f"{row.predicted_bytes / 1e6:.1f}", f"{row.measured_s * 1e3:.0f}", f"{row.predicted_s * 1e3:.0f}",
                f"{row.cores:.2f}", f"{row.kept_s * 1e3:.0f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    off = statistics.median(abs(row.median_bytes - row.predicted_bytes) for row in rows)
    yield f"\nPredictions are {off / 1e6:.1f} MB off in the median."
    much = [row for row in rows if row.median_bytes > 30e6]
    longer_s = sum(row.measured_s - row.kept_s for row in much)
    if longer_s > 0:
        rate = sum(row.median_bytes for row in much) / longer_s
        yield f"Where more than 30 MB are new, a device has them at {rate / 1e9:.2f} GB/s, all together."


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fresh_memory", description="memory that is new in each step"
    )
    parser.add_argument("--models", nargs="+", choices=SMALL, default=SMALL)
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name} too")
    options = parser.parse_args()
    cluster = autopar.Cluster.measure(8, save=False)
    rows = []
    for model in options.models:
        for name in PLANS:
            given, kept = (in_a_process(model, name, cluster, allocator) for allocator in ({}, KEEPS_ALL))
            if kept.median_bytes > 1e6:
                sys.exit(
                    f"{model}, {name}: expected no new memory where the allocator keeps all, got "
                    f"{text_of_bytes(kept.median_bytes)} in each step; {', '.join(KEEPS_ALL)} are glibc's: "
                    "run this where malloc is glibc's, with nothing in LD_PRELOAD"
                )
            rows.append(dataclasses.replace(given, kept_s=kept.measured_s))
            print(f"{model}, {name}: {given.median_bytes / 1e6:.1f} MB new", file=sys.stderr, flush=True)
    text = "\n".join(report(rows, f"python -m benchmarks.fresh_memory {' '.join(sys.argv[1:])}".rstrip()))
    print(text)
    if options.keep:
        RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
