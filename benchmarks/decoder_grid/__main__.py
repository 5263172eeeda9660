"""The free search beside recipes, on decoders drawn at random: crashes, refusals, and what is faster than the search.

    python -m benchmarks.decoder_grid --draws 20 --first 0 [--processes 2] [--clusters dgx-h100 tpu-v6e:4x4]
    python -m benchmarks.decoder_grid --draws 10 --memory     less and less memory, and every request that the search
                                                              may take itself: micro-batches, recomputation, recipes
    python -m benchmarks.decoder_grid --memory --everyday nanogpt vit     the same of steps of `benchmarks.everyday`
    python -m benchmarks.decoder_grid --everyday 1.3B --clusters dgx-h100:1     a decoder of 1.3 billion parameters
    python -m benchmarks.decoder_grid --draws 500 --rows rows.jsonl --keep    also writes results/decoder_grid.md

Choices: `benchmarks/decoder_grid/model.py`. Each decoder is planned for each cluster in each of the ways below; what
takes more than `--limit` seconds of the processor is ended and counted. A way is faster where its predicted step takes
at most 0.9999 of that of the free search. No device is needed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

import autopar
from autopar import recipes
from autopar.errors import AutoparError
from benchmarks.decoder_grid.model import NAMED, Decoder, drawn
from benchmarks.everyday import STEPS as EVERYDAY
from benchmarks.machine import description, markdown
from benchmarks.row_processes import JobProcess, answer, jobs

RESULTS = Path(__file__).parent.parent / "results" / "decoder_grid.md"
CLUSTERS = ("dgx-h100:1", "dgx-h100", "dgx-h100x2", "tpu-v5p:2x2x2", "tpu-v6e:4x4")
FASTER = 1e-4  # as a part of the step; less is a tie
SHARES = (1.0, 0.5, 0.25, 0.1)  # of the memory that the free plan takes where there is enough
FREE = "free"
EVERYDAY_BATCH = 32  # so that there is a step in 32 micro-batches
KINDS = ("crash", "failure", "refused")
Row = dict[str, Any]


def ways(num_devices: int) -> dict[str, dict[str, Any]]:
    """The options of each way by its name; the free search first."""
    one = {FREE: {}, "four micro-batches": {"search": autopar.Search(num_microbatches=4)}}
    one |= {a: {"search": autopar.Search(attention=a)} for a in ("as written", "kernel", "blockwise")}
    if num_devices == 1:
        return one
    return one | {
        "data parallel": {"plan": recipes.data_parallel()},
        "ZeRO-1": {"plan": recipes.zero(1)},
        "ZeRO-3": {"plan": recipes.zero(3)},
        "tensor parallel": {"plan": recipes.tensor_parallel()},
        "megatron": {"plan": recipes.sequence_parallel("megatron")},
        "ulysses": {"plan": recipes.sequence_parallel("ulysses")},
        "two stages": {"plan": recipes.pipeline(2)},
    }


def requests(num_devices: int) -> dict[str, dict[str, Any]]:
    """Requests within the freedoms of the search, by name: micro-batches, recipes, recomputation."""
    found: dict[str, dict[str, Any]] = {FREE: {}}
    for m in (1, 2, 4, 8, 16, 32):
        found[f"num_microbatches={m}"] = {"search": autopar.Search(num_microbatches=m)}
    if num_devices > 1:
        found["dp, zero=1"] = {"plan": recipes.combine(dp=num_devices, zero=1)}
    for zero, m, recompute in itertools.product((0, 3), (1, 4, 8, 16, 32), ("nothing", "matmuls", "input")):
        if (num_devices == 1 and zero) or (m == 1 and recompute != "nothing"):
            continue
        several = {} if m == 1 else {"num_microbatches": m, "recompute": recompute}
        name = f"dp, zero={zero}, m={m}, {recompute}"
        found[name] = {"plan": recipes.combine(dp=num_devices, zero=zero, **several)}
    if num_devices > 1:
        found |= {name: ways(num_devices)[name] for name in ("tensor parallel", "megatron", "two stages")}
    return found


def ways_of(cluster: str, memory: bool) -> dict[str, dict[str, Any]]:
    return (requests if memory else ways)(autopar.Cluster.parse(cluster).num_devices)


def work() -> None:
    """Plans the jobs that this process is given: (draw or name of a step, cluster, of requests, way, memory)."""
    for number, cluster, memory, way, limit_bytes in jobs():
        options = ways_of(cluster, memory)[way]
        search = options.get("search", autopar.Search())
        options = options | {"search": dataclasses.replace(search, memory_limit_bytes=limit_bytes or None)}
        begun_s = time.process_time()
        try:
            found = planned(number, cluster, options)
        except AutoparError as error:
            found = {"refused": f"{type(error).__name__}: {error}".split("\n hint")[0][:600]}
        except Exception as error:
            trace = traceback.format_exc().splitlines()[-8:]
            found = {"crash": f"{type(error).__name__}: {error}"[:300], "trace": trace}
        answer(found | {"processor_s": time.process_time() - begun_s})


def case_of(number: int | str) -> tuple[Any, Any, Any]:
    """(step, shapes of its state, shapes of its batch) of a draw, or of a step by its name."""
    case = NAMED.get(number) or EVERYDAY[number](EVERYDAY_BATCH) if isinstance(number, str) else drawn(0, number)
    example = case.batch_of(0) if isinstance(case, Decoder) else case.batch(0)
    state = eqx.filter_eval_shape(case.init, jax.random.key(0))
    return case.step, state, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), example)


def planned(number: int | str, cluster: str, options: dict[str, Any]) -> Row:
    plan = autopar.plan(*case_of(number), cluster=cluster, cache_dir=None, **options)
    pipeline = plan.record.pipeline
    parts = "" if pipeline is None else f", {len(pipeline.stages)} stages, {pipeline.num_microbatches} micro-batches"
    return {
        "step_time_s": plan.predicted.step_time_s,
        "peak_bytes": max(plan.predicted.peak_bytes),
        "plan": f"mesh {plan.mesh}{parts}",
    }


def rows_of(job: tuple[int | str, str], arguments: argparse.Namespace) -> list[Row]:
    """The rows of a decoder on a cluster; with less and less memory, those of each share."""
    number, cluster = job
    process = JobProcess("benchmarks.decoder_grid", ["--worker"], arguments.limit)

    def row(way: str, limit_bytes: int = 0) -> Row:
        found = process.run((number, cluster, arguments.memory, way, limit_bytes))
        return {"number": number, "cluster": cluster, "way": way, **found}

    try:
        if not arguments.memory:
            return [row(way) for way in ways_of(cluster, False)]
        # What the fastest plan takes is asked for with as much memory as there may be on a device.
        first = row(FREE, 1 << 50)
        limits = {share: int(share * first["peak_bytes"]) for share in SHARES} if "peak_bytes" in first else {}
        shared = [row(way, limits[share]) | {"share": share} for share in limits for way in ways_of(cluster, True)]
        return shared or [first]
    finally:
        process.close()


def faster(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """The rows of one job that are faster than the free search in the same memory, and the ratio."""
    free = {row.get("share"): row for row in rows if row["way"] == FREE}
    for row in rows:
        of = free.get(row.get("share"))
        if of is None or row is of or "step_time_s" not in row:
            continue
        ratio = of.get("step_time_s", float("inf")) / row["step_time_s"]
        if ratio * (1 - FASTER) > 1:
            yield row, ratio


def told(rows: Sequence[Row]) -> list[list[str]]:
    """What is notable in the rows of a job: what crashed or took too long, and what is faster than the search."""
    found = [(row, kind, row[kind]) for row in rows for kind in ("crash", "failure") if kind in row]
    found += [
        (row, "faster", f"{ratio:.4f} times, {row['step_time_s'] * 1e3:.4g} ms, {row['plan']}")
        for row, ratio in faster(rows)
    ]
    return [[*_where(row), row["way"], kind, text.replace("|", "/").replace("\n", " ")] for row, kind, text in found]


def _where(row: Row) -> tuple[str, str]:
    return str(row["number"]), row["cluster"] + (f" at {row['share']:.0%}" if "share" in row else "")


def _time(row: Row) -> str:
    step = f"{row['step_time_s'] * 1e3:.4g} ms" if "step_time_s" in row else next(kind for kind in KINDS if kind in row)
    return f"{row['way']} {step}, planned in {row.get('processor_s', math.nan):.1f} s"


def page(rows: Sequence[Row], notable: Sequence[Sequence[str]], command: str) -> str:
    kinds = collections.Counter(next((kind for kind in KINDS if kind in row), "fine") for row in rows)
    refusals = collections.Counter(
        f"{row['way']}: {row['refused'].split(',')[0][:80]}" for row in rows if "refused" in row
    )
    return (
        f"# Decoders drawn at random\n\n`python -m benchmarks.decoder_grid {command}`: {len(rows)} rows: "
        f"{', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}.\n\n{description()}\n\n"
        f"{markdown(('draw', 'cluster', 'way', 'kind', 'what'), notable)}\n\n## Refusals\n\n"
        f"{markdown(('way and reason', 'rows'), [[text, str(n)] for text, n in refusals.most_common()])}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10, help="how many decoders")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    steps = [*NAMED, *EVERYDAY]
    parser.add_argument("--everyday", nargs="+", choices=steps, metavar="STEP", help="these steps instead")
    parser.add_argument("--clusters", nargs="*", default=CLUSTERS)
    parser.add_argument("--memory", action="store_true", help="less and less memory, every request of the freedoms")
    parser.add_argument("--processes", type=int, default=1, help="at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one way")
    parser.add_argument("--rows", type=Path, help="a file to which every row is added, a JSON object a line")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return 0
    os.environ["JAX_PLATFORMS"] = "cpu"
    numbers = arguments.everyday or range(arguments.first, arguments.first + arguments.draws)
    wanted = list(itertools.product(numbers, arguments.clusters))
    rows: list[Row] = []
    notable: list[list[str]] = []
    with ThreadPoolExecutor(arguments.processes) as pool:
        for found in pool.map(functools.partial(rows_of, arguments=arguments), wanted):
            if arguments.rows:
                with arguments.rows.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
            print(*_where(found[0]), f"{len(found)} rows:", "; ".join(map(_time, found)), flush=True)
            for cells in told(found):
                print("   ", " | ".join(cells), flush=True)
            rows, notable = [*rows, *found], [*notable, *told(found)]
    text = page(rows, notable, " ".join(sys.argv[1:]))
    print(text)
    if arguments.keep:
        RESULTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
