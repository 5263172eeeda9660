"""Tables and plots of the rows: each recipe beside the search, and both beside what Alpa published."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.auto_vs_manual.manual import AUTO, RECIPES
from benchmarks.auto_vs_manual.models import Model, models
from benchmarks.auto_vs_manual.rows import Row, Status, best
from benchmarks.auto_vs_manual.suites import ALPA_FAMILIES, GPUS_A_HOST, p3
from benchmarks.machine import markdown

TIE = 1e-3  # what simulation and sums may differ by
COLUMNS = (
    "model",
    "cluster",
    "recipe",
    "step",
    "auto is faster by",
    "peak",
    "sent",
    "collectives",
    "MFU",
    "plan",
    "attempts",
    "fit",
    "measured",
    "auto is faster by, measured",
    "sent, compiled",
    "took",
)


def beside_auto(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Each row that has a time, with the search's row of the same model and cluster."""
    rows = list(rows)
    own = {row.key[:2]: row for row in rows if row.recipe == AUTO}
    return [
        (row, own[row.key[:2]])
        for row in rows
        if row.recipe != AUTO and row.key[:2] in own and row.status is Status.PLANNED
    ]


def is_slower(own: Row, row: Row) -> bool:
    """Whether the search's plan is slower than a recipe's, or missing where the recipe has one."""
    if own.status is not Status.PLANNED or own.step_time_s is None or row.step_time_s is None:
        return row.step_time_s is not None
    return own.step_time_s > row.step_time_s * (1 + TIE)


def cells_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The cells of a table, in the order of models, clusters and recipes."""
    order = {name: number for number, name in enumerate(models())}
    names = list(RECIPES)
    own = {row.key[:2]: row for row in rows if row.recipe == AUTO}
    clusters = {row.cluster: number for number, row in enumerate(sorted(rows, key=lambda r: (r.devices, r.cluster)))}
    ranked = sorted(rows, key=lambda r: (order[r.model], clusters[r.cluster], names.index(r.recipe)))
    return [cells(row, own.get(row.key[:2])) for row in ranked]


def cells(row: Row, own: Row | None) -> tuple[str, ...]:
    fits = row.status is Status.PLANNED
    gain = measured_gain = ""
    if fits and own is not None and own.step_time_s and row.step_time_s and own.status is Status.PLANNED:
        gain = f"{row.step_time_s / own.step_time_s:.3f}"
    if own is not None and own.measured_s and row.measured_s:
        measured_gain = f"{row.measured_s / own.measured_s:.2f}"
    kinds = ", ".join(f"{count:.0f} {kind}" for kind, (count, _) in row.collectives.items())
    return (
        row.model,
        row.cluster,
        row.recipe,
        row.came_to() + (f" ({row.why})" if fits and row.why else ""),
        gain,
        "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.1f} GB",
        "" if row.sent_bytes is None else f"{row.sent_bytes / 1e9:.3g} GB",
        kinds,
        f"{row.mfu:.1%}" if fits and row.mfu is not None else "",
        row.plan,
        str(row.attempts),
        str(row.fitting),
        "" if row.measured_s is None else f"{row.measured_s * 1e3:.1f} ms",
        measured_gain,
        "" if row.compiled_bytes is None else f"{row.compiled_bytes / 1e9:.3g} GB",
        f"{row.planned_s:.0f} s",
    )


# Beside what was published


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What Alpa (Zheng et al., OSDI 2022) published, and what comes out; `holds` is None where rows are missing."""

    published: str
    ours: str
    holds: bool | None


def speedup(rows: dict[tuple[str, str, str], Row], model: Model, recipe: str) -> float | str | None:
    """How many times as fast the search's plan is; what is wrong where one has no plan, None where a row is missing."""
    own = rows.get((model.name, p3(model.gpus or 0), AUTO))
    other = rows.get((model.name, p3(model.gpus or 0), recipe))
    if own is None or other is None:
        return None
    if own.status is not Status.PLANNED:
        return f"auto {own.came_to()}"
    if other.status is not Status.PLANNED:
        return other.came_to()
    return (other.step_time_s or math.nan) / (own.step_time_s or math.nan)


def scaled(family: str) -> list[Model]:
    """The models of a family's weak scaling over whole hosts, smallest first."""
    found = [m for m in models().values() if m.family == family and m.parameters and (m.gpus or 0) >= GPUS_A_HOST]
    return sorted(found, key=lambda m: m.gpus or 0)


def comparison(
    rows: dict[tuple[str, str, str], Row], family: str, recipe: str, published: str, least: float
) -> Finding:
    """The search against one recipe over all hosts; it holds where the search is at least so many times as fast."""
    found = [(model, speedup(rows, model, recipe)) for model in scaled(family)]
    known = [(model, value) for model, value in found if value is not None]
    texts = [
        f"{model.size} on {(model.gpus or 0) // GPUS_A_HOST}: "
        + (f"{value:.2f}x" if isinstance(value, float) else f"{recipe} {value}")
        for model, value in known
    ]
    numbers = [value for _, value in known if isinstance(value, float)]
    lost = any(isinstance(value, str) and value.startswith("auto ") for _, value in known)
    holds = None if not known else not lost and all(value >= least for value in numbers)
    return Finding(published=published, ours="; ".join(texts) or "not run", holds=holds)


def efficiency(rows: dict[tuple[str, str, str], Row], family: str) -> dict[int, float]:
    """Hosts -> arithmetic a second of the search's plan, each host beside that of one."""
    rates = {}
    for model in scaled(family):
        row = rows.get((model.name, p3(model.gpus or 0), AUTO))
        if row is not None and row.status is Status.PLANNED and row.flops and row.step_time_s:
            rates[(model.gpus or 0) // GPUS_A_HOST] = row.flops / row.step_time_s / row.devices
    return {hosts: rate / rates[1] for hosts, rate in rates.items()} if 1 in rates else {}


def intra_operator_finding(rows: Sequence[Row]) -> Finding:
    """The integer program alone against ZeRO-2, ZeRO-3 and shard-the-largest."""
    ablation = [m for m in models().values() if m.gpus and m.gpus > 1 and m.parameters is None]
    texts, good = [], []
    for model in ablation:
        here = {row.recipe: row for row in rows if row.model == model.name and row.cluster == p3(model.gpus or 0)}
        own = here.get("intra-operator only")
        others = {name: here[name] for name in ("zero 2", "zero 3", "shard the largest") if name in here}
        if own is None or not others:
            continue
        parts = []
        for name, row in others.items():
            if row.status is Status.PLANNED and own.status is Status.PLANNED and row.step_time_s and own.step_time_s:
                parts.append(f"{name} {row.step_time_s / own.step_time_s:.2f}x")
                good.append(row.step_time_s >= own.step_time_s * (1 - TIE))
            else:
                parts.append(f"{name} {row.status}")
                good.append(own.status is Status.PLANNED or row.status is not Status.PLANNED)
        texts.append(f"{model.name} on {model.gpus}: {', '.join(parts)}")
    return Finding(
        published="The integer program alone is the fastest plan of one program in all cases: faster than ZeRO-2, "
        "ZeRO-3 and splitting each array along its largest dimension, for GPT, MoE and Wide-ResNet (section 8.2)",
        ours="; ".join(texts) or "not run",
        holds=all(good) if good else None,
    )


def findings(rows: Sequence[Row]) -> list[Finding]:
    by_key = {row.key: row for row in rows}
    shares = efficiency(by_key, "wide-resnet")
    scaling = Finding(
        published="Wide-ResNet: Alpa keeps 80 % of linear scaling on 4 hosts; plans of data parallelism and stages run "
        "out of memory (section 8.1)",
        ours="auto " + ", ".join(f"{share:.0%} on {hosts}" for hosts, share in shares.items()) if shares else "not run",
        holds=None if 4 not in shares else shares[4] >= 0.8,
    )
    return [
        comparison(
            by_key, "gpt", "megatron grid",
            "GPT: Alpa's plans match or slightly beat the best grid of Megatron-LM (section 8.1)", 1 - TIE,
        ),
        comparison(
            by_key, "moe", "expert and data",
            "MoE over 25 Gb/s: 3.5x as fast as DeepSpeed's expert and data parallelism on 2 hosts, 9.7x on 4 "
            "(section 8.1)", 1 - TIE,
        ),
        scaling,
        comparison(
            by_key, "wide-resnet", "data parallel",
            "Wide-ResNet: data parallelism runs out of memory (section 8.1)", 1 - TIE,
        ),
        intra_operator_finding(rows),
        *(
            comparison(
                by_key, family, "equal stages",
                f"{text}: stages of equal size lose to those of the dynamic programme (section 8.3)", 1 - TIE,
            )
            for family, text in (("gpt", "GPT"), ("wide-resnet", "Wide-ResNet"))
        ),
    ]  # fmt: skip


# Files


def write(directory: Path, rows: Sequence[Row], machines: dict[str, str]) -> None:
    """The table of all rows, that beside Alpa, and the plots."""
    plots = plots_of(directory, rows)
    made = "\n".join(f"- {text}" for text in machines.values())
    holds = {True: "yes", False: "no", None: ""}
    beside = [(f.published, f.ours, holds[f.holds]) for f in findings(rows)]
    parts = [
        "# The search beside plans that experts write",
        "`python -m benchmarks.auto_vs_manual --keep`; rows.csv and rows.json have all of it. Made on:",
        made,
        "## Beside what Alpa published",
        markdown(("published", "here", "holds"), beside),
        *(f"![{path.stem}]({path.name})" for path in plots),
        "## All rows",
        "Steps are predicted; `auto is faster by` is the recipe's time over that of the search.",
        markdown(COLUMNS, cells_of(rows)),
    ]
    (directory / "README.md").write_text("\n\n".join(parts) + "\n")


def plots_of(directory: Path, rows: Sequence[Row]) -> list[Path]:
    """Bars of all recipes for each model and cluster, by family, and curves over hosts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    known = models()
    for measured in (False, True):
        chosen = [row for row in rows if (row.measured_s is not None) == measured and row.devices > 1]
        for family in dict.fromkeys(known[row.model].family for row in chosen) if not measured else (None,):
            group = [row for row in chosen if family is None or known[row.model].family == family]
            pairs = list(dict.fromkeys(row.key[:2] for row in group))
            if not pairs or best(group) is None:
                continue
            wide = min(4, len(pairs))
            high = -(-len(pairs) // wide)
            figure, grid = pyplot.subplots(
                high, wide, figsize=(4.2 * wide, 2.9 * high), layout="constrained", squeeze=False
            )
            for axes, pair in zip(grid.flat, pairs, strict=False):
                bars(axes, [row for row in group if row.key[:2] == pair], measured)
            for axes in list(grid.flat)[len(pairs) :]:
                axes.axis("off")
            path = directory / ("measured.png" if measured else f"bars_{family}.png")
            figure.savefig(path, dpi=90)
            pyplot.close(figure)
            made.append(path)
    path = directory / "scaling.png"
    if curves(rows, path):
        made.append(path)
    return made


def bars(axes, rows: Sequence[Row], measured: bool) -> None:
    """One bar a recipe, the search's marked; a recipe without a plan says so."""
    names = [name for name in RECIPES if any(row.recipe == name for row in rows)]
    by_name = {row.recipe: row for row in rows}
    values = []
    for name in names:
        row = by_name[name]
        seconds = row.measured_s if measured else row.step_time_s
        values.append(seconds if row.status is Status.PLANNED and seconds else 0.0)
    axes.barh(names, values, color=["tab:orange" if name == AUTO else "tab:blue" for name in names])
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        if not value:
            axes.text(0, number, f" {by_name[name].came_to()}"[:48], va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_title(f"{rows[0].model} on {rows[0].cluster}", fontsize=9)
    axes.set_xlabel(f"seconds a step, {'measured' if measured else 'predicted'}", fontsize=8)
    axes.tick_params(labelsize=8)


def curves(rows: Sequence[Row], path: Path) -> bool:
    """Arithmetic a second over hosts for Alpa's families, a curve for each recipe; False where there are no rows."""
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(ALPA_FAMILIES), figsize=(14, 4), layout="constrained")
    drawn = False
    for axes, family in zip(all_axes, ALPA_FAMILIES, strict=True):
        places = {(model.name, p3(model.gpus or 0)): (model.gpus or 0) // GPUS_A_HOST for model in scaled(family)}
        for name in RECIPES:
            points = sorted(
                (places[row.key[:2]], row.flops / row.step_time_s / 1e15)
                for row in rows
                if row.recipe == name and row.key[:2] in places and row.status is Status.PLANNED
                if row.flops and row.step_time_s
            )
            if points:
                drawn = True
                own = name == AUTO
                axes.plot(
                    *zip(*points, strict=True), "o-", label=name, linewidth=2.5 if own else 1, zorder=3 if own else 2
                )
                if own and points[0][0] == 1:
                    hosts = sorted(places.values())
                    axes.plot(hosts, [points[0][1] * n for n in hosts], "--", color="grey", label="linear")
        axes.set(title=family, xlabel="p3.16xlarge hosts", ylabel="PFLOP/s, predicted")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    if drawn:
        figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return drawn
