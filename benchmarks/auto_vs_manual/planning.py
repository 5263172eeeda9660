"""Makes the plans of one row, in a process of its own.

    python -m benchmarks.auto_vs_manual.planning MODEL CLUSTER RECIPE MOST_ATTEMPTS

After each attempt the row so far goes to the standard output, a line of JSON, so that a row that is cut short is known
as far as it came.
"""

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Callable

import jax

from autopar.common.progress import Progress
from autopar.compiler.planner import make_plan
from autopar.errors import AutoparError, InvalidArgumentError, MemoryLimitError, SolverError
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.plan.cache import SEARCH_VERSION
from autopar.plan.plan import Plan, Trees
from autopar.plan.render import in_short
from autopar.plan.step_graphs import StepGraphs
from autopar.sharding.rules import RuleBook
from benchmarks.auto_vs_manual.manual import RECIPES
from benchmarks.auto_vs_manual.models import Model, models
from benchmarks.auto_vs_manual.rows import Row, Status
from benchmarks.auto_vs_manual.settings import Outcome, Problem

MOST_ATTEMPTS = 40
NUMBER_OF_DEVICES = re.compile(r"(.+)/(\d+)")


def cluster_of(text: str) -> Cluster:
    """As `Cluster.parse`, and `p3.16xlarge/4`: four devices of one host."""
    if found := NUMBER_OF_DEVICES.fullmatch(text):
        return Cluster.parse(found[1]).submesh(1, int(found[2]))
    return Cluster.parse(text)


def traced_problem(model: Model, cluster: Cluster) -> tuple[Problem, Trees]:
    """The model's step, traced on shapes as `autopar.plan` traces it."""
    args = model.shapes()
    traced = trace(model.build().step, args, names=("state", "batch"), donate=(0,), batch=(1,))
    trees = Trees(
        arguments=tuple(map(jax.tree.structure, args)),
        names=("state", "batch"),
        donated=frozenset({0}),
        batch=frozenset({1}),
    )
    return Problem(model=model, traced=traced, cluster=cluster), trees


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
    cluster = cluster or cluster_of(cluster_text)
    row = Row(
        model=model.name, cluster=cluster_text, recipe=recipe, devices=cluster.num_devices,
        status=Status.FAILED, why="no attempt was possible: the batch does not divide", search_version=SEARCH_VERSION,
    )  # fmt: skip
    begun = time.perf_counter()
    problem, trees = traced_problem(model, cluster)
    rules, graphs, made = RuleBook(), StepGraphs(), RECIPES[recipe](problem)
    best_plan, best_outcome, outcome = None, None, None
    while True:
        try:
            attempt = made.send(outcome)
        except StopIteration:
            return row, best_plan
        if row.attempts == most_attempts:
            return dataclasses.replace(row, cut_short=f"ended after {most_attempts} attempts"), best_plan
        plan, outcome, refusal = None, None, None
        try:
            plan = make_plan(problem.traced, trees, cluster, attempt.options, rules, Progress("", show=False), graphs)
        except AutoparError as error:
            refusal = error
            if isinstance(error, MemoryLimitError):
                outcome = Outcome(step_time_s=math.inf, peak_bytes=error.needed_bytes, limit_bytes=error.limit_bytes)
        row = dataclasses.replace(row, attempts=row.attempts + 1, planned_s=time.perf_counter() - begun)
        if plan is not None:
            outcome = outcome_of(plan)
            row = dataclasses.replace(row, fitting=row.fitting + outcome.fits)
            if best_outcome is None or outcome.rank() < best_outcome.rank():
                best_plan, best_outcome = plan if outcome.fits else None, outcome
                row = with_plan(row, plan, attempt.text or in_short(plan.record), outcome)
        elif best_outcome is None:
            assert refusal is not None, "an attempt has a plan or a refusal"
            row = refused(row, attempt.text, refusal)
        report(row)


def outcome_of(plan: Plan) -> Outcome:
    peak, limit = max(plan.predicted.peak_bytes), plan.record.memory_limit_bytes
    assert limit is not None, "make_plan always has a limit"
    return Outcome(step_time_s=plan.predicted.step_time_s, peak_bytes=peak, limit_bytes=limit)


def with_plan(row: Row, plan: Plan, text: str, outcome: Outcome) -> Row:
    predicted = plan.predicted
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
        if row.peak_bytes is not None and row.peak_bytes <= error.needed_bytes:
            return row
        return dataclasses.replace(
            row,
            status=Status.OUT_OF_MEMORY,
            why=error.got,
            plan=text,
            peak_bytes=error.needed_bytes,
            limit_bytes=error.limit_bytes,
        )
    if row.status is Status.OUT_OF_MEMORY:
        return row
    unsupported = not isinstance(error, (SolverError, InvalidArgumentError))
    return dataclasses.replace(
        row,
        status=Status.UNSUPPORTED if unsupported else Status.FAILED,
        why=f"{error.where}: expected {error.expected}, got {error.got}",
        plan=text,
    )


def line_of(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row))


def main(name: str, cluster: str, recipe: str, most_attempts: str) -> None:
    row, _ = plan_row(models()[name], cluster, recipe, int(most_attempts), lambda row: print(line_of(row), flush=True))
    print(line_of(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
