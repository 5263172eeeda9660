"""Plans of many pairs of model and cluster, kept, so that a change of the planner that makes any of them worse is seen.

    python -m benchmarks.plan_regression --keep-as before        all pairs: what a change is held against
    python -m benchmarks.plan_regression --keep-as now           the same after the change, beside what was kept before
    python -m benchmarks.plan_regression gpt-39B mlp-*           some pairs, printed beside what is kept
    python -m benchmarks.plan_regression --busy --limit 10       plans twice, once beside a busy process on each core

Rows are made in processes of their own, with nothing cached, and kept as they are made. Planning time is the
processor's. A row is worse when the predicted step is more than 0.5 % longer. `--busy` compares the plans' files byte
by byte. Nothing is run.
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.plan.cache import SEARCH_VERSION
from benchmarks import row_processes
from benchmarks.machine import description, markdown

RESULTS = Path(__file__).parent / "results" / "plan_regression.md"
ROWS = RESULTS.with_suffix(".json")
TOLERANCE = 0.005  # of the predicted step time
TIMEOUT_S = 2400.0
EVERYDAY_EXAMPLES = 32
COLUMNS = (
    "pair", "cluster", "step before", "now", "now / before", "peak before", "now", "planned before", "now", "plan now",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A model, a cluster and what is asked for.

    Attributes:
        cluster: As `benchmarks.auto_vs_manual.models.cluster_of` reads it.
        case: A case of the zoo with its sizes, one of `benchmarks.everyday`, or "" for the model of
            `benchmarks.auto_vs_manual` called `model`.
        plan: A recipe or pins as source text, "" for the free search.
        options: Fields of `autopar.Search`.
    """

    name: str
    cluster: str
    case: str = ""
    model: str = ""
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    plan: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a pair. `cpu_s` is the processor's time of planning; `digest` of the plan's file;
    `search_version` that of the code, of costs and search, that made it (`autopar.plan.cache`); 0: not kept.
    """

    step_time_s: float = 0.0
    peak_bytes: int = 0
    cpu_s: float = 0.0
    plan: str = ""
    digest: str = ""
    error: str = ""
    search_version: int = 0


WIDE_MLP = dict(layers=6, width=8192, batch=512)
GPT_12 = dict(layers=12, width=768, heads=12, vocabulary=50_304, length=1024, batch=16)
GPT_4 = dict(layers=4, width=256, heads=8, vocabulary=2048, length=128, batch=32)
GPT_8 = dict(layers=8, width=2048, heads=16, vocabulary=51_200, length=1024, batch=64)


def _of_zoo(case: str, cluster: str, name: str = "", **rest: Any) -> Pair:
    return Pair(name=name or case, case=case, cluster=cluster, **rest)


def _of_study(model: str, cluster: str, name: str = "", **rest: Any) -> Pair:
    return Pair(name=name or model, model=model, cluster=cluster, **rest)


PAIRS = (
    # Every kind of the zoo, small, on 1 to 16 devices.
    _of_zoo("mlp", "dgx-h100/1"),
    _of_zoo("multi_steps_ema", "p3.16xlarge/2"),
    _of_zoo("dropout", "dgx-a100-80g/4"),
    _of_zoo("bookkeeping", "dgx-h100"),
    _of_zoo("loss_scaling", "p3.16xlarge"),
    _of_zoo("fixed_point", "tpu-v5e:2x2"),
    _of_zoo("gpt_adafactor", "dgx-a100-80g"),
    _of_zoo("gpt_scan_remat", "dgx-h100/4"),
    _of_zoo("gpt_odd", "p3.16xlarge/2"),
    _of_zoo("llama", "tpu-v5e:2x4"),
    _of_zoo("gshard_moe", "p3.16xlarge/4", name="moe-small"),
    _of_zoo("bert", "tpu-v5p:2x2x1"),
    _of_zoo("encoder_decoder", "dgx-a100-80g"),
    _of_zoo("clip", "dgx-h100"),
    _of_zoo("resnet", "tpu-v5e:4x4"),
    _of_zoo("unet", "p3.16xlarge"),
    _of_zoo("lstm", "dgx-a100-80g/4"),
    _of_zoo("gnn", "dgx-h100/4"),
    _of_zoo("nnx_model", "tpu-v5p:2x2x1"),
    _of_zoo("haiku_transformer", "dgx-a100-80g/2"),
    # Sizes that people train, the free search.
    _of_zoo("mlp", "p3.16xlarge", name="mlp-wide", sizes=WIDE_MLP),
    _of_zoo("gpt", "dgx-h100", name="gpt-12", sizes=GPT_12),
    _of_study("gpt-350M", "p3.16xlarge"),
    _of_study("gpt-1.3B", "dgx-a100-80gx2"),
    _of_study("gpt-2.6B", "p3.16xlarge"),
    _of_study("gpt-39B", "p3.16xlargex8"),
    _of_study("gpt-175B", "dgx-a100-80gx128"),
    _of_study("moe-2.4B", "p3.16xlarge"),
    _of_study("moe-10B", "p3.16xlargex2"),
    _of_study("wide-resnet-2B", "p3.16xlarge"),
    _of_study("bert-340M", "tpu-v5e:4x4"),
    _of_study("t5-770M", "dgx-a100-80g"),
    _of_study("vit-632M", "tpu-v5p:4x4x4"),
    _of_study("llama-8B", "dgx-h100x2"),
    _of_study("llama-8B", "tpu-v5e:4x4", name="llama-8B-v5e"),
    _of_study("unet-300M", "dgx-h100x2"),
    # The same with less left to choose.
    _of_zoo("mlp", "p3.16xlarge", name="mlp-wide m=1", sizes=WIDE_MLP, options={"num_microbatches": 1}),
    _of_zoo("mlp", "p3.16xlarge", name="mlp-wide tensor parallel", sizes=WIDE_MLP, plan="recipes.tensor_parallel()"),
    _of_zoo("gpt", "dgx-a100-80g", name="gpt-8 zero 3", sizes=GPT_8, plan="recipes.zero(3)"),
    _of_zoo(
        "gpt", "dgx-a100-80g", name="gpt-8 dp tp pp", sizes=GPT_8,
        plan="recipes.combine(dp=2, tp=2, pp=2, num_microbatches=8, schedule='1f1b')",
    ),
    _of_zoo(
        "gpt", "dgx-h100", name="gpt-8 interleaved", sizes=GPT_8,
        plan="recipes.combine(tp=2, pp=4, chunks=2, num_microbatches=8, schedule='interleaved', recompute='input')",
    ),
    _of_zoo(
        "gpt", "dgx-h100", name="gpt-8 zb-v", sizes=GPT_8,
        plan="recipes.combine(dp=2, pp=4, chunks=2, num_microbatches=8, schedule='zb-v')",
    ),
    _of_zoo("gpt", "p3.16xlarge", name="gpt-8 m=8", sizes=GPT_8, options={"num_microbatches": 8}),
    _of_zoo(
        "gpt", "dgx-a100-80g", name="gpt-8 in 12 GB", sizes=GPT_8,
        options={"memory_limit_bytes": 12_000_000_000},
    ),
    _of_zoo(
        "gpt", "dgx-h100/4", name="gpt-4 pinned", sizes=GPT_4,
        plan="autopar.constrain({'batch/*': P('data')}, axis_sizes={'data': 2})",
    ),
    _of_zoo(
        "gpt", "dgx-h100/4", name="gpt-4 ring", sizes=GPT_4, plan="recipes.sequence_parallel('ring', size=4)",
    ),
    _of_zoo("gshard_moe", "p3.16xlarge/4", name="moe-small experts", plan="recipes.expert_parallel(4)"),
)  # fmt: skip


def planned(pair: Pair) -> tuple[Row, bytes]:
    """Plans in this process; the row and the plan's file."""
    from jax.sharding import PartitionSpec

    import autopar
    from autopar import recipes
    from autopar.errors import AutoparError
    from autopar.plan.render import in_short
    from benchmarks.auto_vs_manual.models import cluster_of, models
    from benchmarks.everyday import STEPS as EVERYDAY
    from benchmarks.zoo import CASES

    if pair.model:
        case, args = models()[pair.model].build(), models()[pair.model].shapes()
    else:
        in_zoo = pair.case in CASES
        case = CASES[pair.case](**pair.sizes) if in_zoo else EVERYDAY[pair.case](EVERYDAY_EXAMPLES)
        args = case.shapes()
    plan = eval(pair.plan, {"recipes": recipes, "autopar": autopar, "P": PartitionSpec}) if pair.plan else None
    step = autopar.parallelize(
        case.step,
        plan=plan,
        cluster=cluster_of(pair.cluster),
        cache_dir=None,
        search=autopar.Search(**pair.options),
    )
    start_s = time.process_time()
    try:
        found = step.plan(*args)
    except AutoparError as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        cpu_s = time.process_time() - start_s
        return Row(cpu_s=cpu_s, error=text[:300], search_version=SEARCH_VERSION), b""
    cpu_s = time.process_time() - start_s
    with tempfile.TemporaryDirectory() as folder:
        found.save(Path(folder) / "plan.json")
        content = (Path(folder) / "plan.json").read_bytes()
    row = Row(
        step_time_s=found.predicted.step_time_s,
        peak_bytes=max(found.predicted.peak_bytes),
        cpu_s=cpu_s,
        plan=in_short(found.record),
        digest=hashlib.sha256(content).hexdigest()[:16],
        search_version=SEARCH_VERSION,
    )
    return row, content


def in_fresh_process(pair: Pair, file: Path | None = None) -> Row:
    """Plans in another process; the plan goes into `file`."""
    arguments = ["--worker", pair.name, *(["--file", str(file)] if file else [])]
    found = row_processes.in_fresh_process("benchmarks.plan_regression", arguments, TIMEOUT_S, {"JAX_PLATFORMS": "cpu"})
    return Row(error=found["failure"]) if "failure" in found else Row(**found)


def kept() -> dict[str, dict[str, Row]]:
    """Rows by what they were kept as and by pair."""
    stored = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    return {name: {pair: Row(**row) for pair, row in rows.items()} for name, rows in stored.items()}


def keep(name: str, pair: str, row: Row) -> None:
    rows = kept()
    rows.setdefault(name, {})[pair] = row
    order = [p.name for p in PAIRS]
    stored = {
        of: {pair: dataclasses.asdict(rows[of][pair]) for pair in sorted(rows[of], key=order.index)}
        for of in sorted(rows)
    }
    ROWS.write_text(json.dumps(stored, indent=1) + "\n")


def cells(pair: Pair, before: Row | None, now: Row | None) -> list[str]:
    def seconds(row: Row | None) -> str:
        return "" if row is None else row.error.split(":")[0] if row.error else _time(row.step_time_s)

    def of(row: Row | None, text: Callable[[Row], str]) -> str:
        return "" if row is None or row.error else text(row)

    both = before is not None and now is not None and not before.error and not now.error
    ratio = f"{now.step_time_s / before.step_time_s:.4f}" if both else ""
    planning = [f"{row.cpu_s:.1f} s" if row else "" for row in (before, now)]
    peaks = [of(row, lambda row: f"{row.peak_bytes / 1e9:.3g} GB") for row in (before, now)]
    short = of(now or before, lambda row: row.plan)
    return [pair.name, pair.cluster, seconds(before), seconds(now), ratio, *peaks, *planning, short]


def _time(seconds: float) -> str:
    return (
        f"{seconds:.4g} s"
        if seconds >= 1
        else f"{1e3 * seconds:.4g} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.4g} us"
    )


def summary(before: dict[str, Row], now: dict[str, Row]) -> tuple[str, bool]:
    """What both columns come to, and whether nothing is worse."""
    both = [name for name in before if name in now]
    if not both:
        return f"{len(before)} pairs before, {len(now)} now.", True
    worse = [
        name
        for name in both
        if bool(now[name].error) > bool(before[name].error)
        or now[name].step_time_s > (1 + TOLERANCE) * before[name].step_time_s > 0
    ]
    better = [
        name
        for name in both
        if not now[name].error and now[name].step_time_s < (1 - TOLERANCE) * before[name].step_time_s
    ]
    ratio = statistics.median(now[name].cpu_s / before[name].cpu_s for name in both)
    same = sum(now[name].digest == before[name].digest for name in both)
    text = (
        f"{len(both)} pairs in both columns: {len(worse)} longer by more than {TOLERANCE:.1%} "
        f"({', '.join(worse) or 'none'}), {len(better)} shorter by more "
        f"({', '.join(better) or 'none'}), {same} with the same plan's file. "
        f"Planning takes {ratio:.2f} times as long in the median."
    )
    return text, not worse


def versions(before: dict[str, Row], now: dict[str, Row]) -> str:
    """By which code the columns were made: predicted times of one version are not held against another's prices."""

    def of(rows: dict[str, Row]) -> str:
        known = {str(row.search_version) if row.search_version else "earlier than 50" for row in rows.values()}
        return ", ".join(sorted(known)) or "none"

    return f"Version of costs and search: before {of(before)}; now {of(now)}; the code's {SEARCH_VERSION}."


def page() -> str:
    rows = kept()
    before, now = rows.get("before", {}), rows.get("now", {})
    table = [cells(pair, before.get(pair.name), now.get(pair.name)) for pair in PAIRS]
    return (
        "# Plans before and after a change\n\n"
        "`python -m benchmarks.plan_regression --keep-as now`: predicted time of the step, peak memory of the fullest "
        "device, and processor time of planning with nothing cached.\n\n"
        f"The last row: {description()}\n\n{versions(before, now)}\n\n{summary(before, now)[0]}\n\n"
        f"{markdown(COLUMNS, table)}\n"
    )


def chosen(patterns: list[str]) -> list[Pair]:
    if not patterns:
        return list(PAIRS)
    found = [pair for pair in PAIRS if any(fnmatch.fnmatch(pair.name, pattern) for pattern in patterns)]
    if not found:
        raise SystemExit(f"none of {', '.join(pair.name for pair in PAIRS)}")
    return found


def _spin() -> None:
    while True:
        pass


def equal_when_busy(pairs: list[Pair]) -> bool:
    """Plans each pair on the machine as it is, and again beside a busy process on each core; prints what is equal."""
    all_equal = True
    for pair in pairs:
        with tempfile.TemporaryDirectory() as folder:
            quiet, busy = Path(folder) / "quiet.json", Path(folder) / "busy.json"
            first = in_fresh_process(pair, quiet)
            others = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)]
            for other in others:
                other.start()
            try:
                second = in_fresh_process(pair, busy)
            finally:
                for other in others:
                    other.kill()
            same = not first.error and not second.error and quiet.read_bytes() == busy.read_bytes()
        all_equal &= same
        times = f"{_time(first.step_time_s)} and {_time(second.step_time_s)}"
        print(f"{pair.name} on {pair.cluster}: {'equal' if same else 'DIFFERENT'}, {times}", flush=True)
    return all_equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", help="names or patterns")
    parser.add_argument("--keep-as", choices=("before", "now"), help=f"keep the rows in {RESULTS.name}")
    parser.add_argument("--missing", action="store_true", help="only pairs that are not kept as that yet")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--busy", action="store_true", help="plan on a quiet and on a busy machine")
    parser.add_argument("--limit", type=int, default=len(PAIRS), help="so many pairs at most")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        row, content = planned(next(pair for pair in PAIRS if pair.name == args.pairs[0]))
        if args.file:
            Path(args.file).write_bytes(content)
        print(json.dumps(dataclasses.asdict(row)))
        return 0
    pairs = chosen(args.pairs)
    if args.missing:
        pairs = [pair for pair in pairs if pair.name not in kept().get(args.keep_as, {})]
    pairs = pairs[: args.limit]
    if args.busy:
        return 0 if equal_when_busy(pairs) else 1
    made: dict[str, Row] = {}
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        todo = {pool.submit(in_fresh_process, pair): pair for pair in pairs}
        for done in concurrent.futures.as_completed(todo):
            pair, row = todo[done], done.result()
            made[pair.name] = row
            before = kept().get("before", {}).get(pair.name) if args.keep_as != "before" else None
            print(" | ".join(cells(pair, before, row)), row.error, flush=True)
            if args.keep_as:
                keep(args.keep_as, pair.name, row)
    if args.keep_as:
        RESULTS.write_text(page())
    if args.keep_as == "before":
        return 0
    text, good = summary(kept().get("before", {}), made)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
