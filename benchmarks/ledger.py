"""Predicted step times and memory beside published ones, with the published parallelism as a recipe.

    python -m benchmarks.published_steps                        every row of benchmarks.published_rows
    python -m benchmarks.published_steps torchtitan --keep      those whose names contain it; writes results
    python -m benchmarks.published_steps --short                rows of one stage from models of 2 and 4 layers: equal
                                                                layers add equal times, so a line through both is taken;
                                                                memory is not told

One set of constants a kind of device, those of `autopar.hardware.presets`. Rows of runs with flash attention are
planned with `attention="blockwise"`, or with `--as-written` as it is written; the table says which.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
from rich.console import Console

import autopar
from autopar.errors import AutoparError
from autopar.hardware.kinds import DeviceKind
from autopar.xla.aot_gpu import CARDS
from benchmarks.machine import description, kept_rows, markdown, without_folders
from benchmarks.published_rows import CLUSTERS, ROWS, Row
from benchmarks.zoo import CASES

RESULTS = Path(__file__).parent / "results" / "published_steps.md"
TARGET = 0.10
SHORT = (2, 4)  # layers
GIBIBYTE = 1 << 30
# What programs have of a chip's memory, as libtpu 0.0.42.1 says where one needs more.
TPU_MEMORY_BYTES = {
    "TPU v5e": int(15.75 * GIBIBYTE),
    "TPU v5p": int(95.74 * GIBIBYTE),
    "TPU v6e": int(31.25 * GIBIBYTE),
}
COLUMNS = (
    "row", "recomputes", "tp x cp x pp x dp", "micro-batches", "attention", "published", "predicted", "ratio",
    "memory published", "predicted", "planned in",
)  # fmt: skip


def _in_short(error: AutoparError) -> str:
    """The beginning of an error."""
    return without_folders(str(error)).splitlines()[0][:80]


def step_of(row: Row) -> tuple:
    """(training step, its state's and its batch's shapes)."""
    model = row.model
    if model.family == "wide_resnet":
        case = CASES["wide_resnet"](
            layers=model.layers, base=model.width, width_factor=1, image=model.length, classes=model.vocabulary,
            batch=row.batch,
        )  # fmt: skip
        return case.step, *case.shapes()
    sizes: dict[str, Any] = {
        "layers": model.layers, "width": model.width, "heads": model.heads, "vocabulary": model.vocabulary,
        "length": model.length, "batch": row.batch, "dtype": jnp.dtype(row.dtype), "optimizer": optax.adamw(1e-4),
    }  # fmt: skip
    if model.family == "llama":
        sizes |= {
            "kv_heads": model.kv_heads, "head": model.head, "feed_forward": model.feed_forward,
            "block": model.length, "float8": row.float8, "one_hot_labels": row.table == "maxtext",
        }  # fmt: skip
    else:
        # The masks of the whole batch are made before the loop over micro-batches, in memory that the published system
        # did not use.
        dropout = row.dropout if row.num_microbatches == 1 else 0.0
        sizes |= {"remat_attention": row.recompute == "attention", "dropout": dropout}
    case = CASES[model.family](**sizes)
    return case.step, *case.shapes()


def recipe_of(row: Row) -> autopar.recipes.Recipe:
    return autopar.recipes.combine(
        dp=row.dp,
        tp=row.tp,
        sp=row.cp,
        sequence="ring",
        pp=row.pp,
        zero=row.zero,
        gather=row.gather,
        num_microbatches=row.num_microbatches if row.table == "megatron a100" or row.num_microbatches > 1 else None,
        sequence_parallel=row.sequence_parallel,
        collective_matmul=bool(row.pieces),
        schedule=None if row.pp == 1 else "interleaved" if row.chunks > 1 else "1f1b",
        chunks=row.chunks if row.chunks > 1 else None,
        recompute=_policy(row),
    )


def _policy(row: Row) -> str:
    """What a recipe recomputes for it. Fused kernels keep what they read, not what they compute in between: a compiler
    does so in one program. Between the programs of a pipeline's passes, what is elementwise is computed again instead.
    """
    if row.recompute not in ("attention", "nothing"):
        return row.recompute
    return "matmuls" if row.pp > 1 else "nothing"


def cluster_of(row: Row, constants: dict[str, float] | None = None) -> autopar.Cluster:
    """The row's hardware, with constants of its devices in place of those of the tables."""
    cluster = CLUSTERS[row.hardware][0](row.gpus)
    if row.waits_for_tensor:
        assert row.tp == cluster.devices_per_host, "what holds up computing is known by its link, that of hosts"
        cluster = dataclasses.replace(
            cluster, inside_host=dataclasses.replace(cluster.inside_host, is_asynchronous=False)
        )
    if row.pieces:
        inside = cluster.inside_host
        assert inside.detail is not None, "a link with channels of NCCL"
        assert row.tp <= cluster.devices_per_host, "products send inside of a host"
        detail = dataclasses.replace(inside.detail, pair_bytes_per_s=None, pair_ramp_s=None)
        inside = dataclasses.replace(inside, detail=detail, sends_in_place=row.pieces == "in place")
        cluster = dataclasses.replace(cluster, inside_host=inside)
    if row.waits_for_all:
        cluster = dataclasses.replace(
            cluster,
            inside_host=dataclasses.replace(cluster.inside_host, is_asynchronous=False),
            between_hosts=dataclasses.replace(cluster.between_hosts, is_asynchronous=False),
        )
    return dataclasses.replace(cluster, device=with_constants(cluster.device, constants or {}))


def with_constants(device: DeviceKind, constants: dict[str, float]) -> DeviceKind:
    """Fields of the device by name; "flops_efficiency.float8" is one entry of such a table."""
    for name, value in constants.items():
        field, _, entry = name.partition(".")
        device = dataclasses.replace(
            device, **{field: tuple((dict(getattr(device, field)) | {entry: value}).items()) if entry else value}
        )
    return device


def options_of(row: Row) -> dict[str, Any]:
    """How attention is planned: without scores where the run had flash attention. Scales of float8 are those of a
    micro-batch, as torchao computes them: the largest number of each operand as it comes. The run fitted its cards, so
    that the limit is what the driver, or the compiler, reports of them, where that is known, and not 90 % of a nominal
    size.
    """
    options: dict[str, Any] = {"attention": "blockwise"} if row.flash else {}
    if row.hardware in TPU_MEMORY_BYTES:
        options["memory_limit_bytes"] = TPU_MEMORY_BYTES[row.hardware]
    device = CLUSTERS[row.hardware][0](row.gpus).device
    for card in CARDS.values():
        if card.kind == device:
            options["memory_limit_bytes"] = card.memory_bytes
    if row.float8 and row.num_microbatches > 1:
        options["per_microbatch"] = "*"
    return options


def planned(row: Row, constants: dict[str, float] | None = None) -> autopar.Plan:
    step, *arguments = step_of(row)
    return autopar.plan(
        step,
        *arguments,
        plan=recipe_of(row),
        cluster=cluster_of(row, constants),
        cache_dir=None,
        show_progress=False,
        **options_of(row),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of a row: seconds of a step, and bytes of the fullest device; of models of fewer layers no bytes, for where the
    peak lies depends on their number.
    """

    step_time_s: float
    peak_bytes: float | None

    @property
    def is_short(self) -> bool:
        return self.peak_bytes is None


def predicted(row: Row, *, short: bool, constants: dict[str, float] | None = None) -> Prediction:
    """With constants in place of the tables'; `short` as on the command line."""

    def at(layers: int) -> Prediction:
        found = planned(dataclasses.replace(row, model=dataclasses.replace(row.model, layers=layers)), constants)
        return Prediction(step_time_s=found.predicted.step_time_s, peak_bytes=max(found.predicted.peak_bytes))

    if not short or row.pp > 1 or row.model.family == "wide_resnet" or row.model.layers <= SHORT[1]:
        return at(row.model.layers)
    few, more = map(at, SHORT)
    times = (row.model.layers - SHORT[0]) / (SHORT[1] - SHORT[0])
    return Prediction(
        step_time_s=few.step_time_s + times * (more.step_time_s - few.step_time_s),
        peak_bytes=None,
    )


def compared(row: Row, short: bool) -> tuple[list[str], bool]:
    """(the cells of a row, whether the prediction is within the target)."""
    started_s = time.process_time()
    attention = options_of(row).get("attention", "as written")
    cells = [
        row.key,
        row.recompute,
        f"{row.tp} x {row.cp} x {row.pp} x {row.dp}",
        f"{row.num_microbatches} of {row.micro_batch}",
        attention,
        f"{row.step_time_s:.2f} s",
    ]
    is_good = False
    try:
        found = predicted(row, short=short)
    except AutoparError as error:
        cells += ["none", _in_short(error)]
    else:
        is_good = abs(found.step_time_s / row.step_time_s - 1) <= TARGET
        cells += [
            f"{found.step_time_s:.2f} s",
            f"{found.step_time_s / row.step_time_s:.3f}",
            f"{row.memory_gib:.0f} GiB" if row.memory_gib else "",
            "" if found.peak_bytes is None else f"{found.peak_bytes / GIBIBYTE:.0f} GiB",
            f"{time.process_time() - started_s:.0f} s" + (" (short)" if found.is_short else ""),
        ]
    return cells, is_good


def keep(made: Sequence[str]) -> None:
    """Writes a row among those that were kept."""
    found = {row[0]: row for row in [*kept_rows(RESULTS), list(made)]}
    rows = [found[name] for name in ROWS if name in found]
    note = (
        f"Rows marked (short) come from models of {SHORT[0]} and {SHORT[1]} layers; those with a date were made then, "
        "with that day's constants\nand prices, and a search version stands "
        "behind plans of earlier searches. Published memory of torchtitan is what PyTorch's allocator had "
        "reserved, with logits in float32 for the\nloss (but for the H200s, where it is compiled); predicted is what "
        "lives at once. Rows may use the\nmemory that the driver, or the compiler, reports of their devices: the "
        "published runs fitted."
    )
    RESULTS.write_text(
        f"# Published step times\n\nThe last row: {description()}\n\n{note}\n\n{markdown(COLUMNS, rows)}\n"
    )


def named(parts: Sequence[str]) -> list[Row]:
    """The rows whose names contain one of these, or all."""
    return [row for key, row in ROWS.items() if not parts or any(part in key for part in parts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"parts of names, of {', '.join(ROWS)}")
    parser.add_argument("--short", action="store_true", help="models of fewer layers, where there is one stage")
    parser.add_argument("--as-written", action="store_true", help="flash attention too is planned as it is written")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    console, missed = Console(width=170), 0
    for row in named(arguments.rows):
        if arguments.as_written:
            row = dataclasses.replace(row, flash=False)
        cells, is_good = compared(row, arguments.short)
        console.print(" | ".join(cells))
        missed += not is_good
        if arguments.keep:
            keep(cells)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
