"""`Step`, a function that runs on every device. A call is: trace, plan, compile, place the arguments, run.

On methods each instance has a step of its own, with `self` bound and not counted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from autopar.common import jax_compat
from autopar.common.progress import Progress
from autopar.errors import InvalidArgumentError
from autopar.execute import nan_check, nnx_objects
from autopar.execute.batches import StepBatches
from autopar.execute.call import FastPath, trace_call
from autopar.execute.call_arguments import CallArguments, Signature, StepOptions, WarnOnce
from autopar.execute.compiled_step import CompiledStep, Lowered, build, lower_whole
from autopar.execute.placement import has_sharding, init_state, on_one_device, put_copies, put_leaves, state_shardings
from autopar.execute.plan_sources import PlanSources, StepPlans
from autopar.execute.step_leaves import results_in_tree, without_shared_memory
from autopar.frontend.static_leaves import RawLeaves, set_apart
from autopar.frontend.tracing import name_of
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import Effort, checked_effort, checked_time_limit_s
from autopar.plan.plan import Plan, Trees
from autopar.plan.schema import OptionValue
from autopar.runtime.execute import turn
from autopar.train.monitoring.step_profile import RECORDED_PROGRAM_OPTIONS, StepProfile, profiled

_Value = TypeVar("_Value")


class PerInstance:
    """A value for each instance, by identity, dropped when the instance is collected."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, Any]] = {}

    def get(self, instance: Any, make: Callable[[Callable[[], Any]], _Value]) -> _Value:
        """The value of an instance, made once by `make` of a weak accessor; it may keep no other reference."""
        key = id(instance)
        if key not in self._values:
            try:
                reference: Any = weakref.ref(instance, lambda _: self._values.pop(key, None))
            except TypeError:  # an instance without weak references stays for good

                def reference() -> Any:
                    return instance

            self._values[key] = reference, make(reference)
        value: _Value = self._values[key][1]
        return value


def without_self(function: Callable[..., Any], instance: Callable[[], Any]) -> Callable[..., Any]:
    """A function with its first argument bound to what `instance()` gives."""

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        owner = instance()
        if owner is None:
            raise ReferenceError(f"the instance whose method {name_of(function)} is traced is gone: keep it")
        return function(owner, *args, **kwargs)

    signature = inspect.signature(function)
    # Functions have no such attribute by their type; `inspect` reads it.
    bound.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return bound


def keep_instance_alive(function: Callable[..., Any], instance: Any) -> Callable[..., Any]:
    """The same function, with a reference to an instance."""

    @functools.wraps(function)
    def keeping(*args: Any, _instance: Any = instance, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return keeping


class Step:
    """A function that runs on every device. Made by `autopar.parallelize`."""

    __name__: str

    def __init__(self, function: Callable[..., Any], options: StepOptions) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = name = name_of(function)
        self._function, self._unnumbered_options = function, options
        self._signature = Signature(function, name)
        self._options = options = options.with_numbers(self._signature)
        self._arguments = CallArguments(name, self._signature, options)
        self._warn = WarnOnce(name)
        self._sources = PlanSources(name, options, self._warn)
        self._plans = StepPlans(name, self._sources, show_progress=options.show_progress)
        self._batches = StepBatches(self._arguments, options, self._plans)
        self._compiled: dict[Any, CompiledStep] = {}
        self._compiled_with_more_options: dict[Any, CompiledStep] = {}
        self._more_options: Mapping[str, OptionValue] | None = None
        self._fast: FastPath | None = None
        self._takes_objects = False
        self._of_instances = PerInstance()

    @property
    def last_progress(self) -> Progress | None:
        """The progress of the latest planning, with its seconds by pass; None before there is a plan."""
        return self._plans.last_progress

    @property
    def latest_plan(self) -> Plan | None:
        """The plan of the latest call or `plan`; None before there is one."""
        return self._plans.latest()

    @property
    def last_called_s(self) -> float | None:
        """When the latest call gave its program to the devices, by `time.perf_counter`; None where that is unknown."""
        return None if self._fast is None else self._fast.called_s

    # Calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; plans and compiles on the first call, and again for new shapes.

        NNX objects among the arguments are changed in place, as under `nnx.jit`. Raises: DonatedStateError for a state
        that was donated to an earlier step; the errors of `plan`.
        """
        if kwargs:
            args = self._signature.places(args, kwargs)
        if jax_compat.jit_is_disabled():
            return self._signature.caller(self._function)(*on_one_device(args))
        if self._takes_objects:
            return nnx_objects.run_and_write_back(self._run, args)
        return self._run(*args)

    def _run(self, *args: Any) -> Any:
        if jax.process_count() > 1:
            args = self._batches.with_whole_batch(args, is_run=True)
        if nan_check.is_on():
            return self._run_checked(args)
        fast = self._fast
        if fast is None or self._options.static_argnums:
            return self._run_slowly(args)
        raw_leaves, structure = jax.tree.flatten(args)
        leaves = fast.raw.dynamic(raw_leaves) if structure == fast.raw.structure else None
        if leaves is None:
            return self._run_slowly(args)
        with turn:
            if not fast.accepts(leaves):
                return self._run_slowly(args)
            try:
                results = fast.run(leaves)
            except (TypeError, ValueError, RuntimeError):
                # The executable refuses new shapes, other layouts and deleted arrays: the slow path handles or names
                # them. What it refuses for any other reason is the user's to see.
                if not self._needs_other_program(args, leaves, fast.compiled):
                    raise
                return self._run_slowly(args)
        return results_in_tree(fast.compiled.traced, results)

    def _run_slowly(self, args: tuple[Any, ...]) -> Any:
        """Runs the step on arguments of any shapes and placement; later calls like it take the fast path."""
        if any(map(nnx_objects.holds_objects, args)):
            self._takes_objects = True
            return self(*args)
        with turn:
            compiled, leaves = self._compiled_for(args)
            self._fast = fast = FastPath(compiled, leaves, RawLeaves.of(args))
            placed = put_leaves(leaves, compiled)
            results = fast.run(without_shared_memory(placed, compiled.donated, compiled.own_constants))
        return results_in_tree(compiled.traced, results)

    def _compiled_for(self, args: tuple[Any, ...]) -> tuple[CompiledStep, list[Any]]:
        """The compiled step, and the leaves of the dynamic arguments. Raises: DonatedStateError, UnsupportedError."""
        dynamic = self._arguments.dynamic(args)
        self._arguments.check_usable(dynamic, self._arguments.dynamic_names(len(args)))
        compiled = self._compile(args)
        return compiled, jax.tree.leaves(tuple(dynamic))

    def _run_checked(self, args: tuple[Any, ...]) -> Any:
        """Runs the step and checks that its results are finite. Raises: NonFiniteError."""
        if not self._takes_objects and any(map(nnx_objects.holds_objects, args)):
            self._takes_objects = True
            return self(*args)
        with turn:
            compiled, leaves = self._compiled_for(args)
            with nan_check.switched_off():
                in_one_process = compiled.across is None
                results = compiled.run(put_copies(leaves, compiled) if in_one_process else put_leaves(leaves, compiled))
            nan_check.check(compiled.traced, leaves, results)
        return results_in_tree(compiled.traced, results)

    def _needs_other_program(self, args: tuple[Any, ...], leaves: Sequence[Any], compiled: CompiledStep) -> bool:
        """Whether arguments differ from those of the executable: in shapes, in layouts, or as deleted arrays."""
        is_other = self._compiled.get(self._arguments.key(args)) is not compiled
        return is_other or not all(map(has_sharding, leaves, compiled.leaf_shardings))

    # Before calls

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays, or `jax.ShapeDtypeStruct` each); nothing is run."""
        args = self._batches.with_whole_batch(nnx_objects.split(self._signature.places(args, kwargs)))
        with turn:
            return self._planned(args)[1]

    def replan(
        self, *args: Any, effort: str = Effort.THOROUGH, time_limit_s: float | None = None, **kwargs: Any
    ) -> Plan:
        """Plans again for arguments of these shapes, with more effort or time; returns the faster of both plans.

        The next call compiles a new plan and moves the state to its layouts. `effort` and `time_limit_s` as in
        `autopar.Search`. Raises: what planning raises, InvalidArgumentError for a step that was given its plan.
        """
        if self._options.plan is not None:
            raise InvalidArgumentError(
                where=f"{self.__name__}.replan",
                expected="a step whose plan is searched for",
                got="one that was given a plan",
                hint="leave plan out: autopar.parallelize(fun, ...)",
            )
        again = checked_effort(f"{self.__name__}.replan(effort=...)", effort)
        time_limit_s = checked_time_limit_s(f"{self.__name__}.replan(time_limit_s=...)", time_limit_s)
        args = self._batches.with_whole_batch(nnx_objects.split(self._signature.places(args, kwargs)))
        with turn:
            key, _ = self._arguments.key(args), self._planned(args)
            if self._plans.improve(key, again, time_limit_s):
                self._compiled.clear()
                self._compiled_with_more_options.clear()
                self._fast = None
            return self._planned(args)[1]

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Plans and lowers for arguments of these shapes, as `jax.jit(f).lower` does: then `.compile()`, `.as_text()`.

        Raises: what planning raises, NotEnoughDevicesError.
        """
        args = nnx_objects.split(self._signature.places(args, kwargs))
        with turn:
            key, (traced, plan) = self._arguments.key(args), self._planned(args)
            lowered_whole = None
            if plan.record.pipeline is None:
                self._sources.check_purity(traced)
                lowered_whole = lower_whole(traced, plan, plan.concrete_mesh(), self._sources.rules())
                self._sources.save_rules()

        def compiling() -> CompiledStep:
            with turn:
                if key not in self._compiled:
                    compiled = lowered_whole.compile() if lowered_whole is not None else self._build(traced, plan)
                    self._compiled[key] = compiled.ready()
                return self._compiled[key]

        return Lowered(plan=plan, whole=lowered_whole, compiling=compiling)

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        """Plans and compiles for arguments of these shapes, ahead of time."""
        return self._compile(self._batches.with_whole_batch(nnx_objects.split(self._signature.places(args, kwargs))))

    def init(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function(*args)`, which makes the state, so that each device makes only its own part of it.

        Before the step has a plan, every leaf is split as evenly as possible. The first call of the step then moves the
        state to the layouts of its plan.
        """
        return init_state(function, args, self.state_shardings)

    def state_shardings(self, leaves: Sequence[Any]) -> list[NamedSharding]:
        """The shardings that `init` gives to the leaves of a state, by a plan if there is one."""
        return state_shardings(leaves, self._plans, self._options)

    def put_batch(self, data: Any, /, *, batch: str | None = None) -> Any:
        """Places host data in the layouts of the plan. Without a plan, the first call places them.

        In a program of several processes the data are either this process's rows of the batch, or the whole batch in
        each process; the first batch determines this, or `batch`, as in `parallelize`.

        Raises: BatchMismatchError for a batch of another structure than the plan's; ProcessMismatchError where the
        processes' data do not match.
        """
        return self._batches.put(data, batch)

    def profile(self, *args: Any, **kwargs: Any) -> StepProfile:
        """Runs the step once under JAX's profiler: a profile beside the plan, with the `results` of the step.

        It is a call of the step: arguments are donated, and the step is planned and compiled first where it is not yet.
        The first run of a program is slower than later ones: profile a step after a few others. Of several processes
        each profiles its own devices, and all have to call this. On a GPU it compiles programs of its own, without CUDA
        graphs, whose kernels bear no names of operations. Kernels are then launched one by one, so that there are gaps
        between short ones; the first profile is of a first run, so that there the second one counts.
        """
        args = self._signature.places(args, kwargs)
        dynamic = self._arguments.dynamic(nnx_objects.split(args))
        self._arguments.check_usable(dynamic, self._arguments.dynamic_names(len(args)))
        options = RECORDED_PROGRAM_OPTIONS.get(jax.default_backend())
        with contextlib.nullcontext() if options is None else self._programs_with(options):
            plan, compiled = self.plan(*args), self.compile(*args)
            return profiled(plan.record, compiled.as_text(), self, args)

    def batch_shardings_for(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[NamedSharding] | None:
        """The layouts of the leaves of a batch with these shapes, in the latest plan for them; None without a plan."""
        return self._batches.shardings_for(shapes)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original function under plain `jax.jit`, on one device; donates nothing.

        State on the stages of a pipeline, or in the memory of the host, is gathered first. NNX objects are not changed.
        """
        args = self._signature.places(args, kwargs)
        if any(map(nnx_objects.holds_objects, args)):
            return nnx_objects.merged(self.plain(*nnx_objects.split(args)).result)
        args = on_one_device(args)
        return self._jitted(args)(*self._arguments.with_dynamic(args, self._arguments.dynamic(args)))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and types of the results as `jax.ShapeDtypeStruct`s, as of `jax.jit(f).eval_shape`; nothing is
        planned or run.
        """
        args = self._signature.places(args, kwargs)
        if any(map(nnx_objects.holds_objects, args)):
            return nnx_objects.merged(self.eval_shape(*nnx_objects.split(args)).result)
        return self._jitted(args).eval_shape(*self._arguments.with_dynamic(args, self._arguments.dynamic(args)))

    def _jitted(self, args: tuple[Any, ...]) -> Any:
        """The original function under plain `jax.jit`."""
        names, function = self._arguments.names(len(args)), self._signature.caller(self._function)
        static = self._options.static_argnums
        return jax.jit(lambda *a: set_apart(nnx_objects.pure(function, a, names)), static_argnums=static)

    def plain_leaves(self, *args: Any) -> list[Any]:
        """The leaves of the arguments that are not static, on one device."""
        return jax.tree.leaves(tuple(self._arguments.dynamic(on_one_device(self._signature.places(args, {})))))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The step of an instance, where the function is a method: `self` is bound, static, and not counted by argnums.

        An NNX object is the method's first argument instead, as under `nnx.jit`.
        """
        if instance is None:
            return self
        if nnx_objects.is_object(instance):
            return functools.partial(self, instance)
        step = self._of_instances.get(
            instance, lambda of: Step(without_self(self._function, of), self._unnumbered_options)
        )
        return BoundStep(step, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return self  # as of any function

    def __repr__(self) -> str:
        plan = self._plans.latest()
        return f"<Step {self.__name__}{self._signature}, {'not planned yet' if plan is None else repr(plan)}>"

    # Tracing, planning, compiling

    def _traced(self, args: tuple[Any, ...]) -> tuple[TracedStep, Trees]:
        return trace_call(self._signature.caller(self._function), args, self._arguments, self._warn)

    def _planned(self, args: tuple[Any, ...]) -> tuple[TracedStep, Plan]:
        args = nnx_objects.split(args)
        return self._plans.of(self._arguments.key(args), lambda: self._traced(args))

    def _compile(self, args: tuple[Any, ...]) -> CompiledStep:
        with turn:
            key = self._arguments.key(args)
            programs = self._compiled if self._more_options is None else self._compiled_with_more_options
            if key not in programs:
                traced, plan = self._planned(args)
                programs[key] = self._build(traced, plan.with_compiler_options(self._more_options or {})).ready()
            return programs[key]

    @contextlib.contextmanager
    def _programs_with(self, options: Mapping[str, OptionValue]) -> Iterator[None]:
        """Inside, the step runs programs compiled with these of XLA's options too; they are kept for another time."""
        with turn:  # no other thread's call, profile or `replan` sees the programs change
            fast, self._fast, self._more_options = self._fast, None, options
            try:
                yield
            finally:
                self._fast, self._more_options = fast, None

    def _build(self, traced: TracedStep, plan: Plan) -> CompiledStep:
        self._sources.check_purity(traced)
        compiled = build(traced, plan, self._sources.rules(), self._plans.progress())
        self._sources.save_rules()
        return compiled


class BoundStep(Step):
    """The step of an instance, with a reference to it. All bound steps of an instance share the plans of one step."""

    __slots__ = ("_instance",)

    def __init__(self, step: Step, instance: Any) -> None:
        self.__dict__ = step.__dict__
        self._instance = instance
