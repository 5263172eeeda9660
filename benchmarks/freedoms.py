"""The worth of each freedom of the search: predicted steps by default beside those of a search without that freedom.

    python -m benchmarks.freedoms                      every row that is not kept
    python -m benchmarks.freedoms 1.3B --again         rows whose names contain it, made again

Steps of `benchmarks.decoder_grid` (draws too) and of `benchmarks.everyday` are planned in as much memory as the default
plan takes where memory is ample, in half and in a quarter of it. No device is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import autopar
from autopar import recipes
from autopar.errors import AutoparError, MemoryLimitError
from benchmarks.machine import description, markdown
from benchmarks.row_processes import Rows, in_fresh_process, is_done, keep, load

RESULTS = Path(__file__).parent / "results" / "freedoms.json"
SHARES = (1.0, 0.5, 0.25)
AMPLE_BYTES = 1 << 50
TIMEOUT_S = 1800.0
DEFAULT, WITHOUT_VALUES, OFFLOAD = "default", "values", "offload, asked for"
# Searches without a freedom.
WITHOUT = {
    "recomputation": autopar.Search(remat="as written"),
    "attention": autopar.Search(attention="as written"),
    "micro-batches": autopar.Search(num_microbatches=1),
}
JOBS = (
    ("1.3B", "dgx-h100:1"),
    ("1.3B", "dgx-h100"),
    ("1.3B", "tpu-v5p:2x2x2"),
    ("1.3B Llama", "dgx-h100"),
    ("1.3B checkpointed", "dgx-h100"),
    ("1.3B unrolled", "dgx-h100"),
    ("draw 1", "dgx-h100"),
    ("draw 3", "tpu-v6e:4x4"),
    ("draw 5", "dgx-h100:1"),
    ("vit", "dgx-h100:1"),
)
# What layers in scans save of each layer alike, as policies of `jax.checkpoint` do, in place of the choice by value.
POLICIES = ("matmuls", "half matmuls", "input")
HEAD = """# The worth of each freedom of the search

`python -m benchmarks.freedoms`: predicted steps by default in as much memory as the default plan takes where memory
is ample, in half and in a quarter of it; beside them those of a search without a freedom, as multiples. `none`: no
plan fits without it, or the step does not admit it. Without values a layer in a scan keeps its products and attention,
half of them, or its input, whichever is fastest, and sends nothing to the hosts. "offload, asked for": ZeRO-3 with the
optimizer's state in the memory of the hosts, in the default's micro-batches, with products and attention kept; under 1
the search missed it."""


def planned(step: str, cluster: str) -> dict[str, Any]:
    """The steps in seconds of each way in each share of the memory; None where no plan fits."""
    from autopar.search.intra_op.saved_values import LayerValues, SavedChoice
    from autopar.search.step_ways import StepWays
    from benchmarks.decoder_grid.__main__ import case_of

    by_policy = [SavedChoice(text=policy) for policy in POLICIES]
    function, *arguments = case_of(int(step.removeprefix("draw ")) if step.startswith("draw ") else step)

    def plan(limit_bytes: int, search: autopar.Search, recipe: Any = None) -> autopar.Plan | None:
        search = dataclasses.replace(search, memory_limit_bytes=limit_bytes)
        try:
            return autopar.plan(function, *arguments, cluster=cluster, plan=recipe, cache_dir=None, search=search)
        except MemoryLimitError:
            return None
        except AutoparError as error:  # a recipe that the step does not admit
            print(f"{step} on {cluster}: {error}", file=sys.stderr)
            return None

    ample = plan(AMPLE_BYTES, autopar.Search())
    assert ample is not None, "there is a plan where memory is ample"
    peak_bytes, found = max(ample.predicted.peak_bytes), {}
    for share in SHARES:
        limit_bytes = int(share * peak_bytes)
        plans = {DEFAULT: plan(limit_bytes, autopar.Search())}
        plans |= {name: plan(limit_bytes, search) for name, search in WITHOUT.items()}
        fixed = mock.patch.object(LayerValues, "choices", return_value=by_policy)
        with fixed, mock.patch.object(StepWays, "within", return_value=None):  # which chooses by value between them
            plans[WITHOUT_VALUES] = plan(limit_bytes, autopar.Search())
        plans[OFFLOAD] = plan(limit_bytes, autopar.Search(attention="kernel"), _offloaded(plans[DEFAULT]))
        found[f"{share:.0%}"] = {name: p and p.predicted.step_time_s for name, p in plans.items()}
    return {"peak_bytes": peak_bytes, "steps_s": found}


def _offloaded(default: autopar.Plan | None) -> recipes.Recipe:
    """ZeRO-3 with the optimizer's state in the memory of the hosts, in the micro-batches of the default plan, products
    and attention kept.
    """
    pipeline = None if default is None else default.record.pipeline
    number = 1 if pipeline is None else pipeline.num_microbatches
    return recipes.cut(recipes.zero(3, offload="optimizer"), num_microbatches=number, recompute="matmuls")


def cells(rows: Rows) -> Iterator[list[str]]:
    for name, row in rows.items():
        for share, steps_s in row.get("steps_s", {}).items():
            default_s = steps_s[DEFAULT]
            others = [_factor(steps_s[way], default_s) for way in (*WITHOUT, WITHOUT_VALUES, OFFLOAD)]
            yield [name, share, "-" if default_s is None else f"{default_s * 1e3:.4g}", *others]


def _factor(step_s: float | None, default_s: float | None) -> str:
    if step_s is None:
        return "none"
    return "alone" if default_s is None else f"{step_s / default_s:.3f}"


def medians(rows: Rows) -> list[str]:
    """A sentence for each share: the medians of what a search without a freedom takes, of those that have a plan."""
    texts = []
    for share in (f"{share:.0%}" for share in SHARES):
        steps = [row["steps_s"][share] for row in rows.values() if is_done(row) and row["steps_s"][share][DEFAULT]]
        told = []
        for way in (*WITHOUT, WITHOUT_VALUES):
            factors = [s[way] / s[DEFAULT] if s[way] else float("inf") for s in steps]
            median = statistics.median(factors) if factors else float("inf")
            told.append(f"{'none' if median == float('inf') else f'{median:.3f}'} without {way}")
        texts.append(f"Median of {len(steps)} steps with {share} of the memory: {', '.join(told)}.")
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="rows whose names contain it")
    parser.add_argument("--again", action="store_true", help="make rows that are kept again")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(planned(*arguments.worker)))
        return 0
    for step, cluster in JOBS:
        name, rows = f"{step}, {cluster}", load(RESULTS)
        if arguments.name in name and (arguments.again or not is_done(rows.get(name))):
            environment = {"JAX_PLATFORMS": "cpu"}
            rows[name] = in_fresh_process("benchmarks.freedoms", ["--worker", step, cluster], TIMEOUT_S, environment)
            keep(RESULTS, rows)
            print(name, rows[name], flush=True)
    rows = load(RESULTS)
    columns = (
        "step, cluster",
        "memory",
        "default, ms",
        *(f"without {way}" for way in (*WITHOUT, WITHOUT_VALUES)),
        OFFLOAD,
    )
    text = f"{HEAD}\n\n{description()}\n\n{markdown(columns, list(cells(rows)))}\n\n{' '.join(medians(rows))}\n"
    RESULTS.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
