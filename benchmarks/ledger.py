"""The ledger of predictions: published step times and memory beside those of this version, with the published
parallelism as a recipe.

    python -m benchmarks.ledger                        every row of benchmarks.published_rows
    python -m benchmarks.ledger torchtitan --keep      those whose names contain it; writes the page, and the errors
                                                       that intervals of predictions come from
    python -m benchmarks.ledger --short                rows of one stage from models of 2 and 4 layers: equal layers
                                                       add equal times, so a line through both is taken; memory is not
                                                       told
    python -m benchmarks.ledger NAME --search          the published plans of such rows and the free search, both with
                                                       all layers; `--keep` keeps them beside the rows' predictions
    python -m benchmarks.ledger --page                 plans nothing; writes both from the rows that are kept

One set of constants a kind of device, those of `autopar.hardware.presets`. Rows of runs with flash attention are
planned with `attention="blockwise"`, or with `--as-written` as it is written; the table says which.
"""

import argparse
import dataclasses
import datetime
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax

import autopar
from autopar.errors import AutoparError
from autopar.execute.aot import CARDS
from autopar.hardware.kinds import DeviceKind
from autopar.plan.cache import SEARCH_VERSION
from benchmarks import ledger_page
from benchmarks.ledger_page import GIBIBYTE, SHORT, Entry
from benchmarks.machine import without_folders
from benchmarks.published_rows import CLUSTERS, MAXTEXT_TABLES, ROWS, Row
from benchmarks.zoo import CASES

# What programs have of a chip's memory, as libtpu 0.0.42.1 says where one needs more.
TPU_MEMORY_BYTES = {
    "TPU v5e": int(15.75 * GIBIBYTE),
    "TPU v5p": int(95.74 * GIBIBYTE),
    "TPU v6e": int(31.25 * GIBIBYTE),
}


def _in_short(error: AutoparError) -> str:
    """The beginning of an error."""
    return without_folders(str(error)).splitlines()[0][:160]


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
            "block": model.length, "float8": row.float8,
            "delayed_scales": row.delayed_scales, "half_gradients": row.half_gradients,
            "half_weights": row.half_weights, "scan": row.is_scan, "kept": row.kept, "in_host": row.in_host,
            "one_hot_labels": row.fused_loss or row.table in MAXTEXT_TABLES,
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
    if row.is_scan:
        return "nothing"  # beside what its step says
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
    if row.cp > 1:
        cluster = dataclasses.replace(
            cluster,
            inside_host=dataclasses.replace(cluster.inside_host, has_ring_order=True),
            between_hosts=dataclasses.replace(cluster.between_hosts, has_ring_order=True),
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
    """How attention is planned: without scores where the run had flash attention. Scales of float8 that are computed
    anew are those of a micro-batch, as torchao has them: the largest number of each operand as it comes. The run
    fitted its cards, so that the limit is what the driver, or the compiler, reports of them, where that is known, and
    not 90 % of a nominal size.
    """
    options: dict[str, Any] = {"attention": "blockwise"} if row.flash else {}
    if row.hardware in TPU_MEMORY_BYTES:
        options["memory_limit_bytes"] = TPU_MEMORY_BYTES[row.hardware]
    device = CLUSTERS[row.hardware][0](row.gpus).device
    for card in CARDS.values():
        if (card.kind.name, card.kind.memory_bytes) == (device.name, device.memory_bytes):  # GB200 is B200 at a Grace
            options["memory_limit_bytes"] = card.memory_bytes
    if row.float8 and not row.delayed_scales and row.num_microbatches > 1:
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
        search=autopar.Search(**options_of(row)),
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


def as_run(row: Row) -> Row:
    """What the prediction of a row comes from: the same for the runs under several releases."""
    return dataclasses.replace(
        row, name="", release="", block_scales=False, step_time_s=0.0, memory_gib=None, fitted=False, note=""
    )


@functools.cache
def _timed(run: Row, short: bool) -> tuple[Prediction, float]:
    """(the prediction, its processor time). Raises: AutoparError."""
    started_s = time.process_time()
    return predicted(run, short=short), time.process_time() - started_s


def entry_of(row: Row, *, short: bool) -> Entry:
    """A row as it is predicted now, or the beginning of the error that refuses it."""
    found = Entry(
        device=CLUSTERS[row.hardware][0](row.gpus).device.name,
        attention=options_of(row).get("attention", "as written"),
        search_version=SEARCH_VERSION,
        made_on=datetime.date.today().isoformat(),
    )
    try:
        made, planned_s = _timed(as_run(row), short)
    except AutoparError as error:
        return dataclasses.replace(found, why=_in_short(error))
    return dataclasses.replace(
        found,
        step_time_s=made.step_time_s,
        peak_bytes=made.peak_bytes,
        planned_s=planned_s,
        is_short=made.is_short,
    )


@functools.cache
def _free(run: Row) -> tuple[autopar.Plan, float]:
    """(the plan of the free search, its processor time). Raises: AutoparError where it finds none."""
    started_s = time.process_time()
    step, *arguments = step_of(run)
    search = autopar.Search(**options_of(run))
    found = autopar.plan(step, *arguments, cluster=cluster_of(run), cache_dir=None, search=search)
    return found, time.process_time() - started_s


def searched(row: Row, *, may_be_short: bool) -> ledger_page.Search:
    """The free search beside the published plan, both with all layers, or where that plan does not fit so by the model,
    with its time from fewer layers if the row has that. Raises: AutoparError where one finds no plan.
    """
    is_short = False
    try:
        published, _ = _timed(as_run(row), is_short)
    except AutoparError:
        if not may_be_short:
            raise
        is_short = True
        published, _ = _timed(as_run(row), is_short)
    found, planned_s = _free(as_run(row))
    return ledger_page.Search(
        published_plan_s=published.step_time_s,
        published_is_short=is_short,
        step_time_s=found.predicted.step_time_s,
        planned_s=planned_s,
        plan=str(found).split(".\n")[0].split(": ", 1)[1].replace("\n", " "),
        search_version=SEARCH_VERSION,
        made_on=datetime.date.today().isoformat(),
    )


def with_search(row: Row, entry: Entry) -> Entry:
    try:
        made = searched(row, may_be_short=entry.is_short)
    except AutoparError as error:
        print(f"{row.key}: {_in_short(error)}", flush=True)
        return entry
    print(f"{row.key}: {made}", flush=True)
    return dataclasses.replace(entry, search=made)


def named(parts: Sequence[str]) -> list[Row]:
    """The rows whose names contain one of these, or all."""
    return [row for key, row in ROWS.items() if not parts or any(part in key for part in parts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"parts of names, of {', '.join(ROWS)}")
    parser.add_argument("--short", action="store_true", help="models of fewer layers, where there is one stage")
    parser.add_argument("--as-written", action="store_true", help="flash attention too is planned as it is written")
    parser.add_argument("--search", action="store_true", help="the free search beside rows that are kept")
    parser.add_argument("--keep", action="store_true", help="write the ledger and the errors")
    parser.add_argument("--page", action="store_true", help="write the ledger and the errors from the rows kept")
    arguments = parser.parse_args()
    kept = ledger_page.load()
    for row in [] if arguments.page else named(arguments.rows):
        if arguments.as_written:
            row = dataclasses.replace(row, flash=False)
        if arguments.search:
            kept[row.key] = with_search(row, kept[row.key])
        else:
            entry = entry_of(row, short=arguments.short)
            print(" | ".join(ledger_page.cells(row, entry)), flush=True)
            beside = kept[row.key].search if row.key in kept else None
            kept[row.key] = dataclasses.replace(entry, search=beside)
        if arguments.keep:
            ledger_page.save(kept)
    if arguments.page:
        ledger_page.save(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
