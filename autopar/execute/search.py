"""`Search`: the wishes for a plan, and how far the search for it goes; and the layouts of another step's state as such
wishes (`parallelize(evaluate, plan=step)`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.common.text import bytes_of_text
from autopar.cost.compiler_options import Requested, requested_options
from autopar.errors import InvalidArgumentError, expect_one_of, expect_positive, expect_type
from autopar.ir.traced_step import ExpertLoad, ShardingsInCode, TracedStep
from autopar.plan.options import (
    AS_WRITTEN,
    Attention,
    FollowedStages,
    PlanRequest,
    checked_effort,
    checked_remat,
    checked_time_limit_s,
)
from autopar.plan.plan import Plan
from autopar.plan.schema import PipelineRecord, PlannedValue
from autopar.runtime.standard_schedules import SCHEDULES

# Of `Search.num_microbatches` and `Search.schedule`: left to the search, in place of those of a step's own.
_AUTO = "auto"
# Fields that a plan has decided which is given and run as it is, with the values that wish for nothing.
_OF_PLANS: dict[str, object] = {
    "num_microbatches": _AUTO, "schedule": _AUTO, "per_microbatch": (), "attention": Attention.AUTO,
    "constraints": ShardingsInCode.ADVICE, "remat": None, "compiler_options": (), "expert_load": (),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The wishes for a plan, and how far the search for it goes. A field that is left out leaves a choice to it.

    Where a step that has a search is planned with another one, fields that this has take the place of its own.

    Attributes:
        num_microbatches: The number of equal parts of the batch, or "auto".
        schedule: The order in which the stages of a pipeline run micro-batches: one of
            `autopar.runtime.standard_schedules.SCHEDULES`, or "auto".
        attention: The program of attention that is found in the step, however it is spelled. "kernel": that of the
            device, which keeps no scores, where it has the form and type (cuDNN's on a GPU, jax's splash attention on a
            TPU). "blockwise": the same, and blocks of queries elsewhere. "as written": the step's own operations, whose
            scores go through memory. "auto", the default: the one by which the step is predicted to be fastest, and
            that fits. The plan's notes name the choice, and what stands in the way of a kernel.
        remat: What is computed again for the backward pass; by default what makes the step fastest, with
            `jax.checkpoint` in the step as advice. Or the values named by `jax.ad_checkpoint.checkpoint_name` that its
            regions save: "as written", those of their policies; "auto", those with which the plan is predicted to be
            the fastest that fits in memory (several searches); or a list of names. What policies save by other rules
            stays saved.
        constraints: How layouts in the step's code (`with_sharding_constraint`, `reshard`, `out_sharding=`) are used:
            "advice", the default: they make one more candidate, which is taken where it is faster than the search's
            plan; "pins": they are kept; "ignore": they are dropped.
        per_microbatch: Modules, by patterns as those of `autopar.constrain`, that may mix the examples of their
            micro-batch: batch statistics, a router's loss and capacity, dynamic scales (`"BatchNorm"`, `"*/router"`).
            Where a plan has micro-batches, its results are then those of gradient accumulation; its notes say so.
        expert_load: How many rows a router sends to each expert, as measured: a count for each expert, or such a list
            for each layer; by default all get equally many. Only their shares count. Where devices share experts, the
            plan is then priced by the busiest device of each layer. Of several mixtures a mapping, from patterns of
            their modules (as `per_microbatch`) to their counts, of which the first that names a mixture counts.
        memory_limit_bytes: Memory of one device that the step may use, a number or text (`80GB`, `16GiB`); by default
            90 % of the device's memory.
        compiler_options: XLA's options by name, as `jax.jit` takes them, beside those that plans set for the cluster's
            platform (`plan.compiler_options`), or in their place; None in place of a value leaves one to XLA.
        effort: How far the search goes on: "default", until no plan can be faster by 0.005 %; "quick", by two percent,
            on meshes of one axis or two, and with pipelines only where no program fits; "thorough", with every mesh and
            with pipelines, whatever they can still gain. `plan.gap` is what another plan could save at most,
            `step.replan()` searches on, and the plan's rejections list what was not tried.
        time_limit_s: Seconds that planning may take, except for the pass in progress; then the best plan so far is
            taken (with 0 the first one that fits), and its notes list the untried rest. By default searches end by
            proof or by rounds.
        show_progress: Whether a progress line is shown on a terminal, as it is by default; elsewhere the log has it now
            and then.

    Raises: InvalidArgumentError.
    """

    num_microbatches: int | str | None = None
    schedule: str | None = None
    attention: str | None = None
    remat: str | Sequence[str] | None = None
    constraints: str | None = None
    per_microbatch: str | Sequence[str] | None = None
    expert_load: Any = None
    memory_limit_bytes: int | str | None = None
    compiler_options: Mapping[str, Any] | Requested | None = None
    effort: str | None = None
    time_limit_s: float | None = None
    show_progress: bool | None = None

    def __post_init__(self) -> None:
        if self.num_microbatches is not None and not _is_auto(self.num_microbatches):
            expected = "a positive whole number, or 'auto'"
            hint = "1 cuts nothing, 'auto' leaves the number to the search"
            check_number("Search(num_microbatches=...)", self.num_microbatches, expected=expected, hint=hint)
        if self.schedule is not None and not _is_auto(self.schedule):
            check_schedule("Search(schedule=...)", self.schedule)
        if self.attention is not None:
            hint = "leave it out to have the faster of a kernel and the operations as written"
            expect_one_of("Search(attention=...)", self.attention, Attention, hint)
        if self.constraints is not None:
            hint = "leave it out to have shardings in the code weighed beside the search's"
            expect_one_of("Search(constraints=...)", self.constraints, ShardingsInCode, hint)
        if self.show_progress is not None:
            hint = "leave it out to show the line on terminals"
            expect_type("Search(show_progress=...)", self.show_progress, bool, "True or False", hint)
        options = self.compiler_options
        checked: dict[str, Any] = {
            "remat": None if self.remat is None else checked_remat(_names("remat", self.remat)),
            "per_microbatch": None if self.per_microbatch is None else _patterns(self.per_microbatch),
            "expert_load": None if self.expert_load is None else _load(self.expert_load),
            "memory_limit_bytes": checked_bytes("Search(memory_limit_bytes=...)", self.memory_limit_bytes),
            "effort": None if self.effort is None else checked_effort("Search(effort=...)", self.effort),
            "time_limit_s": checked_time_limit_s("Search(time_limit_s=...)", self.time_limit_s),
            "compiler_options": None
            if options is None
            else requested_options(dict(options) if isinstance(options, tuple) else options),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def given(self) -> dict[str, Any]:
        """The fields that are not left out, by name."""
        return {name: x for name in FIELDS if (x := getattr(self, name)) is not None}

    def updated(self, other: Search) -> Search:
        """This search with the fields of another in place of its own, where that has them."""
        return dataclasses.replace(self, **other.given())

    def of_plans(self) -> dict[str, Any]:
        """The fields given here that a plan decides: beside a given plan there is nothing left to wish."""
        return {name: x for name, x in self.given().items() if name in _OF_PLANS and x != _OF_PLANS[name]}

    def without(self, *names: str) -> Search:
        """This search with some fields left out."""
        return dataclasses.replace(self, **dict.fromkeys(names))

    def request(self, recipe: PlanRequest) -> PlanRequest:
        """The request of a recipe with these wishes; the recipe's micro-batches are kept, its schedule is replaced.

        Raises: InvalidArgumentError for two numbers of micro-batches.
        """
        fields = self.given()
        fields.pop("show_progress", None)
        for name in ("num_microbatches", "schedule"):
            if name in fields and _is_auto(fields[name]):
                del fields[name]
        number = fields.get("num_microbatches", recipe.num_microbatches)
        if recipe.num_microbatches not in (None, number):
            raise InvalidArgumentError(
                where="parallelize(plan=..., search=Search(num_microbatches=...))",
                expected=f"the recipe's {recipe.num_microbatches} micro-batches",
                got=str(number),
                hint="give the number once, to the recipe or to the search; autopar.plan(step, plan=...) plans a step "
                "under another recipe",
            )
        if "attention" in fields:
            fields["attention"] = Attention(fields["attention"])
        if "constraints" in fields:
            fields["constraints"] = ShardingsInCode(fields["constraints"])
        if fields.get("remat") == AS_WRITTEN:
            fields["scan_recompute"] = ""
        return dataclasses.replace(recipe, **fields)


FIELDS = tuple(field.name for field in dataclasses.fields(Search))


def checked_search(search: object) -> Search:
    """Raises: InvalidArgumentError for another type."""
    hint = "as search=autopar.Search(effort='quick')"
    expect_type("parallelize(search=...)", search, Search, "an autopar.Search", hint)
    assert isinstance(search, Search), "as it was checked"
    return search


def check_number(
    where: str, number: object, *, expected: str = "a positive whole number", hint: str = "1 cuts nothing"
) -> int:
    """The number. Raises: InvalidArgumentError for what is no positive whole number."""
    expect_positive(where, number, expected, hint)
    assert isinstance(number, int), "as it was checked"
    return number


def check_schedule(where: str, name: object) -> None:
    """Raises: InvalidArgumentError for a name that is not known."""
    expect_one_of(where, name, SCHEDULES, "1f1b is always possible", f"one of {', '.join(SCHEDULES)}")


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == _AUTO


def checked_bytes(where: str, size: int | str | None) -> int | None:
    """A number of bytes of one device, also from text. Raises: InvalidArgumentError."""
    nbytes = bytes_of_text(size) if isinstance(size, str) else size
    if isinstance(size, str) and nbytes is None:
        raise InvalidArgumentError(
            where=where, expected="a size, such as 80GB, 16GiB or 1000000", got=repr(size),
            hint="kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB of 1024",
        )  # fmt: skip
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0):
        raise InvalidArgumentError(
            where=where, expected="a positive number of bytes of one device, or text such as 80GB",
            got=f"{size!r}" if isinstance(size, int) else f"{type(size).__name__} ({size!r:.40})",
            hint="leave it out for the default, which the device's own memory sets; int(...) of other numbers",
        )  # fmt: skip
    return nbytes


def _names(option: str, value: object) -> str | tuple[Any, ...]:
    """Text as it is, several of it as a tuple. Raises: InvalidArgumentError for what is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Iterable):
        raise InvalidArgumentError(
            where=f"Search({option}=...)", expected="text, or a list of it",
            got=f"{type(value).__name__} ({value!r:.40})",
            hint="leave it out to have the search decide",
        )  # fmt: skip
    return tuple(value)


def _patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    names = _names("per_microbatch", value)
    patterns = (names,) if isinstance(names, str) else names
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern.strip("/"):
            raise InvalidArgumentError(
                where="Search(per_microbatch=...)", expected="patterns of modules, such as 'BatchNorm'",
                got=repr(pattern), hint="write the name that the error or the plan prints, or '**' for all",
            )  # fmt: skip
    return patterns


def _load(counts: object) -> ExpertLoad:
    """Counts of all mixtures, or of those that patterns name, also as this function returns them.

    Raises: InvalidArgumentError.
    """
    if isinstance(counts, tuple) and all(isinstance(of, tuple) and of and isinstance(of[0], str) for of in counts):
        counts = dict(counts)
    if not isinstance(counts, Mapping):
        return (("**", _layers(counts)),)
    if not counts or not all(isinstance(pattern, str) and pattern.strip("/") for pattern in counts):
        raise InvalidArgumentError(
            where="Search(expert_load=...)", expected="counts by patterns of modules, such as {'layer0/moe': [...]}",
            got=f"{counts!r:.80}", hint="write the name that the plan prints, or give the counts alone for all",
        )  # fmt: skip
    return tuple((pattern, _layers(of)) for pattern, of in counts.items())


def _layers(counts: object) -> tuple[tuple[float, ...], ...]:
    """A count for each expert of each layer. Raises: InvalidArgumentError."""
    try:
        layers = np.atleast_2d(np.asarray(counts, np.float64))
    except (TypeError, ValueError):
        layers = np.zeros(0)
    is_load = layers.ndim == 2 and layers.size and np.isfinite(layers).all() and (layers >= 0).all()
    if not is_load or not layers.sum(1).all():
        raise InvalidArgumentError(
            where="Search(expert_load=...)",
            expected="a count of 0 or more for each expert, or such a list for each layer", got=f"{counts!r:.80}",
            hint="sum jax.nn.one_hot of the experts chosen over the tokens of some batches",
        )  # fmt: skip
    return tuple(map(tuple, layers.tolist()))


@dataclasses.dataclass(frozen=True, slots=True)
class FollowedStep:
    """The step that another one follows: its name, a function to its latest plan, None before it has one, and its own
    function. `donates`: the other is made of the same function, and so takes over the state too.
    """

    name: str
    latest_plan: Callable[[], Plan | None]
    function: Callable[..., Any] | None = None
    donates: bool = False


def with_followed_layouts(request: PlanRequest, followed: FollowedStep, traced: TracedStep, name: str) -> PlanRequest:
    """The request with the mesh of a followed step's plan, or its stages, and its layouts for the leaves of its state.

    The leaves are the arguments of consecutive numbers with the state's shapes; else, where a step takes a part of the
    state (the model of a model and its optimizer), those of equal path, shape and type.
    Raises: InvalidArgumentError where the followed step has no plan or no argument matches its state.
    """
    where = f"{name}, plan={followed.name}"
    plan = followed.latest_plan()
    if plan is None:
        raise InvalidArgumentError(
            where=where,
            expected=f"{followed.name} to have a plan",
            got="none yet",
            hint=f"call {followed.name}, or {followed.name}.plan(state, batch), before {name}",
        )
    matched = _matched(plan, traced)
    if not matched:
        state = [v for v in plan.record.arguments if v.kind == "state"]
        raise InvalidArgumentError(
            where=where,
            expected=f"an argument with the {len(state)} state leaves of {followed.name}",
            got=f"arguments with {len(traced.in_avals)} leaves of other shapes",
            hint="pass the same state object to both steps",
        )
    in_host = tuple(i for i, v in matched if v.in_host)
    request = dataclasses.replace(request, in_host=in_host)
    if plan.record.pipeline is not None:
        return _with_stages(request, plan.record.pipeline, matched)
    fixed = tuple((i, v.layout) for i, v in matched)
    return dataclasses.replace(request, axis_sizes=plan.record.axis_sizes, fixed=fixed)


def _matched(plan: Plan, traced: TracedStep) -> tuple[tuple[int, PlannedValue], ...]:
    """The leaves of the followed state among those of a step, by number."""
    state, avals = [v for v in plan.record.arguments if v.kind == "state"], traced.in_avals
    shapes = [(v.shape, v.dtype) for v in state]
    for first in range(len(avals) - len(state) + 1):
        if [(tuple(a.shape), str(a.dtype)) for a in avals[first : first + len(state)]] == shapes:
            return tuple((first + i, v) for i, v in enumerate(state))
    by_path = {(v.path, v.shape, v.dtype): v for v in state}
    leaves = enumerate(zip(traced.in_paths, avals, strict=True))
    found = [(i, by_path.get((path, tuple(a.shape), str(a.dtype)))) for i, (path, a) in leaves]
    return tuple((i, v) for i, v in found if v is not None)


def _with_stages(
    request: PlanRequest, pipeline: PipelineRecord, matched: tuple[tuple[int, PlannedValue], ...]
) -> PlanRequest:
    """The request for the stages of a followed plan."""
    groups = pipeline.stages[: len(pipeline.stages) // pipeline.chunks]
    followed = FollowedStages(
        schedule=pipeline.schedule,
        group_axis_sizes=tuple(stage.axis_sizes for stage in groups),
        leaves=matched,
    )
    return dataclasses.replace(request, followed_stages=followed, num_stages=len(groups), chunks=pipeline.chunks)
