"""A step that runs on every device: its plans, its programs, and the calls of them."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.calls import nan_check, nnx_objects
from autopar.calls.aliasing import without_shared_memory
from autopar.calls.arguments import hashable, lies_as, on_one_device, put_copies, put_leaves
from autopar.calls.fast_path import FastPath
from autopar.calls.methods import OfInstances, keeping, without_self
from autopar.calls.process_batches import PlannedBatch, ProcessBatches, batch_word
from autopar.calls.signatures import Signature
from autopar.common import jax_compat
from autopar.common.cache_dir import cache_directory, default_directory
from autopar.common.gc_policy import collected_seldom
from autopar.common.progress import Progress
from autopar.compiler.memory_errors import check_given_plan_fits
from autopar.compiler.planner import check_plan, make_plan
from autopar.errors import BatchMismatchError, DonatedStateError, InvalidArgumentError, UnsupportedError
from autopar.executables.compiled_step import Compiled, CompiledPipeline, build, build_whole, lower_whole, put
from autopar.executables.lowered_step import Lowered
from autopar.executables.multiprocess import make_state, naming_the_lost
from autopar.executables.short_batches import for_short_batch
from autopar.frontend.donation import untied_arguments
from autopar.frontend.drop_shardings import placement_note
from autopar.frontend.tracing import abstract, flatten_arguments, impurity, name_of, trace, traced_once
from autopar.hardware.cluster import Cluster
from autopar.ir.jax_sharding import concrete_mesh, named_sharding
from autopar.ir.layout import even_layout
from autopar.ir.mesh import LogicalMesh
from autopar.ir.traced_step import TracedStep, is_same_step
from autopar.plan.cache import DiskCache, plan_key
from autopar.plan.file import decode, encode
from autopar.plan.options import PipelineOptions, PlanOptions
from autopar.plan.plan import Plan, Trees
from autopar.plan.schema import PlannedValue
from autopar.recipes import Recipe
from autopar.runtime.execution.dispatch import turn
from autopar.runtime.processes.agreement import agree
from autopar.sharding.rules import RuleBook

logger = logging.getLogger("autopar")

DEFAULT_CACHE = "default"  # the user's cache directory
_DEFAULTS = {"batch_argnums": (1,), "donate_argnums": (0,), "static_argnums": ()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `parallelize` was asked for; names as in its signature."""

    plan: Plan | None
    recipe: Recipe
    pipeline: PipelineOptions
    cluster: Cluster | None
    memory_limit_bytes: int | None
    batch_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    batch_argnames: tuple[str, ...]
    donate_argnames: tuple[str, ...]
    static_argnames: tuple[str, ...]
    follow: Step | None
    batch: str
    cache_dir: str | Path | None
    time_limit_s: float | None
    show_progress: bool


class Step:
    """A function that runs on every device. Made by `autopar.parallelize`."""

    __name__: str

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = name_of(function)
        self._function, self._asked = function, options
        self._signature = Signature(function, self.__name__)
        self._options = _numbered(options, self._signature)
        self._of_instances = OfInstances()
        self._compiled: dict[Any, Compiled | CompiledPipeline] = {}
        self._plans: dict[Any, tuple[TracedStep, Plan]] = {}
        self._short_batches: dict[Any, tuple[TracedStep, Plan]] = {}
        self._fast: FastPath | None = None
        self._takes_objects = False
        self._told: set[str] = set()
        self._disk = DiskCache(_cache_directory(options.cache_dir))
        self._rules: dict[Any, RuleBook] = {}
        self._batches = ProcessBatches(self.__name__, options.batch)
        self.last_progress: Progress | None = None

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; plans and compiles on the first call, and again for new shapes.

        NNX objects among the arguments are changed in place, as under `nnx.jit`.
        Raises: DonatedStateError when a state is used that an earlier step took over, and what `plan` raises.
        """
        if kwargs:
            args = self._signature.places(args, kwargs)
        if jax_compat.jit_is_disabled():
            return self._signature.caller(self._function)(*on_one_device(args))
        if self._takes_objects:
            return nnx_objects.run_and_write_back(self._run, args)
        return self._run(*args)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The step of an instance, where the function is a method: `self` is bound, static, and not counted by argnums.

        An NNX object is its method's first argument instead, as under `nnx.jit`.
        """
        if instance is None:
            return self
        if nnx_objects.is_object(instance):
            return functools.partial(self, instance)
        step = self._of_instances.get(instance, lambda of: Step(without_self(self._function, of), self._asked))
        return BoundStep(step, instance)

    def __repr__(self) -> str:
        plan = self._latest_plan()
        return f"<Step {self.__name__}{self._signature}, {'not planned yet' if plan is None else repr(plan)}>"

    def _run(self, *args: Any) -> Any:
        if jax.process_count() > 1:
            args = self._with_whole_batch(args, is_run=True)
        if nan_check.is_on():
            return self._run_checked(args)
        fast = self._fast
        if fast is None or self._options.static_argnums:
            return self._call_slowly(args)
        leaves, tree = jax.tree.flatten(args)
        if tree != fast.tree:
            return self._call_slowly(args)
        with turn:
            if not fast.takes(leaves):
                return self._call_slowly(args)
            try:
                results = fast.run(leaves)
            except (TypeError, ValueError, RuntimeError):
                # The executable refuses new shapes, other layouts and deleted arrays: the slow path handles or names
                # them. What it refuses for any other reason is the user's to see.
                if not self._differs(args, leaves, fast.compiled):
                    raise
                return self._call_slowly(args)
        return jax.tree.unflatten(fast.compiled.traced.out_tree, results)

    def _run_checked(self, args: tuple[Any, ...]) -> Any:
        """Runs the step and looks at its results. Raises: NonFiniteError."""
        if not self._takes_objects and any(map(nnx_objects.holds_objects, args)):
            self._takes_objects = True
            return self(*args)
        with turn:
            dynamic = self._dynamic(args)
            self._refuse_unusable(dynamic, self._dynamic_names(len(args)))
            compiled, given = self._compile(args), jax.tree.leaves(tuple(dynamic))
            with nan_check.switched_off():
                here = compiled.across is None
                results = compiled.run(put_copies(given, compiled) if here else put_leaves(given, compiled))
            nan_check.check(compiled.traced, given, results)
        return jax.tree.unflatten(compiled.traced.out_tree, results)

    def _call_slowly(self, args: tuple[Any, ...]) -> Any:
        if any(map(nnx_objects.holds_objects, args)):
            self._takes_objects = True
            return self(*args)
        with turn:
            dynamic = self._dynamic(args)
            self._refuse_unusable(dynamic, self._names(len(dynamic)))
            compiled, given = self._compile(args), jax.tree.leaves(tuple(dynamic))
            self._fast = fast = FastPath(compiled, given)
            constants = compiled.constants if isinstance(compiled, Compiled) else [c for _, c in compiled.fixed]
            results = fast.run(without_shared_memory(put_leaves(given, compiled), compiled.donated, constants))
        return jax.tree.unflatten(compiled.traced.out_tree, results)

    def _differs(self, args: tuple[Any, ...], leaves: Sequence[Any], compiled: Compiled | CompiledPipeline) -> bool:
        """Whether arguments are not what an executable was compiled for: shapes, layouts, or deleted arrays."""
        if self._compiled.get(self._key(args)) is not compiled:
            return True
        return not all(map(lies_as, leaves, compiled.leaf_shardings))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or `jax.ShapeDtypeStruct`s); nothing is run."""
        args = self._with_whole_batch(nnx_objects.split(self._signature.places(args, kwargs)))
        with turn:
            return self._planned(args)[1]

    def compile(self, *args: Any, **kwargs: Any) -> Compiled | CompiledPipeline:
        """Plans and compiles for arguments of these shapes, ahead of time."""
        return self._compile(self._with_whole_batch(nnx_objects.split(self._signature.places(args, kwargs))))

    def _compile(self, args: tuple[Any, ...]) -> Compiled | CompiledPipeline:
        with turn:
            key = self._key(args)
            if key not in self._compiled:
                traced, plan = self._planned(args)
                self._compiled[key] = self._build(traced, plan).ready()
            return self._compiled[key]

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Plans and lowers for arguments of these shapes, as `jax.jit(f).lower` does: then `.compile()`, `.as_text()`.

        Raises: what planning raises, NotEnoughDevicesError.
        """
        args = nnx_objects.split(self._signature.places(args, kwargs))
        with turn:
            key, (traced, plan) = self._key(args), self._planned(args)
            whole = None
            if plan.record.pipeline is None:
                whole = lower_whole(traced, plan, plan.concrete_mesh(), self._rule_book())
                keep_rules(self)

        def compiling() -> Compiled | CompiledPipeline:
            with turn:
                if key not in self._compiled:
                    compiled = whole.compile() if whole is not None else self._build(traced, plan)
                    self._compiled[key] = compiled.ready()
                return self._compiled[key]

        return Lowered(plan=plan, whole=whole, compiling=compiling)

    def init(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function(*args)`, which makes the state, so that each device makes only its own part of it.

        Before the step has a plan the state is laid out by itself: every leaf split as evenly as it can be. The first
        call of the step then moves it to where its plan wants it.
        """
        trees: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(*nnx_objects.split((function(*values),)))
            trees.append(tree)
            return leaves

        shapes = jax.eval_shape(flat, *args)
        shardings = self._state_shardings(shapes)
        with turn:
            if jax.process_count() > 1 or len({s.mesh for s in shardings}) > 1:
                leaves = make_state(flat, shapes, shardings, args)
            else:
                leaves = jax.jit(flat, out_shardings=shardings)(*args)
        return nnx_objects.merged(jax.tree.unflatten(trees[0], leaves))

    def put_batch(self, data: Any, /, *, batch: str | None = None) -> Any:
        """Puts host data where the plan wants it. Before there is a plan the first call will do it.

        In a program of several processes the data are this process's rows of the batch or, the same in all, the whole
        of it; the first batch tells, or `batch`, as in `parallelize`.

        Raises: BatchMismatchError for a batch of another structure than the plan's; ProcessMismatchError where the
        processes' data do not fit together.
        """
        word = None if batch is None else batch_word(batch, f"{self.__name__}.put_batch(batch=...)")
        if (planned := self._latest_plan()) is not None:
            self._check_structure(data, planned)
        for path, leaf in jax.tree_util.tree_flatten_with_path(data)[0]:
            abstract(leaf, f"batch{jax.tree_util.keystr(path)}")
        leaves, tree = jax.tree.flatten(data)
        if jax.process_count() > 1:
            placed = naming_the_lost(lambda: self._batches.put(word, leaves, tree, self._planned_batches))
            return jax.tree.unflatten(tree, placed)
        if planned is None:
            return data
        shapes, shardings = self._planned_batches()[-1]
        if [tuple(np.shape(leaf)) for leaf in leaves] != shapes:
            return data  # another shape has another plan: the call makes it and puts the batch itself
        return jax.tree.unflatten(tree, put(leaves, shardings()))

    def _check_structure(self, data: Any, planned: Plan) -> None:
        """Raises: BatchMismatchError for a batch of another structure than the plan's."""
        assert planned.trees is not None, "a step's plan has its trees"
        trees = [planned.trees.arguments[i] for i in sorted(planned.trees.batch)]
        expected = trees[0] if len(trees) == 1 else jax.tree_util.treedef_tuple(trees)
        if jax.tree.structure(data) != expected:
            raise BatchMismatchError(
                where=f"{self.__name__}.put_batch",
                expected=f"a batch with the structure {expected}",
                got=f"{jax.tree.structure(data)}",
                hint="pass what the step takes in batch_argnums, or plan for the new batch first",
            )

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function as it was written under plain `jax.jit`, on one device; donates nothing.

        State that lies on the stages of a pipeline, or in the memory of the host, is brought together first. NNX
        objects stay as they are.
        """
        args = self._signature.places(args, kwargs)
        if any(map(nnx_objects.holds_objects, args)):
            return nnx_objects.merged(self.plain(*nnx_objects.split(args)).result)
        static, args = self._options.static_argnums, on_one_device(args)
        names = self._names(len(args))
        function = self._signature.caller(self._function)
        return jax.jit(lambda *a: nnx_objects.pure(function, a, names), static_argnums=static)(*args)

    # Inside

    def _with_whole_batch(self, args: Sequence[Any], *, is_run: bool = False) -> tuple[Any, ...]:
        """Arguments with the whole batch, where this process passed its own rows of it. NNX objects are split."""
        if jax.process_count() == 1 or any(map(nnx_objects.holds_objects, args)):
            return tuple(args)
        examples = nnx_objects.batch_argnums(args, self._options.batch_argnums, _DEFAULTS["batch_argnums"])
        whole = naming_the_lost(
            lambda: self._batches.arguments(
                self._dynamic(args),
                sorted(self._numbers(examples, len(args))),
                names=lambda: self._dynamic_names(len(args)),
                planned=self._planned_batches,
                is_run=is_run,
            )
        )
        dynamic, static = iter(whole), self._options.static_argnums
        return tuple(arg if i in static else next(dynamic) for i, arg in enumerate(args))

    def _planned_batches(self) -> list[PlannedBatch]:
        """The batch of each plan, the latest last."""

        def shardings(plan: Plan, values: Sequence[PlannedValue]) -> list[NamedSharding]:
            plan.check_devices()
            return [plan.sharding_of(v) for v in values]

        found = []
        for plan in [self._options.plan, *(plan for _, plan in self._plans.values())]:
            if plan is not None:
                values = (
                    plan.argument_leaves(plan.trees.batch)
                    if plan.trees
                    else [v for v in plan.record.arguments if v.kind == "batch"]
                )
                found.append(PlannedBatch([v.shape for v in values], functools.partial(shardings, plan, values)))
        return found

    def _dynamic(self, args: Sequence[Any]) -> list[Any]:
        return [a for i, a in enumerate(args) if i not in self._options.static_argnums]

    def _numbers(self, argnums: Sequence[int], num_args: int) -> tuple[int, ...]:
        """Argument numbers counted over the dynamic arguments only."""
        dynamic = [i for i in range(num_args) if i not in self._options.static_argnums]
        return tuple(dynamic.index(i) for i in argnums if i in dynamic)

    def _names(self, num_args: int) -> list[str]:
        known = self._signature.names
        return [known[i] if i < len(known) else f"argument {i}" for i in range(num_args)]

    def _dynamic_names(self, num_args: int) -> list[str]:
        return [name for i, name in enumerate(self._names(num_args)) if i not in self._options.static_argnums]

    def _key(self, args: Sequence[Any]) -> Any:
        names = self._names(len(args))
        static_argnums = self._options.static_argnums
        leaves, tree, paths, _ = flatten_arguments(self._dynamic(args), self._dynamic_names(len(args)))
        avals = [abstract(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        static = tuple(hashable(a, names[i]) for i, a in enumerate(args) if i in static_argnums)
        types = tuple((a.shape, str(a.dtype), a.weak_type) for a in avals)
        return tree, types, static, jax_compat.trace_context()

    def _check_argnums(self, num_args: int) -> None:
        for name in ("batch_argnums", "donate_argnums", "static_argnums"):
            given = getattr(self._options, name)
            outside = [i for i in given if not 0 <= i < self._signature.most(num_args)]
            if outside and given != _DEFAULTS.get(name):
                raise InvalidArgumentError(
                    where=f"{self.__name__}, {name}={given}",
                    expected=f"numbers of its {num_args} arguments, from 0",
                    got=f"{outside[0]}",
                    hint="count positional arguments from 0; static ones count too, the self of a method does not",
                )

    def _traced(self, args: tuple[Any, ...]) -> tuple[TracedStep, Trees]:
        self._check_argnums(len(args))
        options, dynamic = self._options, self._dynamic(args)
        static = {i: a for i, a in enumerate(args) if i in options.static_argnums}
        function, all_names = self._signature.caller(self._function), self._names(len(args))

        def bound(*values: Any) -> Any:
            rest = iter(values)
            given = [static[i] if i in static else next(rest) for i in range(len(args))]
            return nnx_objects.pure(function, given, all_names)

        bound.__name__ = self.__name__
        names = self._dynamic_names(len(args))
        donated = nnx_objects.donate_argnums(args, options.donate_argnums, _DEFAULTS["donate_argnums"])
        examples = nnx_objects.batch_argnums(args, options.batch_argnums, _DEFAULTS["batch_argnums"])
        donate = self._numbers(donated if options.follow is None else (), len(args))
        batch = self._numbers(examples, len(args))
        traced = trace(bound, dynamic, names=names, donate=donate, batch=batch)
        if any(map(nnx_objects.is_split, dynamic)):
            traced = nnx_objects.tie_objects(traced, dynamic, donate)
            donate = tuple(sorted({traced.argument_of[leaf] for leaf in traced.donated}))
            for sentence in nnx_objects.idle_optimizers(traced, dynamic, names):
                self._tell(sentence)
        for sentence in untied_arguments(traced, names, donate):
            self._tell(sentence)
        trees = Trees(
            arguments=tuple(map(nnx_objects.public_tree, dynamic)),
            names=tuple(names),
            donated=frozenset(donate),
            batch=frozenset(batch),
        )
        return traced, trees

    def _tell(self, sentence: str) -> None:
        """Warns the user, once."""
        if sentence not in self._told:
            self._told.add(sentence)
            logger.warning("%s: %s", self.__name__, sentence)

    def _planned(self, args: tuple[Any, ...]) -> tuple[TracedStep, Plan]:
        args = nnx_objects.split(args)
        key = self._key(args)
        if key in self._short_batches:
            return self._short_batches[key]
        if key not in self._plans:
            progress = Progress(f"autopar {self.__name__}", show=self._options.show_progress)
            with collected_seldom():
                with progress.pass_("trace"):
                    traced, trees = self._traced(args)
                known = self._known_plan(traced)
                if known is not None:
                    self._plans[key] = traced, dataclasses.replace(known, trees=trees)
                    return self._plans[key]
                short = self._short_batch_plan(traced, progress)
                if short is not None:
                    self._short_batches[key] = traced, dataclasses.replace(short, trees=trees)
                    return self._short_batches[key]
                if self._plans:
                    logger.warning("%s: arguments of new shapes or types: planning again", self.__name__)
                if jax.process_count() > 1:
                    plan = self._agreed_plan(traced, trees, progress)
                else:
                    plan = self._given_plan(traced, trees) or self._search(traced, trees, progress)
            if traced.placements:
                note = placement_note(traced.placements)
                if not self._plans:
                    logger.warning("%s: %s", self.__name__, note)
                plan = plan.with_note(note)
            self._plans[key] = (traced, plan)
            self.last_progress = progress
        return self._plans[key]

    def _known_plan(self, traced: TracedStep) -> Plan | None:
        """A plan made for the same computation before: on other weak types, or in another configuration of jax."""
        return next((plan for other, plan in self._plans.values() if is_same_step(other, traced)), None)

    def _short_batch_plan(self, traced: TracedStep, progress: Progress) -> Plan | None:
        """A plan made before, carried over to a batch of fewer examples."""
        for other, plan in reversed(self._plans.values()):
            with progress.pass_("short batch"):
                found = for_short_batch(plan, other, traced, self._rule_book())
            if found is not None:
                keep_rules(self)
                return found
        return None

    def _agreed_plan(self, traced: TracedStep, trees: Trees, progress: Progress) -> Plan:
        """The plan of process 0, in all processes.

        Raises: ProcessMismatchError where the processes do not mean the same step, ProcessLostError.
        """
        given = self._given_plan(traced, trees)
        asked = dataclasses.replace(self._options, plan=None, follow=None, cache_dir=None, show_progress=False)
        leaves = (sorted(traced.tied.items()), sorted(traced.donated), sorted(traced.batch))
        same = traced.fingerprint, jax_compat.lowering_flags()
        parts = (*same, leaves, repr(asked), encode(given.record) if given is not None else None)
        with progress.pass_("plan of process 0"):
            data = agree(
                self.__name__,
                plan_key(parts),
                lambda: encode((given or self._search(traced, trees, progress)).record),
            )
        return given or Plan(decode(data, "the plan of process 0"), trees)

    def _given_plan(self, traced: TracedStep, trees: Trees) -> Plan | None:
        plan = self._options.plan
        if plan is None:
            return None
        check_plan(plan, traced)
        check_given_plan_fits(plan, self._options.memory_limit_bytes)
        return dataclasses.replace(plan, trees=trees)

    def _wanted(self, traced: TracedStep) -> tuple[Cluster, PlanOptions]:
        """What is asked of the search."""
        options = self._options
        followed = options.follow._latest_plan() if options.follow is not None else None
        cluster = options.cluster or (followed.cluster if followed is not None else Cluster.local())
        wanted = PlanOptions(
            memory_limit_bytes=options.memory_limit_bytes,
            time_limit_s=options.time_limit_s,
            pipeline=options.pipeline,
            binding=options.recipe.binding,
            recompute=options.recipe.recompute,
            pins=options.recipe.pins,
        )
        if options.follow is not None:
            wanted = _followed(wanted, options.follow, traced, self.__name__)
        return cluster, wanted

    def _search(self, traced: TracedStep, trees: Trees, progress: Progress) -> Plan:
        cluster, wanted = self._wanted(traced)
        leaves = (sorted(traced.tied.items()), sorted(traced.donated), sorted(traced.batch))
        names = (traced.name, traced.in_paths, traced.out_paths)
        key = plan_key((traced.fingerprint, jax_compat.lowering_flags(), leaves, names, cluster, wanted))
        with progress.pass_("cache"):
            known = self._disk.load_plan(key, lambda record: check_plan(Plan(record), traced))
        if known is not None:
            return Plan(known, trees)  # and the step was traced to the same jaxpr before, in another process
        with progress.pass_("purity"):
            impure = impurity(traced)
        if impure is not None:
            self._tell(impure)
            traced = traced_once(traced)
        plan = make_plan(traced, trees, cluster, wanted, self._rule_book(), progress)
        self._disk.save_plan(key, plan.record)
        keep_rules(self)
        return plan

    def _rule_book(self) -> RuleBook:
        flags = jax_compat.lowering_flags()
        if flags not in self._rules:
            self._rules[flags] = self._disk.load_rules()
        return self._rules[flags]

    def _latest_plan(self) -> Plan | None:
        if self._plans:
            return next(reversed(self._plans.values()))[1]
        return None

    def _build(self, traced: TracedStep, plan: Plan) -> Compiled | CompiledPipeline:
        compiled = build(traced, plan, self._rule_book())
        keep_rules(self)
        return compiled

    def _refuse_unusable(self, dynamic: Sequence[Any], names: Sequence[str]) -> None:
        """Raises: DonatedStateError for deleted arrays, UnsupportedError inside of another transformation."""
        leaves, _, paths, _ = flatten_arguments(dynamic, names)
        for leaf, path in zip(leaves, paths, strict=True):
            if jax_compat.is_tracer(leaf):
                raise UnsupportedError(
                    where=f"{self.__name__}, {path}",
                    expected="an array",
                    got="a traced value: the step is called inside of jax.jit, jax.grad or another transformation",
                    hint="transform the plain function and decorate the result",
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise DonatedStateError(
                    where=f"{self.__name__}, {path}",
                    expected="an array that still holds its data",
                    got="one that an earlier step took over (it was donated)",
                    hint=f"use the state that the step returned: state, ... = {self.__name__}(state, ...); or pass "
                    "donate_argnums=() to keep both",
                )

    def _state_shardings(self, leaves: Sequence[Any]) -> list[NamedSharding]:
        """The plan's shardings for leaves of these shapes, or an even split where there is no plan yet."""
        shapes = [(tuple(x.shape), str(x.dtype)) for x in leaves]
        for _, plan in reversed(self._plans.values()):
            assert plan.trees is not None, "a step's plan has its trees"
            # The whole state, or one of the arguments that it is made of.
            for which in (plan.trees.donated, *(frozenset({i}) for i in sorted(plan.trees.donated))):
                planned = plan.argument_leaves(which)
                if [(v.shape, v.dtype) for v in planned] == shapes:
                    plan.check_devices()
                    return [plan.sharding_of(v) for v in planned]
        cluster = self._options.plan.cluster if self._options.plan else self._options.cluster or Cluster.local()
        line = LogicalMesh(axis_sizes=(cluster.num_devices,))
        devices = concrete_mesh(line)
        return [named_sharding(even_layout(tuple(x.shape), line), devices) for x in leaves]


def _numbered(options: Options, signature: Signature) -> Options:
    """Options with numbers in place of the names of arguments."""
    numbers: dict[str, Any] = {}
    for kind in ("batch", "donate", "static"):
        names, given = getattr(options, f"{kind}_argnames"), getattr(options, f"{kind}_argnums")
        if names:
            kept = () if given == _DEFAULTS[f"{kind}_argnums"] else given
            named = signature.numbers(f"{kind}_argnames", names)
            numbers |= {f"{kind}_argnums": tuple(dict.fromkeys((*kept, *named))), f"{kind}_argnames": ()}
    return dataclasses.replace(options, **numbers)


class BoundStep(Step):
    """The step of an instance, which it keeps: what the step itself has is shared by all that are made of it."""

    __slots__ = ("_instance",)

    def __init__(self, step: Step, instance: Any) -> None:
        self.__dict__ = step.__dict__
        self._instance = instance


def compile_on(step: Step, mesh: Mesh, *args: Any) -> Compiled:
    """Compiles a step for the devices of a mesh that need not be here; what comes back cannot be run."""
    traced, plan = step._planned(args)
    if plan.record.pipeline is not None:
        raise UnsupportedError(
            where=step.__name__,
            expected="a plan without stages",
            got=f"{len(plan.record.pipeline.stages)} stages",
            hint="compile for other hardware under a plan of one stage and one micro-batch",
        )
    return build_whole(traced, plan, mesh, step._rule_book())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanningRequest:
    """A step traced for its arguments, and what is asked of the search for it. `arguments` without the static ones."""

    traced: TracedStep
    trees: Trees
    cluster: Cluster
    options: PlanOptions
    rules: RuleBook
    arguments: tuple[Any, ...]
    show_progress: bool


def planning_request_of(step: Step, *args: Any) -> PlanningRequest:
    """What a step that searches would ask of the search for these arguments, of which none is a shape alone.

    Raises: InvalidArgumentError where the step has a plan, a recipe or another step's layout already, or gets shapes;
    DonatedStateError, UnsupportedError.
    """
    args = nnx_objects.split(args)
    options, dynamic = step._options, step._dynamic(args)
    given = {"a plan": options.plan is not None, "a recipe": options.recipe != Recipe(), "follow": options.follow}
    for what, is_given in given.items():
        if is_given:
            raise InvalidArgumentError(
                where=f"{step.__name__}, made by parallelize",
                expected="a step whose plan is searched for",
                got=f"one with {what}",
                hint="leave out plan and follow of parallelize; a recipe is timed beside the search's plans with "
                "tune(step, ..., beside={'mine': recipe})",
            )
    names = step._dynamic_names(len(args))
    leaves, _, paths, _ = flatten_arguments(dynamic, names)
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise InvalidArgumentError(
                where=f"{step.__name__}, {path}",
                expected="an array: the step is run",
                got=f"a shape, {leaf}",
                hint="pass the state and the batch themselves; autopar.plan and step.plan take shapes",
            )
    step._refuse_unusable(dynamic, names)
    traced, trees = step._traced(args)
    impure = impurity(traced)
    if impure is not None:
        step._tell(impure)
        traced = traced_once(traced)
    cluster, wanted = step._wanted(traced)
    return PlanningRequest(
        traced=traced,
        trees=trees,
        cluster=cluster,
        options=wanted,
        rules=step._rule_book(),
        arguments=tuple(dynamic),
        show_progress=options.show_progress,
    )


def check_is_step(where: str, step: object) -> None:
    """Raises: InvalidArgumentError for what `parallelize` did not make."""
    if not isinstance(step, Step):
        name = where.rpartition(".")[2]
        raise InvalidArgumentError(
            where=where,
            expected="a step made by autopar.parallelize",
            got=type(step).__name__,
            hint=f"decorate the function first: {name}(autopar.parallelize(fun), ...)",
        )


def keep_rules(step: Step) -> None:
    """Keeps the sharding rules that were asked for on disk."""
    step._disk.save_rules(step._rule_book())


def on_cluster(step: Step, cluster: Cluster) -> Step:
    """The same step, planned for a cluster."""
    return Step(function_of(step), dataclasses.replace(step._options, cluster=cluster))


def function_of(step: Step) -> Callable[..., Any]:
    """The function that a step was made of."""
    return keeping(step._function, step._instance) if isinstance(step, BoundStep) else step._function


def _followed(wanted: PlanOptions, step: Step, traced: TracedStep, name: str) -> PlanOptions:
    """Options that give the leaves of a followed step's state, found by shape and order, their layouts there."""
    plan = step._latest_plan()
    if plan is None:
        raise InvalidArgumentError(
            where=f"{name}, follow={step.__name__}",
            expected=f"{step.__name__} to have a plan",
            got="none yet",
            hint=f"call {step.__name__}, or {step.__name__}.plan(state, batch), before {name}",
        )
    if plan.record.pipeline is not None:
        raise UnsupportedError(
            where=f"{name}, follow={step.__name__}",
            expected="a step that runs as one program on all devices",
            got=f"one whose state lies on {len(plan.record.pipeline.stages)} stages",
            hint=f"leave follow out: {name} then plans for itself, and its calls move the state to where it wants it",
        )
    state = [v for v in plan.record.arguments if v.kind == "state"]
    avals = traced.in_avals
    shapes = [(v.shape, v.dtype) for v in state]
    for first in range(len(avals) - len(state) + 1):
        window = avals[first : first + len(state)]
        if [(tuple(a.shape), str(a.dtype)) for a in window] == shapes:
            fixed = tuple((first + i, v.layout) for i, v in enumerate(state))
            in_host = tuple(first + i for i, v in enumerate(state) if v.in_host)
            return dataclasses.replace(wanted, axis_sizes=plan.record.axis_sizes, fixed=fixed, in_host=in_host)
    # Or a part of it, such as the model of a model and its optimiser.
    by_path = {(v.path, v.shape, v.dtype): v for v in state}
    named = zip(traced.in_paths, avals, strict=True)
    found = [(i, by_path.get((path, tuple(a.shape), str(a.dtype)))) for i, (path, a) in enumerate(named)]
    if any(v is not None for _, v in found):
        fixed = tuple((i, v.layout) for i, v in found if v is not None)
        in_host = tuple(i for i, v in found if v is not None and v.in_host)
        return dataclasses.replace(wanted, axis_sizes=plan.record.axis_sizes, fixed=fixed, in_host=in_host)
    raise InvalidArgumentError(
        where=f"{name}, follow={step.__name__}",
        expected=f"an argument with the {len(state)} state leaves of {step.__name__}",
        got=f"arguments with {len(avals)} leaves of other shapes",
        hint="pass the same state object to both steps",
    )


def _cache_directory(given: str | Path | None) -> Path | None:
    if given is None:
        return None
    return default_directory() if given == DEFAULT_CACHE else cache_directory(given)
