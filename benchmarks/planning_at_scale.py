"""How long it takes to plan GPT-3 175B and a model of a trillion parameters for up to 16,384 GPUs, on this machine.

    python -m benchmarks.planning_at_scale                        GPT-3, unrolled and as a scan, for 128 hosts of 8 A100
    python -m benchmarks.planning_at_scale unrolled --hosts 1 16 2048 --model 1T
    python -m benchmarks.planning_at_scale --all --keep           every size (an hour); keeps a table and a plot of it

Each plan is made by `autopar.plan` in a fresh process with nothing cached, tracing included; no device is needed. Where
no plan fits into the memory, finding that out is what is timed.
Sizes: GPT-3 from Brown et al., "Language models are few-shot learners", 2020, table 2.1; 1T from Narayanan et al.,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021, table 1. Batches of 1,536
sequences of 2,048 tokens as there, and of one for every four devices on more than 6,144; master weights and AdamW in
float32. The unrolled model computes in bfloat16, the scanned one in float32 with `jax.checkpoint` on the body.
Rows are kept as they are made, beside those kept before. The plot needs matplotlib: `pip install "autopar[plots]"`.
"""

import argparse
import dataclasses
import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import description, markdown, planning_processor_s

RESULTS = Path(__file__).parent / "results" / "planning_at_scale.md"
ROWS = RESULTS.with_suffix(".json")
PLOT = RESULTS.with_suffix(".png")
SIZES = {
    "GPT-3": {"layers": 96, "width": 12_288, "heads": 96, "vocabulary": 51_200, "length": 2048},
    "1T": {"layers": 128, "width": 25_600, "heads": 160, "vocabulary": 51_200, "length": 2048},
}
HOSTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
CASES_OF = {"unrolled": "gpt", "scanned": "gpt_scan_remat"}
TARGET_S, STAGES_TARGET_S, MEMORY_TARGET_BYTES = 180.0, 5.0, 8 * 2**30
COLUMNS = ("model", "layers", "devices", "wall", "processor", "stages pass", "memory", "step", "MFU", "plan")
TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One plan. Seconds of the clock and of the processor; `stages_s` of the dynamic programme alone."""

    model: str
    form: str
    devices: int
    wall_s: float = 0.0
    cpu_s: float = 0.0
    stages_s: float = 0.0
    memory_bytes: int = 0
    step_time_s: float = 0.0
    mfu: float = 0.0
    text: str = ""
    passes: dict[str, float] = dataclasses.field(default_factory=dict)


def plan_once(model: str, form: str, hosts: int) -> Row:
    """Plans in this process."""
    import jax
    import jax.numpy as jnp
    import optax

    import autopar
    from autopar.errors import MemoryLimitError, SolverError
    from autopar.plan.render import in_short
    from benchmarks.zoo import CASES

    dtype = {"dtype": jnp.bfloat16} if form == "unrolled" else {}
    batch_size = max(1536, 8 * hosts // 4)
    case = CASES[CASES_OF[form]](**SIZES[model], batch=batch_size, **dtype, optimizer=optax.adamw(1e-4))
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    cluster = autopar.Cluster.preset("dgx-a100-80g", hosts=hosts)
    step = autopar.parallelize(case.step, cluster=cluster, cache_dir=None, show_progress=False)
    started_s, cpu_started_s = time.perf_counter(), planning_processor_s()
    plan = refusal = None
    try:
        plan = step.plan(state, batch)
    except (MemoryLimitError, SolverError) as error:
        refusal = error
    passes = step.last_progress.spent_s if step.last_progress is not None else {}
    row = Row(
        model=model,
        form=form,
        devices=cluster.num_devices,
        wall_s=time.perf_counter() - started_s,
        cpu_s=planning_processor_s() - cpu_started_s,
        stages_s=passes.get("stages", 0.0),
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        passes=passes,
    )
    if plan is None:
        return dataclasses.replace(row, text=f"none: {refusal.got}"[:120])
    return dataclasses.replace(
        row,
        step_time_s=plan.predicted.step_time_s,
        mfu=plan.predicted.mfu,
        text=in_short(plan.record),
    )


def planned(model: str, form: str, hosts: int) -> Row:
    """Plans in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.planning_at_scale", form, "--hosts", str(hosts), "--model", model]
    command.append("--worker")
    made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if made.returncode:
        raise SystemExit(made.stderr[-3000:])
    return Row(**json.loads(made.stdout.strip().splitlines()[-1]))


def cells(row: Row) -> tuple[str, ...]:
    found = (f"{row.step_time_s:.2f} s", f"{row.mfu:.1%}") if row.step_time_s else ("", "")
    measured = row.memory_bytes > 0  # not where planning was ended
    return (
        row.model,
        row.form,
        str(row.devices),
        f"{row.wall_s:.0f} s",
        f"{row.cpu_s:.0f} s" if measured else "",
        f"{row.stages_s:.2f} s" if measured else "",
        f"{row.memory_bytes / 1e9:.1f} GB" if measured else "",
        *found,
        row.text,
    )


def plot(rows: list[Row]) -> None:
    """Planning time and memory over devices, a line for each model and form."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for model, form in dict.fromkeys((r.model, r.form) for r in rows):
        line = [r for r in rows if (r.model, r.form) == (model, form) and r.memory_bytes]
        devices, label = [r.devices for r in line], f"{model}, {form}"
        left.plot(devices, [r.wall_s for r in line], "o-", label=label)
        right.plot(devices, [r.memory_bytes / 2**30 for r in line], "o-", label=label)
    for axes, limit, what in (
        (left, TARGET_S, "planning, seconds"),
        (right, MEMORY_TARGET_BYTES / 2**30, "memory of the planner, GiB"),
    ):
        axes.axhline(limit, color="grey", linestyle="--", linewidth=1)
        axes.set(xscale="log", xlabel="devices (8 A100-80GB a host)", ylabel=what, ylim=(0, limit * 1.1))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(PLOT, dpi=110)


def keep(row: Row) -> None:
    """Adds a row to those kept, in the place of one for the same, and writes table and plot of all."""
    kept = [Row(**fields) for fields in json.loads(ROWS.read_text())] if ROWS.exists() else []
    rows = {(r.model, r.form, r.devices): r for r in [*kept, row]}
    order = [*itertools.product(SIZES, CASES_OF, [8 * n for n in HOSTS])]
    rows = dict(sorted(rows.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    ROWS.write_text(json.dumps([dataclasses.asdict(r) for r in rows.values()], indent=1) + "\n")
    table = markdown(COLUMNS, [cells(r) for r in rows.values()])
    plot(list(rows.values()))
    rounded = [f"{r.model} {r.form} {r.devices}" for r in rows.values() if r.wall_s == int(r.wall_s)]
    remarks = "Each row is of the search of its time, on a machine that may have had other work.\n\n"
    if rounded:
        remarks += f"Taken from printed lines of a run that was ended, and rounded: {', '.join(rounded)}.\n\n"
    title = "# Planning for thousands of devices"
    head = f"{title}\n\nThe last row: {description()}\n\n{remarks}![time and memory]({PLOT.name})"
    RESULTS.write_text(f"{head}\n\n{table}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", default=list(CASES_OF), help=f"of {', '.join(CASES_OF)}")
    parser.add_argument("--hosts", type=int, nargs="+", default=[128], help="of 8 devices")
    parser.add_argument("--model", nargs="+", default=["GPT-3"], choices=list(SIZES))
    parser.add_argument("--all", action="store_true", help="both models on 8 to 16,384 devices")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name} and {PLOT.name}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        made = plan_once(arguments.model[0], arguments.forms[0], arguments.hosts[0])
        print(json.dumps(dataclasses.asdict(made)))
        return 0
    models, hosts = (list(SIZES), HOSTS) if arguments.all else (arguments.model, arguments.hosts)
    console, rows = Console(), []
    for model in models:
        for form in arguments.forms:
            for n in hosts:
                rows.append(planned(model, form, n))
                console.print(" | ".join(cells(rows[-1])))
                if arguments.keep:
                    keep(rows[-1])
    shown = Table(*COLUMNS)
    for row in rows:
        shown.add_row(*cells(row))
    console.print(shown)
    good = [r.wall_s <= TARGET_S and r.memory_bytes <= MEMORY_TARGET_BYTES for r in rows]
    return 0 if all(good) and all(r.stages_s <= STAGES_TARGET_S for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
