"""Makes the plans of the rows of one model on one cluster, in a process of their own that traces the step once.

    python -m benchmarks.auto_vs_manual.planning MODEL CLUSTER MOST_ATTEMPTS < recipes, one on each line

Before the first attempt at a recipe and after each the row so far goes to the standard output, a line of JSON, so that
a row that is cut short is known as far as it came. When a row is made, `ROW_IS_MADE` follows, and the next recipe is
read.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator

from autopar.api import parallelize
from autopar.benching import problem_of
from autopar.common.gc_policy import collected_seldom
from autopar.errors import AutoparError, InvalidArgumentError, MemoryLimitError, SolverError
from autopar.hardware.cluster import Cluster
from autopar.manual.making import MOST_ATTEMPTS, Made, made_of, outcome_of
from autopar.manual.settings import Problem
from autopar.plan.cache import SEARCH_VERSION
from autopar.plan.plan import Plan
from autopar.plan.render import in_short
from benchmarks.auto_vs_manual.manual import RECIPES
from benchmarks.auto_vs_manual.models import Model, models
from benchmarks.auto_vs_manual.rows import Row, Status

ROW_IS_MADE = "made"
NUMBER_OF_DEVICES = re.compile(r"(.+)/(\d+)")


def cluster_of(text: str) -> Cluster:
    """As `Cluster.parse`, and `p3.16xlarge/4`: four devices of one host."""
    if found := NUMBER_OF_DEVICES.fullmatch(text):
        return Cluster.parse(found[1]).submesh(1, int(found[2]))
    return Cluster.parse(text)


def traced_problem(model: Model, cluster: Cluster) -> Problem:
    """The model's step, traced on shapes as `autopar.plan` traces it."""
    step = parallelize(model.build().step, cluster=cluster, cache_dir=None, show_progress=False)
    return problem_of(step, *model.shapes())


def plan_row(
    model: Model,
    cluster_text: str,
    recipe: str,
    most_attempts: int = MOST_ATTEMPTS,
    report: Callable[[Row], None] = lambda row: None,
    cluster: Cluster | None = None,
) -> tuple[Row, Plan | None]:
    """The best of a recipe's attempts, as a row and as a plan; `report` gets the row after each of them.

    `cluster` is given where its constants are others than those of the text.
    """
    ((row, plan),) = plan_rows(model, cluster_text, (recipe,), most_attempts, report, cluster)
    return row, plan


def plan_rows(
    model: Model,
    cluster_text: str,
    recipes: Iterable[str],
    most_attempts: int = MOST_ATTEMPTS,
    report: Callable[[Row], None] = lambda row: None,
    cluster: Cluster | None = None,
) -> Iterator[tuple[Row, Plan | None]]:
    """As `plan_row` for each of the recipes; what they have in common is made for the first that needs it."""
    cluster = cluster or cluster_of(cluster_text)
    problem = traced_problem(model, cluster)
    for recipe in recipes:
        row = Row(
            model=model.name, cluster=cluster_text, recipe=recipe, devices=cluster.num_devices, status=Status.FAILED,
            why="ended before its first attempt was over", search_version=SEARCH_VERSION,
        )  # fmt: skip
        report(row)
        made = made_of(
            problem, RECIPES[recipe](problem), most_attempts, lambda so_far, row=row: report(row_of(row, so_far))
        )
        row = row_of(row, made)
        if row.status == Status.FAILED and not row.attempts:
            row = dataclasses.replace(row, why="no attempt was possible: the batch does not divide")
        yield row, made.plan if row.status == Status.PLANNED else None


def row_of(row: Row, made: Made) -> Row:
    """A row with what its recipe came to."""
    row = dataclasses.replace(
        row, attempts=made.attempts, fitting=made.fitting, cut_short=made.cut_short, planned_s=made.planned_s
    )
    if made.plan is not None:
        return with_plan(row, made.plan, made.text or in_short(made.plan.record))
    return row if made.error is None else refused(row, made.text, made.error)


def with_plan(row: Row, plan: Plan, text: str) -> Row:
    predicted, outcome = plan.predicted, outcome_of(plan)
    return dataclasses.replace(
        row,
        status=Status.PLANNED if outcome.fits else Status.OUT_OF_MEMORY,
        why="",
        plan=text,
        step_time_s=predicted.step_time_s,
        peak_bytes=outcome.peak_bytes,
        limit_bytes=plan.record.memory_limit_bytes,
        sent_bytes=predicted.sent_bytes,
        collectives=predicted.by_kind(),
        mfu=predicted.mfu,
        bubble_fraction=predicted.bubble_fraction,
        flops=predicted.flops,
    )


def refused(row: Row, text: str, error: AutoparError) -> Row:
    """A row for which there is no plan yet, with the reason."""
    if isinstance(error, MemoryLimitError):
        return dataclasses.replace(
            row,
            status=Status.OUT_OF_MEMORY,
            why=error.got,
            plan=text,
            peak_bytes=error.needed_bytes,
            limit_bytes=error.limit_bytes,
        )
    unsupported = not isinstance(error, (SolverError, InvalidArgumentError))
    return dataclasses.replace(
        row,
        status=Status.UNSUPPORTED if unsupported else Status.FAILED,
        why=f"{error.where}: expected {error.expected}, got {error.got}",
        plan=text,
    )


def line_of(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row))


def main(name: str, cluster: str, most_attempts: str) -> None:
    def report(row: Row) -> None:
        print(line_of(row), flush=True)

    recipes = (line.strip() for line in sys.stdin)
    with collected_seldom():  # as `Step.plan`
        for row, _ in plan_rows(models()[name], cluster, recipes, int(most_attempts), report):
            report(row)
            print(ROW_IS_MADE, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
