"""Time of the search for pipeline stages: python -m benchmarks.stage_search [--write] [--layers N] [--devices N]

A transformer of GPT-3's shape (an embedding, equal blocks, a head) on hosts of 8 devices: every power of two as size
of a submesh, tensor parallelism within a host, data parallelism over the rest, three recomputation policies. Every
number of micro-batches and several schedules are searched together (`best_stages`). Costs are closed forms, not those
of the planner: what is timed is the search. --write puts the table in benchmarks/results/stage_search.md.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopar.inter_op.search_space import MOST_CHUNKS
from autopar.solver import Schedule, StageOption, StagePlan, StageProblem, best_stages
from benchmarks import machine

RESULTS = Path(__file__).parent / "results" / "stage_search.md"
WIDTH, SEQUENCE, VOCABULARY, BATCH = 12288, 2048, 51200, 1024
FLOPS_PER_S, HOST_BYTES_PER_S, NETWORK_BYTES_PER_S = 500e12, 400e9, 40e9
LIMIT_BYTES, HOST = 76 * 10**9, 8
SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B, Schedule.ZB_H1, Schedule.INTERLEAVED)
POLICIES = {
    "save all": (0.0, 34.0),
    "save matmuls": (0.1, 18.0),
    "recompute": (1.0, 2.0),
}  # of forward; bytes a feature


def options(layers: int, devices: int, microbatches: int, meshes: int) -> tuple[StageOption, ...]:
    """Those of one number of micro-batches; a mesh that the micro-batch does not fill is left out."""
    made = []
    examples = BATCH // microbatches
    for size in (2**k for k in range(int(math.log2(devices)) + 1)):
        for model in [t for t in (8, 4, 2, 1) if t <= size][:meshes]:
            data = size // model
            if examples >= data:
                made += [option(layers, data, model, examples // data, name) for name in POLICIES]
    return tuple(made)


def option(layers: int, data: int, model: int, examples: int, policy: str) -> StageOption:
    """Closed forms a layer: matmuls at a flat rate, Megatron's all-reduces, one gradient reduction, ZeRO-1 states."""
    again, saved = POLICIES[policy]
    tokens = examples * SEQUENCE
    parameters = np.full(layers, 12.0 * WIDTH**2)
    parameters[[0, -1]] = VOCABULARY * WIDTH
    flops = 2 * tokens * parameters + 4 * tokens * SEQUENCE * WIDTH * (np.arange(layers) % (layers - 1) > 0)
    flops[0] /= 100
    reduce_s = 4 * tokens * WIDTH * 2 * (model - 1) / model / HOST_BYTES_PER_S
    forward = flops / model / FLOPS_PER_S + reduce_s
    gradient_s = (
        2
        * 2
        * parameters
        / model
        * (data - 1)
        / data
        / (NETWORK_BYTES_PER_S if data * model > HOST else HOST_BYTES_PER_S)
    )
    return StageOption(
        num_devices=data * model,
        forward_s=forward,
        backward_s=(2 + again) * forward,
        weight_s=flops / model / FLOPS_PER_S,
        once_s=gradient_s + parameters / model / data * 30 / 3e12,
        state_bytes=(parameters / model * (4 + 12 / data)).astype(np.int64),
        saved_bytes=np.full(layers, int(saved * tokens * WIDTH / model), dtype=np.int64),
        working_bytes=np.full(layers, int(34 * tokens * WIDTH / model), dtype=np.int64),
        send_s=np.full(layers, 2 * tokens * WIDTH / model / NETWORK_BYTES_PER_S + 2e-5),
        name=f"data {data}, tensor {model}, {policy}",
    )


def problems(layers: int, devices: int, meshes: int) -> list[StageProblem]:
    """Every number of micro-batches with every schedule."""
    found = []
    for microbatches in (2**k for k in range(int(math.log2(BATCH)) + 1)):
        shared = options(layers, devices, microbatches, meshes)
        for schedule in SCHEDULES:
            found += [
                StageProblem(
                    options=shared,
                    num_devices=devices,
                    num_layers=layers,
                    num_microbatches=microbatches,
                    schedule=schedule,
                    limit_bytes=LIMIT_BYTES,
                    host_devices=HOST,
                    chunks=chunks,
                )
                for chunks in (range(2, MOST_CHUNKS + 1) if schedule is Schedule.INTERLEAVED else (1,))
            ]
    return found


def row(name: str, layers: int, devices: int, meshes: int) -> list[str]:
    """One line of the table."""
    asked = problems(layers, devices, meshes)
    begun = time.perf_counter()
    answers = best_stages(asked)
    seconds = time.perf_counter() - begun
    plans = [(a.step_time_s, p) for p, a in zip(asked, answers, strict=True) if isinstance(a, StagePlan)]
    time_s, best = min(plans, key=lambda pair: pair[0])
    answer = answers[asked.index(best)]
    assert isinstance(answer, StagePlan)
    sizes = [best.options[stage.option].num_devices for stage in answer.stages]
    most = max(len(p.options) for p in asked)
    cells = f"{layers}", f"{devices:,}", f"up to {most}", f"{len(asked)}", f"{seconds:.2f} s"
    chosen = f"{best.schedule}, {best.num_microbatches} micro-batches, {len(sizes)} stages on {sorted(set(sizes))}"
    return [name, *cells, f"{time_s:.3f} s: {chosen}"]


def in_a_process(name: str, layers: int, devices: int, **environment: str) -> list[str]:
    """As `row`, in a fresh process."""
    code = f"from benchmarks import stage_search as s; print('|'.join(s.row({name!r}, {layers}, {devices}, 2)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment})
    return done.stdout.strip().split("|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it when asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stage_search", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=98)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} as well")
    asked = parser.parse_args(arguments)
    size = (asked.layers, asked.devices)
    with tempfile.TemporaryDirectory() as empty:
        rows = [in_a_process("loops compiled anew", *size, NUMBA_CACHE_DIR=empty)]
    rows.append(in_a_process("first call of a process", *size))
    row("loads the loops", 26, 64, 4)
    rows.append(row("later calls", *size, 2))
    rows.append(row("all tensor-parallel sizes", *size, 4))
    rows.append(row("64 devices", 26, 64, 4))
    columns = ("case", "layers", "devices", "options", "problems", "search", "best step of the model")
    table = machine.markdown(columns, rows)
    print(table)
    if asked.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(f"# Search for pipeline stages\n\n{machine.description()}\n\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
