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
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar
from autopar.hardware import presets
from benchmarks.machine import description, markdown
from benchmarks.rival_steps import alternately, call_us, rivals

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


def compare_steps(repeats: int) -> list[list[str]]:
    rows = []
    for width, layers, examples in ((256, 4, 512), (512, 4, 512), (512, 8, 1024)):
        run = rivals(mlp_step, *mlp(width, layers, examples), slow_cluster())
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
        us = call_us(leaves, repeats, slow_cluster())
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
