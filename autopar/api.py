"""The public API: the decorator, and planning for absent hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.calls.batch_mode import checked_mode
from autopar.calls.nnx_objects import unwrapped
from autopar.calls.plan_sources import DEFAULT_CACHE
from autopar.calls.step_options import DEFAULT_ARGNUMS, StepOptions
from autopar.common.units import bytes_of_text
from autopar.cost.compiler_options import requested_options
from autopar.errors import InvalidArgumentError, expect_one_of
from autopar.hardware.cluster import Cluster
from autopar.ir.traced_step import ShardingsInCode
from autopar.plan.options import AS_WRITTEN, Attention, Effort, checked_effort, checked_remat, checked_time_limit_s
from autopar.plan.plan import Plan
from autopar.recipes import Recipe
from autopar.recipes.parse import as_recipe
from autopar.recipes.recipe import plan_request
from autopar.step import Step
from autopar.step_views import followed, function_of

# Options of `parallelize` that a request has under the same name, whatever plan is wished for.
_SEARCHED = (
    "attention", "effort", "constraints", "memory_limit_bytes", "time_limit_s", "per_microbatch", "remat",
    "compiler_options",
)  # fmt: skip


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    plan: Plan | Recipe | str | None = None,
    cluster: Cluster | str | None = None,
    num_microbatches: int | str = "auto",
    schedule: str = "auto",
    attention: str = Attention.AUTO,
    constraints: str = ShardingsInCode.ADVICE,
    remat: str | Sequence[str] | None = None,
    per_microbatch: str | Sequence[str] = (),
    memory_limit_bytes: int | str | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    batch_argnames: str | Sequence[str] | None = None,
    batch_axis: Any = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    follow: Step | None = None,
    batch: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = DEFAULT_CACHE,
    effort: str = Effort.DEFAULT,
    time_limit_s: float | None = None,
    show_progress: bool = True,
) -> Any:
    """Makes a pure training step run on every device, in the layout that the search finds best.

    Args:
        fun: The step, any pure function of arrays in pytrees, or a step made before, to be planned anew: of its options
            it keeps which arguments hold examples, are donated and are static, unless they are named here. Without it,
            a decorator is returned. NNX objects among its arguments may be changed in place, as under `nnx.jit`.
        plan: A plan to run unchanged, or a recipe (`autopar.recipes`, `autopar.constrain`) that constrains the search,
            also as text (`"fsdp"`, `"tensor_parallel(size=8)"`); None searches freely.
        cluster: The hardware to plan for, also as text (`dgx-h100x2`, `tpu-v5e:2x4`, a file of `Cluster.save`: see
            `Cluster.parse`); None takes the devices of this program.
        num_microbatches: The number of equal parts of the batch; "auto" leaves it to the search.
        schedule: The order in which the stages of a pipeline run micro-batches: one of
            `autopar.runtime.pipeline.standard_schedules.SCHEDULES`, or "auto".
        attention: The program of attention that is found in the step, however it is spelled. "kernel": that of the
            device, which keeps no scores, where it has the form and type (cuDNN's on a GPU, jax's flash attention on a
            TPU). "blockwise": the same, and blocks of queries elsewhere. "as written": the step's own operations, whose
            scores go through memory. "auto": the one by which the step is predicted to be fastest, and that fits. The
            plan's notes name the choice, and what stands in the way of a kernel.
        constraints: How layouts in the step's code (`with_sharding_constraint`, `reshard`, `out_sharding=`) are used:
            "advice": they make one more candidate, which is taken where it is faster than the search's plan; "pins":
            they are kept; "ignore": they are dropped.
        remat: What is computed again for the backward pass; None: what makes the step fastest, with `jax.checkpoint` in
            the step as advice. Or the values named by `jax.ad_checkpoint.checkpoint_name` that its regions save: "as
            written", those of their policies; "auto", those with which the plan is predicted to be the fastest that
            fits in memory (several searches); or a list of names. What policies save by other rules stays saved.
        per_microbatch: Modules, by patterns as those of `autopar.constrain`, that may mix the examples of their
            micro-batch: batch statistics, a router's loss and capacity, dynamic scales (`"BatchNorm"`, `"*/router"`).
            Where a plan has micro-batches, its results are then those of gradient accumulation; its notes say so.
        memory_limit_bytes: Memory of one device that the step may use, a number or text (`80GB`, `16GiB`); None: 90 %
            of the device's memory.
        batch_argnums: The arguments whose leaves hold examples, by default argument 1; where that is or holds an NNX
            object, all arguments with arrays after the last object.
        batch_axis: The dimension of their leaves that counts examples: a number, or a tree of numbers as `in_axes` of
            `jax.vmap` has them, None for a leaf without examples; of several such arguments, a tuple of these. By
            default the first dimension, or, where a loop of the step goes over that one, the next one along which
            examples are independent: a step that accumulates over a batch of shape (A, B, ...), or that steps through
            time.
        donate_argnums: The arguments that the step replaces, by default argument 0; their memory is reused for the
            results that replace them. Where there are NNX objects, the default is those that the step changes.
        static_argnums: Arguments that are not arrays; each value of them is a step of its own. By default none.
        batch_argnames, donate_argnames, static_argnames: The same by name, also for keyword-only arguments; the first
            two replace the defaults, or extend given argument numbers.
        follow: Another step whose layout of the state this one adopts, stages included (for an evaluation step). Not
            beside `plan`.
        batch: The batch that each process of several passes: "local", its own rows (the batch is the rows of all, in
            process order), "global", the whole batch, identical in all; None decides by the first batch.
        compiler_options: XLA's options by name, as `jax.jit` takes them, beside those that plans set for the cluster's
            platform (`plan.compiler_options`), or in their place; None in place of a value leaves one to XLA.
        cache_dir: Directory in which plans are kept between runs; None keeps nothing.
        effort: How far the search goes on: "default", until no plan can be faster by 0.005 %; "quick", by two percent,
            on meshes of one axis or two, and with pipelines only where no program fits;
            "thorough", with every mesh and with pipelines, whatever they can still gain. `plan.gap` is what another
            plan could save at most, `step.replan()` searches on, and the plan's rejections list what was not tried.
        time_limit_s: Seconds that planning may take, except for the pass in progress; then the best plan so far is
            taken (with 0 the first one that fits), and its notes list the untried rest. None: searches end by proof
            or by rounds.
        show_progress: Whether a progress line is shown on a terminal; elsewhere the log has it now and then.

    Raises: InvalidArgumentError, UnsupportedError.
    """
    plan = as_recipe(plan)
    if isinstance(cluster, str):
        # Without a number of devices it is what None means: jax's devices are not asked for before the first call.
        cluster = None if cluster == "local" else Cluster.parse(cluster)
    if isinstance(memory_limit_bytes, str):
        memory_limit_bytes = _size("parallelize(memory_limit_bytes=...)", memory_limit_bytes)
    kinds: tuple[tuple[str, Any, tuple[type, ...], str], ...] = (
        (
            "plan",
            plan,
            (Plan, Recipe),
            "load one with autopar.Plan.load(path), or take a recipe of autopar.recipes, such as 'fsdp'",
        ),
        ("cluster", cluster, (Cluster,), "make one with autopar.Cluster.local(), .preset(...) or .parse(text)"),
        ("follow", follow, (Step,), "name a step that parallelize made"),
        (
            "memory_limit_bytes",
            memory_limit_bytes,
            (int,),
            "give bytes of one device, or text such as 80GB",
        ),
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
    hint = "leave it out to have the faster of a kernel and the operations as written"
    expect_one_of("parallelize(attention=...)", attention, Attention, hint)
    hint = "leave it out to have shardings in the code weighed beside the search's"
    expect_one_of("parallelize(constraints=...)", constraints, ShardingsInCode, hint)
    if memory_limit_bytes is not None and memory_limit_bytes <= 0:
        raise InvalidArgumentError(
            where="parallelize(memory_limit_bytes=...)", expected="a positive number of bytes for one device",
            got=repr(memory_limit_bytes), hint="leave it out to use the device's own memory",
        )  # fmt: skip
    if plan is not None and follow is not None:
        raise InvalidArgumentError(
            where="parallelize(plan=..., follow=...)", expected="a plan or recipe, or a step to follow",
            got=f"a {type(plan).__name__.lower()}, and follow={follow!r:.60}",
            hint="leave out plan: a step that follows has the layouts of the other one's state",
        )  # fmt: skip
    wanted_options = requested_options(compiler_options)
    if isinstance(plan, Plan):
        planned_for, given = (None if c is None else (c.num_devices, c.device.name) for c in (plan.cluster, cluster))
        _check_beside_plan(
            cluster=(given or planned_for, planned_for),
            num_microbatches=(num_microbatches, "auto"),
            schedule=(schedule, "auto"),
            per_microbatch=(_patterns(per_microbatch), ()),
            attention=(attention, Attention.AUTO),
            constraints=(constraints, ShardingsInCode.ADVICE),
            remat=(remat, None),
            compiler_options=(wanted_options, ()),
        )
    recipe = plan if isinstance(plan, Recipe) else Recipe()
    request = dataclasses.replace(plan_request(recipe, num_microbatches, schedule), attention=Attention(attention))
    request = dataclasses.replace(request, effort=checked_effort("parallelize(effort=...)", effort))
    roles = {
        "batch": (batch_argnums, batch_argnames),
        "donate": (donate_argnums, donate_argnames),
        "static": (static_argnums, static_argnames),
    }
    options = StepOptions(
        plan=plan if isinstance(plan, Plan) else None,
        request=dataclasses.replace(
            request,
            constraints=ShardingsInCode(constraints),
            memory_limit_bytes=memory_limit_bytes,
            time_limit_s=checked_time_limit_s("parallelize(time_limit_s=...)", time_limit_s),
            per_microbatch=_patterns(per_microbatch),
            remat=AS_WRITTEN if remat is None else checked_remat(remat),
            scan_recompute="" if remat == AS_WRITTEN else None,
            compiler_options=wanted_options,
        ),
        has_recipe=recipe != Recipe(),
        cluster=cluster,
        **_roles(roles, fun),
        batch_axis=fun._options.batch_axis if batch_axis is None and isinstance(fun, Step) else batch_axis,
        follow=None if follow is None else followed(follow),
        batch=checked_mode(batch, "parallelize(batch=...)"),
        cache_dir=cache_dir,
        show_progress=show_progress,
    )
    if fun is not None:
        return _make_step(fun, options)
    return lambda function: _make_step(function, dataclasses.replace(options, **_roles(roles, function)))


def _check_beside_plan(**wishes: tuple[Any, Any]) -> None:
    """Raises: InvalidArgumentError for options, each beside its default, that a given plan has decided."""
    for name, (value, default) in wishes.items():
        if value != default:
            raise InvalidArgumentError(
                where=f"parallelize(plan=..., {name}=...)",
                expected="a plan, which is run as it is, or wishes for a new one",
                got=f"a plan, and {name}={value!r:.60}",
                hint="leave the option out: the plan tells what it was made with; or leave out plan to plan anew",
            )


def as_step(step: Callable[..., Any] | Step) -> Step:
    """What `parallelize` made as it is, and a plain function with the defaults of `parallelize`."""
    parallel = step if isinstance(step, Step) else parallelize(step)
    assert isinstance(parallel, Step), "given a function, it makes a step"
    return parallel


def with_search(step: Step, *, effort: str | None = None, memory_limit_bytes: int | str | None = None) -> Step:
    """A step with its own options except those named here. Raises: InvalidArgumentError, as `parallelize`."""
    given: dict[str, Any] = {
        name: x for name, x in (("effort", effort), ("memory_limit_bytes", memory_limit_bytes)) if x is not None
    }
    checked = parallelize(function_of(step), **given)
    assert isinstance(checked, Step), "given a function, it makes a step"
    named = {name: getattr(checked._options.request, name) for name in given}
    request = dataclasses.replace(step._options.request, **named)
    return Step(function_of(step), dataclasses.replace(step._options, request=request))


def _make_step(fun: Any, options: StepOptions) -> Step:
    function = unwrapped(function_of(fun) if isinstance(fun, Step) else fun)
    if not callable(function):
        raise InvalidArgumentError(
            where="parallelize(fun)", expected="a function", got=type(fun).__name__, hint="decorate the training step"
        )
    return Step(function, options)


def plan(fun: Callable[..., Any] | Step, *args: Any, cluster: Cluster | str, **options: Any) -> Plan:
    """The plan of a step for hardware that need not be here; nothing is run and nothing is allocated.

    `cluster` may be text as on the command line: `dgx-h100x2`, `tpu-v5e:2x4`. `args` are arrays or shapes
    (`jax.ShapeDtypeStruct`), `options` those of `parallelize`. A step that `parallelize` made keeps its own, but
    for those named here.
    """
    if isinstance(fun, Step):
        return planned_with(fun, cluster=cluster, **options).plan(*args)
    given = parallelize(fun, cluster=cluster, **options)
    assert isinstance(given, Step), "given a function, it makes a step"
    return given.plan(*args)


def planned_with(step: Step, **options: Any) -> Step:
    """A step with its own options but for those named, which are those of `parallelize`; `cluster` is always named."""
    options = _own_wishes(step, as_recipe(options.get("plan"))) | options
    given = parallelize(function_of(step), **options)
    assert isinstance(given, Step), "given a function, it makes a step"
    return _with_options(step, given, options)


def _own_wishes(step: Step, plan: Plan | Recipe | None) -> dict[str, Any]:
    """The micro-batches and the schedule that a step without a recipe names, as far as a plan leaves them open."""
    own = step._options
    if own.has_recipe or own.plan is not None or isinstance(plan, Plan):
        return {}
    of_recipe = (plan or Recipe()).request
    wishes = {name: getattr(own.request, name) for name in ("num_microbatches", "schedule")}
    return {name: x for name, x in wishes.items() if x is not None and getattr(of_recipe, name) is None}


def _with_options(step: Step, given: Step, named: Collection[str]) -> Step:
    """A step on the cluster of another one, with the options of that one which are named.

    Raises: InvalidArgumentError where named wishes for a plan would replace the step's own.
    """
    own, other = step._options, given._options
    wishes = sorted({"num_microbatches", "schedule"}.intersection(named))
    if "plan" not in named and wishes and (own.has_recipe or own.plan is not None):
        raise InvalidArgumentError(
            where="autopar.plan(step, ...)", expected=f"a step without a recipe of its own, or plan= beside {wishes}",
            got="a step that parallelize(plan=...) made", hint="name the recipe here too: plan=autopar.recipes...",
        )  # fmt: skip
    is_anew = "plan" in named or bool(wishes)
    request = other.request if is_anew else own.request
    searched = {name: getattr((other if name in named else own).request, name) for name in _SEARCHED}
    names = {field.name for field in dataclasses.fields(StepOptions)}.intersection(named) - {"plan"}
    fields = {name: getattr(other, name) for name in (names | {"plan", "has_recipe"} if is_anew else names)}
    return Step(
        function_of(step),
        dataclasses.replace(
            own, **fields | {"cluster": other.cluster, "request": dataclasses.replace(request, **searched)}
        ),
    )


def _size(where: str, text: str) -> int:
    nbytes = bytes_of_text(text)
    if nbytes is None:
        raise InvalidArgumentError(
            where=where, expected="a size, such as 80GB, 16GiB or 1000000", got=repr(text),
            hint="kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB of 1024",
        )  # fmt: skip
    return nbytes


def _patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    patterns = _argnames(value)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern.strip("/"):
            raise InvalidArgumentError(
                where="parallelize(per_microbatch=...)", expected="patterns of modules, such as 'BatchNorm'",
                got=repr(pattern), hint="write the name that the error or the plan prints, or '**' for all",
            )  # fmt: skip
    return patterns


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
