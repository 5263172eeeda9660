"""`autopar.bench`: the plan of the search beside manual ways to run the same step, each at its best settings."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.api import as_step
from autopar.common.gc_policy import collected_seldom
from autopar.common.progress import Progress
from autopar.common.text_console import PLAIN, TextConsole, TextFormat
from autopar.compiler.materialize import check_plan
from autopar.compiler.whole_graph import whole_graph
from autopar.errors import AutoparError, InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Dimension, Purpose
from autopar.ir.traced_step import TracedStep
from autopar.manual.making import Made, made_of, outcome_of
from autopar.manual.settings import Attempt, Problem, Walk
from autopar.manual.ways import WAYS, applicable
from autopar.microbatch.smaller_step import num_examples
from autopar.plan import bench_text
from autopar.plan.bench_row import BenchRow, ranked
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan
from autopar.plan.render import in_short
from autopar.plan.step_graphs import StepGraphs
from autopar.recipes import Recipe
from autopar.recipes.parse import recipe_of
from autopar.step import Step
from autopar.step_views import on_cluster, problem_of_shapes, save_rules

COLUMNS = 100
SEARCH = "search"
# What can be compared: the name of a way, a recipe or its text, a plan or the file that it was saved in.
Way = Recipe | Plan | str
logger = logging.getLogger("autopar")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Ways to run a step beside each other; of each cluster the fastest first. `step` is the step's name."""

    step: str
    rows: tuple[BenchRow, ...]

    @property
    def clusters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.cluster for row in self.rows))

    def of(self, cluster: str | None = None) -> tuple[BenchRow, ...]:
        """The rows of a cluster, the first one where none is named."""
        cluster = self.clusters[0] if cluster is None else cluster
        return tuple(row for row in self.rows if row.cluster == cluster)

    def best(self, cluster: str | None = None) -> BenchRow | None:
        """The fastest way on a cluster; None where nothing fits."""
        return next((row for row in self.of(cluster) if row.fits), None)

    def report(self, path: str | Path) -> None:
        """Writes the comparison as one page for a browser, which needs no network and no other file."""
        from autopar.plan.report.page import bench_of  # its templates are loaded where a page is wanted

        Path(path).write_text(bench_of(self.step, self.rows), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The rows as plain values, as `json.dumps` takes them."""
        rows = []
        for cluster in self.clusters:
            best = self.best(cluster)
            rows += [row.to_dict() | {"loses": row.loses(best) if best else ""} for row in self.of(cluster)]
        return {"step": self.step, "rows": rows}

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """A table for each cluster, with bars, and where each way loses to the best."""
        console = TextConsole(COLUMNS, text_format)
        for cluster in self.clusters:
            bench_text.write(console, self.step, self.of(cluster), self.best(cluster))
        return console.text()

    __str__ = text


def bench(
    step: Step | Callable[..., Any],
    *args: Any,
    clusters: Cluster | str | Sequence[Cluster | str] | None = None,
    recipes: Mapping[str, Way] | Iterable[Way] | None = None,
) -> Bench:
    """Plans a step by the search and by manual ways, each at the best of the settings that it leaves open.

    Manual ways are data parallelism, ZeRO-1, FSDP (ZeRO-3), hybrid sharding, tensor parallelism, also with FSDP,
    pipelines, also with tensor parallelism, sequence and expert parallelism, as far as the step and the cluster have a
    use for them. Of each, sizes, micro-batches and recomputation are found by bounds and estimates. The logger
    "autopar" says at level INFO what each came to.

    Args:
        step: A step of `autopar.parallelize` without a plan or a recipe, which keeps its options, or a function.
        args: Its arguments, arrays or shapes (`jax.ShapeDtypeStruct`).
        clusters: The hardware to plan for, one or several, also as text; None: that of the step.
        recipes: What to compare the search with: names of these ways, recipes and pins, also as text
            (`"tensor_parallel(size=8)"`), which are taken as they are, plans, and the files of plans; in a mapping
            under names of their own. None: all ways.

    Raises: InvalidArgumentError; UnsupportedError where the step cannot be planned.
    """
    parallel = as_step(step)
    given: list[Cluster | str | None] = (
        [None] if clusters is None else [clusters] if isinstance(clusters, Cluster | str) else list(clusters)
    )
    rows: list[BenchRow] = []
    for cluster in given:
        placed = parallel
        if cluster is not None:
            placed = on_cluster(parallel, Cluster.parse(cluster) if isinstance(cluster, str) else cluster)
        found = _on_one_cluster(placed, args, recipes)
        rows += [dataclasses.replace(row, cluster=cluster) if isinstance(cluster, str) else row for row in found]
    return Bench(step=parallel.__name__, rows=tuple(rows))


def _on_one_cluster(
    step: Step, args: Sequence[Any], recipes: Mapping[str, Way] | Iterable[Way] | None
) -> list[BenchRow]:
    problem = problem_of(step, *args)
    ways = _ways_by_name(problem, recipes)
    progress = Progress(f"autopar bench {step.__name__}", show=step._options.show_progress)
    rows = []
    with collected_seldom():
        for name, way in ways.items():
            with progress.pass_(f"{name} on {problem.cluster.name}"):
                row = _row(problem, name, way)
            rows.append(row)
            logger.info("%s", bench_text.line_of(row))
    save_rules(step)
    return ranked(rows)


def problem_of(step: Step, *args: Any) -> Problem:
    """The step on its cluster as manual ways are made for it. Raises: as `problem_of_shapes`."""
    planning = problem_of_shapes(step, *args)
    traced, graphs = planning.traced, StepGraphs()
    graph = whole_graph(traced, planning.rules, graphs).annotated
    experts = [
        size
        for value in graph.values
        if value.purpose is Purpose.MATRIX
        for size, names in zip(value.shape, value.dimensions, strict=True)
        if Dimension.EXPERT in names
    ]
    return Problem(
        traced=traced,
        trees=planning.trees,
        cluster=planning.cluster,
        examples=num_examples(traced),
        experts=math.gcd(*experts) if experts else 1,
        request=planning.request,
        rules=planning.rules,
        graphs=graphs,
    )


def _row(problem: Problem, name: str, way: Walk | Plan) -> BenchRow:
    """What a way comes to."""
    made = _of_plan(problem, way) if isinstance(way, Plan) else made_of(problem, way)
    outcome, error = made.outcome, made.error
    fits = made.plan is not None and outcome is not None and outcome.fits
    if error is None and not made.attempts:
        why = f"the batch of {problem.examples} does not divide over the devices that would share it"
    else:
        why = "" if error is None else f"{error.where}: expected {error.expected}, got {error.got}"
    return BenchRow(
        name=name,
        cluster=problem.cluster.name,
        examples=problem.examples,
        tokens=num_tokens(problem.traced),
        setting=made.text or (in_short(made.plan.record) if made.plan is not None else ""),
        plan=made.plan,
        fits=fits,
        why=why,
        peak_bytes=None if outcome is None else outcome.peak_bytes,
        limit_bytes=None if outcome is None else outcome.limit_bytes,
        settings=made.attempts,
        planned_s=made.planned_s,
    )


def _of_plan(problem: Problem, plan: Plan) -> Made:
    """A plan that is there, or why it is none of this step."""
    try:
        check_plan(plan, problem.traced)
    except AutoparError as error:
        return Made(error=error, attempts=1)
    return Made(plan=dataclasses.replace(plan, trees=problem.trees), outcome=outcome_of(plan), attempts=1)


def _ways_by_name(problem: Problem, recipes: Mapping[str, Way] | Iterable[Way] | None) -> dict[str, Walk | Plan]:
    """The search, and what it is compared with, by name. Raises: InvalidArgumentError."""
    found: dict[str, Walk | Plan] = {SEARCH: _as_it_is(problem.request)}
    if recipes is None:
        return found | {name: WAYS[name](problem) for name in applicable(problem)}
    if isinstance(recipes, str | Recipe | Plan):
        recipes = [recipes]
    named = recipes.items() if isinstance(recipes, Mapping) else ((_name_of(way), way) for way in recipes)
    for name, way in named:
        if isinstance(way, str) and way in WAYS:
            found[name] = WAYS[way](problem)
            continue
        if isinstance(way, str):
            way = Plan.load(way) if Path(way).is_file() else recipe_of(way)
        if isinstance(way, Plan):
            found[name] = way
        elif isinstance(way, Recipe):
            found[name] = _as_it_is(problem.under(way))
        else:
            raise InvalidArgumentError(
                where="autopar.bench(recipes=...)",
                expected=f"{', '.join(map(repr, WAYS))}, recipes, plans, or files of plans",
                got=repr(way)[:60],
                hint="such as ['ZeRO-3 (FSDP)', 'tensor_parallel(size=8)', 'plan.json']",
            )
    return found


def _as_it_is(request: PlanRequest) -> Walk:
    """A request that leaves nothing open to a walk."""
    yield Attempt(text="", options=request)


def _name_of(way: Way) -> str:
    """The name of a way that the user gave none."""
    if isinstance(way, Recipe):
        return way.request.recipe or "pins"
    return f"plan on {way.cluster.name}" if isinstance(way, Plan) else way


def num_tokens(traced: TracedStep) -> int:
    """The elements of the largest array of the batch that holds whole numbers by example and position; 0 for none."""
    sizes = [
        math.prod(traced.in_avals[i].shape)
        for i in traced.batch
        if len(traced.in_avals[i].shape) == 2 and traced.in_avals[i].dtype.kind in "iu"
    ]
    return max(sizes, default=0)
