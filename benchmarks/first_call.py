"""How long the first call takes: planning, compiling and running the zoo's steps, beside plain `jax.jit`.

    python -m benchmarks.first_call                               every kind of the zoo on 4 and 8 CPU devices
    python -m benchmarks.first_call mlp bert --devices 4
    python -m benchmarks.first_call gpt-4 --devices 8 --profile   time by pass and the hottest functions too
    python -m benchmarks.first_call --keep-as before              keeps the rows that a change is held against
    python -m benchmarks.first_call --keep-as now                 after the change, beside them in first_call.md

Each call is made in a fresh process with an empty cache directory. Imports and making the state are not counted.
`gpt-4` is a Flax GPT of 4 layers, 128 wide.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.row_processes import in_fresh_process, is_done, keep, load

RESULTS = Path(__file__).parent / "results" / "first_call.md"
ROWS = RESULTS.with_suffix(".json")
TIMEOUT_S = 900.0
GPT_4 = {"layers": 4, "width": 128, "heads": 4, "length": 64, "batch": 16}
# Kinds of steps: variants of one kind (its optimizers, its types) plan alike.
KINDS = (
    "mlp", "dropout", "gpt", "gpt-4", "gpt_scan", "llama", "moe", "bert", "encoder_decoder", "vit", "clip", "resnet",
    "unet", "lstm", "gnn", "nnx_model", "equinox_model", "haiku_model",
)  # fmt: skip


def case_of(kind: str) -> Any:
    from benchmarks.zoo import CASES

    return CASES["gpt"](**GPT_4) if kind == "gpt-4" else CASES[kind]()


def first_call(kind: str, runs: str, profile: bool) -> dict[str, Any]:
    """Seconds of the first call in this process. `runs`: "jit" or "autopar"."""
    import jax

    import autopar
    from benchmarks.planning import Sampler

    case = case_of(kind)
    state = jax.block_until_ready(jax.jit(case.init)(jax.random.key(0)))
    batch = case.batch(0)
    if runs == "jit":
        started, cpu_started = time.perf_counter(), time.process_time()
        jax.block_until_ready(jax.jit(case.step, donate_argnums=0)(state, batch))
        return {"call_s": time.perf_counter() - started, "call_cpu_s": time.process_time() - cpu_started}
    step = autopar.parallelize(case.step, show_progress=False)
    sampler = Sampler()
    if profile:
        sampler.start()
    started, cpu_started = time.perf_counter(), time.process_time()
    plan = step.plan(state, batch)
    plan_s, plan_cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    hottest = sampler.stop(plan_cpu_s) if profile else {}
    jax.block_until_ready(step(state, batch))
    pipeline = plan.record.pipeline
    return {
        "plan_s": plan_s,
        "plan_cpu_s": plan_cpu_s,
        "call_s": time.perf_counter() - started,
        "call_cpu_s": time.process_time() - cpu_started,
        "step_time_s": plan.predicted.step_time_s,
        "plan": str(plan.mesh) if pipeline is None else f"{len(pipeline.stages)} stages",
        "passes": step.last_progress.spent_s,
        "hottest": hottest,
    }


def row(kind: str, devices: int, profile: bool) -> dict[str, Any]:
    """The first call of a kind on so many CPU devices, and that of plain jit on one."""
    row: dict[str, Any] = {}
    for runs, count in (("jit", 1), ("autopar", devices)):
        with tempfile.TemporaryDirectory(prefix="autopar-first-call-") as cache:
            environment = {
                "AUTOPAR_CACHE_DIR": cache,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            }
            arguments = ["--child", kind, "--runs", runs, *(["--profile"] if profile else [])]
            found = in_fresh_process("benchmarks.first_call", arguments, TIMEOUT_S, environment)
        if "failure" in found:
            return {"failure": f"{runs}: {found['failure']}"}
        row |= {f"jit_{name}": value for name, value in found.items()} if runs == "jit" else found
    return row


COLUMNS = (
    "step", "devices", "jit, s", "plan before, s", "plan, s", "first call before, s", "first call, s",
    "times jit before", "times jit", "step before, ms", "step, ms", "plan",
)  # fmt: skip


def cells(kind: str, devices: int, found: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    if not is_done(found):
        return [kind, str(devices), found["failure"], *("" for _ in COLUMNS[3:])]

    def both(clock: str, cpu: str, of: dict[str, Any] | None) -> str:
        return "" if of is None else f"{of[clock]:.1f} (cpu {of[cpu]:.1f})"

    def ratio(of: dict[str, Any] | None) -> str:
        return "" if of is None else f"{of['call_cpu_s'] / of['jit_call_cpu_s']:.1f}"

    return [
        kind,
        str(devices),
        both("jit_call_s", "jit_call_cpu_s", found),
        both("plan_s", "plan_cpu_s", before),
        both("plan_s", "plan_cpu_s", found),
        both("call_s", "call_cpu_s", before),
        both("call_s", "call_cpu_s", found),
        ratio(before),
        ratio(found),
        "" if before is None else f"{before['step_time_s'] * 1e3:.3f}",
        f"{found['step_time_s'] * 1e3:.3f}",
        found["plan"],
    ]


def summary(rows: list[dict[str, Any]]) -> str:
    """Medians and maxima of the rows that ran, by the processor's clock."""
    done = [r for r in rows if is_done(r)]
    plans = [r["plan_cpu_s"] for r in done]
    ratios = [r["call_cpu_s"] / r["jit_call_cpu_s"] for r in done]
    return (
        f"planning: median {statistics.median(plans):.1f} s (aim 2), longest {max(plans):.1f} s (aim 6); first call: "
        f"median {statistics.median(ratios):.1f} times plain jit's (aim 2), most {max(ratios):.1f} (aim 3)"
    )


def write_table(kept: dict[str, Any]) -> None:
    from benchmarks.machine import description

    now, before = kept["now"], kept["before"]
    lines = [
        "# The first call",
        "",
        "`python -m benchmarks.first_call --keep-as now`: fresh processes, empty caches, seconds of the clock and (cpu)"
        " of the processor; `times jit` compares the processor's. `before` are the rows that the last change was held"
        " against; `step` is the predicted time of the plan.",
        "",
        description(),
        "",
        f"{summary(list(now.values()))}.",
        *([f"Before, {summary(list(before.values()))}."] if before else []),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "| " + " | ".join("---" for _ in COLUMNS) + " |",
    ]
    for name, found in now.items():
        kind, devices = name.rsplit(", ", 1)
        lines.append("| " + " | ".join(cells(kind, int(devices), found, before.get(name))) + " |")
    RESULTS.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--keep-as", choices=("before", "now"), help=f"keep the rows in {ROWS.name}")
    parser.add_argument("--profile", action="store_true", help="print time by pass and the hottest functions too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--runs", choices=("jit", "autopar"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(first_call(arguments.kinds[0], arguments.runs, arguments.profile)))
        return 0
    kept = {"before": {}, "now": {}} | load(ROWS)
    rows = []
    for kind in arguments.kinds:
        for devices in arguments.devices:
            name = f"{kind}, {devices}"
            found = row(kind, devices, arguments.profile)
            rows.append(found)
            print(" | ".join(cells(kind, devices, found, kept["before"].get(name))), flush=True)
            if arguments.profile and is_done(found):
                show_profile(found)
            if arguments.keep_as is not None and is_done(found):
                found.pop("hottest")
                kept[arguments.keep_as][name] = found
                keep(ROWS, kept)
    if any(map(is_done, rows)):
        print(summary(rows))
    if arguments.keep_as is not None:
        write_table(kept)
    return int(not all(map(is_done, rows)))


def show_profile(found: dict[str, Any]) -> None:
    for name, seconds in found["passes"].items():
        print(f"    {seconds:6.2f}  {name}")
    for title, rows in found["hottest"].items():
        print(f"  hottest functions {title}")
        for name, seconds in rows:
            print(f"    {seconds:6.2f}  {name}")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    raise SystemExit(main())
