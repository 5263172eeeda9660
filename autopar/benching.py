"""`autopar.bench`: the plan of the search beside manual ways to run the same step, each at its best settings."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.api import as_step
from autopar.common.progress import Progress, rare_garbage_collection
from autopar.common.text import PLAIN, TextConsole, TextFormat
from autopar.errors import AutoparError, InvalidArgumentError
from autopar.execute import nnx_objects
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Dimension, Purpose
from autopar.ir.traced_step import TracedStep
from autopar.ops.attention.checks import has_attention
from autopar.passes.smaller_step import num_examples
from autopar.plan.bench import SEARCH, BenchRow, by_cluster, line_of, ranked, setting_of, write
from autopar.plan.context import StepGraphs
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan
from autopar.recipes import Recipe
from autopar.recipes.parse import recipe_of
from autopar.recipes.walks import Attempt, Problem, Walk
from autopar.recipes.ways import QUICK, WAYS, Made, applicable, made_of, outcome_of, way_called
from autopar.search.materialize import check_plan
from autopar.search.step_ways import whole_graph
from autopar.step import Step
from autopar.step_views import on_cluster, planning_problem_of, problem_of_shapes, save_rules, with_plan
from autopar.tuning import FAILURES, Turn, alternate, check_one_process, program_of, quartiles, reason_of, turn_of
from autopar.verification import compare_numbers, rounding_of

COLUMNS = 100
INTERRUPTED = "not planned: interrupted"
WAITS = "not planned yet"
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
        from autopar.plan.page import bench_of  # its templates are loaded where a page is wanted

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
        for rows in by_cluster(self.rows):
            write(console, self.step, rows)
        return console.text()

    __str__ = text


def bench(
    step: Step | Callable[..., Any],
    *args: Any,
    clusters: Cluster | str | Sequence[Cluster | str] | None = None,
    recipes: Mapping[str, Way] | Iterable[Way] | None = None,
    measure: bool = False,
    seconds: float = 20.0,
    report: str | Path | None = None,
) -> Bench:
    """Plans a step by the search and by manual ways, each at the best of the settings that it leaves open.

    Manual ways are data parallelism, ZeRO-1, FSDP (ZeRO-3), hybrid sharding, tensor parallelism, also with FSDP,
    pipelines, also with tensor parallelism, sequence and expert parallelism, as far as the step and the cluster have a
    use for them. Of each, sizes, micro-batches and recomputation are found by bounds and estimates. Ways that are
    planned quickly come before the search. The logger "autopar" says at level INFO what each came to. Ctrl-C ends the
    comparison with the ways that are planned by then.

    Args:
        step: A step of `autopar.parallelize` without a plan or a recipe, which keeps its options, or a function.
        args: Its arguments, arrays or shapes (`jax.ShapeDtypeStruct`).
        clusters: The hardware to plan for, one or several, also as text; None: that of the step.
        recipes: What to compare the search with: names of these ways, or short ones (`"fsdp"`, `"tp"`); recipes and
            pins, also as text (`"tensor_parallel(size=8)"`), which are taken as they are; plans, and the files of
            plans; in a mapping under names of their own. None: all ways.
        measure: Whether to run those that fit, in turns, on the devices of this program: their times beside the
            predicted ones, their numbers beside those of plain `jax.jit`. The arguments are then arrays, which survive.
        seconds: Approximate duration of the timed steps, without compilation. Each way has at least a few turns.
        report: Where to write `Bench.report`'s page, each time that a way is planned.

    Raises: InvalidArgumentError; UnsupportedError where the step cannot be planned, or to measure in a program of
    several processes.
    """
    parallel, args, rows = as_step(step), nnx_objects.split(args), list[BenchRow]()
    given = [clusters] if clusters is None or isinstance(clusters, Cluster | str) else clusters
    named: list[Cluster | str | None] = [*given]
    if measure:
        _check_measured_here(named)

    def written(found: Sequence[BenchRow]) -> Bench:
        comparison = Bench(step=parallel.__name__, rows=(*rows, *ranked(found)))
        if report is not None and comparison.rows:
            comparison.report(report)
        return comparison

    for cluster in named:
        placed = parallel if cluster is None else on_cluster(parallel, as_cluster(cluster))
        found: list[BenchRow] = []
        try:
            found = _on_one_cluster(placed, args, recipes, cluster if isinstance(cluster, str) else "", written)
            is_interrupted = any(row.why == INTERRUPTED for row in found)
            if measure and not is_interrupted:
                found = _measured(placed, args, found, seconds)
        except KeyboardInterrupt:
            if not rows and not found:
                raise
            is_interrupted = True
        rows += ranked(found)
        if is_interrupted:
            break
    return written(())


def as_cluster(cluster: Cluster | str) -> Cluster:
    return Cluster.parse(cluster) if isinstance(cluster, str) else cluster


def _check_measured_here(clusters: Sequence[Cluster | str | None]) -> None:
    """Raises: InvalidArgumentError for hardware that is said not to be that of this program; UnsupportedError in a
    program of several processes.
    """
    absent = [c for c in clusters if isinstance(c, str) and not c.startswith("local") and not c.endswith(".json")]
    if absent:
        raise InvalidArgumentError(
            where="autopar.bench(measure=True)",
            expected="the devices here: local, local:4, or a .json file that was measured on them",
            got=absent[0],
            hint="measure where the hardware is, or leave measure out to predict",
        )
    check_one_process("autopar.bench(measure=True)")


def _on_one_cluster(
    step: Step,
    args: Sequence[Any],
    recipes: Mapping[str, Way] | Iterable[Way] | None,
    text: str,
    told: Callable[[Sequence[BenchRow]], object],
) -> list[BenchRow]:
    """A row for each way. `text` is the cluster as the user wrote it, where that was text; `told` is called after each
    with all of them, as far as they are planned.
    """
    problem = problem_of(step, *args)
    cluster = text or problem.cluster.name
    progress = Progress(f"{step.__name__} on {cluster}", show=step._options.show_progress)
    ways = _ways_by_name(problem, recipes)
    logger.info("%s on %s: plans %s", step.__name__, cluster, ", ".join(ways))
    rows: list[BenchRow] = []
    blank = BenchRow(name="", cluster=cluster, examples=problem.examples, why=WAITS)
    is_interrupted = False
    with rare_garbage_collection():
        for at, (name, way) in enumerate(ways.items(), 1):
            row = dataclasses.replace(blank, name=name, why=INTERRUPTED)
            try:
                if not is_interrupted:
                    with progress.pass_(f"{name} ({at} of {len(ways)})"):
                        row = dataclasses.replace(_row(problem, name, way, progress), cluster=cluster)
            except KeyboardInterrupt:
                if not rows:
                    raise
                is_interrupted = True
            if row.record is not None and row.record.pipeline is None:
                problem = dataclasses.replace(problem, whole_fits=True)
            rows.append(row)
            told([*rows, *(dataclasses.replace(blank, name=waiting) for waiting in [*ways][at:])])
            logger.info("%s", line_of(row))
    save_rules(step)
    return rows


def _measured(step: Step, args: Sequence[Any], rows: Sequence[BenchRow], seconds: float) -> list[BenchRow]:
    """The rows with what those that fit take on the devices here, in turns, and how far they are from plain `jax.jit`.

    Ways that came to the same program share its turns.
    """
    arguments = planning_problem_of(step, *args).arguments
    turns: dict[str, Turn] = {}
    checked: list[tuple[BenchRow, str]] = []
    for row in rows:
        if not isinstance(row.plan, Plan) or not row.fits:
            checked.append((row, ""))
            continue
        placed = with_plan(step, row.plan)
        try:
            compiled = placed.compile(*args)
            program = program_of(compiled)
            turns.setdefault(program, turn_of(compiled, arguments))
            difference = max(compare_numbers(placed, compiled, args).values(), default=0.0)
            differs = not difference <= rounding_of(compiled.traced.jaxpr)
            checked.append((dataclasses.replace(row, difference=difference, differs=differs), program))
        except FAILURES as error:
            checked.append((dataclasses.replace(row, why=f"not measured: {reason_of(error)}"), ""))
    took = dict(zip(turns, alternate(list(turns.values()), seconds), strict=True))
    return [_with_times(row, took[program]) if program else row for row, program in checked]


def _with_times(row: BenchRow, took: Sequence[float] | Exception) -> BenchRow:
    if isinstance(took, Exception):
        return dataclasses.replace(row, why=f"not measured: {reason_of(took)}")
    first, middle, third = quartiles(took)
    return dataclasses.replace(row, measured_s=middle, quartiles_s=(first, third))


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
        attends=has_attention(graph),
        request=planning.request,
        rules=planning.rules,
        graphs=graphs,
    )


def _row(problem: Problem, name: str, way: Walk | Plan, progress: Progress) -> BenchRow:
    """What a way comes to."""
    made = _of_plan(problem, way) if isinstance(way, Plan) else made_of(problem, way, progress=progress)
    outcome, error = made.outcome, made.error
    fits = made.plan is not None and outcome is not None and outcome.fits
    if error is None and not made.attempts:
        why = f"the batch of {problem.examples} does not divide over the devices that would share it"
    else:
        why = "" if error is None else f"{error.where}: expected {error.expected}, got {error.got}; {error.hint}"
    return BenchRow(
        name=name,
        cluster=problem.cluster.name,
        examples=problem.examples,
        tokens=num_tokens(problem.traced),
        setting=made.text or (setting_of(made.plan.record) if made.plan is not None else ""),
        plan=made.plan,
        fits=fits,
        why=why,
        peak_bytes=None if outcome is None else outcome.peak_bytes,
        limit_bytes=None if outcome is None else outcome.limit_bytes,
        of_state=outcome is not None and outcome.of_state,
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
    """The search, and what it is compared with, by name: what is planned quickly first.

    Raises: InvalidArgumentError.
    """
    named = {name: name for name in applicable(problem)} if recipes is None else named_ways(recipes)
    quick: dict[str, Walk | Plan] = {}
    slow: dict[str, Walk | Plan] = {}
    for name, way in named.items():
        if isinstance(way, Recipe):
            quick[name] = _as_it_is(problem.under(way))
        elif isinstance(way, Plan):
            quick[name] = way
        else:
            (quick if way in QUICK else slow)[name] = WAYS[way](problem)
    return quick | {SEARCH: _as_it_is(problem.request)} | slow


def named_ways(recipes: Mapping[str, Way] | Iterable[Way]) -> dict[str, Way]:
    """By name what the search is to be compared with: plans, recipes, and names of `WAYS`. Raises:
    InvalidArgumentError.
    """
    found: dict[str, Way] = {}
    if isinstance(recipes, str | Recipe | Plan):
        recipes = [recipes]
    named = recipes.items() if isinstance(recipes, Mapping) else ((_name_of(way), way) for way in recipes)
    for name, way in named:
        known = way_called(way) if isinstance(way, str) else None
        if known is not None:
            found[known if name == way else name] = known
            continue
        if isinstance(way, str):
            way = Plan.load(way) if Path(way).is_file() else recipe_of(way, tuple(WAYS))
        if isinstance(way, Plan | Recipe):
            found[name] = way
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
