"""The search beside everything: its plan against all grids of tensor, pipeline and data parallelism, ZeRO and the rest.

    python -m benchmarks.grids                              three models on four clusters (an hour)
    python -m benchmarks.grids gpt --clusters dgx-h100      one of each
    python -m benchmarks.grids --keep                       also keeps the table in results/grids.md, row by row
    python -m benchmarks.grids --search --keep              after a change of the search: the grids that were kept stay

For each model and cluster every recipe `combine(tp, pp, dp, num_microbatches, zero, recompute)` is planned and
predicted under the same model as the search's own plan, which must not be slower than the best of them that fits. No
device is needed. Grids: tp, pp and dp powers of two whose product is the number of devices, tp inside of a host; 1, 4
or 16 micro-batches (with stages at least 4); ZeRO 0, 1, 3; recomputation of nothing or of whole layers.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.plan.render import in_short
from benchmarks.machine import description, kept_rows, markdown
from benchmarks.zoo import CASES

RESULTS = Path(__file__).parent / "results" / "grids.md"
CLUSTERS = ("p3.16xlarge", "p3.16xlargex2", "dgx-a100-80g", "dgx-h100x2")
ADAM = optax.adamw(1e-4)
MODELS = {
    "gpt": dict(
        layers=4, width=2048, heads=16, vocabulary=51_200, length=1024, batch=64, dtype=jnp.float16, optimizer=ADAM
    ),
    "moe": dict(layers=4, width=1024, heads=16, experts=16, vocabulary=32_000, length=1024, batch=64, optimizer=ADAM),
    "vit": dict(layers=6, width=1024, heads=16, image=224, patch=16, batch=256),
}
NUM_MICROBATCHES, ZERO, RECOMPUTE = (1, 4, 16), (0, 1, 3), ("nothing", "input")
COLUMNS = (
    "model",
    "cluster",
    "grids",
    "of them fit",
    "best grid",
    "predicted",
    "search",
    "predicted",
    "best / search",
    "took",
)
TIE = 1e-4  # as in `benchmarks.auto_vs_manual.rows`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    tp: int
    pp: int
    dp: int
    num_microbatches: int
    zero: int
    recompute: str

    def __str__(self) -> str:
        return (
            f"tp {self.tp}, pp {self.pp}, dp {self.dp}, {self.num_microbatches} micro-batches, ZeRO {self.zero}, "
            f"recompute {self.recompute}"
        )


def grids(cluster: autopar.Cluster) -> Iterator[Grid]:
    sizes = [2**i for i in range(cluster.num_devices.bit_length())]
    for tp, pp, m, zero, recompute in itertools.product(sizes, sizes, NUM_MICROBATCHES, ZERO, RECOMPUTE):
        if cluster.num_devices % (tp * pp) or tp > cluster.domain_devices or (pp > 1 and m == 1):
            continue
        dp = cluster.num_devices // tp // pp
        if dp > 1 or zero == 0:
            yield Grid(tp=tp, pp=pp, dp=dp, num_microbatches=m, zero=zero, recompute=recompute)


def compared(model: str, cluster_name: str, progress: Progress, kept: list[str] | None) -> list[str]:
    """The cells of a row. With one that was kept, its grids stay, and only the search plans again."""
    case = CASES[model](**MODELS[model])
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    cluster = autopar.Cluster.parse(cluster_name)
    options = {"cluster": cluster, "cache_dir": None, "show_progress": False}
    started_s = time.perf_counter()
    chosen = autopar.plan(case.step, state, batch, **options)
    if kept is not None:
        num_grids, fitting_grids, grid, grid_s = kept[2:6]
        ratio = f"{float(grid_s.split()[0]) / chosen.predicted.step_time_s:.3f}"
        ours = in_short(chosen.record), f"{chosen.predicted.step_time_s:.4g} s"
        return [model, cluster_name, num_grids, fitting_grids, grid, grid_s, *ours, ratio, "the search alone"]
    best: tuple[float, Grid] | None = None
    wanted, fitting = list(grids(cluster)), 0
    for grid in progress.track(wanted, description=f"{model} on {cluster_name}"):
        recipe = autopar.recipes.combine(**dataclasses.asdict(grid))
        try:
            plan = autopar.plan(case.step, state, batch, plan=recipe, **options)
        except AutoparError:
            continue  # more stages than layers, sizes that do not divide, one program that does not fit
        if max(plan.predicted.peak_bytes) > cluster.device.memory_bytes:
            continue
        fitting += 1
        if best is None or plan.predicted.step_time_s < best[0]:
            best = plan.predicted.step_time_s, grid
    text = in_short(chosen.record)
    ours_s = chosen.predicted.step_time_s
    found = ("none fits", "", f"{ours_s:.4g} s", "") if best is None else (
        str(best[1]), f"{best[0]:.4g} s", f"{ours_s:.4g} s", f"{best[0] / ours_s:.3f}",
    )  # fmt: skip
    took = f"{time.perf_counter() - started_s:.0f} s"
    return [model, cluster_name, str(len(wanted)), str(fitting), found[0], found[1], text, found[2], found[3], took]


def keep(rows: list[list[str]]) -> None:
    """Rows kept before stay, but for those made again."""
    found = {tuple(row[:2]): row for row in kept_rows(RESULTS) + rows}
    ordered = [found[key] for key in itertools.product(MODELS, CLUSTERS) if key in found]
    RESULTS.write_text(
        f"# The search beside all grids\n\nThe last row: {description()}\n\n{markdown(COLUMNS, ordered)}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--search", action="store_true", help="plan by search alone, beside the grids that were kept")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    console, rows = Console(width=180), []
    known = {tuple(row[:2]): row for row in kept_rows(RESULTS)} if arguments.search else {}
    with Progress(console=console) as progress:
        for model, cluster in itertools.product(arguments.models, arguments.clusters):
            rows.append(compared(model, cluster, progress, known.get((model, cluster))))
            console.print(" | ".join(rows[-1]))
            if arguments.keep:
                keep(rows)
    shown = Table(*COLUMNS)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    return 0 if all(not row[8] or float(row[8]) >= 1 - TIE for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
