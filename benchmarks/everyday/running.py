"""One step under one way of running it: equal to plain `jax.jit`, refused, wrong, or a crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

import autopar
from autopar import errors, recipes
from benchmarks.everyday import MIXING, ONE_LAYER, STEPS
from benchmarks.random_programs.modes import slow_cluster
from benchmarks.rounding import difference, noise_of, perturbed_arguments, results_of

BATCH = 8
CALLS = 2
STAGES, STAGES_WHOLE, MICROBATCHES = "two stages", "two stages, whole batch", "two micro-batches"
WAYS: dict[str, dict[str, Any]] = {
    "free search": {},
    "data_parallel()": {"plan": recipes.data_parallel()},
    "zero(3)": {"plan": recipes.zero(3)},
    "tensor_parallel()": {"plan": recipes.tensor_parallel()},
    STAGES: {"plan": recipes.pipeline(2, num_microbatches=2)},
    STAGES_WHOLE: {"plan": recipes.pipeline(2, num_microbatches=1)},
    MICROBATCHES: {"search": autopar.Search(num_microbatches=2)},
}
# `excused`: refused, where parts of the batch have another result.
EQUAL, EXCUSED, REFUSED, WRONG = "equal", "excused", "refused", "wrong"
FAILED = (REFUSED, WRONG)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A step with a way of running it on some virtual devices."""

    step: str
    way: str
    devices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a job; `said` is an error's text, or the leaf that differs."""

    job: Job
    kind: str
    said: str = ""


def jobs_of(step: str, devices: int) -> list[Job]:
    """Every way. Stages take two devices; the whole batch in stages is tried where parts of it are refused."""
    return [
        Job(step=step, way=way, devices=devices)
        for way in WAYS
        if (devices > 1 or "stages" not in way) and (way != STAGES_WHOLE or step in MIXING)
    ]


class Bench:
    """A step with what plain `jax.jit` makes of it. Leaves that are no arrays are static, as under `eqx.filter_jit`."""

    def __init__(self, step: str, key: int = 0) -> None:
        case = STEPS[step](BATCH)
        self.step, self._init, self._key = case.step, eqx.filter_jit(case.init), key
        self.batches = [case.batch(seed) for seed in range(CALLS)]
        self.expected, self.noise = self._reference()

    def state(self) -> Any:
        return self._init(jax.random.key(self._key))

    def _reference(self) -> tuple[list[Any], list[list[float]]]:
        arrays, static = eqx.partition(self.state(), eqx.is_array_like)

        def step(arrays: Any, batch: Any) -> Any:
            state, results = self.step(eqx.combine(arrays, static), batch)
            return eqx.filter(state, eqx.is_array_like), results

        def run(seed: int | None) -> list[Any]:
            args = arrays, self.batches
            if seed is not None:
                args = perturbed_arguments(lambda state, batches: step(state, batches[0]), args, seed)
            return results_of(jitted, *args)

        jitted = jax.jit(step)
        plain, *others = (run(seed) for seed in (None, 1, 2, 3))
        return plain, noise_of(plain, others)

    def worst(self, results: list[Any]) -> str:
        """The first leaf that differs; "" where none does."""
        arrays = [(eqx.filter(state, eqx.is_array_like), found) for state, found in results]
        return difference(self.expected, arrays, self.noise)


def run(job: Job, bench_of: Callable[[str, int], Bench]) -> Outcome:
    """`bench_of` makes the bench of a step and a random key, or has it."""
    found = _outcome(job, bench_of(job.step, 0))
    if found.kind == WRONG and _outcome(job, bench_of(job.step, 1)).kind == EQUAL:
        # A number so near a kink or between two integers that rounding decides it is so from one key, not from two.
        return Outcome(job=job, kind=EQUAL, said=f"from another key; from the first: {found.said}")
    return found


def _outcome(job: Job, bench: Bench) -> Outcome:
    step = autopar.parallelize(bench.step, cluster=slow_cluster(job.devices), cache_dir=None, **WAYS[job.way])
    try:
        results = results_of(step, bench.state(), bench.batches)
    except errors.AutoparError as error:
        return Outcome(job=job, kind=EXCUSED if _is_excused(job) else REFUSED, said=str(error))
    worst = bench.worst(results)
    return Outcome(job=job, kind=WRONG if worst else EQUAL, said=worst)


def _is_excused(job: Job) -> bool:
    whole_only = job.step in MIXING and job.way in (STAGES, MICROBATCHES)
    return whole_only or (job.step in ONE_LAYER and job.way in (STAGES, STAGES_WHOLE))
