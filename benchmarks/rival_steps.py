"""A step as users call it beside `jax.jit` by hand around the function that autopar emits, and of the original."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import autopar
from autopar.compiler.materialize import make_function
from autopar.sharding.rules import RuleBook
from autopar.xla import collectives


def leaf_step(state: Any, batch: Any) -> Any:
    return [x + batch for x in state], batch


class Runner:
    """Calls a step again and again, each time with the state that it returned."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        self.step, self.batch = step, batch
        self.state = state

    def whole_s(self) -> float:
        """Time of a step until its results are there."""
        begun = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - begun

    def call_s(self) -> float:
        """Processor time of the calling thread until a call returns: other work on the machine does not lengthen it."""
        begun = time.thread_time()
        self.state, metrics = self.step(self.state, self.batch)
        spent = time.thread_time() - begun
        jax.block_until_ready((self.state, metrics))
        return spent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rivals:
    """The same step three times: autopar's, jit around what autopar emits, jit around the original function."""

    autopar: Runner
    emitted: Runner
    original: Runner
    executable: Any
    sent_bytes: tuple[float, float]  # by a device in a step: autopar's program, the original's


def rivals(function: Callable[..., Any], state: Any, batch: Any, cluster: autopar.Cluster) -> Rivals:
    step = autopar.parallelize(function, cluster=cluster, cache_dir=None, show_progress=False)
    executable = step.compile(state, batch)
    plan, traced = executable.plan, executable.traced
    shardings = (plan.state_shardings, plan.batch_shardings)
    made = make_function(traced, plan, plan.concrete_mesh(), RuleBook())
    assert not executable.constants, "the function below takes none"

    def emitted(state: Any, batch: Any) -> Any:
        return jax.tree.unflatten(traced.out_tree, made.function(*jax.tree.leaves((state, batch))))

    by_hand = [
        jax.jit(f, in_shardings=shardings, out_shardings=(shardings[0], None), donate_argnums=0)
        for f in (emitted, function)
    ]
    own, of_emitted, of_original = (
        collectives.traffic(collectives.collectives(text))
        for text in (executable.as_text(), *(f.lower(state, batch).compile().as_text() for f in by_hand))
    )
    assert own == of_emitted, "the function that autopar emits became another program under jit"
    runners = [Runner(f, *jax.device_put((state, batch), shardings)) for f in (step, *by_hand)]
    return Rivals(
        autopar=runners[0],
        emitted=runners[1],
        original=runners[2],
        executable=executable,
        sent_bytes=(own.total_bytes, of_original.total_bytes),
    )


def alternately(measures: Sequence[Callable[[], float]], repeats: int, warm_up: int = 10) -> list[list[float]]:
    """Measures in turn, the order turned round each time, so that what else the machine does falls on all of them."""
    times: list[list[float]] = [[] for _ in measures]
    for i in range(warm_up + repeats):
        order = list(enumerate(measures))
        for which, measure in order if i % 2 else reversed(order):
            spent = measure()
            if i >= warm_up:
                times[which].append(spent)
    return times


def call_us(leaves: int, repeats: int, cluster: autopar.Cluster) -> list[float]:
    """Median microseconds of the calling thread for a step with so many leaves of state: autopar's step, the compiled
    step, jit by hand.
    """
    state = [np.zeros(8, np.float32) for _ in range(leaves)]
    run = rivals(leaf_step, state, np.ones((), np.float32), cluster)
    ours, emitted = run.autopar, run.emitted
    compiled = Runner(run.executable, *jax.device_put((state, ours.batch), run.executable.shardings))
    times = alternately((ours.call_s, compiled.call_s, emitted.call_s), repeats)
    return [statistics.median(t) * 1e6 for t in times]
