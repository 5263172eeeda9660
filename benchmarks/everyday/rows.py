"""Rows of steps and ways of running them as lines of JSON, and the page that shows them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.everyday import MIXING, ONE_LAYER, STEPS
from benchmarks.everyday.running import (
    CALLS,
    DEVICES,
    EQUAL,
    EXCUSED,
    FAILED,
    KINDS,
    LIMIT_S,
    WAYS,
    Job,
    Row,
    jobs_of,
)
from benchmarks.machine import description, markdown


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")


def load(path: Path) -> dict[str, Row]:
    """The last row of each job, by the job's key."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        made = json.loads(line)
        row = Row(**made | {"job": Job(**made["job"])})
        if row.job.step in STEPS:
            rows[row.job.key] = row
    return rows


def page(rows: Sequence[Row]) -> str:
    run = [row for row in rows if not row.job.cluster]
    planned = [row for row in rows if row.job.cluster]
    lines = [
        "# Training steps as people write them",
        "",
        f"`python -m benchmarks.everyday`: {len({row.job.step for row in run})} steps, {CALLS} calls each on virtual "
        "CPU devices against plain `jax.jit`. Equal: whole numbers and NaNs the same, floats within 8 times what "
        "rounding of the arguments makes of them and 32 units in the last place of the leaf's largest. Excused: "
        "refused, where the result is one of the whole batch, which its parts do not have, or one loop has all layers "
        "(below). Slow: equal, "
        f"after more than {LIMIT_S:.0f} s of processor time for planning and calls. {description()}",
        "",
        *_runs(run),
    ]
    if planned:
        lines += ["", f"## Plans only: {len({row.job.step for row in planned})} steps", "", *_plans(planned)]
    failed = [row for row in rows if row.kind in FAILED]
    lines += ["", "## Failures", "", *(_grouped(failed) or ["None."])]
    lines += ["", "## Excused", "", *(f"- {step}: {why}" for step, why in (MIXING | ONE_LAYER).items())]
    lines += ["", *_grouped([row for row in rows if row.kind == EXCUSED])]
    lines += ["", "## Not run yet", "", *(_not_run(run) or ["None."])]
    near = [row for row in rows if row.kind == EQUAL and row.said]
    lines += ["", "## Equal from another random key", "", *(_grouped(near) or ["None."])]
    return "\n".join(lines) + "\n"


def _not_run(rows: Sequence[Row]) -> list[str]:
    """The jobs of the whole table that have no row."""
    have = {row.job.key for row in rows}
    wanted: dict[tuple[str, int], list[Job]] = collections.defaultdict(list)
    for step, devices in itertools.product(STEPS, DEVICES):
        for job in jobs_of(step, devices, list(WAYS)):
            wanted[job.way, devices].append(job)
    lines = []
    for (way, devices), jobs in wanted.items():
        missing = [job.step for job in jobs if job.key not in have]
        if missing:
            which = "all" if len(missing) == len(jobs) else ", ".join(missing)
            lines.append(f"- {way} on {devices}: {len(missing)} of {len(jobs)} ({which})")
    return lines


def _runs(rows: Sequence[Row]) -> list[str]:
    """Outcomes by way and devices, then for each step."""
    lines = [markdown(["way", "devices", "runs", *KINDS, "mean s", "max s"], _counts(rows)), ""]
    found = {(row.job.step, row.job.way, row.job.devices): row for row in rows}
    devices = sorted({row.job.devices for row in rows})
    table = [
        [step, *(", ".join(_cell(found, step, way, devices)) for way in WAYS)]
        for step in STEPS
        if any(row.job.step == step for row in rows)
    ]
    return [*lines, f"On {', '.join(map(str, devices))} devices:", "", markdown(["step", *WAYS], table)]


def _cell(found: dict, step: str, way: str, devices: Sequence[int]) -> list[str]:
    """One word where all are alike."""
    rows = [found[step, way, n] for n in devices if (step, way, n) in found]
    if len({row.kind for row in rows}) == 1:
        return [rows[0].kind]
    return [f"{row.kind} on {row.job.devices}" for row in rows]


def _counts(rows: Sequence[Row]) -> list[list[str]]:
    groups: dict[tuple[str, int], list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row.job.way, row.job.devices].append(row)
    ordered = sorted(groups, key=lambda group: (list(WAYS).index(group[0]), group[1]))
    return [[way, str(n), *_numbers(groups[way, n])] for way, n in ordered] + [["all", "", *_numbers(rows)]]


def _numbers(rows: Sequence[Row]) -> list[str]:
    kinds = collections.Counter(row.kind for row in rows)
    seconds = [row.processor_s for row in rows] or [0.0]
    counted = [str(kinds[kind]) for kind in KINDS]
    return [str(len(rows)), *counted, f"{sum(seconds) / len(seconds):.1f}", f"{max(seconds):.0f}"]


def _plans(rows: Sequence[Row]) -> list[str]:
    groups: dict[tuple[str, int], list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row.job.cluster, row.job.batch].append(row)
    table = [[cluster, str(batch), *_numbers(some)] for (cluster, batch), some in sorted(groups.items())]
    return [markdown(["cluster", "batch", "plans", *KINDS, "mean s", "max s"], table)]


def _grouped(rows: Sequence[Row]) -> list[str]:
    """What was said, once for all jobs of a step that it was said of."""
    groups: dict[tuple[str, str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row.job.step, row.kind, re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", row.said)].append(row)
    return [f"- {step}, {kind} ({_jobs(some)}): {some[0].said}" for (step, kind, _), some in groups.items()]


def _jobs(rows: Sequence[Row]) -> str:
    ways: dict[str, list[str]] = collections.defaultdict(list)
    for row in rows:
        where = f"{row.job.cluster} {row.job.batch}" if row.job.cluster else str(row.job.devices)
        ways["plan" if row.job.cluster else row.job.way].append(where)
    return "; ".join(f"{way} on {', '.join(where)}" for way, where in ways.items())
