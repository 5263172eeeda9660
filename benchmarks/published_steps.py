"""Predicted step times beside published ones: GPTs that others trained on A100s, with their parallelism as a recipe.

    python -m benchmarks.published_steps                     every row
    python -m benchmarks.published_steps 1.7B 39.1B --keep   some of them; keeps the table in results/published_steps.md
    python -m benchmarks.published_steps --search            beside each the search's own plan

One set of constants for all rows (`Cluster.preset("dgx-a100-80g")`). Sources: Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM", 2021, table 1 (full recomputation; micro-batches and
interleaving from its scripts); Korthikanti et al., "Reducing activation recomputation in large transformer models",
2022, table 5 (the same models with full recomputation, and with sequence parallelism and selective recomputation).
Iteration times of the first are its sequences times the model's flops over its achieved rate.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.plan.render import in_short
from benchmarks.machine import description, kept_rows, markdown
from benchmarks.zoo import CASES

RESULTS = Path(__file__).parent / "results" / "published_steps.md"
TARGET = 0.10
COLUMNS = (
    "model",
    "recomputes",
    "GPUs",
    "tp x pp x dp",
    "micro-batches",
    "published",
    "predicted",
    "ratio",
    "peak",
    "planned in",
)
SEARCHED = (*COLUMNS, "searched", "its plan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a published table. Sizes as printed there; the vocabulary is 51,200, sequences have 2,048 tokens."""

    name: str
    layers: int
    hidden: int
    heads: int
    tp: int
    pp: int
    gpus: int
    batch: int
    micro_batch: int
    chunks: int = 1
    selective: bool = False
    step_time_s: float

    @property
    def dp(self) -> int:
        return self.gpus // self.tp // self.pp

    @property
    def num_microbatches(self) -> int:
        return self.batch // self.dp // self.micro_batch


ROWS = {
    row.name: row
    for row in (
        Published(
            name="1.7B", layers=24, hidden=2304, heads=24, tp=1, pp=1, gpus=32, batch=512, micro_batch=16,
            step_time_s=3.528,
        ),
        Published(
            name="7.5B", layers=36, hidden=4096, heads=32, tp=4, pp=1, gpus=128, batch=512, micro_batch=16,
            step_time_s=3.696,
        ),
        Published(
            name="39.1B", layers=48, hidden=8192, heads=64, tp=8, pp=2, gpus=512, batch=1536, micro_batch=4,
            step_time_s=14.453,
        ),
        Published(
            name="145.6B", layers=80, hidden=12_288, heads=96, tp=8, pp=8, gpus=1536, batch=2304, micro_batch=2,
            chunks=2, step_time_s=24.817,
        ),
        Published(
            name="529.6B", layers=105, hidden=20_480, heads=128, tp=8, pp=35, gpus=2520, batch=2520, micro_batch=1,
            chunks=3, step_time_s=54.085,
        ),
        Published(
            name="22B", layers=48, hidden=6144, heads=64, tp=8, pp=1, gpus=8, batch=4, micro_batch=4, step_time_s=1.42,
        ),
        Published(
            name="22B selective", layers=48, hidden=6144, heads=64, tp=8, pp=1, gpus=8, batch=4, micro_batch=4,
            selective=True, step_time_s=1.10,
        ),
        Published(
            name="530B", layers=105, hidden=20_480, heads=128, tp=8, pp=35, gpus=280, batch=280, micro_batch=1,
            chunks=3, step_time_s=49.05,
        ),
        Published(
            name="530B selective", layers=105, hidden=20_480, heads=128, tp=8, pp=35, gpus=280, batch=280,
            micro_batch=1, chunks=3, selective=True, step_time_s=37.83,
        ),
    )
}  # fmt: skip


def step_of(row: Published) -> tuple:
    """(training step, its state's and its batch's shapes)."""
    case = CASES["gpt"](
        layers=row.layers, width=row.hidden, heads=row.heads, vocabulary=51_200, length=2048, batch=row.batch,
        remat_attention=row.selective, dtype=jnp.float16, optimizer=optax.adamw(1e-4),
    )  # fmt: skip
    state = jax.eval_shape(case.init, jax.random.key(0))
    return case.step, state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))


def recipe_of(row: Published) -> autopar.recipes.Recipe:
    return autopar.recipes.combine(
        dp=row.dp,
        tp=row.tp,
        pp=row.pp,
        num_microbatches=row.num_microbatches,
        sequence_parallel=row.selective,
        schedule=None if row.pp == 1 else "interleaved" if row.chunks > 1 else "1f1b",
        chunks=row.chunks if row.chunks > 1 else None,
        recompute="nothing" if row.selective else "input",
    )


def compared(row: Published, search: bool) -> tuple[list[str], bool]:
    """(the cells of a row, whether the prediction is within the target)."""
    step, *arguments = step_of(row)
    options = {
        "cluster": autopar.Cluster.preset("dgx-a100-80g", hosts=row.gpus // 8),
        "cache_dir": None,
        "show_progress": False,
    }
    started_s = time.process_time()
    plan = autopar.plan(step, *arguments, plan=recipe_of(row), **options)
    planned_s = time.process_time() - started_s
    predicted_s = plan.predicted.step_time_s
    cells = [
        row.name,
        "attention" if row.selective else "all",
        str(row.gpus),
        f"{row.tp} x {row.pp} x {row.dp}",
        f"{row.num_microbatches} of {row.micro_batch}",
        f"{row.step_time_s:.2f} s",
        f"{predicted_s:.2f} s",
        f"{predicted_s / row.step_time_s:.3f}",
        f"{max(plan.predicted.peak_bytes) / 1e9:.0f} GB",
        f"{planned_s:.0f} s",
    ]
    if search:
        try:
            own = autopar.plan(step, *arguments, **options)
        except AutoparError as error:
            cells += ["none", str(error)[:80]]
        else:
            cells += [f"{own.predicted.step_time_s:.2f} s", in_short(own.record)]
    return cells, abs(predicted_s / row.step_time_s - 1) <= TARGET


def keep(made: list[str]) -> None:
    """Writes a row among those that were kept."""
    found = {row[0]: row for row in [*kept_rows(RESULTS), made]}
    rows = [found[row.name] for row in ROWS.values() if row.name in found]
    columns = SEARCHED if any(len(row) > len(COLUMNS) for row in rows) else COLUMNS
    RESULTS.write_text(f"# Published step times\n\nThe last row: {description()}\n\n{markdown(columns, rows)}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--search", action="store_true", help="plan each by search too")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    console, found = Console(width=170), []
    for name in arguments.rows:
        found.append(compared(ROWS[name], arguments.search))
        console.print(" | ".join(found[-1][0]))
        if arguments.keep:
            keep(found[-1][0])
    columns = SEARCHED if arguments.search else COLUMNS
    shown = Table(*columns)
    for cells, _ in found:
        shown.add_row(*cells)
    console.print(shown)
    return 0 if all(good for _, good in found) else 1


if __name__ == "__main__":
    sys.exit(main())
