"""Tables of the rows: each recipe beside the search, and what is written of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from autopar.common.units import text_of_bytes
from benchmarks.auto_vs_manual import figures, findings
from benchmarks.auto_vs_manual.manual import AUTO, NAMES, TIMED
from benchmarks.auto_vs_manual.models import models
from benchmarks.auto_vs_manual.rows import TIE, Row, Status
from benchmarks.machine import markdown

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
SHOWN = ("model", "cluster", "recipe", "step", "auto is faster by", "peak", "sent", "plan", "measured")  # in a terminal


def beside_auto(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Each row that has a time, with the search's row of the same model and cluster."""
    rows = list(rows)
    own = {row.key[:2]: row for row in rows if row.recipe == AUTO}
    return [
        (row, own[row.key[:2]])
        for row in rows
        if row.recipe not in (AUTO, TIMED) and row.key[:2] in own and row.status is Status.PLANNED
    ]


def is_slower(own: Row, row: Row) -> bool:
    """Whether the search's plan is slower than a recipe's, or missing where the recipe has one."""
    if own.status is not Status.PLANNED or own.step_time_s is None or row.step_time_s is None:
        return row.step_time_s is not None
    return own.step_time_s > row.step_time_s * (1 + TIE)


def cells_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The cells of a table, in the order of models, clusters and recipes."""
    order = {name: number for number, name in enumerate(models())}
    own = {row.key[:2]: row for row in rows if row.recipe == AUTO}
    clusters = {row.cluster: number for number, row in enumerate(sorted(rows, key=lambda r: (r.devices, r.cluster)))}
    ranked = sorted(rows, key=lambda r: (order[r.model], clusters[r.cluster], NAMES.index(r.recipe)))
    return [cells(row, own.get(row.key[:2])) for row in ranked]


def cells(row: Row, own: Row | None) -> tuple[str, ...]:
    fits = row.status is Status.PLANNED
    gain = measured_gain = ""
    if row is own:
        own = None
    is_whole = not row.cut_short  # of a recipe that was not gone through, the best setting is not known
    if fits and is_whole and own is not None and own.step_time_s and row.step_time_s and own.status is Status.PLANNED:
        gain = f"{row.step_time_s / own.step_time_s:.3f}"
    if row.measured_beside_auto is not None:
        measured_gain = f"{row.measured_beside_auto:.2f}"
    kinds = ", ".join(f"{count:.0f} {kind}" for kind, (count, _) in row.collectives.items())
    return (
        row.model,
        row.cluster,
        row.recipe,
        row.came_to() + (f" ({row.cut_short})" if row.cut_short else ""),
        gain,
        "" if row.peak_bytes is None else text_of_bytes(row.peak_bytes),
        "" if row.sent_bytes is None else text_of_bytes(row.sent_bytes),
        kinds,
        f"{row.mfu:.1%}" if fits and row.mfu is not None else "",
        row.plan,
        str(row.attempts),
        str(row.fitting),
        "" if row.measured_s is None else f"{row.measured_s * 1e3:.1f} ms",
        measured_gain,
        "" if row.compiled_bytes is None else text_of_bytes(row.compiled_bytes),
        f"{row.planned_s:.0f} s",
    )


# Files


def write(directory: Path, rows: Sequence[Row], machines: dict[str, str]) -> None:
    """README.md with what Alpa published beside ours, the weak scaling, all rows and the plots."""
    plots = figures.drawn(directory, rows)
    holds = {True: "yes", False: "no", None: ""}
    beside = [(found.published, found.ours, holds[found.holds]) for found in findings.findings(rows)]
    slower = [(row, own) for row, own in beside_auto(rows) if is_slower(own, row)]
    lost = [(*row.key, own.came_to(), row.came_to(), own.plan, row.plan) for row, own in slower]
    parts = [
        "# The search beside plans that experts write",
        "`python -m benchmarks.auto_vs_manual --keep`; rows.csv and rows.json have all of it. Made on:",
        "\n".join(f"- {text}" for text in machines.values()),
        "## Beside what Alpa published",
        markdown(("published", "here, predicted", "holds"), beside),
        "## Where a recipe is faster than the search",
        markdown(("model", "cluster", "recipe", "search", "recipe", "search's plan", "recipe's plan"), lost),
        "## Run on this machine",
        "The search's step, and that of the plan that the clock chose among the best (`autopar.tune`), beside the "
        "recipe that was the fastest in the same turns, of those that came to another program: medians of what the two "
        "took. They are to be the fastest, or within 3 % of it.",
        markdown(findings.MEASURED_COLUMNS, findings.measured_cells(rows)),
        "## Weak scaling over hosts",
        "Times, and how much faster the search is, are predicted.",
        markdown(findings.SCALING_COLUMNS, findings.scaling_cells(rows)),
        "## Plots",
        *(f"![{path.stem}]({path.name})" for path in plots),
        "## All rows",
        "Steps are predicted; `auto is faster by` is the recipe's time over that of the search, where the whole recipe "
        "was gone through.",
        markdown(COLUMNS, cells_of(rows)),
    ]
    (directory / "README.md").write_text("\n\n".join(parts) + "\n")
