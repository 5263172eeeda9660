"""Makes the plans of the rows of one model on one cluster, in a process of their own that traces the step once.

    python -m benchmarks.auto_vs_manual.planning MODEL CLUSTER MOST_ATTEMPTS < recipes, one on each line

Before the first attempt at a recipe and after each the row so far goes to the standard output, a line of JSON, so that
a row that is cut short is known as far as it came. When a row is made, `ROW_IS_MADE` follows, and the next recipe is
read.
"""

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import jax

from autopar.common.gc_policy import collected_seldom
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
from benchmarks.auto_vs_manual.estimates import Estimates, best_case
from benchmarks.auto_vs_manual.manual import RECIPES
from benchmarks.auto_vs_manual.models import Model, models
from benchmarks.auto_vs_manual.rows import Row, Status
from benchmarks.auto_vs_manual.settings import Attempt, Outcome, Problem

MOST_ATTEMPTS = 40
ROW_IS_MADE = "made"
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
    begun = time.perf_counter()
    problem, trees, rules, graphs = *traced_problem(model, cluster), RuleBook(), StepGraphs()
    for recipe in recipes:
        row = Row(
            model=model.name, cluster=cluster_text, recipe=recipe, devices=cluster.num_devices, status=Status.FAILED,
            why="ended before its first attempt was over", search_version=SEARCH_VERSION,
        )  # fmt: skip
        making = _Making(problem, trees, row, rules, graphs, report, begun)
        report(row)
        made, outcome = RECIPES[recipe](problem), None
        while True:
            try:
                attempt = made.send(outcome)
            except StopIteration:
                break
            if making.row.attempts == most_attempts:
                making.row = dataclasses.replace(making.row, cut_short=f"ended after {most_attempts} attempts")
                break
            outcome = making.seen(attempt)
        making.settle()
        if making.row.status == Status.FAILED and not making.row.attempts:
            making.row = dataclasses.replace(making.row, why="no attempt was possible: the batch does not divide")
        yield making.row, making.best_plan
        begun = time.perf_counter()


class _Making:
    """A row and its best plan, while the attempts of a recipe are gone through."""

    def __init__(
        self,
        problem: Problem,
        trees: Trees,
        row: Row,
        rules: RuleBook,
        graphs: StepGraphs,
        report: Callable[[Row], None],
        begun: float,
    ) -> None:
        self.problem, self.trees, self.row, self.report = problem, trees, row, report
        self.rules, self.graphs = rules, graphs
        self.begun = begun
        self.estimates = Estimates(problem, rules, graphs)
        self.waiting: list[tuple[Attempt, Outcome]] = []  # estimates of which no plan was made
        self.best_plan: Plan | None = None
        self.best_outcome: Outcome | None = None  # of a plan

    def seen(self, attempt: Attempt) -> Outcome | None:
        """What an attempt comes to, by an estimate or a plan; None where it is refused, but not for its memory."""
        known = [outcome for _, outcome in self.waiting] + [o for o in (self.best_outcome,) if o is not None]
        outcome = self.estimates.outcome(attempt, min(known, key=Outcome.rank, default=None))
        self.row = dataclasses.replace(self.row, attempts=self.row.attempts + 1)
        if outcome is None:
            return self.planned(attempt)
        if not outcome.too_slow:
            self.waiting.append((attempt, outcome))
            self.row = dataclasses.replace(self.row, fitting=self.row.fitting + outcome.fits)
        return outcome

    def planned(self, attempt: Attempt, *, is_counted: bool = False) -> Outcome | None:
        """What the plan of an attempt comes to; the row gets it where it is the best. `is_counted`: among `fitting`."""
        plan, outcome, refusal = None, None, None
        progress, cluster = Progress("", show=False), self.problem.cluster
        try:
            plan = make_plan(
                self.problem.traced, self.trees, cluster, attempt.options, self.rules, progress, self.graphs
            )
        except AutoparError as error:
            refusal = error
            if isinstance(error, MemoryLimitError):
                outcome = Outcome(step_time_s=math.inf, peak_bytes=error.needed_bytes, limit_bytes=error.limit_bytes)
        self.row = dataclasses.replace(self.row, planned_s=time.perf_counter() - self.begun)
        if plan is not None:
            outcome = outcome_of(plan)
            self.row = dataclasses.replace(self.row, fitting=self.row.fitting + outcome.fits - is_counted)
            if self.best_outcome is None or outcome.rank() < self.best_outcome.rank():
                self.best_plan, self.best_outcome = plan if outcome.fits else None, outcome
                self.row = with_plan(self.row, plan, attempt.text or in_short(plan.record), outcome)
        elif self.best_outcome is None:
            assert refusal is not None, "an attempt has a plan or a refusal"
            self.row = refused(self.row, attempt.text, refusal)
        self.report(self.row)
        return outcome

    def settle(self) -> None:
        """Plans what is estimated, the best first, until nothing else may be better than the best plan."""
        while self.waiting:
            attempt, outcome = min(self.waiting, key=lambda pair: pair[1].rank())
            if self.best_outcome is not None:
                better = [pair for pair in self.waiting if best_case(pair[1]) < self.best_outcome.rank()]
                if not better:
                    break
                attempt, outcome = min(better, key=lambda pair: pair[1].rank())
            self.waiting.remove((attempt, outcome))
            self.planned(attempt, is_counted=outcome.fits)
        self.row = dataclasses.replace(self.row, planned_s=time.perf_counter() - self.begun)
        self.report(self.row)


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
