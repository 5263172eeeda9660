"""`autopar.tune`: measures the plans with the shortest predicted times, since predictions cannot rank close plans."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import msgspec
from rich.markup import escape
from rich.table import Table

from autopar.common.progress import Progress, rare_garbage_collection
from autopar.common.text import PLAIN, TextConsole, TextFormat, text_of_bytes, text_of_s
from autopar.errors import AutoparError, InvalidArgumentError, UnsupportedError
from autopar.execute.compiled_step import CompiledStep, build
from autopar.execute.placement import put_copies
from autopar.execute.plan_sources import PlanningProblem
from autopar.plan.plan import Plan
from autopar.plan.render import in_short
from autopar.plan.schema import MeasuredRecord
from autopar.plan.summary import fullest
from autopar.recipes import Recipe, data_parallel, zero
from autopar.recipes.parse import as_recipe
from autopar.runtime.execute import drain
from autopar.search.planner import make_plan, make_plans
from autopar.step import Step
from autopar.step_views import check_is_step, planning_problem_of, save_rules

# Recipes that are timed beside the search's plans, by the names that they have in the table.
BESIDE = (("data_parallel()", data_parallel()), *((f"zero({stage})", zero(stage)) for stage in (1, 2, 3)))
# Steps of a turn behind the first, which finds caches full of another plan's data.
STEPS_IN_A_ROW = 2
# Rounds of turns that count, at least and at most; one before them warms up.
LEAST_ROUNDS, MOST_ROUNDS = 3, 30
# What a plan can fail with that is no mistake of this package: too little memory, something a compiler refuses.
FAILURES = (AutoparError, jax.errors.JaxRuntimeError)
_Error = TypeVar("_Error", bound=Exception)
# Where operations come from, which differs between plans that come to the same program.
_METADATA = re.compile(r", metadata=\{[^}]*\}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One plan: predicted seconds of a step, the measured median with its quartiles, and `why` it was not timed, if so.

    Without a plan (a recipe that the step or the devices do not admit) there is no prediction.
    """

    name: str
    plan: Plan | None
    predicted_s: float | None
    measured_s: float | None
    why: str = ""
    quartiles_s: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Measured plans of a step: the timed plans, fastest first, then the others by predicted time."""

    target: str
    rows: tuple[Timed, ...]

    @property
    def fastest(self) -> Timed:
        return self.rows[0]

    @property
    def plan(self) -> Plan:
        """The plan that was the fastest."""
        plan = self.fastest.plan
        assert plan is not None, "what was timed has a plan"
        return plan

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The plans as a table."""
        console = TextConsole(120, text_format)
        rows = Table(f"timed on {self.target}", "predicted", "measured", "half of its steps", "relative", "not timed")
        fastest_s = self.fastest.measured_s
        for row in self.rows:
            rows.add_row(
                escape(row.name),
                text_of_s(row.predicted_s) if row.predicted_s is not None else "",
                text_of_s(row.measured_s) if row.measured_s is not None else "",
                " to ".join(map(text_of_s, row.quartiles_s)) if row.quartiles_s is not None else "",
                f"{row.measured_s / fastest_s:.3f}" if row.measured_s and fastest_s else "",
                escape(row.why),
            )
        console.table(rows)
        return console.text()

    __str__ = text


def tune(
    step: Step,
    *args: Any,
    beside: Mapping[str, Recipe | str] | Iterable[Recipe | str] | None = None,
    within: float = 1.25,
    most: int = 8,
    seconds: float = 20.0,
) -> Tuning:
    """Measures the plans with the shortest predicted times on the devices, and returns them with the fastest first.

    These are the plan of the search, other plans that the search evaluated, and recipes. They take turns, each on a
    state of its own that is dropped after the turn: devices hold one more state than the given one. Where that is too
    much, pass one in the memory of the host (`jax.device_get(state)`).

    Args:
        step: A step of `autopar.parallelize` without a plan, a recipe or a step to follow.
        args: Its arguments, arrays. They survive.
        beside: Recipes to time as well, by their names in the table, also as text (`["fsdp", "tensor_parallel"]`): all
            that fit are timed. None: data parallelism and ZeRO, as far as `within` and `most` allow.
        within: The largest ratio of a plan's predicted time to the shortest predicted time.
        most: The largest number of plans to time, without those of `beside`.
        seconds: Approximate duration of the timed steps, without compilation. Each plan has at least a few turns.

    Raises: InvalidArgumentError; UnsupportedError in a program of several processes; what planning, compiling and
    running raise, where no plan could be timed.
    """
    return tuned_by(alternate, step, args, beside, within, most, seconds)


# Runs one plan a few steps; returns what each of them took, in seconds.
Turn = Callable[[], Sequence[float]]
# Has plans run turn by turn for about so many seconds; what the steps of each took, or what one failed with.
Clock = Callable[[Sequence[Turn], float], Sequence[Sequence[float] | Exception]]


def tuned_by(
    clock: Clock,
    step: Step,
    args: Sequence[Any],
    beside: Mapping[str, Recipe | str] | Iterable[Recipe | str] | None,
    within: float,
    most: int,
    seconds: float,
) -> Tuning:
    """`tune` with a given clock."""
    _check(step, within, most, seconds)
    named = _recipes_by_name(beside)
    recipes = dict(BESIDE) if named is None else named
    problem = planning_problem_of(step, *args)
    progress = Progress(f"autopar tune {step.__name__}", show=problem.show_progress)
    with rare_garbage_collection():
        planned = list(_planned(problem, recipes, within, progress))
    save_rules(step)
    refused = [_FailedPlan(name, result) for name, result in planned if isinstance(result, Exception)]
    plans = [(name, result) for name, result in planned if isinstance(result, Plan)]
    fitting = [(name, plan) for name, plan in plans if not _memory_excess(plan)]
    # The search's own comes first, which takes a plan that is easier to read before one that is hardly faster.
    asked = {*(named or ()), *(name for name, _ in fitting[:1])}
    # A recipe that was asked for bears its name also where the search came to the same program.
    slower = sorted(fitting[1:], key=lambda row: (row[0] not in asked, step_s(row[1])))
    running, failed, rows = _compiled(problem, [*fitting[:1], *slower], asked, within, most, progress)
    rows += [_row(name, plan, why=_memory_excess(plan)) for name, plan in plans if _memory_excess(plan)]
    with progress.pass_(f"time {len(running)} plans"):
        durations_s = clock([candidate.turn for candidate in running], seconds)
    for candidate, steps in zip(running, durations_s, strict=True):
        if isinstance(steps, Exception):
            failed.append(_FailedPlan(candidate.name, steps, candidate.plan))
        else:
            first, middle, third = quartiles(steps)
            rows.append(
                dataclasses.replace(_row(candidate.name, candidate.plan), measured_s=middle, quartiles_s=(first, third))
            )
    if all(row.measured_s is None for row in rows) and (failed or refused):
        raise (failed + refused)[0].error
    if all(row.measured_s is None for row in rows):
        raise InvalidArgumentError(
            where=f"autopar.tune({step.__name__}, ...)",
            expected="a plan that fits",
            got="; ".join(f"{row.name}: {row.why}" for row in rows),
            hint="raise memory_limit_bytes, or name other recipes (beside)",
        )
    rows += [_row(candidate.name, candidate.plan, why=reason_of(candidate.error)) for candidate in failed + refused]
    rows.sort(key=lambda row: [math.inf if s is None else s for s in (row.measured_s, row.predicted_s)])
    target = f"{jax.default_backend()} x {problem.cluster.num_devices}"
    return Tuning(target=target, rows=(_with_note(rows), *rows[1:]))


@dataclasses.dataclass(frozen=True, slots=True)
class _FailedPlan:
    """A plan that could not be found, compiled or run."""

    name: str
    error: Exception
    plan: Plan | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _CompiledPlan:
    """A compiled plan, ready to be timed."""

    name: str
    plan: Plan
    turn: Turn


def _row(name: str, plan: Plan | None, why: str = "") -> Timed:
    """The row of a plan without a measurement."""
    return Timed(name=name, plan=plan, predicted_s=step_s(plan) if plan is not None else None, measured_s=None, why=why)


def _memory_excess(plan: Plan) -> str:
    """The excess over the memory limit as text, if any: a recipe with stages is built even if it exceeds the limit."""
    full = fullest(plan.record)
    if full.limit_bytes is None or full.peak_bytes <= full.limit_bytes:
        return ""
    return f"needs {text_of_bytes(full.peak_bytes)} on a device, of {text_of_bytes(full.limit_bytes)}"


def step_s(plan: Plan) -> float:
    """Predicted seconds of a step."""
    return plan.predicted.step_time_s


def _recipes_by_name(beside: Mapping[str, Recipe | str] | Iterable[Recipe | str] | None) -> dict[str, Recipe] | None:
    """The recipes that the user names, or None. Raises: InvalidArgumentError."""
    if beside is None:
        return None
    if not isinstance(beside, Mapping) and not isinstance(beside, str) and isinstance(beside, Iterable):
        beside = {one.request.recipe if isinstance(one, Recipe) else str(one): one for one in beside}
    found = {name: as_recipe(recipe) for name, recipe in beside.items()} if isinstance(beside, Mapping) else None
    if found is None or not all(isinstance(recipe, Recipe) for recipe in found.values()):
        raise InvalidArgumentError(
            where="autopar.tune(beside=...)",
            expected="recipes by name, or a list of recipes",
            got=repr(beside)[:60],
            hint="such as {'tensor': autopar.recipes.tensor_parallel()}, ['fsdp'], or {} for none",
        )
    return found


def _check(step: Any, within: float, most: int, seconds: float) -> None:
    """Raises: InvalidArgumentError, UnsupportedError in a program of several processes."""
    check_is_step("autopar.tune", step)
    numbers = (("within", within, 1, (int, float)), ("most", most, 1, (int,)), ("seconds", seconds, 0, (int, float)))
    for name, value, least, kinds in numbers:
        if not isinstance(value, kinds) or not value >= least:
            raise InvalidArgumentError(
                where=f"autopar.tune({name}=...)",
                expected=f"{least} or more" + (", a whole number" if kinds == (int,) else ""),
                got=repr(value),
                hint="leave it out",
            )
    check_one_process("autopar.tune")


def check_one_process(where: str) -> None:
    """Raises: UnsupportedError in a program of several processes."""
    if jax.process_count() > 1:
        raise UnsupportedError(
            where=where,
            expected="a program of one process",
            got=f"{jax.process_count()} processes",
            hint="give each plan to a step (plan=...), and time it where it runs",
        )


def _planned(
    problem: PlanningProblem, beside: Mapping[str, Recipe], within: float, progress: Progress
) -> Iterable[tuple[str, Plan | AutoparError]]:
    """By name: the best plan and its near competitors, then the recipes; or the errors in their place."""
    inputs = problem.traced, problem.trees, problem.cluster
    try:
        plans = make_plans(*inputs, problem.request, problem.rules, progress, within)
    except AutoparError as error:
        yield "search", without_traceback(error)
    else:
        occurrences: dict[str, int] = {}
        for number, plan in enumerate(plans):
            name = f"{'runner-up' if number else 'search'}: {in_short(plan.record)}"
            occurrences[name] = occurrences.get(name, 0) + 1
            yield name if occurrences[name] == 1 else f"{name} ({occurrences[name]})", plan
    for name, recipe in beside.items():
        try:
            yield name, make_plan(*inputs, problem.request.with_recipe(recipe.request), problem.rules, progress)
        except AutoparError as error:
            yield name, without_traceback(error)


def _compiled(
    problem: PlanningProblem,
    plans: Sequence[tuple[str, Plan]],
    asked: Collection[str],
    within: float,
    most: int,
    progress: Progress,
) -> tuple[list[_CompiledPlan], list[_FailedPlan], list[Timed]]:
    """(plans to time, those that do not compile, those that need no timing). Those `asked` for are always timed."""
    running: dict[str, _CompiledPlan] = {}  # by program
    failed: list[_FailedPlan] = []
    rows: list[Timed] = []
    best_s = min((step_s(plan) for _, plan in plans), default=0.0)
    for name, plan in plans:
        unasked = [candidate for candidate in running.values() if candidate.name not in asked]
        if name not in asked and step_s(plan) > within * best_s:
            rows.append(_row(name, plan, why=f"predicted to take more than {within:g} times the best"))
            continue
        if name not in asked and len(unasked) + 1 >= most:
            rows.append(_row(name, plan, why=f"not among the {most} predicted to be the fastest"))
            continue
        try:
            with progress.pass_(f"compile {name}"):
                compiled = build(problem.traced, plan, problem.rules, Progress("", show=False))
                program = program_of(compiled)
        except FAILURES as error:
            failed.append(_FailedPlan(name, without_traceback(error), plan))
            continue
        if program in running:
            rows.append(_row(name, plan, why=f"the same program as {running[program].name}"))
        else:
            running[program] = _CompiledPlan(name, plan, turn_of(compiled, problem.arguments))
    return list(running.values()), failed, rows


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of what steps took, of which the second is the median."""
    found = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [*seconds] * 3
    return found[0], found[1], found[2]


def without_traceback(error: _Error) -> _Error:
    """The error without tracebacks, whose frames would keep arrays on the devices alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def reason_of(error: Exception) -> str:
    """The error in one line of a table."""
    text = f"{error.where}: {error.got}" if isinstance(error, AutoparError) else str(error)
    return text.strip().split("\n")[0]


def program_of(compiled: CompiledStep) -> str:
    """A key that is equal for plans with equal programs, and for pipelines with equal decisions.

    The text of a pipeline's tasks does not tell in which order and where they run.
    """
    pipeline = compiled.plan.record.pipeline
    if pipeline is None:
        return _METADATA.sub("", compiled.as_text())
    stages = [(s.first_layer, s.first_device, s.axis_sizes, s.decisions) for s in pipeline.stages]
    way = (pipeline.schedule, pipeline.num_microbatches, pipeline.chunks, pipeline.scan_parts, pipeline.keeps_copies)
    record = compiled.plan.record
    return msgspec.json.encode(
        (way, record.attention_kernel, record.scan_recompute, pipeline.recomputed, stages)
    ).decode()


def turn_of(compiled: CompiledStep, arguments: Sequence[Any]) -> Turn:
    """A few steps of a plan, each on the state of the previous one; afterwards the devices hold nothing of them."""
    tied, leaves = compiled.traced.tied, jax.tree.leaves(tuple(arguments))

    def turn() -> list[float]:
        program = compiled.ready()
        state = jax.block_until_ready(put_copies(leaves, program))
        took = []
        for _ in range(1 + STEPS_IN_A_ROW):
            begun = time.perf_counter()
            results = jax.block_until_ready(program.run(state))
            took.append(time.perf_counter() - begun)
            # What a step takes over comes back.
            state = [results[tied[i]] if i in tied else leaf for i, leaf in enumerate(state)]
            del results
        drain()
        return took[1:]

    return turn


def alternate(
    turns: Sequence[Turn], seconds: float, now: Callable[[], float] = time.perf_counter
) -> list[Sequence[float] | Exception]:
    """One measurement of each plan a round, in alternating order, so that other load on the machine affects all."""
    took: list[list[float]] = [[] for _ in turns]
    failed: dict[int, Exception] = {}
    begun = now()
    for number in itertools.count():
        order = [i for i in range(len(turns)) if i not in failed]
        for i in order if number % 2 else reversed(order):
            try:
                steps = turns[i]()
            except FAILURES as error:
                failed[i] = without_traceback(error)
            else:
                took[i] += steps if number else []
        one_more_s = (now() - begun) * (number + 2) / (number + 1)
        if len(failed) == len(turns) or number >= MOST_ROUNDS or (number >= LEAST_ROUNDS and one_more_s > seconds):
            break
    return [failed.get(i, steps) for i, steps in enumerate(took)]


def _measured(timed: Sequence[Timed]) -> tuple[MeasuredRecord, ...]:
    """The step times of the timed plans beside their predictions."""
    return tuple(
        MeasuredRecord(
            source="tune",
            name=f"step time of {row.name}",
            unit="s",
            predicted=row.predicted_s or 0.0,
            measured=row.measured_s or 0.0,
        )
        for row in timed
    )


def _with_note(rows: Sequence[Timed]) -> Timed:
    """The fastest row, whose plan says how it was chosen."""
    fastest, timed = rows[0], [row for row in rows if row.measured_s is not None]
    assert fastest.plan is not None, "what was timed has a plan"
    other_plans = f"{len(timed) - 1} other plan{'s' if len(timed) != 2 else ''}"
    foreseen = min(timed, key=lambda row: row.predicted_s or 0.0)
    note = f"timed on the devices beside {other_plans}: {text_of_s(fastest.measured_s or 0.0)}; "
    if foreseen is fastest:
        note += "it was predicted to be the fastest, too"
    else:
        note += f"the one predicted to be the fastest took {text_of_s(foreseen.measured_s or 0.0)}"
    record = fastest.plan.record
    record = dataclasses.replace(record, notes=(*record.notes, note), measured=(*record.measured, *_measured(timed)))
    return dataclasses.replace(fastest, plan=dataclasses.replace(fastest.plan, record=record))
