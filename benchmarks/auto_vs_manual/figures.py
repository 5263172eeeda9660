"""Plots of the rows; they need matplotlib (`pip install "autopar[plots]"`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.auto_vs_manual import findings
from benchmarks.auto_vs_manual.manual import AUTO, NAMES, RECIPES, TIMED
from benchmarks.auto_vs_manual.models import models
from benchmarks.auto_vs_manual.rows import Row, Status
from benchmarks.auto_vs_manual.suites import ALPA_FAMILIES

OWN, OTHER = "tab:orange", "tab:blue"
PANELS_A_ROW, MOST_LETTERS = 4, 48


def drawn(directory: Path, rows: Sequence[Row]) -> list[Path]:
    """Bars of all recipes by family, predicted; bars of what was measured; curves over hosts; published beside ours."""
    import matplotlib

    matplotlib.use("Agg")
    known = models()
    predicted = [row for row in rows if row.devices > 1 and not known[row.model].small]
    made = []
    for family in dict.fromkeys(known[row.model].family for row in predicted):
        group = [row for row in predicted if known[row.model].family == family]
        made.append(all_bars(directory / f"bars_{family}.png", group, lambda row: row.step_time_s, "predicted"))
    if measured := [row for row in rows if known[row.model].small]:
        made.append(all_bars(directory / "measured.png", measured, lambda row: row.measured_s, "measured"))
    if any(findings.rates(findings.by_key(rows), family, name) for family in ALPA_FAMILIES for name in RECIPES):
        made += [curves(directory / "scaling.png", rows), beside_published(directory / "published.png", rows)]
    return made


def all_bars(path: Path, rows: Sequence[Row], seconds_of: Callable[[Row], float | None], how: str) -> Path:
    """A panel for each model and cluster."""
    from matplotlib import pyplot

    pairs = list(dict.fromkeys(row.key[:2] for row in sorted(rows, key=lambda row: (row.devices, row.model))))
    wide = min(PANELS_A_ROW, len(pairs))
    high = -(-len(pairs) // wide)
    size = (4.2 * wide, 2.9 * high)
    figure, grid = pyplot.subplots(high, wide, figsize=size, layout="constrained", squeeze=False)
    for axes, pair in zip(grid.flat, pairs, strict=False):
        bars(axes, [row for row in rows if row.key[:2] == pair], seconds_of)
        axes.set_title(" on ".join(pair), fontsize=9)
        axes.set_xlabel(f"seconds a step, {how}", fontsize=8)
    for axes in list(grid.flat)[len(pairs) :]:
        axes.axis("off")
    return saved(figure, path)


def bars(axes: Any, rows: Sequence[Row], seconds_of: Callable[[Row], float | None]) -> None:
    """One bar a recipe, the search's marked; a recipe without a plan says why."""
    by_name = {row.recipe: row for row in rows}
    names = [name for name in NAMES if name in by_name]
    fits = {name: by_name[name].status is Status.PLANNED for name in names}
    values = [(seconds_of(by_name[name]) or 0.0) if fits[name] else 0.0 for name in names]
    axes.barh(names, values, color=[OWN if name in (AUTO, TIMED) else OTHER for name in names])
    for place, name in enumerate(names):
        if not fits[name]:
            axes.text(0, place, f" {by_name[name].came_to()}"[:MOST_LETTERS], va="center", fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)


def curves(path: Path, rows: Sequence[Row]) -> Path:
    """Arithmetic a second over hosts for Alpa's families, a curve for each recipe."""
    from matplotlib import pyplot

    known = findings.by_key(rows)
    figure, panels = pyplot.subplots(1, len(ALPA_FAMILIES), figsize=(14, 4), layout="constrained")
    for axes, family in zip(panels, ALPA_FAMILIES, strict=True):
        for name in RECIPES:
            if rates := findings.rates(known, family, name):
                style = {"linewidth": 2.5, "zorder": 3, "color": OWN} if name == AUTO else {"linewidth": 1}
                axes.plot(list(rates), [rate / 1e15 for rate in rates.values()], "o-", label=name, **style)
        alone = findings.rates(known, family, AUTO).get(1)
        if alone is not None:
            hosts = [findings.hosts_of(model) for model in findings.scaled(family)]
            axes.plot(hosts, [alone * n / 1e15 for n in hosts], "--", color="grey", label="linear", linewidth=1)
        axes.set(title=family, xlabel="p3.16xlarge hosts", ylabel="PFLOP/s, predicted")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    return saved(figure, path)


def beside_published(path: Path, rows: Sequence[Row]) -> Path:
    """MoE against expert and data parallelism, and the scaling of Wide-ResNet: published and here."""
    from matplotlib import pyplot

    known = findings.by_key(rows)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    panels = (
        (left, findings.PUBLISHED_MOE_SPEEDUPS, findings.speedups(known, "moe", "expert and data")),
        (right, findings.PUBLISHED_WIDE_RESNET_SHARE, findings.shares(known, "wide-resnet")),
    )
    for axes, published, ours in panels:
        hosts = sorted({*published, *ours})
        for shift, values, label, colour in ((-0.2, published, "Alpa, measured", OTHER), (0.2, ours, "here", OWN)):
            places = [hosts.index(n) + shift for n in values]
            shown = axes.bar(places, list(values.values()), 0.38, label=label, color=colour)
            axes.bar_label(shown, fmt="%.2f", fontsize=8)
        axes.set_xticks(range(len(hosts)), list(map(str, hosts)))
        axes.set_xlim(-0.6, len(hosts) - 0.4)
        axes.set_xlabel("p3.16xlarge hosts")
        axes.legend(fontsize=8, loc="lower right")
    left.set_title("MoE: times as fast as expert and data parallelism", fontsize=10)
    right.set_title("Wide-ResNet: share of linear scaling", fontsize=10)
    return saved(figure, path)


def saved(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path
