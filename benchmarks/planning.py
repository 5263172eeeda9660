"""How long planning takes: GPT with its layers unrolled, from tracing to the plan, and again from the disk cache.

    python -m benchmarks.planning                                12 and 96 layers on dgx-h100 with 8, 16 and 64 devices
    python -m benchmarks.planning --layers 12 --devices 8 --cluster flat
    python -m benchmarks.planning --profile                      time by pass and the hottest functions of each row too
    python -m benchmarks.planning --keep-as before               keeps the rows that a change is held against
    python -m benchmarks.planning --keep-as now                  the same after the change, beside them in planning.md

Each plan is made in a fresh process with an empty cache directory, and then again in another one with the directory
that the first has filled. Imports are timed by themselves. Nothing is run and no device is needed. `--profile` samples
the stack every few milliseconds of processor time, which costs next to nothing, in a third process.
"""

import argparse
import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "planning.md"
ROWS = RESULTS.with_suffix(".json")
HOTTEST = 10  # functions that a profile prints
SAMPLE_S = 0.005  # of processor time, from one look at the stack to the next
SIZES = {"width": 768, "heads": 12, "vocabulary": 50_304, "length": 1024, "batch": 16}
TARGETS_S = {(12, 8): 5.0, (96, 8): 60.0}  # of the first run, by (layers, devices), tracing included
CACHED_TARGET_S = 1.0
TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One plan made in one process: seconds of the clock, and of the processor (`cpu_s`).

    `passes` by name, in order; `mesh` that was chosen; `step_time_s` as predicted; `gap` of the solver. `hottest` are
    functions with the processor time under them, and with their own, of a run that was sampled.
    """

    layers: int
    cluster: str
    devices: int
    import_s: float = 0.0
    total_s: float = 0.0
    cpu_s: float = 0.0
    passes: dict[str, float] = dataclasses.field(default_factory=dict)
    mesh: str = ""
    gap: float = 0.0
    step_time_s: float = 0.0
    hottest: dict[str, list[tuple[str, float]]] = dataclasses.field(default_factory=dict)
    failure: str = ""


def make_cluster(name: str, devices: int):
    """`flat`: one link between all devices; else a preset with as many hosts as it takes."""
    from autopar import Cluster

    if name == "flat":
        return Cluster.flat(devices)
    host = Cluster.preset(name).domain_devices
    if devices % host:
        raise SystemExit(f"{name} has {host} devices a host: {devices} are no whole hosts")
    return Cluster.preset(name, hosts=devices // host)


def plan_once(layers: int, cluster: str, devices: int, profile: bool) -> Run:
    """Plans in this process; the cache is where the environment says."""
    begun = time.perf_counter()
    import jax

    import autopar
    from benchmarks.zoo import CASES

    imported = time.perf_counter()
    case = CASES["gpt"](layers=layers, **SIZES)
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    step = autopar.parallelize(case.step, cluster=make_cluster(cluster, devices), show_progress=False)
    sampler = Sampler()
    if profile:
        sampler.start()
    started, cpu_started = time.perf_counter(), time.process_time()
    plan = step.plan(state, batch)
    total_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return Run(
        layers=layers,
        cluster=cluster,
        devices=devices,
        import_s=imported - begun,
        total_s=total_s,
        cpu_s=cpu_s,
        passes=step.last_progress.spent_s,
        mesh=str(plan.mesh),
        gap=plan.record.solver.gap,
        step_time_s=plan.predicted.step_time_s,
        hottest=sampler.stop(cpu_s) if profile else {},
    )


class Sampler:
    """Looks at the stack every few milliseconds of processor time and counts the functions of autopar on it."""

    def __init__(self) -> None:
        self.under: collections.Counter[str] = collections.Counter()
        self.own: collections.Counter[str] = collections.Counter()
        self.samples = 0

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self.sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def sample(self, number: int, frame: FrameType | None) -> None:
        self.samples += 1
        on_stack: dict[str, None] = {}
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path != Path(__file__):
                on_stack[f"{path.relative_to(ROOT)}:{frame.f_code.co_name}"] = None
            frame = frame.f_back
        self.under.update(on_stack.keys())
        self.own.update([*on_stack][:1])

    def stop(self, cpu_s: float) -> dict[str, list[tuple[str, float]]]:
        """Seconds of the hottest functions: with all that they call, and with what they call outside of autopar."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        share = cpu_s / max(self.samples, 1)
        return {
            "with what they call": [(name, n * share) for name, n in self.under.most_common(HOTTEST)],
            "by themselves": [(name, n * share) for name, n in self.own.most_common(HOTTEST)],
        }


def show_profile(run: Run) -> None:
    """Time by pass, and the hottest functions."""
    head = f"{run.layers} layers, {run.cluster}, {run.devices} devices"
    if run.failure:
        print(f"{head}: {run.failure}")
        return
    passes = Table("pass", "s", title=f"{head}: time by pass, of the clock")
    for name, seconds in run.passes.items():
        passes.add_row(name, f"{seconds:.2f}")
    Console(width=140).print(passes)
    for title, rows in run.hottest.items():
        table = Table("function", "s", title=f"{head}: hottest functions {title}, processor time of {run.cpu_s:.2f} s")
        for name, seconds in rows:
            table.add_row(name, f"{seconds:.2f}")
        Console(width=140).print(table)


def in_fresh_process(layers: int, cluster: str, devices: int, cache: str, profile: bool = False) -> Run:
    command = [sys.executable, "-m", "benchmarks.planning", "--child", "--cluster", cluster]
    command += ["--layers", str(layers), "--devices", str(devices), *(["--profile"] if profile else [])]
    environment = os.environ | {"AUTOPAR_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    empty = Run(layers=layers, cluster=cluster, devices=devices)
    try:
        child = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return dataclasses.replace(empty, failure=f"more than {TIMEOUT_S:.0f} s")
    if child.returncode:
        return dataclasses.replace(empty, failure=(child.stderr.strip().splitlines() or ["died"])[-1][:100])
    return Run(**json.loads(child.stdout.splitlines()[-1]))


def row_of(first: Run, second: Run, before: dict[str, Any] | None) -> list[str]:
    """A line of the table. `before` is the first run of the same row that is kept as that."""
    head = [str(first.layers), f"{first.cluster}, {first.devices}"]
    if failure := first.failure or second.failure:
        return [*head, failure, *("" for _ in COLUMNS[3:])]
    meshes = ", ".join(
        f"{'x'.join(part.split('=')[1] for part in name.removeprefix('mesh ').split(' x '))} {seconds:.1f}"
        for name, seconds in first.passes.items()
        if name.startswith("mesh")
    )
    return [
        *head,
        f"{first.passes['trace']:.2f}",
        f"{first.passes['graph']:.2f}",
        meshes,
        f"{first.passes['record']:.2f}",
        verdict(Run(**before), None) if before is not None else "",
        verdict(first, TARGETS_S.get((first.layers, first.devices))),
        verdict(second, CACHED_TARGET_S),
        f"{before['step_time_s'] * 1e3:.4f}" if before is not None and before["step_time_s"] else "",
        f"{first.step_time_s * 1e3:.4f}",
        f"{first.mesh}, gap {first.gap:.2%}",
    ]


def verdict(run: Run, target_s: float | None) -> str:
    """Clock and processor; the target is the clock's, of a machine that does nothing else."""
    compared = "" if target_s is None else f" ({'<' if run.total_s < target_s else 'not <'} {target_s:g})"
    return f"{run.total_s:.2f}{compared}, cpu {run.cpu_s:.2f}"


COLUMNS = (
    "layers", "devices", "trace", "graph", "each mesh", "record", "total before", "total", "from the cache",
    "step before, ms", "step, ms", "plan",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--cluster", default="dgx-h100", help="flat, or the name of a preset")
    parser.add_argument("--keep-as", choices=("before", "now"), help=f"keep the rows in {ROWS.relative_to(ROOT)}")
    parser.add_argument("--profile", action="store_true", help="print time by pass and the hottest functions too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run = plan_once(arguments.layers[0], arguments.cluster, arguments.devices[0], arguments.profile)
        print(json.dumps(dataclasses.asdict(run)))
        return 0
    runs: list[tuple[Run, Run]] = []
    for layers in arguments.layers:
        for devices in arguments.devices:
            with tempfile.TemporaryDirectory(prefix="autopar-planning-") as cache:
                first, second = (in_fresh_process(layers, arguments.cluster, devices, cache) for _ in range(2))
            runs.append((first, second))
            if arguments.keep_as is not None and not (first.failure or second.failure):
                keep(arguments.keep_as, first, second)
            print(" | ".join(row_of(first, second, kept_before(first))), flush=True)
            if arguments.profile:
                with tempfile.TemporaryDirectory(prefix="autopar-planning-") as cache:
                    show_profile(in_fresh_process(layers, arguments.cluster, devices, cache, profile=True))
    table = Table(*COLUMNS, title="planning GPT, seconds")
    for first, second in runs:
        table.add_row(*row_of(first, second, kept_before(first)))
    Console(width=200).print(table)
    if arguments.keep_as is not None:
        write_table()
    return int(any(first.failure or second.failure for first, second in runs))


def key_of(run: Run) -> str:
    return f"{run.layers} layers, {run.cluster}, {run.devices}"


def kept() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows by "before" and "now", and by name: the first run and the one from the cache."""
    return json.loads(ROWS.read_text()) if ROWS.exists() else {"before": {}, "now": {}}


def kept_before(run: Run) -> dict[str, Any] | None:
    runs = kept()["before"].get(key_of(run))
    return runs[0] if runs is not None else None


def keep(name: str, first: Run, second: Run) -> None:
    rows = kept()
    rows[name][key_of(first)] = [dataclasses.asdict(first), dataclasses.asdict(second)]
    ROWS.write_text(json.dumps(rows, indent=1) + "\n")


def write_table() -> None:
    from benchmarks.machine import description, markdown

    rows = [[Run(**run) for run in runs] for runs in kept()["now"].values()]
    sizes = ", ".join(f"{name} {size:,}" for name, size in SIZES.items())
    RESULTS.write_text(
        "# Planning time\n\n"
        f"GPT with unrolled layers ({sizes}), seconds. `python -m benchmarks.planning --keep-as now`: the first run "
        "has an empty cache; `from the cache` is a fresh process that finds the plan on disk. Imports are not counted. "
        "`cpu` is the processor's time, which other work on the machine lengthens less. `before` are the rows that the "
        "last change was held against; `step` is the predicted time of the plan.\n\n"
        f"{description()}\n\n"
        + markdown(COLUMNS, [row_of(first, second, kept_before(first)) for first, second in rows])
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
