"""Each kind of step that large codebases write, small, against plain `jax.jit`: a table by kind.

    python -m benchmarks.kinds                          what the table does not have yet
    python -m benchmarks.kinds "splash attention" --again
    python -m benchmarks.kinds --show                   the table as it stands, and its page anew

Under the free search on 1, 2, 4 and 8 virtual CPU devices, in two stages of two micro-batches on 2, 4 and 8, and under
each recipe that applies on 4. Pallas calls are interpreted. Numbers are the largest difference of a result from plain
`jax.jit`, in units of its largest value, or from a plain loop over micro-batches where a kind is taken by these. Rows
of a kind are made in a process of their own, and kept in results/kinds.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from autopar import recipes
from autopar.errors import AutoparError
from benchmarks import kind_steps, row_processes
from benchmarks.kind_steps import KINDS, KindStep
from benchmarks.machine import description, markdown, without_folders

RESULTS = row_processes.ROOT / "benchmarks" / "results" / "kinds.json"
TOLERANCE = 1e-5
TIMEOUT_S = 1800.0  # of the rows of a kind
# Programs run for milliseconds, and LLVM's optimiser takes longer than it could save. Collectives and memory are
# decided by XLA's own passes.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
FREE, STAGES = "free", "two stages"
DEVICES, RECIPES_ON = (1, 2, 4, 8), 4
RECIPES: dict[str, recipes.Recipe | None] = {
    FREE: None,
    STAGES: recipes.pipeline(2, num_microbatches=2),
    kind_steps.DATA: recipes.data_parallel(),
    kind_steps.ZERO: recipes.zero(3),
    kind_steps.TENSOR: recipes.tensor_parallel(),
    kind_steps.ULYSSES: recipes.sequence_parallel("ulysses"),
    kind_steps.RING: recipes.sequence_parallel("ring"),
    kind_steps.USP: recipes.sequence_parallel("usp"),
    kind_steps.EXPERT: recipes.expert_parallel(),
}
COLUMNS = (
    "kind",
    "devices",
    "plan",
    "difference",
    "sent, bytes: predicted",
    "compiled",
    "peak, kB: predicted",
    "compiled",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One kind under one plan; `said` is an error's first line, in place of the figures."""

    plan: str
    difference: float = 0.0
    predicted_bytes: float = 0.0
    compiled_bytes: float = 0.0
    predicted_peak_bytes: float = 0.0
    compiled_peak_bytes: float = 0.0
    said: str = ""
    is_error_of_autopar: bool = False
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.said and self.difference <= TOLERANCE


def row_of(kind: KindStep, plan: str, devices: int) -> Row:
    """Plans, compiles, runs and compares in this process."""
    from tests.small_steps import slow_cluster

    begun_s = time.process_time()
    options = kind.options | ({"per_microbatch": kind.per_microbatch} if plan == STAGES else {})
    step = autopar.parallelize(
        kind.step, plan=RECIPES[plan], cluster=slow_cluster(devices), cache_dir=None, show_progress=False, **options
    )
    try:
        found = autopar.verify(step, *kind.args)
    except Exception as error:  # whatever is raised is the row
        where = f"{type(error).__name__}: " if not isinstance(error, AutoparError) else ""
        said = str(error).strip().splitlines() or [type(error).__name__]
        said_of = without_folders(f"{where}{said[0]}")
        return Row(plan=plan, said=said_of[:300], is_error_of_autopar=isinstance(error, AutoparError))
    return Row(
        plan=plan,
        difference=found.difference if found.difference is not None else float("nan"),
        predicted_bytes=found.total.predicted,
        compiled_bytes=found.total.compiled,
        predicted_peak_bytes=found.peak.predicted,
        compiled_peak_bytes=found.peak.compiled,
        seconds=round(time.process_time() - begun_s, 1),
    )


def plans_of(kind: KindStep, devices: int) -> list[str]:
    return [FREE, *([STAGES] if devices > 1 else []), *(kind.recipes if devices == RECIPES_ON else ())]


def rows_of(name: str, every: Sequence[int]) -> dict[str, Any]:
    """All plans of a kind on some numbers of devices, in this process: "kind | devices" -> rows."""
    warnings.simplefilter("ignore")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    found = {}
    for devices in every:
        kind = KINDS[name](devices)
        rows = [dataclasses.asdict(row_of(kind, plan, devices)) for plan in plans_of(kind, devices)]
        found[f"{name} | {devices}"] = {"rows": rows}
    return found


def cells(name: str, devices: str, row: Row) -> list[str]:
    if row.said:
        outcome = "refused" if row.is_error_of_autopar else "BROKEN"
        return [name, devices, row.plan, f"{outcome}: {row.said.replace('|', '/')}"]
    wrong = "" if row.is_equal else " (WRONG)"
    peaks = (f"{peak / 1e3:,.1f}" for peak in (row.predicted_peak_bytes, row.compiled_peak_bytes))
    sent = (f"{sent:,.0f}" for sent in (row.predicted_bytes, row.compiled_bytes))
    return [name, devices, row.plan, f"{row.difference:.1e}{wrong}", *sent, *peaks]


def short(rows: row_processes.Rows) -> list[list[str]]:
    """By kind: how many rows are equal, the largest difference, how many are refused, how many anything else."""
    lines = []
    for name in KINDS:
        of_kind = [
            Row(**r) for key, found in rows.items() if key.split(" | ")[0] == name for r in found.get("rows", ())
        ]
        if not of_kind:
            continue  # not made yet
        equal = [row for row in of_kind if row.is_equal]
        refused = [row for row in of_kind if row.said and row.is_error_of_autopar]
        largest = f"{max(row.difference for row in equal):.1e}" if equal else ""
        same = sum(row.predicted_bytes == row.compiled_bytes for row in equal)
        others = len(of_kind) - len(equal) - len(refused)
        lines.append([name, str(len(equal)), largest, str(same), str(len(refused)), str(others)])
    return lines


def keep(rows: row_processes.Rows) -> None:
    order = [f"{name} | {devices}" for name in KINDS for devices in DEVICES]
    rows = {key: rows[key] for key in order if key in rows}
    row_processes.keep(RESULTS, rows)
    every = [cells(*key.split(" | "), Row(**row)) for key, found in rows.items() for row in found.get("rows", ())]
    failed = [[*key.split(" | "), "", found["failure"]] for key, found in rows.items() if found.get("failure")]
    assert __doc__ is not None, "python -OO has no docstrings"
    what = __doc__.split("\n\n")[-1].strip().replace("\n", " ")
    by_kind = ("kind", "equal", "largest difference", "bytes as predicted", "refused", "wrong or broken")
    RESULTS.with_suffix(".md").write_text(
        f"# Steps by kind\n\n`python -m benchmarks.kinds`. {what}\n\n{description()}\n\n"
        f"{markdown(by_kind, short(rows))}\n\n## Every row\n\nSent and peak are those of one device; in stages sent is "
        "the sum over stages, of one device\nof each, without what goes between them.\n\n"
        f"{markdown(COLUMNS, [*every, *failed])}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--again", action="store_true", help="also what the table has")
    parser.add_argument("--show", action="store_true", help="run nothing; the page is written from the rows")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(rows_of(arguments.only[0], arguments.devices)))
        return 0
    if unknown := [name for name in arguments.only if name not in KINDS]:
        parser.error(f"no kind {unknown[0]!r}")
    for name in () if arguments.show else arguments.only or KINDS:
        kept = row_processes.load(RESULTS)
        wanted = [
            d for d in arguments.devices if arguments.again or not row_processes.is_done(kept.get(f"{name} | {d}"))
        ]
        if wanted:
            child = [name, "--child", "--devices", *map(str, wanted)]
            found = row_processes.in_fresh_process("benchmarks.kinds", child, TIMEOUT_S, {"XLA_FLAGS": _FLAGS})
            if "failure" in found:
                found = {f"{name} | {d}": found for d in wanted}
            keep(row_processes.load(RESULTS) | found)
            for key, rows in found.items():
                lines = [cells(*key.split(" | "), Row(**row)) for row in rows.get("rows", ())]
                print("\n".join(" | ".join(line) for line in lines) or f"{key}: {rows['failure']}", flush=True)
    keep(row_processes.load(RESULTS))
    print("\n".join(" | ".join(line) for line in short(row_processes.load(RESULTS))))
    return int(any(line[-1] != "0" for line in short(row_processes.load(RESULTS))))


if __name__ == "__main__":
    sys.exit(main())
