"""What autopar's step costs beyond a hand-written `jax.jit` of the same program, on 8 virtual CPU devices.

    python -m benchmarks.overhead                    both tables
    python -m benchmarks.overhead --repeats 400      more repetitions
    python -m benchmarks.overhead --keep             also keeps them in results/overhead.md

Steps of 10 ms and more, called alternately, medians: the step as users call it against `jax.jit` written by hand around
the very function that autopar emits, which is what its call costs; and against `jax.jit` of the original function with
the plan's shardings of state and batch, where XLA's partitioner decides the rest: that is another program.

A trivial step with 10, 100 and 400 leaves of state: processor time of the calling thread until the call returns, with
the devices idle before each.
"""

import os

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # before jax starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.compiler.materialize import make_function
from autopar.hardware import presets
from autopar.sharding.rules import RuleBook
from autopar.xla import collectives
from benchmarks.machine import description, markdown

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "overhead.md"
TARGET_RATIO = 1.02
LEAVES = (10, 100, 400)


def slow_cluster() -> autopar.Cluster:
    """Eight devices so slow beside their links that the search splits small models."""
    device = dataclasses.replace(
        presets.V100,
        name="slow",
        peak_flops=tuple((dtype, rate / 1e4) for dtype, rate in presets.V100.peak_flops),
        peak_memory_bytes_per_s=presets.V100.peak_memory_bytes_per_s / 1e4,
    )
    return autopar.Cluster.flat(8, device=device, links=(presets.NVLINK2,))


def mlp_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], {"loss": loss}


def mlp(width: int, layers: int, examples: int) -> tuple[Any, Any]:
    """(state, batch) of numpy arrays."""
    random = np.random.default_rng(0)
    state = [random.normal(size=(width, width)).astype(np.float32) / width**0.5 for _ in range(layers)]
    return state, {name: random.normal(size=(examples, width)).astype(np.float32) for name in "xy"}


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


def rivals(function: Callable[..., Any], state: Any, batch: Any) -> Rivals:
    step = autopar.parallelize(function, cluster=slow_cluster(), cache_dir=None)
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


def compare_steps(repeats: int) -> list[list[str]]:
    rows = []
    for width, layers, examples in ((256, 4, 512), (512, 4, 512), (512, 8, 1024)):
        run = rivals(mlp_step, *mlp(width, layers, examples))
        times = alternately((run.autopar.whole_s, run.emitted.whole_s, run.original.whole_s), repeats)
        ours, emitted, original = map(statistics.median, times)
        quick = [statistics.quantiles(t, n=10)[0] for t in times]
        rows.append(
            [
                f"MLP {layers} x {width}, {examples} examples",
                f"{ours * 1e3:.2f}",
                f"{emitted * 1e3:.2f}",
                f"{ours / emitted:.4f} ({'<=' if ours / emitted <= TARGET_RATIO else 'not <='} {TARGET_RATIO})",
                f"{quick[0] / quick[1]:.4f}",
                f"{original * 1e3:.2f}",
                f"{ours / original:.4f}",
                " / ".join(f"{sent / 1e6:.2f}" for sent in run.sent_bytes),
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


def compare_calls(repeats: int) -> list[list[str]]:
    rows = []
    for leaves in LEAVES:
        state = [np.zeros(8, np.float32) for _ in range(leaves)]
        run = rivals(leaf_step, state, np.ones((), np.float32))
        ours, emitted = run.autopar, run.emitted
        compiled = Runner(run.executable, *jax.device_put((state, ours.batch), run.executable.shardings))
        times = alternately((ours.call_s, compiled.call_s, emitted.call_s), repeats)
        us = [statistics.median(t) * 1e6 for t in times]
        rows.append([str(leaves), *(f"{x:.0f}" for x in us), f"{us[0] - us[1]:+.1f}", f"{us[0] - us[2]:+.1f}"])
        print(" | ".join(rows[-1]), flush=True)
    return rows


STEP_COLUMNS = (
    "step",
    "autopar, ms",
    "jit by hand, ms",
    "ratio",
    "ratio of fastest tenths",
    "jit of the original, ms",
    "ratio to it",
    "MB sent, / original's",
)
CALL_COLUMNS = (
    "leaves",
    "autopar, us",
    "compiled step, us",
    "jit by hand, us",
    "over the compiled step",
    "over jit by hand",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--keep", action="store_true", help=f"keep the tables in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    steps = compare_steps(arguments.repeats)
    calls = compare_calls(arguments.repeats)
    for columns, rows in ((STEP_COLUMNS, steps), (CALL_COLUMNS, calls)):
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        Console(width=140).print(table)
    if arguments.keep:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(
            "# Overhead of a step\n\n"
            f"`python -m benchmarks.overhead --repeats {arguments.repeats} --keep`, 8 virtual CPU devices.\n\n"
            f"{description()}\n\n"
            "Whole steps, called alternately, until the results are there:\n\n"
            f"{markdown(STEP_COLUMNS, steps)}\n\n"
            "Processor time of the calling thread until a call of a trivial step returns (`compiled step`: what "
            "`step.compile(...)` gives):\n\n"
            f"{markdown(CALL_COLUMNS, calls)}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
