"""The search's plans beside those that experts write, predicted under one model of costs.

    python -m benchmarks.auto_vs_manual weak-scaling             Alpa's models, each on the V100s it is sized for
    python -m benchmarks.auto_vs_manual intra-operator           plans of one program: the integer program and ZeRO
    python -m benchmarks.auto_vs_manual hardware gpt auto        every family on A100s, H100s and TPUs; of these rows
                                                                 those whose names have all these parts
    python -m benchmarks.auto_vs_manual --again                  rows that are kept already, too; all of them take days

A row is one model on one cluster under one recipe: the best of all that the recipe leaves open, of `--attempts`
settings at most. Rows are made in fresh processes and kept at once in results/auto_vs_manual.json, the table beside it.
The exit status tells whether a recipe was faster than the search anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import row_processes
from benchmarks.auto_vs_manual.models import Model, cluster_of, models
from benchmarks.auto_vs_manual.recipes import AUTO, RECIPES
from benchmarks.machine import description

RESULTS = Path(__file__).parent.parent / "results" / "auto_vs_manual.json"
TIMEOUT_S = 7200.0
TIE = 1e-4  # of a step: less is as fast; the search takes half of it for equal
COLUMNS = ("model", "cluster", "recipe", "step", "beside the search", "MFU", "peak, GB", "plan", "settings", "version")
# What Alpa compared its plans with, by family: the systems that experts wrote for it, and parts of its own search.
OF_FAMILY = {"gpt": "megatron grid", "moe": "expert and data", "wide-resnet": "pipeline and data"}
HARDWARE = ("dgx-a100-80g", "dgx-h100x2", "tpu-v5e:4x4")
HARDWARE_MODELS = {
    "gpt-2.6B": ("tensor parallel", "megatron grid"),
    "moe-2.4B": ("expert and data",),
    "wide-resnet-1B": ("pipeline and data",),
    "bert-340M": ("tensor parallel", "megatron grid"),
    "t5-770M": ("tensor parallel", "megatron grid"),
    "vit-632M": ("tensor parallel", "megatron grid"),
    "llama-8B": ("tensor parallel", "ulysses", "ring attention"),
    "unet-460M": ("pipeline and data",),
}
Job = tuple[str, str, str]  # a model, a cluster, a recipe


def p3(model: Model) -> str:
    """As many V100s as the model is sized for."""
    gpus = model.gpus or 0
    return f"p3.16xlarge/{gpus}" if gpus < 8 else f"p3.16xlargex{gpus // 8}".removesuffix("x1")


def weak_scaling() -> list[Job]:
    """Alpa's models, each on the hosts it is sized for, beside what Alpa compared itself with."""
    sized = [m for m in models().values() if m.family in OF_FAMILY and m.parameters and (m.gpus or 0) >= 8]
    others = ("data parallel", "zero 3", "intra-operator only", "equal stages")
    return [(m.name, p3(m), r) for m in sized for r in (AUTO, OF_FAMILY[m.family], *others)]


def intra_operator() -> list[Job]:
    """The integer program alone, without stages and micro-batches, beside ZeRO and the like; and the whole search."""
    sized = [m for m in models().values() if (m.gpus or 0) > 1 and m.parameters is None]
    others = ("intra-operator only", "data parallel", "zero 2", "zero 3", "shard the largest")
    return [(m.name, p3(m), r) for m in sized for r in (AUTO, *others)]


def hardware() -> list[Job]:
    """A model of every family on GPUs and TPUs of other kinds than Alpa's, beside the recipes that suit it."""
    return [
        (name, cluster, recipe)
        for cluster in HARDWARE
        for name, extra in HARDWARE_MODELS.items()
        for recipe in (AUTO, "data parallel", "zero 1", "zero 3", *extra)
    ]


SUITES: dict[str, Callable[[], list[Job]]] = {
    "weak-scaling": weak_scaling,
    "intra-operator": intra_operator,
    "hardware": hardware,
}


def row_of(model: str, cluster: str, recipe: str, attempts: int) -> dict[str, Any]:
    """The best of a recipe's settings."""
    from autopar import parallelize
    from autopar.benching import problem_of
    from autopar.plan.cache import SEARCH_VERSION
    from autopar.plan.render import in_short
    from autopar.recipes.ways import made_of

    known, on = models()[model], cluster_of(cluster)
    step = parallelize(known.build().step, cluster=on, cache_dir=None)
    problem = problem_of(step, *known.shapes())
    made = made_of(problem, RECIPES[recipe](problem), attempts)
    row: dict[str, Any] = {
        "attempts": made.attempts, "fitting": made.fitting, "cut_short": made.cut_short, "planned_s": made.planned_s,
        "plan": made.text, "search_version": SEARCH_VERSION, "on": description(),
    }  # fmt: skip
    if made.outcome is not None:
        row |= {"peak_bytes": made.outcome.peak_bytes, "limit_bytes": made.outcome.limit_bytes}
    if made.plan is not None and made.outcome is not None and made.outcome.fits:
        predicted = made.plan.predicted
        row |= {"step_time_s": predicted.step_time_s, "mfu": predicted.mfu, "sent_bytes": predicted.sent_bytes}
        return row | {"plan": made.text or in_short(made.plan.record)}
    if made.error is not None:
        return row | {"why": f"{made.error.where}: expected {made.error.expected}, got {made.error.got}"}
    return row | {"why": "out of memory" if made.attempts else "the batch does not divide"}


def name_of(job: Job) -> str:
    return " | ".join(job)


def came_to(row: dict[str, Any]) -> str:
    """The time, or why there is none."""
    if "step_time_s" in row:
        return f"{row['step_time_s']:.4g} s"
    over = row.get("peak_bytes", 0) - row.get("limit_bytes", 0)
    return f"out of memory, {over / 1e9:.3g} GB over" if over > 0 else row.get("failure") or row.get("why", "")


def beside_search(name: str, rows: row_processes.Rows) -> float | None:
    """A row's time over the search's, where both have one."""
    model, cluster, _ = name.split(" | ")
    own = rows.get(name_of((model, cluster, AUTO)), {})
    both = "step_time_s" in own and "step_time_s" in rows[name]
    return rows[name]["step_time_s"] / own["step_time_s"] if both else None


def cells(name: str, rows: row_processes.Rows) -> list[str]:
    row, ratio = rows[name], beside_search(name, rows)
    made = str(row.get("attempts", "")) + (" (of more)" if row.get("cut_short") else "")
    peak = f"{row['peak_bytes'] / 1e9:.1f}" if row.get("peak_bytes") else ""
    mfu = f"{row['mfu']:.0%}" if row.get("mfu") else ""
    factor = "" if ratio is None else f"{ratio:.2f}"
    return [*name.split(" | "), came_to(row), factor, mfu, peak, row.get("plan", ""), made,
            str(row.get("search_version") or "")]  # fmt: skip


HEAD = """# The search beside plans that experts write

`python -m benchmarks.auto_vs_manual`: predicted. `settings`: how many were seen by a plan, an estimate or a bound, the
best of which counts; `of more`: not all of the recipe's. `version`: of the search and the costs that made the row; rows
compare within one version. Machines and dates are in auto_vs_manual.json."""


def selected(names: list[str]) -> list[Job]:
    """The jobs of the suites that are named, or of all, whose names have all the other parts."""
    suites = [name for name in names if name in SUITES] or list(SUITES)
    parts = [name for name in names if name not in SUITES]
    jobs = dict.fromkeys(job for suite in suites for job in SUITES[suite]())
    return [job for job in jobs if all(part in name_of(job) for part in parts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"suites ({', '.join(SUITES)}), parts of names of rows")
    parser.add_argument("--attempts", type=int, default=40, help="most settings of a recipe")
    parser.add_argument("--again", action="store_true", help="also rows that are kept already")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(row_of(*arguments.child, arguments.attempts)))
        return 0
    order = [name_of(job) for suite in SUITES.values() for job in suite()]
    page = row_processes.Page(path=RESULTS, head=HEAD, columns=COLUMNS, order=order, cells=cells)

    def made(name: str) -> dict[str, Any]:
        command = ["--child", *name.split(" | "), "--attempts", str(arguments.attempts)]
        return row_processes.in_fresh_process("benchmarks.auto_vs_manual", command, TIMEOUT_S)

    names = [name_of(job) for job in selected(arguments.names)]
    rows = page.make(names, made, arguments.again)
    factors = [beside_search(name, rows) for name in names]
    return int(any(factor is not None and factor < 1 - TIE for factor in factors))


if __name__ == "__main__":
    sys.exit(main())
