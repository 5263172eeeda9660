"""The ways in which a decoder is planned or run, and what comes of each; one process for several, a line for each.

python -m benchmarks.decoder_grid.ways '{"seed": 0, "number": 4, "cluster": "dgx-h100x8", "ways": ["free"]}'

The "number" of a job is that of a draw, or the name of one of `benchmarks.everyday.STEPS`.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import traceback
from typing import Any

import equinox as eqx
import jax
import numpy as np

import autopar
from autopar import recipes
from autopar.errors import AutoparError
from benchmarks.decoder_grid.model import Decoder, drawn
from benchmarks.everyday import STEPS as EVERYDAY

FREE = "free"
STEPS, TOLERANCE = 2, 2e-4  # of runs beside plain jit; bfloat16 differs by more
TOLERANCE_16 = 5e-2
EVERYDAY_BATCH = 32  # so that there is a step in 32 micro-batches


def ways(num_devices: int) -> dict[str, dict[str, Any]]:
    """The options of each way by its name; the free search first."""
    one = {
        FREE: {},
        "four micro-batches": {"num_microbatches": 4},
        "blockwise": {"attention": "blockwise"},
    }
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
        "ulysses blockwise": {"plan": recipes.sequence_parallel("ulysses"), "attention": "blockwise"},
    }


def requests(num_devices: int) -> dict[str, dict[str, Any]]:
    """Requests within the freedoms of the search, by name: micro-batches, recipes, recomputation."""
    found: dict[str, dict[str, Any]] = {FREE: {}}
    for m in (1, 2, 4, 8, 16, 32):
        found[f"num_microbatches={m}"] = {"num_microbatches": m}
    if num_devices > 1:
        found["dp, zero=1"] = {"plan": recipes.combine(dp=num_devices, zero=1)}
    for zero, m, recompute in itertools.product((0, 3), (1, 4, 8, 16, 32), ("nothing", "matmuls", "input")):
        if (num_devices == 1 and zero) or (m == 1 and recompute != "nothing"):
            continue
        several = {} if m == 1 else {"num_microbatches": m, "recompute": recompute}
        name = f"dp, zero={zero}, m={m}, {recompute}"
        found[name] = {"plan": recipes.combine(dp=num_devices, zero=zero, **several)}
    if num_devices > 1:
        for name in ("tensor parallel", "megatron", "two stages"):
            found[name] = ways(num_devices)[name]
    return found


def planned(job: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    number = job["number"]
    case = EVERYDAY[number](EVERYDAY_BATCH) if isinstance(number, str) else drawn(job["seed"], number)
    example = case.batch_of(0) if isinstance(case, Decoder) else case.batch(0)
    state = eqx.filter_eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), example)
    plan = autopar.plan(case.step, state, batch, cluster=job["cluster"], cache_dir=None, show_progress=False, **options)
    pipeline = plan.record.pipeline
    parts = "" if pipeline is None else f", {len(pipeline.stages)} stages, {pipeline.num_microbatches} micro-batches"
    return {
        "step_time_s": plan.predicted.step_time_s,
        "peak_bytes": max(plan.predicted.peak_bytes),
        "plan": f"mesh {plan.mesh}{parts}",
    }


def run(decoder: Decoder, options: dict[str, Any]) -> dict[str, Any]:
    """The largest difference to plain jit on the devices of the process, as a part of the largest value of a leaf."""
    step = autopar.parallelize(decoder.step, cache_dir=None, show_progress=False, **options)
    plain = jax.jit(decoder.step)
    ours = theirs = jax.jit(decoder.init)(jax.random.key(0))
    theirs = jax.tree.map(np.asarray, theirs)
    worst = 0.0
    for seed in range(STEPS):
        (ours, loss), (theirs, expected) = step(ours, decoder.batch_of(seed)), plain(theirs, decoder.batch_of(seed))
        pairs = zip(
            jax.tree.leaves((ours["parameters"], loss)), jax.tree.leaves((theirs["parameters"], expected)), strict=True
        )
        for a, b in pairs:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    allowed = TOLERANCE_16 if decoder.casts else TOLERANCE
    return {"difference": worst} if worst <= allowed else {"difference": worst, "wrong": True}


def outcome(job: dict[str, Any], name: str) -> dict[str, Any]:
    cluster = job["cluster"]
    num_devices = autopar.Cluster.parse(cluster).num_devices if cluster else len(jax.devices())
    known = requests(num_devices) if job.get("requests") else ways(num_devices)
    options = dict(known[name])
    if job.get("memory_bytes"):
        options["memory_limit_bytes"] = int(job["memory_bytes"])
    begun_s = time.process_time()
    try:
        found = planned(job, options) if cluster else run(drawn(job["seed"], job["number"]), options)
    except AutoparError as error:
        found = {"refused": f"{type(error).__name__}: {error}".split("\n hint")[0][:600]}
    except Exception as error:
        found = {
            "crash": f"{type(error).__name__}: {error}"[:300],
            "trace": traceback.format_exc().splitlines()[-8:],
        }
    return {"way": name, **found, "processor_s": time.process_time() - begun_s}


def main() -> int:
    job = json.loads(sys.argv[1])
    for name in job["ways"]:
        print(json.dumps(outcome(job, name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
