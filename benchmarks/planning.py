"""How long planning takes: GPT with its layers unrolled, from tracing to the plan, and again from the disk cache.

    python -m benchmarks.planning                                12 and 96 layers on dgx-h100 with 8, 16 and 64 devices
    python -m benchmarks.planning --layers 12 --devices 8 --cluster flat
    python -m benchmarks.planning --profile                      time by pass and the hottest functions of each row too
    python -m benchmarks.planning --keep-as before               keeps the rows that a change is held against
    python -m benchmarks.planning --keep-as now                  the same after the change, beside them in planning.md
    python -m benchmarks.planning --after --keep                 a changed model, with what its first form left on disk

Each plan is made in a fresh process with an empty cache directory, and then again in another one with the directory
that the first has filled. Imports are timed by themselves. Nothing is run and no device is needed. `--profile` samples
the stack every few milliseconds of processor time, which costs next to nothing, in a third process.

Modules that are imported while a plan is made (numba) count with its time, but not their compilation to bytecode, which
an installed package has behind it: that is done before the first process, whatever the environment says of it.
"""

import argparse
import atexit
import collections
import dataclasses
import functools
import json
import os
import shutil
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

from benchmarks.machine import description, markdown, planning_processor_s

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "planning.md"
ROWS = RESULTS.with_suffix(".json")
HOTTEST = 10  # functions that a profile prints
SAMPLE_S = 0.005  # of processor time, from one look at the stack to the next
SIZES = {"width": 768, "heads": 12, "vocabulary": 50_304, "length": 1024, "batch": 16}
TARGETS_S = {(12, 8): 5.0, (96, 8): 60.0}  # of the first run, by (layers, devices), tracing included
CACHED_TARGET_S = 1.0
# `--after`: a model that was planned, its changed forms, and the aim for these as a part of planning from nothing.
PLANNED_LAYERS, AFTER_TARGET = 48, 0.2
CHANGED = {"another head": (48, 32_000), "64 layers": (64, SIZES["vocabulary"])}  # layers, vocabulary
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


def plan_once(layers: int, cluster: str, devices: int, profile: bool, vocabulary: int = SIZES["vocabulary"]) -> Run:
    """Plans in this process; the cache is where the environment says."""
    begun = time.perf_counter()
    import jax

    import autopar
    from benchmarks.zoo import CASES

    imported = time.perf_counter()
    case = CASES["gpt"](layers=layers, **SIZES | {"vocabulary": vocabulary})
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    step = autopar.parallelize(case.step, cluster=make_cluster(cluster, devices), show_progress=False)
    sampler = Sampler()
    if profile:
        sampler.start()
    started, cpu_started = time.perf_counter(), planning_processor_s()
    plan = step.plan(state, batch)
    total_s, cpu_s = time.perf_counter() - started, planning_processor_s() - cpu_started
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


@functools.cache
def compiled_modules() -> str:
    """A folder with the compiled form of all modules that planning imports, where the child processes find it."""
    folder = tempfile.mkdtemp(prefix="autopar-planning-modules-")
    atexit.register(shutil.rmtree, folder)
    with tempfile.TemporaryDirectory(prefix="autopar-planning-") as cache:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.planning", "--child", "--layers", "6", "--devices", "8"],
            cwd=ROOT, env=child_environment(cache, folder), capture_output=True, check=False,
        )  # fmt: skip
    return folder


def child_environment(cache: str, modules: str) -> dict[str, str]:
    """The environment with a cache directory and a folder of compiled modules."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"AUTOPAR_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu", "PYTHONPYCACHEPREFIX": modules}


def in_fresh_process(
    layers: int,
    cluster: str,
    devices: int,
    cache: str,
    profile: bool = False,
    vocabulary: int = SIZES["vocabulary"],
) -> Run:
    command = [sys.executable, "-m", "benchmarks.planning", "--child", "--cluster", cluster]
    command += ["--layers", str(layers), "--devices", str(devices), *(["--profile"] if profile else [])]
    command += ["--vocabulary", str(vocabulary)]
    environment = child_environment(cache, compiled_modules())
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class After:
    """A changed model: planned from nothing, after its first form with the same cache, and with its own plan there."""

    name: str
    nothing: dict[str, Any]
    after: dict[str, Any]
    cached: dict[str, Any]

    def cells(self) -> list[str]:
        nothing, after, cached = (Run(**run) for run in (self.nothing, self.after, self.cached))
        if failure := nothing.failure or after.failure or cached.failure:
            return [self.name, failure, *("" for _ in AFTER_COLUMNS[2:])]
        share, least = after.cpu_s / nothing.cpu_s, cached.cpu_s / nothing.cpu_s
        return [
            self.name,
            f"{nothing.cpu_s:.2f}",
            f"{after.cpu_s:.2f}",
            f"{share:.2f} ({'<' if share < AFTER_TARGET else 'not <'} {AFTER_TARGET:g})",
            f"{cached.cpu_s:.2f}",
            f"{least:.2f}",
            f"{after.step_time_s * 1e3:.4f}" + ("" if after.step_time_s == nothing.step_time_s else ", not equal"),
        ]


AFTER_COLUMNS = (
    "changed model", "from nothing, cpu s", "after the first form, cpu s", "share", "its own plan in the cache, cpu s",
    "share at least", "step, ms",
)  # fmt: skip


def planned_after(cluster: str, devices: int) -> list[After]:
    """The changed forms of a model that was planned before, each beside what only its first form left on disk."""
    found = []
    with tempfile.TemporaryDirectory(prefix="autopar-planning-") as first:
        in_fresh_process(PLANNED_LAYERS, cluster, devices, first)
        for name, (layers, vocabulary) in CHANGED.items():
            with tempfile.TemporaryDirectory(prefix="autopar-planning-") as folder:
                empty, filled = str(Path(folder, "empty")), str(Path(folder, "filled"))
                shutil.copytree(first, filled)
                runs = [
                    dataclasses.asdict(in_fresh_process(layers, cluster, devices, cache, vocabulary=vocabulary))
                    for cache in (empty, filled, empty)
                ]
            found.append(After(name=name, nothing=runs[0], after=runs[1], cached=runs[2]))
            print(" | ".join(found[-1].cells()), flush=True)
    return found


def row_of(first: Run, second: Run, before: dict[str, Any] | None) -> list[str]:
    """A line of the table. `before` is the first run of the same row that is kept as that."""
    head = [str(first.layers), f"{first.cluster}, {first.devices}"]
    if failure := first.failure or second.failure:
        return [*head, failure, *("" for _ in COLUMNS[3:])]
    meshes = ", ".join(
        f"{mesh_text(name)} {seconds:.1f}" for name, seconds in first.passes.items() if "mesh" in name.split("=")[0]
    )
    return [
        *head,
        f"{first.passes['trace']:.2f}",
        f"{first.passes['graph']:.2f}",
        meshes,
        f"{first.passes['write the plan']:.2f}",
        verdict(Run(**before), None) if before is not None else "",
        verdict(first, TARGETS_S.get((first.layers, first.devices))),
        verdict(second, CACHED_TARGET_S),
        f"{before['step_time_s'] * 1e3:.4f}" if before is not None and before["step_time_s"] else "",
        f"{first.step_time_s * 1e3:.4f}",
        f"{first.mesh}, gap {first.gap:.2%}",
    ]


def mesh_text(name: str) -> str:
    """Of a pass: 2x4 for `mesh x=2 x y=4`; of several meshes that are searched at once, the name as it is."""
    if not name.startswith("mesh "):
        return name
    return "x".join(part.split("=")[1] for part in name.removeprefix("mesh ").split(" x "))


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
    parser.add_argument("--after", action="store_true", help=f"plan changed forms of {PLANNED_LAYERS} layers after it")
    parser.add_argument("--keep", action="store_true", help="with --after: keep its rows")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, default=SIZES["vocabulary"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        layers, devices = arguments.layers[0], arguments.devices[0]
        run = plan_once(layers, arguments.cluster, devices, arguments.profile, arguments.vocabulary)
        print(json.dumps(dataclasses.asdict(run)))
        return 0
    if arguments.after:
        changed = planned_after(arguments.cluster, arguments.devices[0])
        if arguments.keep:
            on = f"{arguments.cluster}, {arguments.devices[0]} devices"
            after = {"on": on, "machine": description(), "rows": [dataclasses.asdict(row) for row in changed]}
            ROWS.write_text(json.dumps(kept() | {"after": after}, indent=1) + "\n")
            write_table(machine_of_page())
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
        write_table(description())
    return int(any(first.failure or second.failure for first, second in runs))


def key_of(run: Run) -> str:
    return f"{run.layers} layers, {run.cluster}, {run.devices}"


def kept() -> dict[str, Any]:
    """Rows by "before" and "now", and by name: the first run and the one from the cache; those of "after"."""
    return json.loads(ROWS.read_text()) if ROWS.exists() else {"before": {}, "now": {}}


def kept_before(run: Run) -> dict[str, Any] | None:
    runs = kept()["before"].get(key_of(run))
    return runs[0] if runs is not None else None


def keep(name: str, first: Run, second: Run) -> None:
    rows = kept()
    rows[name][key_of(first)] = [dataclasses.asdict(first), dataclasses.asdict(second)]
    ROWS.write_text(json.dumps(rows, indent=1) + "\n")


def write_table(machine: str) -> None:
    """`machine`: on which the rows of the first table were made."""
    rows = [[Run(**run) for run in runs] for runs in kept()["now"].values()]
    sizes = ", ".join(f"{name} {size:,}" for name, size in SIZES.items())
    text = (
        "# Planning time\n\n"
        f"GPT with unrolled layers ({sizes}), seconds. `python -m benchmarks.planning --keep-as now`: the first run "
        "has an empty cache; `from the cache` is a fresh process that finds the plan on disk. Imports are not counted. "
        "`cpu` is the time of processors, of all processes that plan, which other work on the machine lengthens less. "
        "`before` are the rows that the last change was held against; `step` is the predicted time of the plan.\n\n"
        f"{machine}\n\n" + markdown(COLUMNS, [row_of(first, second, kept_before(first)) for first, second in rows])
    )
    after = kept().get("after")
    if after is not None:
        text += (
            "\n\n## A changed model\n\n"
            f"`python -m benchmarks.planning --after --keep`: the same model of {PLANNED_LAYERS} layers on "
            f"{after['on']} was planned before, and its plan and rules are in the cache. With its own plan in the "
            "cache a step is traced, and nothing is searched for: no cache of parts of plans can be faster, which "
            f"gives the least share.\n\n{after['machine']}\n\n"
            + markdown(AFTER_COLUMNS, [After(**row).cells() for row in after["rows"]])
        )
    RESULTS.write_text(text + "\n")


def machine_of_page() -> str:
    """The line of the page on the machine that made its first table."""
    return RESULTS.read_text().split("\n\n")[2]


if __name__ == "__main__":
    sys.exit(main())
