"""Decoders on one card that has too little memory for the batch at once: the default beside requests and jit by hand.

    python -m benchmarks.card_memory                    all rows, on the first device that jax finds
    python -m benchmarks.card_memory '12 layers, 8 GB'  some of them
    python -m benchmarks.card_memory --small            sizes for a CPU: whether it works, no figures to quote
    python -m benchmarks.card_memory --results DIR      keeps the table there, and not in benchmarks/results

Each row is a decoder and a memory limit. Its step runs as the default plans it, under the requests of the row (numbers
of micro-batches), and where the row has it as `jax.jit` runs what a person writes by hand: `jax.checkpoint` around each
layer and gradients added up over micro-batches by `lax.scan`. Each way runs in a process of its own, one after the
other: two states at once would not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from benchmarks import row_processes
from benchmarks.decoder_grid.model import OPTIMIZERS, Decoder
from benchmarks.machine import description, markdown

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 240.0  # of one way
ROUNDS = 5
BY_HAND = "by hand"
_LOAD = r" \(load [^)]*\)"
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_LLAMA = dict(
    vocabulary=50_304, length=2048, scans=True, remat="none", casts=True, rope=True, rms=True, gated=False, tied=True,
    optimizer="adamw", slices_tokens=True,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A decoder, the memory that it may take, and the ways to run it beside the default."""

    decoder: Decoder
    limit: str | None
    requests: tuple[int, ...]
    by_hand: int | None = None

    @property
    def ways(self) -> tuple[str, ...]:
        """`default`, numbers of micro-batches, and by hand."""
        return "default", *map(str, self.requests), *([BY_HAND] if self.by_hand else [])


ROWS = {
    "1.3 billion parameters": Row(
        decoder=Decoder(layers=24, width=2048, heads=16, kv_heads=16, hidden=8192, batch=32, **_LLAMA),
        limit=None,
        requests=(8,),
        by_hand=8,
    ),
    "12 layers, 8 GB": Row(
        decoder=Decoder(layers=12, width=1024, heads=16, kv_heads=16, hidden=4096, batch=16, **_LLAMA),
        limit="8GB",
        requests=(8,),
    ),
    "9 layers in float32": Row(
        decoder=Decoder(
            layers=9, width=2048, heads=16, kv_heads=16, hidden=8192, batch=64, **_LLAMA | {"casts": False}
        ),
        limit=None,
        requests=(32,),
    ),
}


def smaller(row: Row) -> Row:
    sizes = dict(
        layers=2, width=64, heads=4, kv_heads=4, hidden=128, batch=row.decoder.batch, vocabulary=256, length=64
    )
    return dataclasses.replace(row, decoder=dataclasses.replace(row.decoder, **sizes), limit=None)


def by_hand(decoder: Decoder, num_microbatches: int) -> Any:
    """The step as a person writes it where memory is short."""
    inner = dataclasses.replace(decoder, remat="full")

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        parts = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, state["parameters"])

        def add(carry: Any, part: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(inner.loss)(state["parameters"], part)
            return jax.tree.map(lambda a, b: a + b / num_microbatches, carry, found), None

        (loss, gradients), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), parts)
        updates, optimizer = OPTIMIZERS[decoder.optimizer]().update(gradients, state["optimizer"], state["parameters"])
        parameters = jax.tree.map(lambda p, u: p + u, state["parameters"], updates)
        return {"parameters": parameters, "optimizer": optimizer}, loss

    return jax.jit(step, donate_argnums=0)


def measured(row: Row, way: str) -> dict[str, Any]:
    """One way: losses of two steps, predicted and measured seconds, bytes."""
    decoder, key = row.decoder, jax.random.key(0)
    shapes, batch = jax.eval_shape(decoder.init, key), decoder.batch_of(0)
    found: dict[str, Any] = {}
    if way == BY_HAND:
        assert row.by_hand is not None
        step: Any = by_hand(decoder, row.by_hand)
        state = jax.jit(decoder.init)(key)
    else:
        options: dict[str, Any] = {} if way == "default" else {"num_microbatches": int(way)}
        step = autopar.parallelize(
            decoder.step, cluster=autopar.Cluster.local(1, measured=False), memory_limit_bytes=row.limit,
            cache_dir=None, show_progress=False, **options,
        )  # fmt: skip
        begun = time.process_time()
        plan = step.plan(shapes, batch)
        found["planning_s"] = time.process_time() - begun
        found["predicted_s"] = plan.predicted.step_time_s
        found["predicted_bytes"] = max(plan.predicted.peak_bytes)
        found["plan"] = str(plan).split("\n\n")[0].replace("\n", " ")[:400]
        state = step.init(decoder.init, key)
    losses, took_s = [], []
    for seed in range(2 + ROUNDS):
        arguments = decoder.batch_of(seed)
        begun = time.perf_counter()
        state, loss = step(state, arguments)
        losses.append(float(loss))
        took_s.append(time.perf_counter() - begun)
    found["losses"], found["measured_s"] = losses[:2], statistics.median(took_s[2:])
    found["device_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return found | {"device": jax.devices()[0].device_kind, "on": description()}


def cells(name: str, way: str, row: dict[str, Any]) -> list[str]:
    shown = [name, way if way in ("default", BY_HAND) else f"{way} micro-batches"]
    if row.get("failure"):
        return [*shown, row["failure"], "", "", "", ""]
    predicted = row.get("predicted_s")
    gb = [f"{row[of] / 1e9:.1f}" if row.get(of) else "" for of in ("predicted_bytes", "device_bytes")]
    loss = ", ".join(f"{loss:.4f}" for loss in row["losses"])
    return [
        *shown, f"{predicted * 1e3:,.0f}" if predicted else "", f"{row['measured_s'] * 1e3:,.0f}", " / ".join(gb), loss,
        f"{row['planning_s']:.0f}" if "planning_s" in row else "",
    ]  # fmt: skip


def page(rows: row_processes.Rows) -> str:
    columns = (
        "decoder", "way", "predicted, ms", "measured, ms", "peak, GB: predicted / device's",
        "losses of two steps", "planning, s of processor",
    )  # fmt: skip
    devices = dict.fromkeys(
        f"{row['device']}: {re.sub(_LOAD, '', row['on'])}" for row in rows.values() if "device" in row
    )
    table = markdown(columns, [cells(*key.split(": "), row) for key, row in rows.items()])
    plans = [f"- {key}: {row['plan']}" for key, row in rows.items() if "plan" in row]
    parts = [
        "# One card with too little memory",
        "`python -m benchmarks.card_memory`",
        *devices,
        table,
        "\n".join(plans),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    if arguments.child:
        name, way = arguments.child
        print(json.dumps(measured(smaller(ROWS[name]) if arguments.small else ROWS[name], way)))
        return 0
    path = arguments.results / "card_memory.json"
    rows = row_processes.load(path)
    for name in arguments.rows or ROWS:
        for way in ROWS[name].ways:
            given = ["--child", name, way, *(["--small"] * arguments.small)]
            rows[f"{name}: {way}"] = found = row_processes.in_fresh_process(
                "benchmarks.card_memory", given, TIMEOUT_S, ENVIRONMENT
            )
            row_processes.keep(path, rows)
            path.with_suffix(".md").write_text(page(rows))
            print(f"{name}: {way}: {found.get('failure') or found['measured_s']}", flush=True)
    print(page(rows))
    return int(any(row.get("failure") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
