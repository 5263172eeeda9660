"""Every case of the zoo in parallel against plain `jax.jit`, from the same state and batches.

    python -m benchmarks.correctness                             all cases on 1, 2, 4 and 8 devices
    python -m benchmarks.correctness gpt mlp --devices 8
    python -m benchmarks.correctness --published --hardware local

Each case runs in a process of its own, so that one that crashes or hangs is a row of the table and not the end of it.
The table of a full run is kept in benchmarks/results/correctness.md.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import autopar
from benchmarks.zoo import CASES, Case
from benchmarks.zoo.case import PyTree
from benchmarks.zoo.comparison import worst_difference
from benchmarks.zoo.published import PUBLISHED

RESULTS = Path(__file__).parent / "results" / "correctness.md"
DEVICES = (1, 2, 4, 8)
STEPS = 3
SLOWNESS = 1e-6
TIMEOUT_S = 900.0  # of one case on one number of devices

ALL_CASES: dict[str, Callable[..., Case]] = CASES | {
    name: case for cases in PUBLISHED.values() for name, case in cases.items()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One case on one number of devices.

    Attributes:
        mesh: Sizes of the logical mesh's axes.
        split_leaves: How many of the `leaves` of state and batch are not replicated.
        loss: Difference of the metrics, the loss among them.
        state: Difference of the state after the last step.
        sent: Bytes that a device sends in a step, predicted and compiled.
        peak: Bytes of a device's memory at its fullest, predicted and compiled.
        failure: The last line of what a run that died said.
    """

    case: str
    devices: int
    mesh: str = ""
    split_leaves: int = 0
    leaves: int = 0
    loss: float | None = None
    state: float | None = None
    worst_leaf: str = ""
    tolerance: float | None = None
    sent: tuple[float, float] = (0.0, 0.0)
    peak: tuple[float, float] = (0.0, 0.0)
    seconds: float | None = None
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and max(self.loss, self.state) <= self.tolerance


def cluster_of(hardware: str, num_devices: int) -> autopar.Cluster:
    """The devices of this program as they are, or as they are not, for the sake of the plans that follow.

    Sending costs more than computing such small cases, so that the best plan for real devices ("local") computes
    everything everywhere. On devices with next to no speed ("slow") the best plan splits all that can be split; where
    every two of them are a host with a slower link to the others ("hosts"), it treats mesh axes differently.
    """
    cluster = autopar.Cluster.local(num_devices=num_devices)
    if hardware == "local":
        return cluster
    rates = tuple((dtype, rate * SLOWNESS) for dtype, rate in cluster.device.peak_flops)
    memory_rate = cluster.device.peak_memory_bytes_per_s * SLOWNESS
    device = dataclasses.replace(cluster.device, peak_flops=rates, peak_memory_bytes_per_s=memory_rate)
    cluster = dataclasses.replace(cluster, device=device)
    if hardware == "slow" or num_devices <= 2:
        return cluster
    inside = dataclasses.replace(cluster.inside_host, bytes_per_s=cluster.inside_host.bytes_per_s * SLOWNESS)
    between = dataclasses.replace(inside, bytes_per_s=inside.bytes_per_s / 10)
    return dataclasses.replace(
        cluster, num_hosts=num_devices // 2, devices_per_host=2, inside_host=inside, between_hosts=between
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """What plain `jax.jit` makes of a case: the first state, the metrics of each step, and the last state."""

    initial: PyTree
    metrics: list[PyTree]
    state: PyTree


def plain_run(case: Case) -> Reference:
    initial = state = jax.jit(case.init)(jax.random.key(0))
    step = jax.jit(case.step)
    metrics = []
    for seed in range(STEPS):
        state, step_metrics = step(state, case.batch(seed))
        metrics.append(step_metrics)
    return Reference(initial=initial, metrics=metrics, state=state)


def run_case(case: Case, reference: Reference, hardware: str, num_devices: int) -> Row:
    """Trains `STEPS` steps in parallel and compares the metrics, the loss among them, and the last state."""
    start_s = time.perf_counter()
    parallel = autopar.parallelize(
        case.step, cluster=cluster_of(hardware, num_devices), cache_dir=None, show_progress=False
    )
    state = jax.tree.map(lambda leaf: leaf.copy(), reference.initial)  # the parallel step donates its state
    loss = 0.0
    for seed, expected in enumerate(reference.metrics):
        state, metrics = parallel(state, parallel.put_batch(case.batch(seed)))
        loss = max(loss, worst_difference(case, expected, metrics).relative)
    worst = worst_difference(case, reference.state, state)
    shapes = jax.eval_shape(lambda *args: args, reference.initial, case.batch(0))
    verification = autopar.verify(parallel, *shapes)
    plan = parallel.plan(*shapes)
    shardings = jax.tree.leaves((plan.state_shardings, plan.batch_shardings))
    return Row(
        case=case.name,
        devices=num_devices,
        mesh="x".join(map(str, plan.record.axis_sizes)),
        split_leaves=sum(not sharding.is_fully_replicated for sharding in shardings),
        leaves=len(shardings),
        loss=loss,
        state=worst.relative,
        worst_leaf=worst.path if worst.relative > 0 else "",
        tolerance=case.tolerance,
        sent=(verification.total.predicted, verification.total.compiled),
        peak=(verification.peak.predicted, verification.peak.compiled),
        seconds=time.perf_counter() - start_s,
    )


def work(name: str, hardware: str, devices: list[int]) -> None:
    """Prints a row in JSON for each number of devices."""
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    case = ALL_CASES[name]()
    reference = plain_run(case)
    for num_devices in devices:
        row = run_case(case, reference, hardware, num_devices)
        print(json.dumps(dataclasses.asdict(row)), flush=True)


def rows_of(name: str, hardware: str, devices: list[int]) -> Iterator[Row]:
    """Runs `work` in a process, and in another one for the devices that are left where it dies."""
    remaining = list(devices)
    while remaining:
        command = [sys.executable, "-m", "benchmarks.correctness", "--worker", name, "--hardware", hardware]
        command += ["--devices", *map(str, remaining)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S * len(remaining))
            output, failure = done.stdout, last_line(done.stderr) if done.returncode else ""
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"").decode()
            failure = f"no result after {TIMEOUT_S * len(remaining):.0f} s"
        rows = [Row(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
        yield from rows
        remaining = remaining[len(rows) :]
        if remaining:
            yield Row(case=name, devices=remaining.pop(0), failure=failure)


def last_line(text: str) -> str:
    """The last line of a traceback that says something; jax's notes on hidden frames follow it."""
    lines = [line for line in text.splitlines() if line and line[0] not in " -" and not line.startswith("For simpl")]
    return lines[-1] if lines else "died without a word"


HEADINGS = ("case", "devices", "mesh", "split", "metrics", "state", "aim", "sent, kB", "peak, kB", "s", "")


def cells(row: Row) -> tuple[str, ...]:
    if row.failure:
        return (row.case, str(row.devices), *[""] * (len(HEADINGS) - 3), "FAILED")
    differences = (f"{row.loss:.0e}", f"{row.state:.0e}", f"{row.tolerance:.0e}")
    kilobytes = (f"{predicted / 1e3:.1f}/{compiled / 1e3:.1f}" for predicted, compiled in (row.sent, row.peak))
    split, seconds = f"{row.split_leaves}/{row.leaves}", f"{row.seconds:.0f}"
    verdict = "" if row.passed else "WRONG"
    return (row.case, str(row.devices), row.mesh, split, *differences, *kilobytes, seconds, verdict)


def notes_of(rows: list[Row]) -> list[str]:
    """What there is to say of the rows that did not pass."""
    return [
        f"{row.case} on {row.devices}: {row.failure or f'differs most in {row.worst_leaf}'}"
        for row in rows
        if not row.passed
    ]


def table_of(rows: list[Row]) -> Table:
    table = Table(title="Three steps in parallel against plain jax.jit")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(*cells(row), style="" if row.passed else "red")
    return table


def markdown_of(rows: list[Row], hardware: str) -> str:
    good = sum(row.passed for row in rows)
    lines = [
        "# The zoo in parallel against plain jax.jit",
        "",
        f"`python -m benchmarks.correctness`, jax {jax.__version__}, {STEPS} steps from the same state and batches, "
        f"devices: {hardware}. Differences are max |difference| / max |leaf|, of the worst leaf; what a "
        "device sends in a step and its peak memory are predicted/compiled. "
        f"{good} of {len(rows)} within tolerance.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        *(f"- {note}" for note in notes_of(rows)),
    ]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(ALL_CASES)}")
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--published", action="store_true", help="other people's models too")
    parser.add_argument("--hardware", choices=("slow", "hosts", "local"), default="hosts", help="see cluster_of")
    parser.add_argument(
        "--output", type=Path, help=f"where to keep the table (default, for a full run: {RESULTS.name})"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in ALL_CASES]:
        parser.error(f"no case is called {unknown[0]!r}; the cases are {', '.join(ALL_CASES)}")
    return args


def main() -> int:
    args = parse_arguments()
    if args.worker:
        work(args.worker, args.hardware, args.devices)
        return 0
    names = args.cases or list(ALL_CASES if args.published else CASES)
    console = Console(width=None if sys.stdout.isatty() else 132)
    rows: list[Row] = []
    with Progress(console=console) as progress:
        for name in progress.track(names, description="cases"):
            for row in rows_of(name, args.hardware, args.devices):
                rows.append(row)
                progress.console.print(*filter(None, cells(row)))
    console.print(table_of(rows), *notes_of(rows), sep="\n")
    full = not args.cases and args.devices == list(DEVICES)
    if output := args.output or (RESULTS if full else None):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(markdown_of(rows, args.hardware))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
