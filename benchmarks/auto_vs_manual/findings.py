"""What Alpa (Zheng et al., "Alpa", OSDI 2022) published of its plans beside others, and what comes out here."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from benchmarks.auto_vs_manual.manual import AUTO, RECIPES, TIMED
from benchmarks.auto_vs_manual.models import Model, models
from benchmarks.auto_vs_manual.rows import TIE, Row, Status
from benchmarks.auto_vs_manual.suites import ALPA_FAMILIES, GPUS_A_HOST, OF_FAMILY, p3

# Section 8.1: hosts -> how many times as fast as DeepSpeed; the share of linear scaling of Wide-ResNet.
PUBLISHED_MOE_SPEEDUPS = {2: 3.5, 4: 9.7}
PUBLISHED_WIDE_RESNET_SHARE = {4: 0.8}

ByKey = dict[tuple[str, str, str], Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A published result and ours. `holds` is None where rows are missing."""

    published: str
    ours: str
    holds: bool | None


def hosts_of(model: Model) -> int:
    return (model.gpus or 0) // GPUS_A_HOST


def scaled(family: str) -> list[Model]:
    """The models of a family's weak scaling over whole hosts, smallest first."""
    found = [m for m in models().values() if m.family == family and m.parameters and hosts_of(m)]
    return sorted(found, key=hosts_of)


def by_key(rows: Sequence[Row]) -> ByKey:
    return {row.key: row for row in rows}


def row_for(rows: ByKey, model: Model, recipe: str) -> Row | None:
    """The row of a model on the hosts that it is sized for."""
    return rows.get((model.name, p3(model.gpus or 0), recipe))


def speedup(rows: ByKey, model: Model, recipe: str) -> float | str | None:
    """How many times as fast the search's plan is; what is wrong where one has no plan, None where a row is missing."""
    own, other = row_for(rows, model, AUTO), row_for(rows, model, recipe)
    if own is None or other is None:
        return None
    if own.status is not Status.PLANNED:
        return f"auto {own.came_to()}"
    if other.status is not Status.PLANNED:
        return other.came_to()
    return (other.step_time_s or math.nan) / (own.step_time_s or math.nan)


def speedups(rows: ByKey, family: str, recipe: str) -> dict[int, float]:
    """Hosts -> how many times as fast as a recipe the search's plan is, where both have one."""
    found = {hosts_of(model): speedup(rows, model, recipe) for model in scaled(family)}
    return {hosts: value for hosts, value in found.items() if isinstance(value, float)}


def comparison(rows: ByKey, family: str, recipe: str, published: str, *, grows: bool = False) -> Finding:
    """The search against one recipe over all hosts; it holds where the search is nowhere slower than what was tried of
    the recipe. Where nothing that was tried fits and not all was, that says nothing.

    grows: it is said to be faster by more on more hosts, which takes a factor for each of Alpa's numbers of hosts.
    """
    found = [(model, speedup(rows, model, recipe)) for model in scaled(family)]
    known = [(model, value) for model, value in found if value is not None]
    texts = [
        f"{model.size} on {hosts_of(model)}: "
        + (f"{value:.2f}x" if isinstance(value, float) else f"{recipe} {value}")
        + early(row_for(rows, model, recipe))
        for model, value in known
    ]
    good = []
    for model, value in known:
        if isinstance(value, float):
            good.append(value >= 1 - TIE)
        elif value.startswith(f"{AUTO} "):
            good.append(False)
        elif not early(row_for(rows, model, recipe)):  # else it may yet fit
            good.append(True)
    holds = all(good) if good else None
    if grows and holds:
        factors = [value for _, value in known if isinstance(value, float)]
        if any(more <= fewer * (1 + TIE) for fewer, more in itertools.pairwise(factors)):
            holds = False
        elif not set(PUBLISHED_MOE_SPEEDUPS) <= set(speedups(rows, family, recipe)):
            holds = None
    return Finding(published=published, ours="; ".join(texts) or "not run", holds=holds)


def early(row: Row | None) -> str:
    """That not all of a recipe was tried, where it is so."""
    return f" (the best of {row.attempts} attempts: {row.cut_short})" if row is not None and row.cut_short else ""


def rates(rows: ByKey, family: str, recipe: str) -> dict[int, float]:
    """Hosts -> arithmetic of a recipe's plan, flops a second on all devices."""
    found = {}
    for model in scaled(family):
        row = row_for(rows, model, recipe)
        if row is not None and row.status is Status.PLANNED and row.flops and row.step_time_s:
            found[hosts_of(model)] = row.flops / row.step_time_s
    return found


def shares(rows: ByKey, family: str, recipe: str = AUTO) -> dict[int, float]:
    """Hosts -> the arithmetic of each host beside that of one host alone under the search's plan."""
    alone = rates(rows, family, AUTO).get(1)
    return {hosts: rate / hosts / alone for hosts, rate in rates(rows, family, recipe).items()} if alone else {}


def scaling(rows: ByKey) -> Finding:
    found = shares(rows, "wide-resnet")
    least = PUBLISHED_WIDE_RESNET_SHARE[4]
    return Finding(
        published=f"Wide-ResNet: Alpa keeps {least:.0%} of linear scaling on 4 hosts (section 8.1)",
        ours=", ".join(f"{share:.0%} on {hosts}" for hosts, share in found.items()) or "not run",
        holds=found[4] >= least if 4 in found else None,
    )


def alone(rows: Sequence[Row]) -> Finding:
    """The integer program without stages against ZeRO-2, ZeRO-3 and shard-the-largest."""
    texts, good = [], []
    for model in models().values():
        if model.parameters is not None or not model.gpus or model.gpus == 1:
            continue
        here = {row.recipe: row for row in rows if row.model == model.name and row.cluster == p3(model.gpus)}
        own = here.get("intra-operator only")
        others = {name: here[name] for name in ("zero 2", "zero 3", "shard the largest") if name in here}
        if own is None or not others:
            continue
        parts = []
        for name, row in others.items():
            if row.status is not Status.PLANNED:
                parts.append(f"{name} {row.status}")
            elif own.status is not Status.PLANNED:
                parts.append(f"{name} has a plan, the program alone {own.status}")
                good.append(False)
            else:
                ratio = (row.step_time_s or math.nan) / (own.step_time_s or math.nan)
                parts.append(f"{name} {ratio:.2f}x")
                good.append(ratio >= 1 - TIE)
        texts.append(f"{model.name} on {model.gpus} GPUs: {', '.join(parts)}")
    return Finding(
        published="One program without stages and micro-batches: the integer program's plan is faster than ZeRO-2, "
        "ZeRO-3 and splitting each array along its largest dimension, for GPT, MoE and Wide-ResNet (section 8.2)",
        ours="; ".join(texts) or "not run",
        holds=all(good) if good else None,
    )


def findings(rows: Sequence[Row]) -> list[Finding]:
    known = by_key(rows)
    moe = ", ".join(f"{speed}x on {hosts}" for hosts, speed in PUBLISHED_MOE_SPEEDUPS.items())
    return [
        comparison(
            known,
            "gpt",
            "megatron grid",
            "GPT: Alpa's plans match or slightly beat the best grid of Megatron-LM (section 8.1)",
        ),
        comparison(
            known,
            "moe",
            "expert and data",
            f"MoE, hosts joined by 25 Gb/s: faster than DeepSpeed's expert and data parallelism, {moe} (section 8.1)",
            grows=True,
        ),
        scaling(known),
        comparison(
            known,
            "wide-resnet",
            "data parallel",
            "Wide-ResNet: data parallelism runs out of memory (section 8.1)",
        ),
        alone(rows),
        *(
            comparison(
                known,
                family,
                "equal stages",
                f"{text}: stages of equal size lose to those of the dynamic programme (section 8.3)",
            )
            for family, text in (("gpt", "GPT"), ("wide-resnet", "Wide-ResNet"))
        ),
    ]


MEASURED_COLUMNS = ("model", "chosen by", "plan", "step", "fastest recipe", "step", "over the chosen", "holds")
MEASURED_WITHIN = 0.03
BESIDE = {AUTO: ("search", "measured_beside_auto"), TIMED: ("clock", "measured_beside_timed")}


def measured_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Of each small model the step of the search's plan and of the one that the clock chose, as they were measured,
    beside the fastest recipe.
    """
    cells = []
    for own in rows:
        if own.recipe not in BESIDE or own.measured_s is None:
            continue
        by, field = BESIDE[own.recipe]
        beside = [
            (ratio, row.measured_s, row.recipe)
            for row in rows
            if row.key[:2] == own.key[:2] and row.recipe not in BESIDE and row.measured_s
            if (ratio := getattr(row, field)) is not None
        ]
        # One that came to the same program has its times, and so a ratio of one to the last bit.
        others = [found for found in beside if found[0] != 1.0]
        chosen = (own.model, by, own.plan, f"{own.measured_s * 1e3:.1f} ms")
        if not others:
            cells.append((*chosen, "none", "", "", "yes" if beside else ""))
            continue
        ratio, seconds, recipe = min(others)
        holds = "yes" if ratio >= 1 - MEASURED_WITHIN else "no"
        cells.append((*chosen, recipe, f"{seconds * 1e3:.1f} ms", f"{ratio:.2f}", holds))
    return cells


SCALING_COLUMNS = ("family", "model", "hosts", "recipe", "step", "PFLOP/s", "of linear", "auto is faster by", "plan")


def scaling_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The weak scaling over hosts; `of linear` is beside the search's own plan on one host."""
    known, cells = by_key(rows), []
    for family in ALPA_FAMILIES:
        names = dict.fromkeys((AUTO, *OF_FAMILY[family], *RECIPES))
        for model in scaled(family):
            for name in names:
                if (row := row_for(known, model, name)) is None:
                    continue
                hosts, times = hosts_of(model), speedup(known, model, name)
                rate, share = rates(known, family, name).get(hosts), shares(known, family, name).get(hosts)
                cells.append(
                    (
                        family,
                        model.size,
                        str(hosts),
                        name,
                        row.came_to(),
                        f"{rate / 1e15:.3f}" if rate else "",
                        f"{share:.0%}" if share else "",
                        f"{times:.2f}" if isinstance(times, float) and name != AUTO else "",
                        row.plan,
                    )
                )
    return cells
