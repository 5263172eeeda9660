"""Every case of the zoo as a pipeline against plain `jax.jit`, two steps from the same state and batches.

    python -m benchmarks.staged                             a sample: see `sample`
    python -m benchmarks.staged --all                       every case, schedule and number of micro-batches: hours
    python -m benchmarks.staged gpt mlp --stages 2 --schedules 1f1b zb-h1 --microbatches 4

Each case runs in a process of its own. Every program is proved by `verify_program` before it runs. --keep puts the
table in benchmarks/results/staged.md.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import autopar
from autopar.runtime.pipeline.program import Send
from autopar.runtime.pipeline.standard_schedules import SCHEDULES
from autopar.runtime.pipeline.verify import verify_program, verify_schedule
from benchmarks.correctness import cluster_of, last_line
from benchmarks.machine import description, markdown
from benchmarks.zoo import CASES, Case
from benchmarks.zoo.comparison import worst_difference

RESULTS = Path(__file__).parent / "results" / "staged.md"
STEPS = 2
STAGES, MICROBATCHES = (2, 4), (1, 2, 4, 8)
TIMEOUT_S = 240.0  # of one configuration
SAMPLED = ("mlp", "gpt", "moe")  # tried on every schedule

# What makes a case deep enough for 4 stages, and its batch large enough for 8 micro-batches, where its constructor can.
GROWN: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    (
        {"layers": 7, "batch": 32},
        ("mlp", "mlp_ema", "mlp_multi_steps", "dropout", "dropout_raw_key", "bookkeeping", "loss_scaling"),
    ),
    (
        {"layers": 4, "batch": 16},
        ("gpt", "gpt_remat", "moe", "bert", "gpt_scan", "gpt_scan_remat", "gpt_adafactor"),
    ),
    ({"layers": 3, "batch": 16}, ("encoder_decoder", "vit")),
    # See NOTES.
    ({"layers": 2, "batch": 16}, ("gpt_bf16", "gpt_adamw")),
    ({"batch": 16}, ("clip", "nnx_model", "haiku_model", "fixed_point", "equinox_model", "lstm")),
    ({"blocks": 2, "batch": 16}, ("resnet",)),
    ({"batch": 12}, ("gpt_odd",)),
    ({"layers": 4}, ("gnn",)),
)
SIZES = {name: sizes for sizes, names in GROWN for name in names}


NOTES = (
    "gpt_bf16 has 2 layers: with 4 its state differs by 5e-2, as much as plain jit differs from itself when it adds up "
    "the gradients of four micro-batches, or from float32.",
    "loss_scaling starts at a scale of 2^12: at its own, gradients of the whole batch overflow in float16 where those "
    "of a micro-batch do not, so that a step is skipped in one and not in the other.",
    "gpt_adamw exceeds 1e-5 in a bias with 2 layers (1.07e-5) as with 4 (1.03e-5), since Adam divides by the size of a "
    "gradient: changing the first parameters by one unit in the last place moves the same bias by 1.04e-5 under plain "
    "jit, and the moments of the staged step are within 1.4e-6.",
)


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Setting:
    """One way to run a case. `stages` counts groups of devices; interleaved and zb-v put two stages on each."""

    stages: int
    schedule: str
    microbatches: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One case in one setting.

    Attributes:
        meshes: Sizes of the axes of each group of devices.
        layers: How many each stage has.
        sends: Transfers in a step.
        split_leaves: How many of the `leaves` of state and batch are not replicated on their stage.
        metrics: Largest difference of the metrics, the loss among them, over both steps.
        state: Difference of the state after the last step, at `worst_leaf`.
        refused: Why there is no such pipeline, in the words of the error.
        failure: What went wrong otherwise.
    """

    case: str
    setting: Setting
    meshes: str = ""
    layers: str = ""
    sends: int = 0
    split_leaves: int = 0
    leaves: int = 0
    metrics: float = 0.0
    state: float = 0.0
    worst_leaf: str = ""
    tolerance: float = 0.0
    seconds: float = 0.0
    refused: str = ""
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and (bool(self.refused) or max(self.metrics, self.state) <= self.tolerance)

    @property
    def verdict(self) -> str:
        return "FAILED" if self.failure else "refused" if self.refused else "" if self.passed else "WRONG"


def sample(name: str) -> list[Setting]:
    """Every case on 2 and 4 stages; every schedule with every number of micro-batches on the MLP; every schedule on
    the cases of `SAMPLED`, on 2 stages and, where they are cheap, on 4."""
    found = [Setting(stages=s, schedule="1f1b", microbatches=m) for s, m in ((2, 4), (4, 2))]
    if name == "mlp":
        found += [Setting(stages=2, schedule=x, microbatches=m) for x in SCHEDULES for m in MICROBATCHES]
        found += [Setting(stages=4, schedule=x, microbatches=8) for x in SCHEDULES]
    elif name in SAMPLED:
        found += [Setting(stages=2, schedule=x, microbatches=4) for x in SCHEDULES]
        found.append(Setting(stages=4, schedule="zb-h1", microbatches=8))
    return list(dict.fromkeys(found))


def product(stages: Sequence[int], schedules: Sequence[str], microbatches: Sequence[int]) -> list[Setting]:
    return [Setting(stages=s, schedule=x, microbatches=m) for s in stages for x in schedules for m in microbatches]


def case_of(name: str) -> Case:
    case = CASES[name](**SIZES[name])
    if name != "loss_scaling":
        return case
    # At the scale that it starts with, gradients of the whole batch overflow in float16, those of a micro-batch do not.
    return dataclasses.replace(case, init=lambda key: case.init(key) | {"scale": jnp.float32(2.0**12)})


def forward_only(case: Case) -> Case:
    """An evaluation step: the metrics of a state, nothing else."""
    return dataclasses.replace(case, step=lambda state, batch: case.step(state, batch)[1])


def run_setting(case: Case, setting: Setting, hardware: str, num_devices: int) -> Row:
    """Two steps in stages and two by plain `jax.jit`; the state flows."""
    start_s = time.perf_counter()
    evaluates = setting.schedule.startswith("inference")
    wanted = forward_only(case) if evaluates else case
    recipe = autopar.recipes.pipeline(setting.stages, setting.schedule, num_microbatches=setting.microbatches)
    parallel = autopar.parallelize(
        wanted.step,
        plan=recipe,
        cluster=cluster_of(hardware, num_devices),
        donate_argnums=() if evaluates else (0,),
        cache_dir=None,
        show_progress=False,
    )
    plain = jax.jit(wanted.step)
    expected = jax.jit(case.init)(jax.random.key(0))
    state = jax.tree.map(lambda leaf: leaf.copy(), expected)  # the parallel step donates its state
    try:
        compiled = parallel.compile(state, case.batch(0))
    except autopar.errors.AutoparError as error:
        return Row(case=case.name, setting=setting, refused=f"{type(error).__name__}: {error}".replace("\n", " "))
    verify_schedule(compiled.staged.schedule)
    verify_program(compiled.executor.program, compiled.staged.schedule)
    worst_metrics = 0.0
    for seed in range(STEPS):
        batch = case.batch(seed)
        if evaluates:
            metrics, got = plain(expected, batch), parallel(state, batch)
        else:
            expected, metrics = plain(expected, batch)
            state, got = parallel(state, batch)
        worst_metrics = max(worst_metrics, worst_difference(case, metrics, got).relative)
    worst = worst_difference(case, expected, state)
    plan = compiled.plan
    groups = dict.fromkeys((s.first_device, s.axis_sizes) for s in plan.record.pipeline.stages)
    shardings = jax.tree.leaves((plan.state_shardings, plan.batch_shardings))
    return Row(
        case=case.name,
        setting=setting,
        meshes="+".join("x".join(map(str, sizes)) for _, sizes in groups),
        layers="+".join(str(len(s.layers)) for s in plan.record.pipeline.stages),
        sends=sum(len(i.transfers) for i in compiled.executor.program.instructions if isinstance(i, Send)),
        split_leaves=sum(not s.is_fully_replicated for s in shardings),
        leaves=len(shardings),
        metrics=worst_metrics,
        state=worst.relative,
        worst_leaf=worst.path if worst.relative > 0 else "",
        tolerance=case.tolerance,
        seconds=time.perf_counter() - start_s,
    )


def work(name: str, settings: Sequence[Setting], hardware: str, num_devices: int) -> None:
    """Prints a row in JSON for each setting."""
    jax.config.update("jax_num_cpu_devices", num_devices)
    case = case_of(name)
    for setting in settings:
        try:
            row = run_setting(case, setting, hardware, num_devices)
        except Exception as error:  # a bug is a row of the table, and the next setting is tried
            row = Row(case=name, setting=setting, failure=f"{type(error).__name__}: {error}".replace("\n", " "))
        print(json.dumps(dataclasses.asdict(row)), flush=True)


def rows_of(name: str, settings: Sequence[Setting], hardware: str, num_devices: int) -> Iterator[Row]:
    """Runs `work` in a process, and in another one for the settings that are left where it dies."""
    remaining = list(settings)
    while remaining:
        command = [sys.executable, "-m", "benchmarks.staged", "--worker", name, "--hardware", hardware]
        command += ["--devices", str(num_devices)]
        command += ["--settings", json.dumps([dataclasses.astuple(setting) for setting in remaining])]
        with tempfile.TemporaryFile("w+") as errors:
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            while remaining:
                # A setting that hangs ends the process, and with it the reading of its output.
                patience = threading.Timer(TIMEOUT_S, worker.kill)
                patience.start()
                line = next((text for text in worker.stdout or () if text.startswith("{")), "")
                patience.cancel()
                if not line:
                    break
                fields = json.loads(line)
                remaining.pop(0)
                yield Row(**fields | {"setting": Setting(**fields["setting"])})
            code = worker.wait()
            errors.seek(0)
            failure = f"exit {code} (killed after {TIMEOUT_S:.0f} s if -9): {last_line(errors.read())}"
        if remaining:
            yield Row(case=name, setting=remaining.pop(0), failure=failure)


HEADINGS = ("case", "groups", "schedule", "m", "meshes", "layers", "sends", "split", "metrics", "state", "aim", "s", "")


def cells(row: Row) -> tuple[str, ...]:
    setting = (row.case, str(row.setting.stages), row.setting.schedule, str(row.setting.microbatches))
    if row.refused or row.failure:
        return (*setting, *[""] * (len(HEADINGS) - 5), row.verdict)
    split, differences = f"{row.split_leaves}/{row.leaves}", (row.metrics, row.state, row.tolerance)
    return (
        *setting, row.meshes, row.layers, str(row.sends), split, *(f"{x:.0e}" for x in differences),
        f"{row.seconds:.0f}", row.verdict,
    )  # fmt: skip


def notes_of(rows: Sequence[Row]) -> list[str]:
    """What there is to say of the rows that were refused or did not pass, equal reasons together."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reason = row.failure or row.refused or ("" if row.passed else f"differs most in {row.worst_leaf}")
        if reason:
            setting = f"{row.setting.stages} {row.setting.schedule} m={row.setting.microbatches}"
            found.setdefault((row.case, reason), []).append(setting)
    here = f"{Path(__file__).parents[1]}/"
    return [
        f"{case} ({'; '.join(settings)}): {reason.replace(here, '')[:400]}"
        for (case, reason), settings in found.items()
    ]


def summary_of(rows: Sequence[Row]) -> str:
    ran = [row for row in rows if not row.refused and not row.failure]
    good = sum(row.passed for row in ran)
    refused, failed = sum(bool(row.refused) for row in rows), sum(bool(row.failure) for row in rows)
    typical = float(np.median([row.state for row in ran])) if ran else 0.0
    return (
        f"{len(rows)} settings: {good} of {len(ran)} that ran are within tolerance (median difference of the state "
        f"{typical:.0e}), {refused} refused, {failed} failed."
    )


def markdown_of(rows: Sequence[Row], hardware: str, num_devices: int) -> str:
    lines = [
        "# The zoo in pipelines against plain jax.jit",
        "",
        f"`python -m benchmarks.staged`, {STEPS} steps from the same state and batches on {num_devices} devices "
        f"({hardware}). Groups of devices, their meshes, the layers of each stage, transfers of a step, how many of "
        "the leaves of state and batch are split on their stage. Differences are max |difference| / max |leaf|, of the "
        f"worst leaf. Every program was proved by `verify_program`. {description()}",
        "",
        summary_of(rows),
        "",
        markdown(HEADINGS, [cells(row) for row in rows]),
        "",
        *(f"- {note}" for note in NOTES),
        "",
        "Refused, wrong or failed:",
        "",
        *(f"- {note}" for note in notes_of(rows)),
    ]
    return "\n".join(lines) + "\n"


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Two steps in stages against plain jax.jit")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(*cells(row), style="" if row.passed else "red")
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--stages", nargs="+", type=int, help="groups of devices; given options replace the sample")
    parser.add_argument("--schedules", nargs="+", choices=tuple(SCHEDULES))
    parser.add_argument("--microbatches", nargs="+", type=int)
    parser.add_argument("--all", action="store_true", help="the whole cross product")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--hardware", choices=("slow", "hosts", "local"), default="hosts", help="see correctness.py")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"no case is called {unknown[0]!r}; the cases are {', '.join(CASES)}")
    return args


def settings_of(args: argparse.Namespace) -> Callable[[str], list[Setting]]:
    """The settings of each case."""
    if not (args.all or args.stages or args.schedules or args.microbatches):
        return sample
    settings = product(args.stages or STAGES, args.schedules or tuple(SCHEDULES), args.microbatches or MICROBATCHES)
    return lambda name: settings


def main() -> int:
    args = parse_arguments()
    if args.worker:
        settings = [Setting(stages=s, schedule=x, microbatches=m) for s, x, m in json.loads(args.settings)]
        work(args.worker, settings, args.hardware, args.devices)
        return 0
    of_case = settings_of(args)
    names = args.cases or list(CASES)
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows: list[Row] = []
    with Progress(console=console) as progress:
        task = progress.add_task("settings", total=sum(len(of_case(name)) for name in names))
        for name in names:
            for row in rows_of(name, of_case(name), args.hardware, args.devices):
                rows.append(row)
                progress.update(task, advance=1, description=f"{name} {row.setting.schedule}")
                progress.console.print(*filter(None, cells(row)))
    console.print(table_of(rows), *notes_of(rows), summary_of(rows), sep="\n", markup=False)
    if args.keep:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(markdown_of(rows, args.hardware, args.devices))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
