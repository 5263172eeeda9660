"""How long planning takes: GPT with its layers unrolled, from tracing to the plan, and again from the disk cache.

    python -m benchmarks.planning                                12 and 96 layers on dgx-h100 with 8, 16 and 64 devices
    python -m benchmarks.planning --layers 12 --devices 8 --cluster flat
    python -m benchmarks.planning --layers 12 --devices 8 --profile
    python -m benchmarks.planning --keep                         also keeps the table in results/planning.md

Each plan is made in a fresh process with an empty cache directory, and then again in another one with the directory
that the first has filled. Imports are timed by themselves. Nothing is run and no device is needed. `--profile` prints
the functions of autopar that take the most time instead.
"""

import argparse
import cProfile
import dataclasses
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "planning.md"
SIZES = {"width": 768, "heads": 12, "vocabulary": 50_304, "length": 1024, "batch": 16}
TARGETS_S = {(12, 8): 5.0, (96, 8): 60.0}  # of the first run, by (layers, devices), tracing included
CACHED_TARGET_S = 1.0
TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One plan made in one process: seconds of the clock, and of the processor (`cpu_s`).

    `passes` by name, in order; `mesh` that was chosen; `gap` of the solver.
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
    profiler = cProfile.Profile(time.process_time)
    if profile:
        profiler.enable()
    started, cpu_started = time.perf_counter(), time.process_time()
    plan = step.plan(state, batch)
    total_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    if profile:
        profiler.disable()
        show_hottest(profiler)
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
    )


def show_hottest(profiler: cProfile.Profile, number: int = 15) -> None:
    """The functions of autopar with the most time of their own, and with the most time altogether."""
    rows = [
        (f"{Path(file).relative_to(ROOT)}:{line} {name}", calls, own, total)
        for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profiler).stats.items()
        if file.startswith((str(ROOT / "autopar"), str(ROOT / "solver")))
    ]
    for title, column in (("own time", 2), ("time with what it calls", 3)):
        table = Table(
            "function", "calls", "own, s", "in all, s", title=f"hottest by {title} (processor time, under cProfile)"
        )
        for name, calls, own, total in sorted(rows, key=lambda row: -row[column])[:number]:
            table.add_row(name, f"{calls:,}", f"{own:.2f}", f"{total:.2f}")
        Console(width=140).print(table)


def in_fresh_process(layers: int, cluster: str, devices: int, cache: str) -> Run:
    command = [sys.executable, "-m", "benchmarks.planning", "--child", "--cluster", cluster]
    command += ["--layers", str(layers), "--devices", str(devices)]
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


def row_of(first: Run, second: Run) -> list[str]:
    """A line of the table."""
    head = [str(first.layers), f"{first.cluster}, {first.devices}"]
    if failure := first.failure or second.failure:
        return [*head, failure]
    meshes = ", ".join(
        f"{'x'.join(part.split('=')[1] for part in name.removeprefix('mesh ').split(' x '))} {seconds:.1f}"
        for name, seconds in first.passes.items()
        if name.startswith("mesh")
    )
    target_s = TARGETS_S.get((first.layers, first.devices))
    return [
        *head,
        f"{first.passes['trace']:.2f}",
        f"{first.passes['graph']:.2f}",
        meshes,
        f"{first.passes['record']:.2f}",
        verdict(first, target_s),
        verdict(second, CACHED_TARGET_S),
        f"{first.mesh}, gap {first.gap:.2%}",
    ]


def verdict(run: Run, target_s: float | None) -> str:
    """Clock and processor; the target is the clock's, of a machine that does nothing else."""
    compared = "" if target_s is None else f" ({'<' if run.total_s < target_s else 'not <'} {target_s:g})"
    return f"{run.total_s:.2f}{compared}, cpu {run.cpu_s:.2f}"


COLUMNS = ("layers", "devices", "trace", "graph", "each mesh", "record", "total", "from the cache", "plan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--cluster", default="dgx-h100", help="flat, or the name of a preset")
    parser.add_argument("--keep", action="store_true", help=f"keep the table in {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--profile", action="store_true", help="print the hottest functions instead")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child or arguments.profile:
        if arguments.profile:
            os.environ["AUTOPAR_CACHE_DIR"] = tempfile.mkdtemp(prefix="autopar-planning-")
        run = plan_once(arguments.layers[0], arguments.cluster, arguments.devices[0], arguments.profile)
        print(json.dumps(dataclasses.asdict(run)))
        return 0
    rows, failed = [], False
    for layers in arguments.layers:
        for devices in arguments.devices:
            with tempfile.TemporaryDirectory(prefix="autopar-planning-") as cache:
                first, second = (in_fresh_process(layers, arguments.cluster, devices, cache) for _ in range(2))
            failed |= bool(first.failure or second.failure)
            rows.append(row_of(first, second))
            print(" | ".join(rows[-1]), flush=True)
    table = Table(*COLUMNS, title="planning GPT, seconds")
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if arguments.keep:
        keep(rows)
    return int(failed)


def keep(rows: list[list[str]]) -> None:
    from benchmarks.machine import description, markdown

    RESULTS.parent.mkdir(exist_ok=True)
    sizes = ", ".join(f"{name} {size:,}" for name, size in SIZES.items())
    RESULTS.write_text(
        "# Planning time\n\n"
        f"GPT with unrolled layers ({sizes}), seconds. `python -m benchmarks.planning --keep`: the first run has "
        "an empty cache; `from the cache` is a fresh process that finds the plan on disk. Imports are not counted. "
        "`cpu` is the processor's time, which other work on the machine does not lengthen much.\n\n"
        f"{description()}\n\n{markdown(COLUMNS, rows)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
