"""The free search beside recipes, on decoders drawn at random: crashes, refusals, and what is faster than the search.

    python -m benchmarks.decoder_grid --draws 20 --first 0 --clusters dgx-h100 tpu-v6e:4x4
    python -m benchmarks.decoder_grid --everyday nanogpt vit                    steps of `benchmarks.everyday`
    python -m benchmarks.decoder_grid --everyday 1.3B --clusters dgx-h100:1     a decoder of 1.3 billion parameters

Choices: `benchmarks/decoder_grid/model.py`. Each decoder is planned for each cluster in each of the ways below. A way
is faster where its predicted step takes at most 0.9999 of that of the free search. No device is needed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from typing import Any

import equinox as eqx
import jax

import autopar
from autopar import recipes
from autopar.errors import AutoparError
from benchmarks.decoder_grid.model import NAMED, Decoder, drawn
from benchmarks.everyday import STEPS as EVERYDAY

CLUSTERS = ("dgx-h100:1", "dgx-h100", "dgx-h100x2", "tpu-v5p:2x2x2", "tpu-v6e:4x4")
FASTER = 1e-4  # as a part of the step; less is a tie
FREE = "free"
EVERYDAY_BATCH = 32  # so that there is a step in 32 micro-batches


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


def case_of(number: int | str) -> tuple[Any, Any, Any]:
    """(step, shapes of its state, shapes of its batch) of a draw, or of a step by its name."""
    case = NAMED.get(number) or EVERYDAY[number](EVERYDAY_BATCH) if isinstance(number, str) else drawn(0, number)
    example = case.batch_of(0) if isinstance(case, Decoder) else case.batch(0)
    state = eqx.filter_eval_shape(case.init, jax.random.key(0))
    return case.step, state, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), example)


def planned(number: int | str, cluster: str, options: dict[str, Any]) -> tuple[float, str]:
    """(the predicted step, infinite where there is none; the plan, or what became of it)."""
    try:
        plan = autopar.plan(*case_of(number), cluster=cluster, cache_dir=None, **options)
    except AutoparError as error:
        return float("inf"), f"refused: {str(error).splitlines()[0]}"
    except Exception as error:
        return float("inf"), f"crash: {type(error).__name__}: {error}"
    pipeline = plan.record.pipeline
    parts = "" if pipeline is None else f", {len(pipeline.stages)} stages, {pipeline.num_microbatches} micro-batches"
    return plan.predicted.step_time_s, f"mesh {plan.mesh}{parts}"


def compare(number: int | str, cluster: str) -> None:
    """Plans a decoder for a cluster in each way, the free search first, and prints what becomes of each."""
    free_s = float("inf")
    for way, options in ways(autopar.Cluster.parse(cluster).num_devices).items():
        begun_s = time.process_time()
        step_s, text = planned(number, cluster, options)
        free_s = step_s if way == FREE else free_s
        faster = f", {free_s / step_s:.4f} times as fast as the search" if step_s * (1 + FASTER) < free_s else ""
        planned_s = time.process_time() - begun_s
        print(f"{number} | {cluster} | {way} | {step_s * 1e3:.4g} ms{faster} | {planned_s:.1f} s | {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10, help="how many decoders")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    steps = [*NAMED, *EVERYDAY]
    parser.add_argument("--everyday", nargs="+", choices=steps, metavar="STEP", help="these steps instead")
    parser.add_argument("--clusters", nargs="*", default=CLUSTERS)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    numbers = arguments.everyday or range(arguments.first, arguments.first + arguments.draws)
    for number, cluster in itertools.product(numbers, arguments.clusters):
        compare(number, cluster)


if __name__ == "__main__":
    main()
