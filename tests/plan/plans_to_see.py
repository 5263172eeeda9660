"""Plans of all kinds, to be looked at.

`JAX_NUM_CPU_DEVICES=8 python -m tests.plan.plans_to_see FOLDER [NAME ...]` saves them.
"""

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import autopar
from autopar import recipes
from benchmarks.zoo import CASES
from tests.small_steps import mlp_batch, mlp_step, new_mlp_state, slow_cluster

GPT_SIZES = {"layers": 4, "width": 1024, "heads": 16, "vocabulary": 8192, "length": 256, "batch": 64}
GPT_3_SIZES = {"layers": 96, "width": 12_288, "heads": 96, "vocabulary": 51_200, "length": 2048, "batch": 1536}
OPTIONS = {"cache_dir": None}
# The decision and the devices of GPT-3's paper do not matter here: a plan of 96 layers for 1,024 devices does.
THOUSAND = recipes.combine(pp=16, tp=8, dp=8, zero=1, num_microbatches=48, recompute="input")


def planned(case: Any, cluster: str, plan: Any = None) -> autopar.Plan:
    args = jax.eval_shape(case.init, jax.random.key(0)), jax.eval_shape(lambda: case.batch(0))
    return autopar.plan(case.step, *args, cluster=cluster, plan=plan, search=autopar.Search(effort="quick"), **OPTIONS)


def gpt() -> Any:
    return CASES["gpt"](**GPT_SIZES, dtype=jnp.bfloat16, optimizer=optax.adamw(1e-4))


def experts() -> autopar.Plan:
    case = CASES["moe"](layers=4, width=1024, heads=16, experts=8, vocabulary=8192, length=256, batch=64)
    return planned(case, "dgx-h100", recipes.combine(ep=8))


def thousand_devices() -> autopar.Plan:
    case = CASES["gpt"](**GPT_3_SIZES, dtype=jnp.bfloat16, optimizer=optax.adamw(1e-4))
    return planned(case, "dgx-a100-80gx128", THOUSAND)


def tuned() -> autopar.Plan:
    step = autopar.parallelize(mlp_step, cluster=slow_cluster(), **OPTIONS)
    return autopar.tune(step, new_mlp_state(), mlp_batch(), within=2.5).plan


PINS = {"**/feed_forward_in/kernel": P(None, "model"), "batch/tokens": P("data")}
PLANS: dict[str, Callable[[], autopar.Plan]] = {
    "program": lambda: planned(gpt(), "dgx-h100"),
    "pipeline": lambda: planned(gpt(), "dgx-h100", recipes.combine(pp=4, dp=2, num_microbatches=8)),
    "experts": experts,
    "thousand": thousand_devices,
    "pins": lambda: planned(gpt(), "dgx-h100", autopar.constrain(PINS, axis_sizes={"model": 4})),
    "tuned": tuned,
}


@functools.cache
def plan_of(name: str) -> autopar.Plan:
    """One of the plans, made once."""
    return PLANS[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[*PLANS, []])
    parsed = parser.parse_args()
    for name in parsed.names or PLANS:
        begun_s = time.perf_counter()
        plan_of(name).save(parsed.folder / f"{name}.json")
        print(f"{name}: {time.perf_counter() - begun_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
