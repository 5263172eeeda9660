"""The public API: the decorator, and planning for absent hardware."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import InvalidArgumentError
from autopar.execute.batches import checked_mode
from autopar.execute.call_arguments import DEFAULT_ARGNUMS, StepOptions
from autopar.execute.nnx_objects import unwrapped
from autopar.execute.plan_sources import DEFAULT_CACHE
from autopar.execute.search import FIELDS as SEARCH_FIELDS
from autopar.execute.search import Search, checked_search
from autopar.hardware.cluster import Cluster
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan
from autopar.recipes import Recipe
from autopar.recipes.parse import as_recipe
from autopar.step import Step
from autopar.step_views import followed, function_of


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    plan: Plan | Recipe | Step | str | None = None,
    cluster: Cluster | str | None = None,
    search: Search | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    batch_argnames: str | Sequence[str] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    batch_axis: Any = None,
    batch: str | None = None,
    cache_dir: str | Path | None = DEFAULT_CACHE,
    **unknown: Any,
) -> Any:
    """Makes a pure training step run on every device, in the layout that the search finds best.

    Args:
        fun: The step, any pure function of arrays in pytrees, or a step made before, to be planned anew: of its options
            it keeps which arguments hold examples, are donated and are static, unless they are named here. Without it,
            a decorator is returned. NNX objects among its arguments may be changed in place, as under `nnx.jit`.
        plan: A plan to run unchanged; a recipe (`autopar.recipes`, `autopar.constrain`) that constrains the search,
            also as text (`"fsdp"`, `"tensor_parallel(size=8)"`); another step, whose layout of the state this one
            adopts, stages included: for an evaluation step, which donates nothing, and for the same function on
            batches of another length, which donates as that step does. None searches freely.
        cluster: The hardware to plan for, also as text (`dgx-h100x2`, `tpu-v5e:2x4`, a file of `Cluster.save`: see
            `Cluster.parse`); None takes the devices of this program.
        search: The wishes for a plan and the effort of the search, as `autopar.Search(num_microbatches=8)`.
        batch_argnums: The arguments whose leaves hold examples. By default the first one after argument 0 and those
            like it (`step(params, opt_state, batch)`) that has arrays other than keys of random numbers (typed, or of
            uint32 with a last dimension of 2), and those after it with as many rows in each array; behind several NNX
            objects, all arguments with arrays after the last.
        donate_argnums: The arguments that the step replaces; their memory is reused for the results that replace them.
            By default argument 0, those like it and others in front of the batch, of which a result is the old value
            changed, as gradients are not. Where there are NNX objects, the default is those that the step changes.
        static_argnums: Arguments that are not arrays; each value of them is a step of its own. By default none.
        batch_argnames, donate_argnames, static_argnames: The same by name, also for keyword-only arguments; the first
            two replace the defaults, or extend given argument numbers.
        batch_axis: The dimension of the leaves of a batch that counts examples: a number, or a tree of numbers as
            `in_axes` of `jax.vmap` has them, None for a leaf without examples; of several such arguments, a tuple of
            these. By default the first dimension, or, where a loop of the step goes over that one, the next one along
            which examples are independent: a step that accumulates over a batch of shape (A, B, ...), or that steps
            through time.
        batch: The batch that each process of several passes: "local", its own rows (the batch is the rows of all, in
            process order), "global", the whole batch, identical in all; None decides by the first batch.
        cache_dir: Directory in which plans are kept between runs; None keeps nothing.

    Raises: InvalidArgumentError, UnsupportedError.
    """
    _check_known(unknown)
    plan = as_recipe(plan) if isinstance(plan, str) else plan
    if isinstance(cluster, str):
        # Without a number of devices it is what None means: jax's devices are not asked for before the first call.
        cluster = None if cluster == "local" else Cluster.parse(cluster)
    _check_kinds(plan, cluster, cache_dir)
    search = Search() if search is None else checked_search(search)
    if isinstance(plan, Plan):
        _check_beside_plan(plan, cluster, search)
    roles = {
        "batch": (batch_argnums, batch_argnames),
        "donate": (donate_argnums, donate_argnames),
        "static": (static_argnums, static_argnames),
    }
    options = StepOptions(
        **_kinds_of_plan(plan),
        search=search,
        cluster=cluster,
        **_roles(roles, fun),
        batch_axis=fun._options.batch_axis if batch_axis is None and isinstance(fun, Step) else batch_axis,
        batch=checked_mode(batch, "parallelize(batch=...)"),
        cache_dir=cache_dir,
    )
    if fun is not None:
        return _make_step(fun, options)
    return lambda function: _make_step(function, dataclasses.replace(options, **_roles(roles, function)))


def _check_known(unknown: Mapping[str, Any]) -> None:
    """Raises: InvalidArgumentError for options that there are not, with the place of those that `Search` has."""
    for name, value in unknown.items():
        known = [p for p in inspect.signature(parallelize).parameters if p not in ("fun", "unknown")]
        expected = "the options " + ", ".join(known)
        if name in SEARCH_FIELDS:
            expected = f"search=autopar.Search({name}={value!r:.40})"
        elif name in ("in_shardings", "out_shardings"):
            expected = "layouts that the search keeps as plan=autopar.constrain(...): docs/from-pjit.md"
        elif name == "follow":
            expected = f"plan={value!r:.40}: a step to follow, a recipe or a plan"
        raise InvalidArgumentError(
            where=f"parallelize({name}=...)", expected=expected, got=f"{name}={value!r:.40}",
            hint="wishes for the search are one value, autopar.Search; recipes, plans and steps to follow are plan=",
        )  # fmt: skip


def _check_kinds(plan: object, cluster: object, cache_dir: object) -> None:
    """Raises: InvalidArgumentError for values of other types."""
    of_plan = (
        "load one with autopar.Plan.load(path), take a recipe of autopar.recipes, such as 'fsdp', or name a step that "
        "parallelize made"
    )
    kinds: tuple[tuple[str, Any, tuple[type, ...], str], ...] = (
        ("plan", plan, (Plan, Recipe, Step), of_plan),
        ("cluster", cluster, (Cluster,), "make one with autopar.Cluster.local(), .preset(...) or .parse(text)"),
        ("cache_dir", cache_dir, (str, Path), "name a directory, or None to keep nothing"),
    )
    for option, value, kind, hint in kinds:
        if value is not None and not isinstance(value, kind):
            raise InvalidArgumentError(
                where=f"parallelize({option}=...)",
                expected=f"{' or '.join(k.__name__ for k in kind)}, or None",
                got=f"{type(value).__name__} ({value!r:.40})",
                hint=hint,
            )


def _kinds_of_plan(plan: Plan | Recipe | Step | None) -> dict[str, Any]:
    """The three options of a step that `plan` of `parallelize` stands for."""
    return {
        "plan": plan if isinstance(plan, Plan) else None,
        "recipe": plan.request if isinstance(plan, Recipe) else PlanRequest(),
        "follow": followed(plan) if isinstance(plan, Step) else None,
    }


def _check_beside_plan(plan: Plan, cluster: Cluster | None, search: Search) -> None:
    """Raises: InvalidArgumentError for wishes that a given plan has decided, and for another cluster than its own."""
    wishes = search.of_plans()
    if cluster is not None:
        own, given = ((c.num_devices, c.device.name) for c in (plan.cluster, cluster))
        wishes |= {} if own == given else {"cluster": given}
    for name, value in wishes.items():
        option = f"{name}=..." if name == "cluster" else f"search=Search({name}=...)"
        raise InvalidArgumentError(
            where=f"parallelize(plan=..., {option})",
            expected="a plan, which is run as it is, or wishes for a new one",
            got=f"a plan, and {name}={value!r:.60}",
            hint="leave the option out: the plan tells what it was made with; or leave out plan to plan anew "
            "(plan=None of a step that has one)",
        )


def as_step(step: Callable[..., Any] | Step) -> Step:
    """What `parallelize` made as it is, and a plain function with the defaults of `parallelize`."""
    parallel = step if isinstance(step, Step) else parallelize(step)
    assert isinstance(parallel, Step), "given a function, it makes a step"
    return parallel


def with_search(step: Step, search: Search) -> Step:
    """A step with its own options, and the wishes of a search in place of its own."""
    updated = step._options.search.updated(search)
    return Step(function_of(step), dataclasses.replace(step._options, search=updated))


def _make_step(fun: Any, options: StepOptions) -> Step:
    function = unwrapped(function_of(fun) if isinstance(fun, Step) else fun)
    if not callable(function):
        raise InvalidArgumentError(
            where="parallelize(fun)", expected="a function", got=type(fun).__name__, hint="decorate the training step"
        )
    if options.follow is not None and options.follow.function is function:
        options = dataclasses.replace(options, follow=dataclasses.replace(options.follow, donates=True))
    return Step(function, options)


def plan(fun: Callable[..., Any] | Step, *args: Any, cluster: Cluster | str, **options: Any) -> Plan:
    """The plan of a step for hardware that need not be here; nothing is run and nothing is allocated.

    `cluster` may be text as on the command line: `dgx-h100x2`, `tpu-v5e:2x4`. `args` are arrays or shapes
    (`jax.ShapeDtypeStruct`), `options` those of `parallelize`. A step that `parallelize` made keeps its own, but
    for those named here.
    """
    options = {"cluster": cluster, **options}
    given = planned_with(fun, **options) if isinstance(fun, Step) else parallelize(fun, **options)
    assert isinstance(given, Step), "given a function, it makes a step"
    return given.plan(*args)


def planned_with(step: Step, **options: Any) -> Step:
    """A step with its own options but for those named, which are those of `parallelize`.

    A plan, a recipe or a step to follow that is named takes the place of its own, with the wishes that this decides
    and with the number of micro-batches and the schedule that were wished for beside its own.
    """
    given = parallelize(function_of(step), **options)
    assert isinstance(given, Step), "given a function, it makes a step"
    own, other = step._options, given._options
    search = own.search
    if "plan" in options:
        decided = search.of_plans() if other.plan is not None else ()
        is_anew = own.has_recipe or own.plan is not None or other.follow is not None
        pipeline = ("num_microbatches", "schedule")
        named = [name for name in pipeline if is_anew or getattr(other.recipe, name) is not None]
        search = search.without(*decided, *named)
    elif own.plan is not None:
        _check_beside_plan(own.plan, other.cluster, other.search)
    fields = {name: getattr(other, name) for name in options if name not in ("plan", "search")}
    if "plan" in options:
        fields |= {name: getattr(other, name) for name in ("plan", "recipe", "follow")}
    return Step(function_of(step), dataclasses.replace(own, **fields, search=search.updated(other.search)))


def _roles(given: Mapping[str, tuple[Any, Any]], fun: Any) -> dict[str, Any]:
    """Which arguments hold examples, are donated and are static, by number and by name: as given, else as a step made
    before has them, else the defaults.
    """
    found: dict[str, Any] = {}
    for kind, (numbers, names) in given.items():
        by_number, by_name = f"{kind}_argnums", f"{kind}_argnames"
        if numbers is None and names is None and isinstance(fun, Step):
            found |= {option: getattr(fun._options, option) for option in (by_number, by_name)}
        else:
            found[by_number] = DEFAULT_ARGNUMS[by_number] if numbers is None else _argnums(numbers)
            found[by_name] = () if names is None else _argnames(names)
    return found


def _argnums(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _argnames(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
