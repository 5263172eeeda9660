"""Whether two stages really run at the same time: two CPU devices on two cores.

    python -m benchmarks.pipeline_overlap                 the tables
    python -m benchmarks.pipeline_overlap --keep          also keeps them in results/pipeline_overlap.md
    python -m benchmarks.pipeline_overlap --seconds 600   longer, for a machine that others use too

The same training step several times in one process, called in turn: as two stages on two devices (1F1B, 8
micro-batches); as one stage on one device with the same 8 micro-batches, which does the same arithmetic and is the
reference; and under plain `jax.jit` on one device with the whole batch. With m micro-batches and two equal stages the
first can be 2m/(m+1) times as fast as the reference.

One core for one device: XLA's CPU client has a pool with at least one thread for each device, which all devices share,
so that one device alone would use both cores (`--xla_cpu_multi_thread_eigen=false` and starting on one core do not
change that). So all threads of the process are confined to one core while a step on one device is sampled, and have
both cores for the two stages. Processor time beside time shows that it holds. While one stage waits in the bubble, the
other may use its core: that can hide at most the bubble, and the paced devices below have no such help. A last row
shows one device with both cores.

Samples count where the machine had the cores to give: what other processes used meanwhile, from /proc/stat, is noted
with each, and the medians of the quiet ones stand beside those of all.

Where other processes keep both cores busy all the time, that says nothing. So the same programs run on paced devices
too: after each task its device sleeps, a forward task for 40 ms and a backward task for 80 ms, as an accelerator
computes without the host's processor. What is left of the ideal is then what the runtime does: its order, its dispatch,
its transfers.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.executables.compiled_pipeline import routes, stage_meshes
from autopar.runtime.execution.execute import Executor
from autopar.runtime.pipeline.program import Task, TaskKind
from benchmarks.machine import description, markdown
from benchmarks.overhead import mlp, mlp_step

RESULTS = Path(__file__).parent / "results" / "pipeline_overlap.md"
MICROBATCHES = 8
IDEAL = 2 * MICROBATCHES / (MICROBATCHES + 1)
TARGET = 0.85
QUIET = 0.1  # of a core, used by others
PATIENCE_S = 15.0  # before a sample is taken on a busy machine after all
PACE_S = {TaskKind.FORWARD: 0.04, TaskKind.BACKWARD: 0.08}
PACED_WIDTH = 32
ALL_CORES = sorted(os.sched_getaffinity(0))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def confine(cores: set[int]) -> None:
    """All threads of this process run on these cores from now on."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.sched_setaffinity(int(thread), cores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One step: seconds until its results were there, processor seconds of this process, cores that others used."""

    wall_s: float
    cpu_s: float
    others: float


def machine_busy_s() -> float:
    """Processor seconds that all processes have used, and that the host took away."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def wait_for_quiet(patience_s: float) -> None:
    """Until other processes leave the cores alone, or for so long."""
    ends = time.monotonic() + patience_s
    while time.monotonic() < ends:
        busy, begun = machine_busy_s(), time.monotonic()
        time.sleep(0.2)
        if (machine_busy_s() - busy) / (time.monotonic() - begun) < QUIET:
            return


class Rival:
    """A step that is called again and again with the state that it returned, on so many cores."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any, *, cores: int) -> None:
        self.step, self.state, self.batch, self.cores = step, state, batch, set(ALL_CORES[:cores])
        self.samples: list[Sample] = []

    def sample(self) -> Sample:
        confine(self.cores)
        busy, cpu, begun = machine_busy_s(), time.process_time(), time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
        return Sample(wall_s=wall_s, cpu_s=cpu_s, others=max(machine_busy_s() - busy - cpu_s, 0.0) / wall_s)


def compiled(stages: int, state: Any, batch: Any) -> Any:
    step = autopar.parallelize(
        mlp_step,
        plan=autopar.recipes.pipeline(stages, "1f1b", num_microbatches=MICROBATCHES),
        cluster=autopar.Cluster.local(num_devices=stages),
        cache_dir=None,
        show_progress=False,
    )
    return step.compile(state, batch)


def medians(rival: Rival, quiet: bool) -> tuple[int, float, float]:
    """(number of samples, median time, median processor time)."""
    chosen = [s for s in rival.samples if s.others < QUIET or not quiet]
    if not chosen:
        return 0, float("nan"), float("nan")
    return len(chosen), statistics.median(s.wall_s for s in chosen), statistics.median(s.cpu_s for s in chosen)


def task_rows(pipeline: Any, repeats: int = 5) -> list[list[str]]:
    """Each task alone, on zeros: whether stages are even, and the longest way through the schedule from that."""
    rows = []
    program = pipeline.executor.program
    for task, executable in zip(program.pipeline.tasks, pipeline.executables, strict=True):
        (shardings, _), times = executable.input_shardings, []
        for _ in range(repeats):
            avals = executable.in_avals[0]
            arrays = [
                jax.device_put(jax.numpy.zeros(a.shape, a.dtype), s) for a, s in zip(avals, shardings, strict=True)
            ]
            jax.block_until_ready(arrays)
            begun = time.process_time()
            jax.block_until_ready(executable(*arrays))
            times.append(time.process_time() - begun)
        rows.append([task.name, f"{min(times) * 1e3:.1f}"])
    return rows


def paced(executable: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """A task whose device sleeps after it. Results are there when the device wakes up.

    On CPU a program with a callback runs in the calling thread where its arguments are there already: at the start of a
    step that makes stages wait for each other, never run ahead.
    """

    def sleep(x: Any) -> Any:
        time.sleep(seconds)
        return np.zeros((), np.float32)

    @jax.jit
    def pace(*arrays: Any) -> Any:
        zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.float32), arrays[0].ravel()[0])
        return tuple(a + zero.astype(a.dtype) for a in arrays)

    return lambda *arrays: pace(*executable(*arrays)) if seconds else executable(*arrays)


def seconds_of(task: Task, alone: bool) -> float:
    """How long a task's device sleeps; `alone`: one stage does the work of both, forward and backward in one task."""
    if not task.kind.repeats:
        return 0.0
    return 2 * sum(PACE_S.values()) if alone else PACE_S[task.kind]


def on_paced_devices(step: Any) -> Any:
    """A compiled pipeline with the same program, and devices that sleep."""
    program = step.executor.program
    stages = {task.stage for task in program.pipeline.tasks}
    executables = [
        paced(executable, seconds_of(task, len(stages) == 1))
        for task, executable in zip(program.pipeline.tasks, step.executables, strict=True)
    ]
    executor = Executor(program, executables, routes(step.staged, stage_meshes(step.staged)))
    return dataclasses.replace(step, executor=executor)


def in_turn(rivals: dict[str, Rival], go_on: Callable[[int], bool]) -> None:
    """Samples all, the order turned round each time, after a warm-up."""
    for rival in rivals.values():
        for _ in range(2):
            rival.sample()
    turn = 0
    while go_on(turn):
        for rival in list(rivals.values())[:: 1 if turn % 2 else -1]:
            rival.samples.append(rival.sample())
        turn += 1


TASK_COLUMNS = ("task", "processor time, ms")
COLUMNS = ("step", "samples", "time, ms", "processor time, ms", "speed-up", "of the ideal")


def rows_of(rivals: dict[str, Rival], quiet: bool) -> list[list[str]]:
    found = {name: medians(rival, quiet) for name, rival in rivals.items()}
    reference_s = found[REFERENCE][1]
    rows = []
    for name, (number, wall_s, cpu_s) in found.items():
        if not number:
            rows.append([name, "0"])
            continue
        speed_up = reference_s / wall_s
        rows.append([name, str(number), f"{wall_s * 1e3:.0f}", f"{cpu_s * 1e3:.0f}", f"{speed_up:.3f}"])
        if name == PIPELINE:
            share = speed_up / IDEAL
            rows[-1].append(f"{share:.3f} ({'>=' if share >= TARGET else 'not >='} {TARGET})")
    return rows


PIPELINE = "two stages, two devices"
REFERENCE = "one stage, one device"
PLAIN = "plain jit, one device, whole batch"
BOTH_CORES = "one stage, one device with both cores"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="for how long to sample at most")
    parser.add_argument("--samples", type=int, default=15, help="how many quiet samples of each step are enough")
    parser.add_argument("--paced-samples", type=int, default=8, help="how many samples of each step on paced devices")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keep", action="store_true", help=f"keep the tables in results/{RESULTS.name}")
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 2)
    state, batch = mlp(options.width, options.layers, options.width * MICROBATCHES)
    pipeline, reference = compiled(2, state, batch), compiled(1, state, batch)
    plain = jax.jit(mlp_step, donate_argnums=0)
    on_first = jax.devices()[0]
    rivals = {
        PIPELINE: Rival(pipeline, *jax.device_put((state, batch), pipeline.shardings), cores=2),
        REFERENCE: Rival(reference, *jax.device_put((state, batch), reference.shardings), cores=1),
        PLAIN: Rival(plain, *jax.device_put((state, batch), on_first), cores=1),
        BOTH_CORES: Rival(reference, *jax.device_put((state, batch), reference.shardings), cores=2),
    }
    ends = time.monotonic() + options.seconds

    def more(turn: int) -> bool:
        wait_for_quiet(PATIENCE_S)
        enough = min(medians(r, True)[0] for r in rivals.values()) >= options.samples
        return not turn or (time.monotonic() < ends and not enough)

    in_turn(rivals, more)
    small = mlp(PACED_WIDTH, options.layers, PACED_WIDTH * MICROBATCHES)
    sleeping = {
        name: Rival(on_paced_devices(step), *jax.device_put(small, step.shardings), cores=2)
        for name, step in ((PIPELINE, compiled(2, *small)), (REFERENCE, compiled(1, *small)))
    }
    in_turn(sleeping, lambda turn: turn < options.paced_samples)
    tables = [
        ("quiet", rows_of(rivals, True)),
        ("all", rows_of(rivals, False)),
        ("paced devices", rows_of(sleeping, False)),
    ]
    tasks = task_rows(pipeline)
    for title, rows in tables:
        table = Table(*COLUMNS, title=title)
        for row in rows:
            table.add_row(*row)
        Console(width=120).print(table)
    for row in tasks:
        print(*row, "ms")
    if options.keep:
        others = statistics.mean(s.others for r in rivals.values() for s in r.samples)
        RESULTS.write_text(
            "# Overlap of two stages\n\n"
            f"`python -m benchmarks.pipeline_overlap --seconds {options.seconds:.0f} --keep`: an MLP of "
            f"{options.layers} layers of width {options.width}, {MICROBATCHES} micro-batches of {options.width} "
            f"examples, 1F1B, one core for one device; other processes used {others:.2f} cores on average.\n\n"
            f"{description()}\n\n"
            f"Ideal {IDEAL:.3f}, target {TARGET} of it. Samples during which others used less than {QUIET} of a "
            f"core:\n\n{markdown(COLUMNS, tables[0][1])}\n\n"
            "All samples. On a machine that was never quiet these say how its scheduler shared the cores among all "
            "processes, not whether stages overlap (processor time stays comparable):\n\n"
            f"{markdown(COLUMNS, tables[1][1])}\n\n"
            "The same runtime on paced devices: each sleeps 40 ms after a forward task and 80 ms after a backward task "
            "(the one stage of the reference, which does both in one task, as long as all of them), an MLP of width "
            f"{PACED_WIDTH}:\n\n{markdown(COLUMNS, tables[2][1])}\n\n"
            f"Each task of the two stages alone:\n\n{markdown(TASK_COLUMNS, tasks)}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
