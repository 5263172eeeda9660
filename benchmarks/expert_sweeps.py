"""The order of published sweeps over expert parallelism, beside the order of predicted step times.

    python -m benchmarks.expert_sweeps                  every sweep; --keep writes results/expert_sweeps.md
    python -m benchmarks.expert_sweeps nvlink --layers 1

A sweep is one model on one cluster; experts are shared by 1, 2, 4, ... devices (`recipes.combine(ep=..., zero=3)`), or
within as many by their inner width (`tp`). Models have `--layers` layers in place of all: equal layers add equal times.
Published are model flops by the devices' peak (MFU), of a step with the same tokens; where a sweep has none, only
predictions are told, as where the same model runs over another transport. Experts' products run in a kernel of grouped
products, as in these runs.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import optax

import autopar
from autopar.errors import AutoparError
from benchmarks.machine import markdown, without_folders
from benchmarks.zoo.moe import moe

RESULTS = Path(__file__).parent / "results" / "expert_sweeps.md"
# marin-community/marin, issue 7332, comment of 2026-07-17: 512 experts of which 8 are taken, 64 GB200 of one rack, in
# bfloat16, everything computed again; EP1 holds experts by FSDP and multiplies them where the tokens are. The inner
# width is a quarter of the width, as of the 256 experts of issue 7201.
MANY = {"width": 4096, "heads": 32, "experts": 512, "top_k": 8, "ragged": 1024, "length": 8192, "batch": 128}
# Same repository, issue 6979, comment of 2026-07-13: 64 experts of which 4 are taken, eight H100. Tokens are gathered
# and sums scattered ("ring"), which sends more than an all-to-all where top_k is less than the devices. EP1 is of a
# batch of 256.
FEW = {"width": 2048, "heads": 16, "experts": 64, "top_k": 4, "ragged": 1024, "length": 4096, "batch": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """`sizes` of `benchmarks.zoo.moe`; `mfu`: published, in percent, by the devices that share experts."""

    cluster: autopar.Cluster
    sizes: dict[str, int]
    ways: tuple[int, ...]
    mfu: dict[int, float] = dataclasses.field(default_factory=dict)
    by_width: tuple[int, ...] = ()  # shared by their inner width


def rack(gpus: int) -> autopar.Cluster:
    cluster = autopar.Cluster.preset("gb200-nvl72")
    return dataclasses.replace(cluster, num_hosts=gpus // 4, hosts_per_domain=gpus // 4)


SWEEPS = {
    "512 experts, 64 GB200 by NVLink": Sweep(
        cluster=rack(64), sizes=MANY, ways=(1, 2, 4, 8, 16, 32, 64), mfu={1: 6.05, 8: 12.56, 16: 13.66, 64: 14.39},
        by_width=(8,),
    ),
    "512 experts, 64 B200 by InfiniBand between eights": Sweep(
        cluster=autopar.Cluster.preset("dgx-b200", hosts=8), sizes=MANY, ways=(1, 2, 4, 8, 16, 32), by_width=(8,),
    ),
    "64 experts, 8 H100 by NVLink": Sweep(
        cluster=autopar.Cluster.preset("dgx-h100"), sizes=FEW, ways=(1, 2, 4, 8),
        mfu={1: 21.51, 2: 20.67, 4: 18.93, 8: 17.02}, by_width=(8,),
    ),
    "64 experts, 64 H100 by InfiniBand between eights": Sweep(
        cluster=autopar.Cluster.preset("dgx-h100", hosts=8), sizes=FEW | {"batch": 256}, ways=(1, 2, 4, 8, 16, 32),
        by_width=(8,),
    ),
}  # fmt: skip


def planned(sweep: Sweep, layers: int, recipe: autopar.recipes.Recipe) -> autopar.Plan | str:
    """The plan, or the beginning of the error that refuses it."""
    case = moe(
        **sweep.sizes, by="gmm", layers=layers, vocabulary=32_000, dtype=jnp.bfloat16, optimizer=optax.adamw(1e-4)
    )
    search = autopar.Search(attention="blockwise")
    try:
        return autopar.plan(
            case.step, *case.shapes(), plan=recipe, cluster=sweep.cluster, cache_dir=None, search=search
        )
    except AutoparError as error:
        return without_folders(str(error)).splitlines()[0][:160]


def rows_of(sweep: Sweep, layers: int) -> list[list[str]]:
    """One for each way: what is predicted, and what was published."""
    ways = [(f"experts {n}", autopar.recipes.combine(ep=n, zero=3), sweep.mfu.get(n)) for n in sweep.ways]
    ways += [(f"width {n}", autopar.recipes.combine(tp=n, zero=3), None) for n in sweep.by_width]
    rows = []
    for name, recipe, mfu in ways:
        made = planned(sweep, layers, recipe)
        if isinstance(made, str):
            told = [made, "", "", ""]
        else:
            of = made.predicted
            sends = sum(c.time_s for c in of.collectives if "all-to-all" in c.kind)
            told = [f"{1e3 * s:.1f}" for s in (of.step_time_s, of.compute_time_s, of.collective_time_s, sends)]
        rows.append([name, *told, "" if mfu is None else f"{mfu:g}"])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def page(tables: dict[str, list[list[str]]], layers: int) -> str:
    head = ["shared by", "step, ms", "computing", "collectives", "of these all-to-alls", "published MFU, %"]
    text = [f"# Sweeps over expert parallelism\n\n`python -m benchmarks.expert_sweeps --keep`, {layers} layers.\n"]
    text += [f"## {name}\n\n{markdown(head, rows)}\n" for name, rows in tables.items()]
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", help=f"parts of names, of {', '.join(SWEEPS)}")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    wanted = [n for n in SWEEPS if not arguments.sweeps or any(s.lower() in n.lower() for s in arguments.sweeps)]
    tables = {}
    for name in wanted:
        print(name, flush=True)
        tables[name] = rows_of(SWEEPS[name], arguments.layers)
    if arguments.keep:
        RESULTS.write_text(page(tables, arguments.layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
