"""The free search beside recipes, on decoders drawn at random: crashes, refusals, and what is faster than the search.

    python -m benchmarks.decoder_grid --draws 20 --seed 0 [--processes 2] [--first 0] [--clusters dgx-h100 tpu-v6e:4x4]
    python -m benchmarks.decoder_grid --draws 20 --run 4      four of the small ones on four CPU devices beside jit
    python -m benchmarks.decoder_grid --draws 10 --memory     less and less memory, and every request that the search
                                                              may take itself: micro-batches, recomputation, recipes
    python -m benchmarks.decoder_grid --memory --everyday nanogpt vit     the same of steps of `benchmarks.everyday`
    python -m benchmarks.decoder_grid --draws 500 --keep      also writes results/decoder_grid.md
    python -m benchmarks.decoder_grid --draws 60 --spread --rows rows.jsonl     each on one of the clusters, in turn
    python -m benchmarks.decoder_grid --of rows.jsonl --keep  the page of rows that were made before

Choices: `benchmarks/decoder_grid/model.py`. Each decoder is planned for each cluster in a process of its own, in each
of the ways of `benchmarks/decoder_grid/ways.py`; what takes more than `--limit` seconds is ended and counted. A way is
faster where its predicted step takes at most 0.9999 of that of the free search. Attention in blocks is another step:
its rows count beside the free search in blocks. No device is needed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import autopar
from benchmarks.decoder_grid.model import drawn
from benchmarks.decoder_grid.ways import FREE, requests, ways
from benchmarks.everyday import STEPS as EVERYDAY
from benchmarks.machine import description, markdown

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "decoder_grid.md"
CLUSTERS = ("dgx-h100:1", "dgx-h100", "dgx-h100x2", "tpu-v5p:2x2x2", "tpu-v6e:4x4")
FASTER = 1e-4  # as a part of the step; less is a tie, as in `benchmarks.grids`
SHARES = (1.0, 0.5, 0.25, 0.1)  # of the memory that the free plan takes where there is enough
BLOCKWISE = "blockwise"
RUN_DEVICES = 4
Row = dict[str, Any]


def rows_of(job: Row, limit_s: float) -> Iterator[Row]:
    """What comes of each way of a job. Where one takes too long, its process is ended, and another has the rest."""
    waiting = list(job["ways"])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "AUTOPAR_PLANNING_PROCESSES": "1"}
    if not job["cluster"]:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RUN_DEVICES}"
    while waiting:
        command = [sys.executable, "-m", "benchmarks.decoder_grid.ways", json.dumps({**job, "ways": waiting})]
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_read, args=(child, lines), daemon=True).start()
            while waiting:
                try:
                    line = lines.get(timeout=limit_s)
                except queue.Empty:
                    line, why = None, {"hang": f"more than {limit_s:.0f} s"}
                else:
                    errors.seek(0)
                    why = {"crash": f"the process ended: {errors.read()[-300:]}"}
                if line is None:
                    yield {"way": waiting.pop(0), **why}
                    break
                waiting.pop(0)
                yield json.loads(line)
            child.kill()
            child.wait()


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None, "its output is a pipe"
    for line in child.stdout:
        if line.startswith("{"):
            lines.put(line)
    lines.put(None)


def jobs_of(arguments: argparse.Namespace) -> list[Row]:
    numbers = arguments.everyday or range(arguments.first, arguments.first + arguments.draws)
    if arguments.run:
        small = [n for n in numbers if n % 2 == 0][: arguments.run]
        names = list(ways(RUN_DEVICES))
        return [{"seed": arguments.seed, "number": n, "cluster": "", "ways": names} for n in small]
    found: list[Row] = []
    pairs = list(itertools.product(numbers, arguments.clusters))
    if arguments.spread:  # on all in turn, small and large ones on each
        n = len(arguments.clusters)
        pairs = [(number, arguments.clusters[(number + number // n) % n]) for number in numbers]
    for number, cluster in pairs:
        num_devices = autopar.Cluster.parse(cluster).num_devices
        names = list((requests if arguments.memory else ways)(num_devices))
        job = {"seed": arguments.seed, "number": number, "cluster": cluster, "requests": arguments.memory}
        found.append({**job, "ways": [n for n in names if n == FREE or not arguments.ways or n in arguments.ways]})
    return found


def results_of(job: Row, arguments: argparse.Namespace) -> list[Row]:
    """The rows of a job; with less and less memory, those of each share."""
    about = {key: job[key] for key in ("number", "cluster")}
    if not arguments.memory:
        return [{**about, **row} for row in rows_of(job, arguments.limit)]
    # What the fastest plan takes is asked for with as much memory as there may be on a device.
    (first,) = rows_of({**job, "ways": [FREE], "memory_bytes": 1 << 50}, arguments.limit)
    found: list[Row] = []
    for share in arguments.shares if "peak_bytes" in first else ():
        limited = {**job, "memory_bytes": int(share * first["peak_bytes"])}
        found += [{**about, "share": share, **row} for row in rows_of(limited, arguments.limit)]
    return found or [{**about, **first}]


def faster(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """The rows of one job that are faster than the free search of the same attention and memory, and the ratio."""
    free = {(row.get("share"), row["way"]): row for row in rows if row["way"] in (FREE, BLOCKWISE)}
    found = []
    for row in rows:
        of = free.get((row.get("share"), BLOCKWISE if BLOCKWISE in row["way"] else FREE))
        if of is None or row is of or "step_time_s" not in row:
            continue
        if "step_time_s" not in of:
            found.append((row, float("inf")))
        elif row["step_time_s"] < (1 - FASTER) * of["step_time_s"]:
            found.append((row, of["step_time_s"] / row["step_time_s"]))
    return found


@dataclasses.dataclass(kw_only=True)
class Summary:
    """What came of all jobs."""

    jobs: int = 0
    rows: int = 0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notable: list[list[str]] = dataclasses.field(default_factory=list)

    def add(self, job: Row, rows: Sequence[Row]) -> list[list[str]]:
        """Takes the rows of a job up; returns those to be told."""
        self.jobs, self.rows = self.jobs + 1, self.rows + len(rows)
        told: list[list[str]] = []
        for row in rows:
            kind = next((k for k in ("crash", "hang", "wrong", "refused") if k in row), "fine")
            self.kinds[kind] += 1
            if kind == "refused":
                self.refusals[f"{row['way']}: {row['refused'].split(',')[0][:80]}"] += 1
            elif kind != "fine":
                told.append(_cells(row, kind, str(row[kind] if kind != "wrong" else row["difference"])))
        for row, ratio in faster(rows):
            self.kinds["faster"] += 1
            told.append(_cells(row, "faster", f"{ratio:.4f} times, {row['step_time_s'] * 1e3:.4g} ms, {row['plan']}"))
        self.notable += told
        return told


def _cells(row: Row, kind: str, text: str) -> list[str]:
    share = f" at {row['share']:.0%}" if "share" in row else ""
    where = (row["cluster"] or "4 CPU devices") + share
    return [str(row["number"]), where, row["way"], kind, text.replace("|", "/").replace("\n", " ")]


def kept_jobs(path: Path) -> list[tuple[Row, list[Row]]]:
    """The jobs of rows that were kept, each with its rows."""
    found: dict[tuple[int, str, bool], list[Row]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        found.setdefault((row["number"], row["cluster"], "share" in row), []).append(row)
    return [({"number": number, "cluster": cluster}, rows) for (number, cluster, _), rows in found.items()]


def _about(seed: int, number: int | str) -> str:
    return "" if isinstance(number, str) else str(drawn(seed, number))


def page(summary: Summary, draws: Collection[int], seed: int) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(summary.kinds.items()))
    refusals = [[text, str(n)] for text, n in summary.refusals.most_common()]
    return (
        "# Decoders drawn at random\n\n"
        f"`python -m benchmarks.decoder_grid`, {len(draws)} draws from {min(draws)} to {max(draws)}, seed {seed}: "
        f"{summary.rows} rows of {summary.jobs} decoders on clusters: {kinds}.\n\n"
        f"{description()}\n\n"
        f"{markdown(('draw', 'cluster', 'way', 'kind', 'what'), summary.notable)}\n\n## Refusals\n\n"
        f"{markdown(('way and reason', 'rows'), refusals)}\n"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10, help="how many decoders")
    parser.add_argument("--everyday", nargs="+", choices=list(EVERYDAY), metavar="STEP", help="these steps instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--processes", type=int, default=1, help="at a time")
    parser.add_argument("--clusters", nargs="*", default=CLUSTERS)
    parser.add_argument("--ways", nargs="*", help="some of them, beside the free search")
    parser.add_argument("--run", type=int, default=0, help="run so many of the small ones instead")
    parser.add_argument("--memory", action="store_true", help="less and less memory, every request of the freedoms")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES, help="of memory")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one way")
    parser.add_argument("--rows", type=Path, help="a file to which every row is added, a JSON object a line")
    parser.add_argument("--spread", action="store_true", help="each decoder on one of the clusters")
    parser.add_argument("--of", type=Path, help="no new rows: those of this file")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    return parser.parse_args()


def new_jobs(arguments: argparse.Namespace) -> Iterator[tuple[Row, list[Row]]]:
    jobs = jobs_of(arguments)
    with ThreadPoolExecutor(arguments.processes) as pool:
        for job, rows in zip(jobs, pool.map(lambda job: results_of(job, arguments), jobs), strict=True):
            if arguments.rows:
                with arguments.rows.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            yield job, rows


def main() -> int:
    arguments = parsed()
    summary, draws = Summary(), set[int]()
    for job, rows in kept_jobs(arguments.of) if arguments.of else new_jobs(arguments):
        draws.add(job["number"])
        print(f"{job['number']} {job['cluster']} {_about(arguments.seed, job['number'])}", flush=True)
        for cells in summary.add(job, rows):
            print("   ", " | ".join(cells), flush=True)
    print(dict(summary.kinds))
    print(markdown(("way and reason", "rows"), [[text, str(n)] for text, n in summary.refusals.most_common()]))
    if arguments.keep:
        RESULTS.write_text(page(summary, draws, arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
