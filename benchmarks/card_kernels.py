"""Kernels of a training step one by one on an accelerator: what they are predicted to take, and what they take there.

    python -m benchmarks.card_kernels                     all, on the first device that jax finds
    python -m benchmarks.card_kernels "softmax*" loop     some, by name or pattern
    python -m benchmarks.card_kernels --small             sizes for a CPU: whether it works, no figures to quote
    python -m benchmarks.card_kernels --keep              also keeps results/card_kernels.md
    python -m benchmarks.card_kernels --predict dgx-h200:1  only the predictions of kept rows anew, on any machine

A row is a step of one or few operations, planned with the constants of the preset and compiled by plain `jax.jit`. It
is called again and again without waiting for its results, which is what its time is divided by. Arrays are large, so
that a call is hidden behind the one before.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

import autopar
from autopar.plan.cache import SEARCH_VERSION
from benchmarks.machine import description, markdown

RESULTS = Path(__file__).parent / "results" / "card_kernels.md"
SAMPLE_S, SMALL_SAMPLE_S, SAMPLES = 0.1, 0.005, 3
VOCABULARY = 50_304
SMALLER = 64  # by how much the first dimension of `--small` is
COLUMNS = ("step", "of", "predicted, us", "measured, us", "ratio", "arguments and results, GB/s")
Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """A step whose results have the shapes of its operands, so that it runs on what it returned.

    Attributes:
        step: Operands to as many results.
        operands: (shape, dtype) of each.
        shortened: The operands whose first dimension `--small` makes shorter.
    """

    step: Callable[..., Arrays]
    operands: tuple[tuple[tuple[int, ...], Any], ...]
    shortened: tuple[int, ...] = (0,)

    def smaller(self) -> Kernels:
        operands = list(self.operands)
        for i in self.shortened:
            (first, *rest), dtype = operands[i]
            operands[i] = (max(2, first // SMALLER), *rest), dtype
        return dataclasses.replace(self, operands=tuple(operands))

    def state(self) -> Arrays:
        key = jax.random.key(0)
        return tuple(
            jax.random.randint(key, shape, 0, VOCABULARY)
            if dtype == jnp.int32
            else (jax.random.normal(key, shape, jnp.float32) * (0.02 if len(shape) == 3 else 1)).astype(dtype)
            for shape, dtype in self.operands
        )


def _elementwise(function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any) -> Kernels:
    return Kernels(step=lambda x: (function(x),), operands=((shape, dtype),))


def _with_backward(function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any) -> Kernels:
    def step(x: jax.Array, gradient: jax.Array) -> Arrays:
        y, backward = jax.vjp(function, x)
        return backward(gradient)[0], y

    return Kernels(step=step, operands=((shape, dtype),) * 2, shortened=(0, 1))


def _softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


def _layer_norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    off = wide - wide.mean(-1, keepdims=True)
    return (off * jax.lax.rsqrt((off**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _batch_norm(x: jax.Array) -> jax.Array:
    off = x - x.mean((0, 1, 2))
    return jax.nn.relu(off * jax.lax.rsqrt((off**2).mean((0, 1, 2)) + 1e-5))


def _loss_gradient(logits: jax.Array) -> jax.Array:
    def losses(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return jax.nn.logsumexp(wide, -1) - wide[:, 0]

    value, backward = jax.vjp(losses, logits)
    return backward(jnp.ones_like(value))[0]


def _column_sums() -> Kernels:
    return Kernels(
        step=lambda x, total: (x, total + x.sum(0, dtype=jnp.float32)),
        operands=(((16_384, 4096), jnp.bfloat16), ((4096,), jnp.float32)),
    )


def _transposed(first: tuple[int, ...], order: tuple[int, ...], dtype: Any) -> Kernels:
    second = tuple(first[i] for i in order)
    assert tuple(second[i] for i in order) == first, "transposing twice leads back"
    step = lambda x, y: (y.transpose(order), x.transpose(order))  # noqa: E731
    return Kernels(step=step, operands=((first, dtype), (second, dtype)), shortened=(0, 1) if order[0] == 0 else ())


def _adam() -> Kernels:
    def step(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> Arrays:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-3) + 0.1 * p), m, v, g

    return Kernels(step=step, operands=(((8192, 8192), jnp.float32),) * 4, shortened=(0, 1, 2, 3))


def _embedding() -> Kernels:
    def step(table: jax.Array, tokens: jax.Array) -> Arrays:
        rows, backward = jax.vjp(lambda t: t[tokens].astype(jnp.bfloat16), table)
        return table + 1e-3 * backward(rows)[0], tokens

    operands = ((VOCABULARY, 1024), jnp.float32), ((65_536,), jnp.int32)
    return Kernels(step=step, operands=operands, shortened=(1,))


def _products(rows: int, width: int, wide: int, layers: int, dtype: Any) -> Kernels:
    """The three products of linear layers in training, each with weights of its own."""

    def layer(x: jax.Array, weights: jax.Array) -> Arrays:
        y = x @ weights
        return x + (y @ weights.T) * jnp.asarray(1e-30, dtype), x.T @ y

    def step(x: jax.Array, weights: jax.Array) -> Arrays:
        x, gradients = jax.lax.scan(layer, x, weights)
        return x, weights + gradients * 0

    return Kernels(step=step, operands=(((rows, width), dtype), ((layers, width, wide), dtype)))


def _feed_forward(width: int, layers: int) -> Kernels:
    def forward(x: jax.Array, into: jax.Array, out: jax.Array) -> jax.Array:
        layer = lambda x, w: (x + jax.nn.gelu(x @ w[0]) @ w[1], None)  # noqa: E731
        return jax.lax.scan(layer, x, (into, out))[0]

    def step(x: jax.Array, into: jax.Array, out: jax.Array) -> Arrays:
        y, backward = jax.vjp(forward, x, into, out)
        of_x, of_into, of_out = backward(y)
        little = jnp.bfloat16(1e-9)
        return of_x * jnp.bfloat16(1e-3), into + of_into * little, out + of_out * little

    shapes = ((8192, width), (layers, width, 4 * width), (layers, 4 * width, width))
    return Kernels(step=step, operands=tuple((shape, jnp.bfloat16) for shape in shapes))


def _loop(turns: int) -> Kernels:
    body = lambda i, x: jnp.sin(x) + 1e-3 * i  # noqa: E731
    return _elementwise(lambda x: jax.lax.fori_loop(0, turns, body, x), (256, 1024), jnp.float32)


def _recurrent(turns: int, backward: bool) -> Kernels:
    def forward(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ weights), None), x, None, length=turns)[0]

    def step(x: jax.Array, weights: jax.Array) -> Arrays:
        if not backward:
            return forward(x, weights), weights
        y, pull = jax.vjp(forward, x, weights)
        of_x, of_weights = pull(y)
        return x + 1e-9 * of_x, weights + 1e-9 * of_weights

    return Kernels(step=step, operands=(((256, 1024), jnp.float32), ((1024, 1024), jnp.float32)))


BF16, F32 = jnp.bfloat16, jnp.float32
STEPS: dict[str, Callable[[], Kernels]] = {
    "scaled": functools.partial(_elementwise, lambda x: x * 1.0001, (8192, 8192), F32),
    "softmax of 1024": functools.partial(_elementwise, _softmax, (8, 16, 1024, 1024), BF16),
    "softmax of 2048": functools.partial(_elementwise, _softmax, (4, 16, 2048, 2048), BF16),
    "softmax of 1024, with backward": functools.partial(_with_backward, _softmax, (8, 16, 1024, 1024), BF16),
    "layer norm": functools.partial(_elementwise, _layer_norm, (65_536, 1024), BF16),
    "layer norm, with backward": functools.partial(_with_backward, _layer_norm, (65_536, 1024), BF16),
    "gelu, with backward": functools.partial(_with_backward, jax.nn.gelu, (16_384, 4096), BF16),
    "batch norm, with backward": functools.partial(_with_backward, _batch_norm, (256, 64, 64, 64), F32),
    "sums of columns": _column_sums,
    "transposed heads": functools.partial(_transposed, (32, 1024, 16, 64), (0, 2, 1, 3), BF16),
    "transposed matrix": functools.partial(_transposed, (8192, 8192), (1, 0), F32),
    "gradient of a loss": functools.partial(_elementwise, _loss_gradient, (8192, 32_768), BF16),
    "embedding, with backward": _embedding,
    "adam": _adam,
    "products 8192 x 1024 x 4096": functools.partial(_products, 8192, 1024, 4096, 8, BF16),
    "products 8192 x 4096 x 4096": functools.partial(_products, 8192, 4096, 4096, 4, BF16),
    "products 8192 x 8192 x 8192": functools.partial(_products, 8192, 8192, 8192, 2, BF16),
    "products 256 x 1024 x 4096": functools.partial(_products, 256, 1024, 4096, 8, BF16),
    "products 8192 x 1024 x 4096, float32": functools.partial(_products, 8192, 1024, 4096, 8, F32),
    "products 8192 x 4096 x 4096, float32": functools.partial(_products, 8192, 4096, 4096, 4, F32),
    "products 256 x 1024 x 4096, float32": functools.partial(_products, 256, 1024, 4096, 8, F32),
    "feed forward of 1024": functools.partial(_feed_forward, 1024, 8),
    "feed forward of 4096": functools.partial(_feed_forward, 4096, 2),
    "loop of 100": functools.partial(_loop, 100),
    "loop of 1000": functools.partial(_loop, 1000),
    "recurrent, 16 turns": functools.partial(_recurrent, 16, False),
    "recurrent, 128 turns": functools.partial(_recurrent, 128, False),
    "recurrent, 16 turns, with backward": functools.partial(_recurrent, 16, True),
    "recurrent, 128 turns, with backward": functools.partial(_recurrent, 128, True),
}


def predicted_s(kernels: Kernels, cluster: autopar.Cluster) -> float:
    step = autopar.parallelize(
        lambda state, batch: (kernels.step(*state), 0.0), cluster=cluster, cache_dir=None, show_progress=False
    )
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kernels.operands)
    return step.plan(shapes, jax.ShapeDtypeStruct((1,), F32)).predicted.step_time_s


def row(name: str, small: bool) -> list[str]:
    """Predicts and times one."""
    kernels = STEPS[name]().smaller() if small else STEPS[name]()
    state = kernels.state()
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)
    seconds = predicted_s(kernels, autopar.Cluster.local(1, measured=False))
    # Nothing is donated: kernels that run a row at a time write over nothing that they read, so that XLA would copy it.
    compiled = jax.jit(kernels.step).lower(*shapes).compile()
    state, nbytes = compiled(*state), 2 * sum(x.nbytes for x in state)
    measured_s = statistics.median(_call_s(compiled, state, SMALL_SAMPLE_S if small else SAMPLE_S))
    return [
        name,
        ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in shapes),
        f"{seconds * 1e6:,.1f}",
        f"{measured_s * 1e6:,.1f}",
        f"{seconds / measured_s:.2f}",
        f"{nbytes / measured_s / 1e9:,.0f}",
    ]


def _call_s(compiled: Callable[..., Arrays], state: Arrays, sample_s: float) -> list[float]:
    state = jax.block_until_ready(compiled(*state))
    begun = time.perf_counter()
    state = jax.block_until_ready(compiled(*state))
    calls = max(4, min(400, round(sample_s / (time.perf_counter() - begun))))
    seconds = []
    for _ in range(SAMPLES):
        begun = time.perf_counter()
        for _ in range(calls):
            state = compiled(*state)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - begun) / calls)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help="names or patterns")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--keep", nargs="?", type=Path, const=RESULTS, metavar="FILE", help=f"keep {RESULTS.name}")
    parser.add_argument("--predict", metavar="CLUSTER", help="of one device, such as dgx-h200:1: runs nothing")
    arguments = parser.parse_args()
    if arguments.predict:
        RESULTS.write_text(with_predictions(RESULTS.read_text(), autopar.Cluster.parse(arguments.predict)))
        return 0
    names = [name for name in STEPS if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.names)]
    rows = []
    for name in names:
        rows.append(row(name, arguments.small))
        print(" | ".join(rows[-1]), flush=True)
    if arguments.keep:
        arguments.keep.write_text(page(rows))
    return 0


def with_predictions(text: str, cluster: autopar.Cluster) -> str:
    """The kept page with the predictions of today beside the times that were measured then."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        cells = line.strip("| ").split(" | ")
        if cells[0] in STEPS:
            seconds, measured_us = predicted_s(STEPS[cells[0]](), cluster), float(cells[3].replace(",", ""))
            cells[2], cells[4] = f"{seconds * 1e6:,.1f}", f"{seconds * 1e6 / measured_us:.2f}"
            lines[i] = f"| {' | '.join(cells)} |"
    later = f"Predictions were made again after the run, by search version {SEARCH_VERSION}."
    kept = [line for line in lines if not line.startswith("Predictions were made again")]
    return "\n".join([*kept[:3], "", later, *kept[3:], ""])


def page(rows: list[list[str]]) -> str:
    device = jax.devices()[0]
    return "\n".join([
        "# Kernels on a card",
        "",
        "`python -m benchmarks.card_kernels`: steps of few operations, predicted by the constants of the preset, and "
        f"measured on {device.device_kind}; {description()}.",
        "",
        markdown(COLUMNS, rows),
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
