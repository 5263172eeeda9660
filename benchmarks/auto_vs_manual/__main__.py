"""The search's plans beside those that experts write, predicted under one model of costs, and run where they are small.

    python -m benchmarks.auto_vs_manual --suite weak-scaling --keep     Alpa's models on 1 to 8 p3.16xlarge hosts
    python -m benchmarks.auto_vs_manual --suite intra-operator --keep   the integer program alone beside ZeRO
    python -m benchmarks.auto_vs_manual --suite measured --keep         small models, run on 8 virtual CPU devices
    python -m benchmarks.auto_vs_manual --models gpt-2.6B llama --clusters dgx-h100 dgx-h100x4 --recipes auto "zero*"
    python -m benchmarks.auto_vs_manual                                 everything, which takes days

Models are named by family, by family and size, or by a pattern; `--list` shows them, the clusters and the recipes. The
rows of one model on one cluster (each the best of all that its recipe leaves open) are made in fresh processes, as many
at once as there are processors. Rows are kept as soon as they are there, and a run that was interrupted goes on where
it stopped: in the user's cache directory, with --keep in results/auto_vs_manual, where tables and plots are written too
(`pip install "autopar[plots]"`).
The exit status tells whether a recipe was faster than the search anywhere.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autopar.common.cache_dir import default_directory
from autopar.manual.making import MOST_ATTEMPTS
from benchmarks.auto_vs_manual import reports
from benchmarks.auto_vs_manual.manual import AUTO, NAMES
from benchmarks.auto_vs_manual.models import models
from benchmarks.auto_vs_manual.processes import measured, planned
from benchmarks.auto_vs_manual.rows import Row, Rows
from benchmarks.auto_vs_manual.suites import CLUSTERS, SUITES, Job, selected
from benchmarks.machine import description

RESULTS = Path(__file__).parent.parent / "results" / "auto_vs_manual"
TIMEOUT_S = 1800.0


def groups(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that are made together: those of one model on one cluster."""
    found: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        found.setdefault(job.key[:2], []).append(job)
    return list(found.values())


def to_make(group: Sequence[Job], rows: Rows, again: bool) -> list[Job]:
    """Those of one model on one cluster that are not there. What is run in turns is made together: a row that was made
    alone would have nothing beside it.
    """
    missing = [job for job in group if again or rows.get(*job.key) is None]
    return list(group) if missing and group[0].model.small else missing


def show_names(console: Console) -> None:
    for title, names in (("models", models()), ("clusters", CLUSTERS), ("recipes", NAMES), ("suites", SUITES)):
        console.print(f"[bold]{title}[/bold]: {', '.join(names)}")


def table_of(rows: Sequence[Row]) -> Table:
    """The columns that fit into a terminal."""
    shown = Table(*reports.SHOWN)
    places = [reports.COLUMNS.index(name) for name in reports.SHOWN]
    for cells in reports.cells_of(rows):
        shown.add_row(*(cells[place] for place in places))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=[], help="rows that belong together")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="families, names or patterns")
    parser.add_argument("--clusters", nargs="+", metavar="CLUSTER", help="as `autopar plan --cluster`")
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", help=f"of {', '.join(NAMES)}, or patterns")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a row")
    parser.add_argument("--attempts", type=int, default=MOST_ATTEMPTS, help="most plans that are made for a row")
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    parser.add_argument("--keep", action="store_true", help=f"keep rows, tables and plots in {RESULTS.name}")
    parser.add_argument("--list", action="store_true", help="show the names and end")
    arguments = parser.parse_args()
    console = Console(width=200) if not sys.stdout.isatty() else Console()
    if arguments.list:
        show_names(console)
        return 0
    directory = RESULTS if arguments.keep else (default_directory() or Path(tempfile.gettempdir())) / "auto_vs_manual"
    rows, machine = Rows(directory), description()
    jobs = selected(arguments.suite, arguments.models, arguments.clusters, arguments.recipes)
    missing = [job for group in groups(jobs) for job in to_make(group, rows, arguments.again)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(jobs), completed=len(jobs) - len(missing))
        for group in groups(missing):
            progress.update(task, description=" | ".join((*group[0].key[:2], *(job.recipe for job in group)))[:120])

            def told(row: Row) -> None:
                text = f"{' | '.join(row.key)}: {row.attempts} attempts, {row.came_to()}"
                progress.update(task, description=text[:120])

            def done(row: Row) -> None:
                rows.add(row, machine)
                tried = f"{row.attempts} attempts, {row.planned_s:.0f} s"
                console.print(f"{' | '.join(row.key)}: {row.came_to()} | {row.plan} | {tried}", markup=False)
                progress.advance(task)

            if group[0].model.small:
                for row in measured(group, arguments.timeout):
                    done(row)
            else:
                planned(group, arguments.timeout, arguments.attempts, told, done)
    found = [row for job in jobs if (row := rows.get(*job.key)) is not None]
    console.print(table_of(found))
    if arguments.keep:
        reports.write(directory, list(rows), rows.machines)
    slower = [(row, own) for row, own in reports.beside_auto(found) if reports.is_slower(own, row)]
    for row, own in slower:
        console.print(f"{AUTO} is slower: {' | '.join(row.key)}: {own.came_to()} against {row.came_to()}", markup=False)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
