"""One step under one way of running it: equal to plain `jax.jit`, refused, wrong, or a crash."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

import autopar
from autopar import errors, recipes
from benchmarks.everyday import MIXING, ONE_LAYER, STEPS
from benchmarks.machine import planning_processor_s, without_folders
from benchmarks.random_programs.modes import slow_cluster
from benchmarks.rounding import difference, noise_of, perturbed_arguments, results_of

BATCH = 8
DEVICES = (1, 2, 4, 8)
CALLS = 2
LIMIT_S = 30.0  # of processor time, for planning and two calls
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
# `excused`: refused, where parts of the batch have another result. `slow`: equal, after more than `LIMIT_S`.
EQUAL, PLANNED, EXCUSED, REFUSED, SLOW, WRONG, CRASH, HANG = KINDS = (
    "equal",
    "planned",
    "excused",
    "refused",
    "slow",
    "wrong",
    "crash",
    "hang",
)
FAILED = (REFUSED, SLOW, WRONG, CRASH, HANG)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A step with a way of running it on some virtual devices, or with the cluster that it is planned for only."""

    step: str
    way: str = "free search"
    devices: int = 0
    cluster: str = ""
    batch: int = BATCH

    @property
    def key(self) -> str:
        return " | ".join(map(str, dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a job; `said` is an error's text, or the leaf that differs."""

    job: Job
    kind: str
    said: str = ""
    processor_s: float = 0.0


def jobs_of(step: str, devices: int, ways: list[str]) -> list[Job]:
    """Stages take two devices; the whole batch in stages is tried where parts of it are refused."""
    return [
        Job(step=step, way=way, devices=devices)
        for way in ways
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


def run(job: Job, bench_of: Callable[[str, int], Bench]) -> Row:
    """`bench_of` makes the bench of a step and a random key, or has it."""
    start_s = planning_processor_s()
    if job.cluster:
        kind, said = _planned(job)
        return _row(job, kind, said, planning_processor_s() - start_s)
    bench = bench_of(job.step, 0)
    start_s = planning_processor_s()
    kind, said = _outcome(job, bench)
    processor_s = planning_processor_s() - start_s
    if kind == WRONG and _outcome(job, bench_of(job.step, 1))[0] == EQUAL:
        # A number so near a kink or between two integers that rounding decides it is so from one key, not from two.
        kind, said = EQUAL, f"from another key; from the first: {said}"
    return _row(job, kind, said, processor_s)


def _row(job: Job, kind: str, said: str, processor_s: float) -> Row:
    late = kind in (EQUAL, PLANNED) and processor_s > LIMIT_S
    return Row(job=job, kind=SLOW if late else kind, said=said, processor_s=round(processor_s, 1))


def _planned(job: Job) -> tuple[str, str]:
    case = STEPS[job.step](job.batch)
    state = eqx.filter_eval_shape(case.init, jax.random.key(0))
    step = autopar.parallelize(case.step, cluster=job.cluster, cache_dir=None, **WAYS[job.way])
    try:
        plan = step.plan(state, case.batch(0))
    except errors.AutoparError as error:
        return REFUSED, without_folders(_text(error))
    except Exception as error:
        return CRASH, without_folders(f"{_text(error)} ({_where(error)})")
    return PLANNED, str(plan).splitlines()[0]


def _outcome(job: Job, bench: Bench) -> tuple[str, str]:
    step = autopar.parallelize(bench.step, cluster=slow_cluster(job.devices), cache_dir=None, **WAYS[job.way])
    try:
        results = results_of(step, bench.state(), bench.batches)
    except errors.AutoparError as error:
        return EXCUSED if _is_excused(job) else REFUSED, without_folders(_text(error))
    except Exception as error:
        return CRASH, without_folders(f"{_text(error)} ({_where(error)})")
    worst = bench.worst(results)
    return (WRONG, worst) if worst else (EQUAL, "")


def _is_excused(job: Job) -> bool:
    whole_only = job.step in MIXING and job.way in (STAGES, MICROBATCHES)
    return whole_only or (job.step in ONE_LAYER and job.way in (STAGES, STAGES_WHOLE))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:800]


def _where(error: BaseException) -> str:
    """The last three lines of autopar's on the way to an error."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "/autopar/" in f.filename or "solver" in f.filename
    ]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
