"""Plans and runs one small model under several recipes on the devices of this machine, in a process of its own.

    python -m benchmarks.auto_vs_manual.measuring MODEL CLUSTER RECIPE...
    python -m benchmarks.auto_vs_manual.measuring --plan MODEL FILE      one program: a turn for each line

The devices' constants are measured first. Each program runs in a process of its own, for what others have left of its
memory would help it, and in several one after the other: the same program may be faster in one process than in another,
from its first step to its last. They take turns, so that what else the machine does falls on all recipes alike. The
median of each counts, and of each beside the search's, and beside the one that the clock chose (`autopar.tune`), the
median of what the two took in the same turns. Recipes that come to the same program as another share it. Bytes and peak
are those of the program that XLA made. Each recipe's row goes to the standard output, a line of JSON.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.predicted_time import Running, take_turns  # first of all: it asks for 8 CPU devices

import jax  # isort: skip

import autopar  # isort: skip
from autopar import tuning
from autopar.hardware import calibrate
from autopar.plan.render import in_short
from autopar.verification import peak_bytes, traffic_of
from benchmarks.auto_vs_manual.manual import AUTO, TIMED
from benchmarks.auto_vs_manual.models import Model, models
from benchmarks.auto_vs_manual.planning import cluster_of, line_of, plan_row, with_plan
from benchmarks.auto_vs_manual.rows import Row, Status

PROCESSES, ROUNDS = 3, 4  # of each program one after the other, and turns that count in each


class InAProcess:
    """A plan that runs a turn of steps whenever it is told to, in a process of its own. Seconds as in `Running`; what
    is compiled is kept in the directory for the next process.
    """

    def __init__(self, model: str, recipe: str, plan: autopar.Plan, directory: str) -> None:
        self.name = f"{model} | {recipe}"
        path = Path(directory) / f"{recipe}.json"
        plan.save(path)
        self.command = [sys.executable, "-m", "benchmarks.auto_vs_manual.measuring", "--plan", model, str(path)]
        self.environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(Path(directory) / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.process: subprocess.Popen[str] | None = None
        self.wall_s: list[float] = []
        self.processor_s: list[float] = []

    def start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(self.command, **pipes, text=True, env=self.environment)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def run(self) -> None:
        assert self.process is not None, "it was started"
        assert self.process.stdin is not None, "it is a pipe"
        assert self.process.stdout is not None, "it is a pipe"
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"{self.name}: its process ended with {self.process.wait()}; its errors stand above")
        wall_s, processor_s = json.loads(line)
        self.wall_s += wall_s
        self.processor_s += processor_s


def run_in_turn(name: str, path: str) -> None:
    """The other side of `InAProcess`."""
    case, plan = models()[name].build(), autopar.Plan.load(path)
    step = autopar.parallelize(case.step, cluster=plan.cluster, plan=plan, cache_dir=None, show_progress=False)
    batch = case.batch(0)
    running = Running(step, step.init(case.init, jax.random.key(0)), step.put_batch(batch))
    for _ in sys.stdin:
        running.wall_s, running.processor_s = [], []
        running.run()
        print(json.dumps([running.wall_s, running.processor_s]), flush=True)


def main(name: str, cluster_text: str, *names: str) -> None:
    model, count = models()[name], cluster_of(cluster_text).num_devices
    case, cluster = model.build(), autopar.Cluster.of_measurement(calibrate.measure(count, show_progress=False), count)
    rows: list[Row] = []
    programs: dict[str, InAProcess] = {}
    program_of: dict[str, str] = {}  # of each recipe
    with tempfile.TemporaryDirectory() as directory:
        try:
            for recipe in names:
                if recipe == TIMED:
                    row, plan = timed_row(model, cluster_text, cluster)
                else:
                    row, plan = plan_row(model, cluster_text, recipe, cluster=cluster)
                if plan is not None and row.status is Status.PLANNED:
                    step = autopar.parallelize(
                        case.step, cluster=cluster, plan=plan, cache_dir=None, show_progress=False
                    )
                    compiled = step.compile(*model.shapes())
                    text = program_of[recipe] = tuning.program_of(compiled)
                    if text not in programs:
                        programs[text] = InAProcess(name, recipe, plan, directory)
                    row = dataclasses.replace(
                        row, compiled_bytes=traffic_of(compiled).total_bytes, compiled_peak_bytes=peak_bytes(compiled)
                    )
                rows.append(row)
            measured_s = run_in_turns(programs)
        finally:
            for program in programs.values():
                program.stop()
    for row in rows:
        print(line_of(with_times(row, measured_s, program_of)), flush=True)


def run_in_turns(programs: Mapping[str, InAProcess]) -> dict[str, list[float]]:
    """Seconds of the steps of each program, those of the same turns in the same places."""
    seconds: dict[str, list[float]] = {text: [] for text in programs}
    for _ in range(PROCESSES):
        for program in programs.values():
            program.start()
        take_turns(list(programs.values()), ROUNDS)
        for text, program in programs.items():
            seconds[text] += program.wall_s
            program.stop()
    return seconds


def timed_row(model: Model, cluster_text: str, cluster: autopar.Cluster) -> tuple[Row, autopar.Plan | None]:
    """The plan that is the fastest by the clock of those that the search predicts to be the best."""
    begun, case = time.perf_counter(), model.build()
    row = Row(
        model=model.name, cluster=cluster_text, recipe=TIMED, devices=cluster.num_devices, status=Status.FAILED
    )  # fmt: skip
    step = autopar.parallelize(case.step, cluster=cluster, cache_dir=None, show_progress=False)
    try:
        tuned = autopar.tune(step, step.init(case.init, jax.random.key(0)), case.batch(0))
    except tuning.FAILURES as error:
        return dataclasses.replace(row, why=str(error).strip().splitlines()[0]), None
    print(tuned, file=sys.stderr, flush=True)
    count = sum(timed.measured_s is not None for timed in tuned.rows)
    row = dataclasses.replace(row, attempts=count, fitting=count, planned_s=time.perf_counter() - begun)
    return with_plan(row, tuned.plan, in_short(tuned.plan.record)), tuned.plan


def with_times(row: Row, measured_s: Mapping[str, list[float]], program_of: Mapping[str, str]) -> Row:
    """A row with what its program took, and beside it the search's and the one that the clock chose."""
    if row.recipe not in program_of:
        return row
    seconds = measured_s[program_of[row.recipe]]
    quartiles = statistics.quantiles(seconds, n=4)

    def beside(chosen: str) -> float | None:
        if row.recipe == chosen or chosen not in program_of:
            return None
        own = measured_s[program_of[chosen]]
        return statistics.median(s / o for s, o in zip(seconds, own, strict=True))

    return dataclasses.replace(
        row,
        measured_s=quartiles[1],
        measured_quartiles_s=(quartiles[0], quartiles[2]),
        measured_beside_auto=beside(AUTO),
        measured_beside_timed=beside(TIMED),
    )


if __name__ == "__main__":
    if sys.argv[1] == "--plan":
        run_in_turn(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
