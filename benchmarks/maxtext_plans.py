"""Plans of MaxText's newest model configurations, as `autopar plan maxtext:base.yml model_name=...` makes them.

    python -m benchmarks.maxtext_plans              the rows that the table does not have yet    (extra: maxtext)
    python -m benchmarks.maxtext_plans --again gpt-oss-20b
    python -m benchmarks.maxtext_plans --compiled   and programs of some of them by the TPU's compiler (extra: tpu)

Sequences of 2,048 tokens, one on each of 64 chips of TPU v5p; `effort="quick"`. Nothing is run. Some models have fewer
layers than their authors gave them, which the table says. Rows are kept at once in
results/maxtext_plans.json, the table beside it.

`--compiled`: the plan's program, and the same step in MaxText's own shardings (all chips on its axis `fsdp`, its flash
attention), both compiled for the slice, and both predicted: the latter by `autopar.lint`, with flash attention where it
pays.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import autopar
from autopar.benching import problem_of
from autopar.errors import AutoparError
from autopar.execute import aot
from autopar.hardware.cluster import Cluster
from autopar.ir.primitives import GROUPED_PRODUCT, RAGGED_PRODUCT
from autopar.plan.cache import SEARCH_VERSION
from autopar.plan.render import in_short
from autopar.search.notes import ragged_notes
from autopar.search.step_ways import whole_graph
from autopar.step_files import maxtext_step, shapes_only
from autopar.step_views import on_cluster
from autopar.verification import lower_for_target
from benchmarks.compiled_elsewhere import compiled_by_xla, versions
from benchmarks.machine import description, without_folders
from benchmarks.row_processes import Page, Rows, is_done

RESULTS = Path(__file__).parent / "results" / "maxtext_plans.json"
COLUMNS = (
    "model", "parameters", "layers", "equations", "attention", "mixture", "plan", "predicted", "MFU", "peak",
    "planning, processor", "made", "sent, compiled: ours / MaxText's", "peak, compiled", "predicted", "libtpu",
)  # fmt: skip
CLUSTER, TARGET = "tpu-v5p:4x4x4", "tpu:v5p:4x4x4"
WHOSE = ("ours", "MaxText's")
COMPILED = ("qwen3-4b-thinking-2507", "olmo3-7b", "olmo3-32b", "gemma4-31b")
GIVEN = ("per_device_batch_size=1", "max_target_length=2048", "override_model_config=true")


# What MaxText does not put into a loop, and what 64 chips do not hold, has fewer layers.
UNROLLED = "scan_layers=false"
FEW, FOUR = "base_num_decoder_layers=8", "base_num_decoder_layers=4"
# The newest first, as their authors published them.
MODELS: dict[str, tuple[str, ...]] = {
    "deepseek4-284b": (FEW,),
    "gemma4-31b": (),
    "gemma4-26b": (),
    "gemma4-e4b": (UNROLLED,),
    "gemma4-e2b": (UNROLLED,),
    "qwen3.5-397b-a17b": (FEW,),
    "qwen3.5-35b-a3b": (),
    "deepseek3.2-671b": (FEW,),
    "olmo3-32b": (),
    "olmo3-7b": (),
    "qwen3-vl-30b-a3b": (UNROLLED, FOUR),
    "qwen3-vl-4b": (UNROLLED, FOUR),
    "qwen3-vl-2b": (UNROLLED, FOUR),
    "qwen3-omni-30b-a3b": (UNROLLED, FOUR),
    "qwen3-next-80b-a3b": (),
    "gpt-oss-120b": (),
    "gpt-oss-20b": (),
    "qwen3-480b-a35b": (FEW,),
    "kimi-k2-1t": (FEW,),
    "qwen3-4b-thinking-2507": (),
}


def row_of(name: str) -> dict[str, Any]:
    """Plans in this process: MaxText takes long to import."""
    settings, hardware = MODELS[name], Cluster.parse(CLUSTER)
    given = [f"model_name={name}", *GIVEN, *settings]
    step, (state, batch) = shapes_only("maxtext:base.yml", given, hardware.num_devices)
    row: dict[str, Any] = {
        "settings": settings,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state["model"])),
    }
    begun_s = time.process_time()
    parallel = autopar.parallelize(step, cache_dir=None, search=autopar.Search(effort="quick"))
    try:
        plan = on_cluster(parallel, hardware).plan(state, batch)
    except AutoparError as error:
        return row | {"failure": without_folders(f"{type(error).__name__}: {error}")[:400]}
    row |= {"planned_s": time.process_time() - begun_s, "plan": in_short(plan.record)}
    problem = problem_of(on_cluster(parallel, hardware), state, batch)
    graph = whole_graph(problem.traced, problem.rules, problem.graphs)
    notes = [without_folders(note) for note in plan.record.notes]
    priced = ragged_notes(graph.annotated, hardware.device.platform)
    products = f"{GROUPED_PRODUCT}:", f"{RAGGED_PRODUCT}:"
    left = [note for note in notes if note.startswith(products) and note not in priced]
    found = "recognised" if RAGGED_PRODUCT in str(problem.traced.jaxpr) else ""
    return row | {
        "equations": sum(1 for _ in graph.annotated.ops()),
        "attention": next((note for note in notes if note.startswith("attention")), ""),
        "mixture": left[0] if left else found,
        "step_time_s": plan.predicted.step_time_s,
        "mfu": plan.predicted.mfu,
        "peak_bytes": max(plan.predicted.peak_bytes),
        "notes": notes,
        "search_version": SEARCH_VERSION,
        "on": description(),
    }


def with_compiled(name: str, row: dict[str, Any], whose: str) -> dict[str, Any]:
    """A row with the figures of one more program: of the plan ("ours"), or of MaxText's own shardings ("MaxText's")."""
    if whose in row.get("compiled", {}):
        return row
    lower, predicted = program_of(name, whose)
    made = dataclasses.asdict(compiled_by_xla(lower())) | {"predicted": predicted, "by": dict(versions())["libtpu"]}
    return row | {"compiled": row.get("compiled", {}) | {whose: made}}


def program_of(name: str, whose: str) -> tuple[Callable[[], Any], dict[str, float]]:
    """What lowers one program of a model for the slice, and what is predicted of it."""
    hardware, given = Cluster.parse(CLUSTER), [f"model_name={name}", *GIVEN, *MODELS[name]]
    if whose == "ours":
        step, args = shapes_only("maxtext:base.yml", given, hardware.num_devices)
        search = autopar.Search(effort="quick")
        parallel = on_cluster(autopar.parallelize(step, cache_dir=None, search=search), hardware)
        lower, plan = functools.partial(lower_for_target, parallel, TARGET, *args), parallel.plan(*args)
        times_s = [plan.predicted.step_time_s]
    else:
        step, *args = _in_own_shardings([*given, "attention=flash"], hardware)
        found = autopar.lint(*_in_own_shardings(given, hardware), cluster=hardware, search=False)
        lower, plan = functools.partial(step.lower, *args), found.plan
        by_kernel = [change.step_time_s for change in found.changes if change.text.startswith("attention by")]
        times_s = [*by_kernel, plan.predicted.step_time_s]
    sent_bytes = sum(sent for _, sent in plan.predicted.by_kind().values())
    return lower, {"step_time_s": times_s[0], "sent_bytes": sent_bytes, "peak_bytes": max(plan.predicted.peak_bytes)}


def _in_own_shardings(given: Sequence[str], hardware: Cluster) -> tuple[Any, Any, Any]:
    devices = aot.target_devices(TARGET)
    return maxtext_step("maxtext:base.yml", given, hardware.num_devices, sharded=True, devices=devices)


def _compiled_cells(row: Mapping[str, Any]) -> list[str]:
    if not (programs := row.get("compiled", {})):
        return [""] * 4
    figures = [_figures(programs[whose]) if whose in programs else ["-"] * 3 for whose in WHOSE]
    versions_of = {program["by"] for program in programs.values()}
    return [*(" / ".join(of_both) for of_both in zip(*figures, strict=True)), ", ".join(versions_of)]


def _figures(program: Mapping[str, Any]) -> list[str]:
    predicted, sent = program["predicted"], sum(program["sent_bytes"].values())
    both = (sent, predicted["sent_bytes"]), (program["peak_bytes"], predicted["peak_bytes"])
    return [*(f"{n / 1e9:.1f} ({p / 1e9:.1f}) GB" for n, p in both), f"{predicted['step_time_s']:.3g} s"]


def cells(name: str, rows: Rows) -> list[str]:
    row = rows[name]
    layers = next((s.partition("=")[2] for s in row["settings"] if "num_decoder_layers" in s), "all")
    begin = [name, f"{row['parameters'] / 1e9:.1f}B", layers]
    if not is_done(row):
        return [*begin, row["failure"].replace("\n", " ")]
    return [
        *begin,
        f"{row['equations']:,}",
        "as written" if row["attention"].startswith("attention runs as it is written") else "found",
        row["mixture"],
        row["plan"],
        f"{row['step_time_s']:.3g} s",
        f"{row['mfu']:.0%}" if row["mfu"] else "",
        f"{row['peak_bytes'] / 1e9:.1f} GB",
        f"{row['planned_s']:.0f} s",
        f"{row['on'].rstrip('.')[-10:]}, version {row.get('search_version', 'up to 130')}",
        *_compiled_cells(row),
    ]


HEAD = """# MaxText's newest model configurations

`python -m benchmarks.maxtext_plans`: `autopar plan maxtext:base.yml model_name=... per_device_batch_size=1` for 64
chips of TPU v5p, sequences of 2,048 tokens, `effort="quick"`, MaxText 0.2.5; nothing is run. `equations`: of the step's
graph, the bodies of loops counted once.

The last columns, of some models (`--compiled`): the plan's program beside MaxText's own (all chips on its axis `fsdp`,
its flash attention), both as XLA compiles them for the slice, and what is predicted of them in brackets: the bytes that
a chip sends in a step, its memory; and the predicted times. MaxText's are by `autopar.lint`, its memory with attention
as it is written, its time with a kernel where that pays. Over all 64 chips XLA makes an all-gather an all-reduce of
zeros and a chip's own part, which sends twice as much and is predicted so. Of gpt-oss-20b MaxText's own program is not
compiled: XLA runs out of vector memory in its `ragged_dot`, which the plan makes in blocks. Memory that was compiled up
to version 131 counts space between buffers twice. From version 131 on splash attention takes the place of flash
attention, with windows and values of another width."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these models")
    parser.add_argument("--again", action="store_true", help="also rows that are kept already")
    parser.add_argument("--compiled", action="store_true", help="programs of kept rows, by the TPU's compiler")
    arguments = parser.parse_args()
    page = Page(path=RESULTS, head=HEAD, columns=COLUMNS, order=list(MODELS), cells=cells)
    if arguments.compiled:
        for name, whose in itertools.product(arguments.names or COMPILED, WHOSE):
            page.make([name], lambda name, whose=whose: with_compiled(name, page.rows()[name], whose), again=True)
        return 0
    page.make(arguments.names or list(MODELS), row_of, arguments.again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
