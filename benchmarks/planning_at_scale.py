"""How long it takes to plan GPT-3 175B for a thousand GPUs, on this machine: layers unrolled, and as a scan.

    python -m benchmarks.planning_at_scale                       96 layers, width 12,288, for 128 hosts of dgx-a100-80g
    python -m benchmarks.planning_at_scale unrolled --hosts 16
    python -m benchmarks.planning_at_scale --keep                also keeps the table in results/planning_at_scale.md

Each plan is made by `autopar.plan` in a fresh process with nothing cached, tracing included; no device is needed.
Source of the sizes: Brown et al., "Language models are few-shot learners", 2020, table 2.1; batches of 1,536 sequences
of 2,048 tokens as Narayanan et al., 2021, table 1; master weights and AdamW in float32. The unrolled model computes in
bfloat16, the scanned one in float32 with `jax.checkpoint` on the body.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import description, markdown

RESULTS = Path(__file__).parent / "results" / "planning_at_scale.md"
SIZES = {"layers": 96, "width": 12_288, "heads": 96, "vocabulary": 51_200, "length": 2048, "batch": 1536}
CASES_OF = {"unrolled": "gpt", "scanned": "gpt_scan_remat"}
TARGET_S, STAGES_TARGET_S = 120.0, 5.0
COLUMNS = ("layers", "devices", "wall", "processor", "stages pass", "memory", "step", "MFU", "plan")
TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One plan. Seconds of the clock and of the processor; `stages_s` of the dynamic programme alone."""

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


def plan_once(form: str, hosts: int) -> Row:
    """Plans in this process."""
    import jax
    import jax.numpy as jnp
    import optax

    import autopar
    from benchmarks.zoo import CASES

    dtype = {"dtype": jnp.bfloat16} if form == "unrolled" else {}
    case = CASES[CASES_OF[form]](**SIZES, **dtype, optimizer=optax.adamw(1e-4))
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    cluster = autopar.Cluster.preset("dgx-a100-80g", hosts=hosts)
    step = autopar.parallelize(case.step, cluster=cluster, cache_dir=None, show_progress=False)
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    plan = step.plan(state, batch)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    made = plan.record.pipeline
    text = plan.record.weighed[0].text if made is not None else f"mesh {plan.mesh}"
    best = [w.text for w in plan.record.weighed if w.step_time_s == plan.predicted.step_time_s]
    return Row(
        form=form,
        devices=cluster.num_devices,
        wall_s=wall_s,
        cpu_s=cpu_s,
        stages_s=step.last_progress.spent_s.get("stages", 0.0),
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        step_time_s=plan.predicted.step_time_s,
        mfu=plan.predicted.mfu,
        text=best[0] if best else text,
        passes=step.last_progress.spent_s,
    )


def planned(form: str, hosts: int) -> Row:
    """Plans in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.planning_at_scale", form, "--hosts", str(hosts), "--worker"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if made.returncode:
        raise SystemExit(made.stderr[-3000:])
    return Row(**json.loads(made.stdout.strip().splitlines()[-1]))


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.form,
        str(row.devices),
        f"{row.wall_s:.0f} s",
        f"{row.cpu_s:.0f} s",
        f"{row.stages_s:.2f} s",
        f"{row.memory_bytes / 1e9:.1f} GB",
        f"{row.step_time_s:.2f} s",
        f"{row.mfu:.1%}",
        row.text,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", default=list(CASES_OF), help=f"of {', '.join(CASES_OF)}")
    parser.add_argument("--hosts", type=int, default=128, help="of 8 devices")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(dataclasses.asdict(plan_once(arguments.forms[0], arguments.hosts))))
        return 0
    console, rows = Console(), []
    for form in arguments.forms:
        console.print(f"{form} ...")
        rows.append(planned(form, arguments.hosts))
        shown = Table(*COLUMNS)
        for row in rows:
            shown.add_row(*cells(row))
        console.print(shown)
        console.print({name: round(seconds, 1) for name, seconds in rows[-1].passes.items()})
    if arguments.keep:
        title = "# Planning GPT-3 175B"
        table = markdown(COLUMNS, [cells(row) for row in rows])
        RESULTS.write_text(f"{title}\n\n{description()}\n\n{table}\n")
    return 0 if all(r.wall_s <= TARGET_S and r.stages_s <= STAGES_TARGET_S for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
