"""The plans of a step by the shapes of its arguments, and their sources: the user, the cache on disk, the search, or
process 0 of several.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.common.files import cache_directory, default_directory
from autopar.common.progress import Progress, rare_garbage_collection
from autopar.errors import InvalidArgumentError
from autopar.execute.call_arguments import StepOptions, WarnOnce
from autopar.execute.search import with_followed_layouts
from autopar.execute.smaller_batch import fewer_examples, for_short_batch
from autopar.frontend.drop_shardings import placement_note
from autopar.frontend.fingerprints import module_fingerprint
from autopar.frontend.tracing import IMPURE, checked_when_traced_again
from autopar.hardware.cluster import Cluster
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import ShardingsInCode, TracedStep, is_same_step
from autopar.ops.kernels.known import entries
from autopar.passes.example_axis import with_example_dims
from autopar.passes.smaller_step import num_examples
from autopar.passes.split_scan import divisors
from autopar.plan.cache import DiskCache, plan_key
from autopar.plan.options import Effort, PlanRequest
from autopar.plan.plan import Plan, Trees, decode, encode
from autopar.plan.schema import PlanRecord
from autopar.runtime.agreement import agree
from autopar.search.materialize import check_plan
from autopar.search.memory_errors import check_given_plan_fits
from autopar.search.planner import make_plan

DEFAULT_CACHE = "default"  # the user's cache directory
logger = logging.getLogger("autopar")


class PlanSources:
    """Plans for one step, and the sharding rules on which they depend; both are kept in the cache on disk."""

    def __init__(self, name: str, options: StepOptions, warn: WarnOnce) -> None:
        self._name, self._options, self._warn = name, options, warn
        self._disk = DiskCache(_cache_directory(options.cache_dir))
        self._rules: dict[Any, RuleBook] = {}
        # By the jaxpr, which is kept so that its id stays its own: the step, and what was kept of plans for it on disk.
        self._searched_for: dict[int, TracedStep] = {}
        self._kept: dict[int, dict[str, PlanRecord]] = {}
        self._impurities: dict[int, str] = {}

    def plan(self, traced: TracedStep, trees: Trees, progress: Progress, *, is_shorter: bool = False) -> Plan:
        """The plan for a traced step; in a program of several processes that of process 0.

        `is_shorter`: the step has a plan for more examples, so that these are cut into as many of the micro-batches
        that are requested as divide them. Raises: the errors of the search; ProcessMismatchError for different steps;
        ProcessLostError.
        """
        given = self._given_plan(traced, trees)

        def made() -> Plan:
            return given or self._searched(traced, trees, progress, self._divided(traced) if is_shorter else None)

        if jax.process_count() == 1:
            return made()
        inputs = (encode(given.record) if given is not None else None), is_shorter
        agreed = self._of_process_0(traced, trees, progress, inputs, made)
        return given or agreed

    def _divided(self, traced: TracedStep) -> tuple[Cluster, PlanRequest]:
        """What is requested, with as many of the micro-batches as divide the examples."""
        cluster, request = self.request(traced)
        wanted = request.num_microbatches
        if wanted is None:
            return cluster, request
        number = max(n for n in divisors(num_examples(traced)) if n <= wanted)
        return cluster, dataclasses.replace(request, num_microbatches=number)

    def again(
        self,
        traced: TracedStep,
        trees: Trees,
        progress: Progress,
        effort: Effort,
        time_limit_s: float | None,
        *,
        is_shorter: bool = False,
    ) -> Plan:
        """The plan of another search with more effort or time; in a program of several processes that of process 0.

        `is_shorter`: as of `plan`.
        """
        cluster, request = self._divided(traced) if is_shorter else self.request(traced)
        requested = cluster, dataclasses.replace(request, effort=effort, time_limit_s=time_limit_s)
        if jax.process_count() == 1:
            return self._searched(traced, trees, progress, requested)
        return self._of_process_0(
            traced, trees, progress, repr(requested), lambda: self._searched(traced, trees, progress, requested)
        )

    def _of_process_0(
        self,
        traced: TracedStep,
        trees: Trees,
        progress: Progress,
        inputs: Any,
        make: Callable[[], Plan],
    ) -> Plan:
        """What `make` makes in process 0, in all processes, whose steps, options and inputs have to be equal."""
        search = self._options.search.without("show_progress")
        options = dataclasses.replace(self._options, plan=None, follow=None, cache_dir=None, search=search)
        leaves = _roles_of_leaves(traced)
        computation = traced.fingerprint, jax_compat.lowering_flags()
        parts = (*computation, leaves, traced.layouts_in_code, repr(options), inputs)
        with progress.pass_("plan of process 0"):
            data = agree(
                self._name,
                plan_key(parts),
                lambda: encode(make().record),
            )
        return Plan(decode(data, "the plan of process 0"), trees)

    @property
    def constraints(self) -> ShardingsInCode:
        """What shardings in the step's code are to its plans."""
        return self._options.request.constraints

    def request(self, traced: TracedStep) -> tuple[Cluster, PlanRequest]:
        """The cluster to plan for, and what is requested of the search."""
        options = self._options
        followed = options.follow.latest_plan() if options.follow is not None else None
        cluster = options.cluster or (followed.cluster if followed is not None else Cluster.local())
        if options.follow is None:
            return cluster, options.request
        return cluster, with_followed_layouts(options.request, options.follow, traced, self._name)

    def _given_plan(self, traced: TracedStep, trees: Trees) -> Plan | None:
        plan = self._options.plan
        if plan is None:
            return None
        check_plan(plan, traced)
        check_given_plan_fits(plan, self._options.request.memory_limit_bytes)
        return dataclasses.replace(plan, trees=trees)

    def replanned(self, plan: Plan, traced: TracedStep, trees: Trees, request: PlanRequest) -> Plan:
        """The plan of the same step on the cluster of its plan under another request, as the step's options have it for
        anything but the layouts, stages and memory. Raises: the errors of the search.
        """
        own = self._options.request
        request = dataclasses.replace(
            request,
            time_limit_s=own.time_limit_s,
            attention=own.attention,
            effort=own.effort,
            constraints=own.constraints,
            per_microbatch=own.per_microbatch,
            expert_load=own.expert_load,
            compiler_options=own.compiler_options,
            remat=own.remat,
            scan_recompute=own.scan_recompute,
        )
        progress = Progress(f"autopar {self._name}, instead", show=self._options.show_progress)
        return self._searched(traced, trees, progress, (plan.cluster, request))

    def _searched(
        self,
        traced: TracedStep,
        trees: Trees,
        progress: Progress,
        requested: tuple[Cluster, PlanRequest] | None = None,
    ) -> Plan:
        """The plan of an earlier search for the same step, cluster and request, else that of a new search."""
        cluster, request = requested or self.request(traced)
        leaves = _roles_of_leaves(traced)
        written = traced.layouts_in_code
        kernels = entries()
        names = (traced.name, traced.in_paths, traced.out_paths, module_fingerprint(traced.jaxpr))
        key = plan_key(
            (traced.fingerprint, jax_compat.lowering_flags(), leaves, names, written, kernels, cluster, request)
        )
        with progress.pass_("cache"):
            cached = self._disk.load_plan(key, lambda record: check_plan(Plan(record), traced))
        if cached is not None:
            logger.info("%s: the plan of an earlier search, from the cache", traced.name)
            for note in cached.notes:
                if note.startswith(IMPURE):
                    self._warn(note)
            return Plan(cached, trees)  # and the step was traced to the same jaxpr before, in another process
        number = id(traced.jaxpr)
        if number not in self._searched_for:
            self._searched_for[number] = checked_when_traced_again(
                traced, lambda told: self._found_impure(number, told)
            )
        plan = make_plan(self._searched_for[number], trees, cluster, request, self.rules(), progress)
        self._disk.save_plan(key, plan.record)
        self._kept.setdefault(number, {})[key] = plan.record
        self.save_rules()
        return plan

    def with_example_dims(self, traced: TracedStep) -> TracedStep:
        """The step with the dimensions of its batch that count examples, where no option names them."""
        return traced if self._options.batch_axis is not None else with_example_dims(traced, self.rules())

    def check_purity(self, traced: TracedStep) -> None:
        """Warns of a function that is not pure, before the program of a plan that was searched for is compiled. Where
        the search was for micro-batches too, it was checked by then.
        """
        number = id(traced.jaxpr)
        if number in self._searched_for and not self._searched_for[number].is_pure():
            for key, record in self._kept.get(number, {}).items():
                # Whoever finds the plan in the cache traces the step once.
                self._disk.save_plan(key, Plan(record).with_note(self._impurities[number]).record)

    def _found_impure(self, number: int, told: str) -> None:
        self._impurities[number] = told
        self._warn(told)

    def rules(self) -> RuleBook:
        """The sharding rules under jax's configuration at the moment."""
        flags = jax_compat.lowering_flags()
        if flags not in self._rules:
            self._rules[flags] = self._disk.load_rules()
        return self._rules[flags]

    def save_rules(self) -> None:
        self._disk.save_rules(self.rules())


def _cache_directory(directory: str | Path | None) -> Path | None:
    if directory is None:
        return None
    return default_directory() if directory == DEFAULT_CACHE else cache_directory(directory)


def _roles_of_leaves(traced: TracedStep) -> tuple[list[Any], ...]:
    """What a plan depends on beside the computation: which leaves are state and batch, and where examples are."""
    return tuple(map(sorted, (traced.tied.items(), traced.donated, traced.batch, traced.example_dims.items())))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """The traced step, the cluster and the request of a search. `arguments` are without the static ones."""

    traced: TracedStep
    trees: Trees
    cluster: Cluster
    request: PlanRequest
    rules: RuleBook
    arguments: tuple[Any, ...]
    show_progress: bool


def check_leaves_plan_open(name: str, options: StepOptions) -> None:
    """Raises: InvalidArgumentError where a step already has a plan, a recipe or another step's layouts."""
    conflicts = {
        "a plan": options.plan is not None,
        "a recipe": options.has_recipe,
        "a step to follow": options.follow is not None,
    }
    for option, is_given in conflicts.items():
        if is_given:
            raise InvalidArgumentError(
                where=f"{name}, made by parallelize",
                expected="a step whose plan is searched for",
                got=f"one with {option}",
                hint="leave out plan of parallelize; a recipe is timed beside the search's plans with "
                "tune(step, ..., beside={'mine': recipe})",
            )


class StepPlans:
    """The plans of a step, by the key of the arguments for which they hold; `len` counts them without short batches.

    A new key gets, in this order: the plan of an equal trace (other weak types, another configuration of JAX on which
    no sharding rule depends); the plan of a batch with more examples, carried over; a plan of its own.
    """

    def __init__(self, name: str, sources: PlanSources, *, show_progress: bool) -> None:
        self._name, self._sources, self._show_progress = name, sources, show_progress
        self._by_key: dict[Any, tuple[TracedStep, Plan]] = {}
        self._short_batches: dict[Any, tuple[TracedStep, Plan]] = {}
        self._shorter: set[Any] = set()  # the keys of shorter batches that got a plan of their own
        self._flags: dict[Any, Any] = {}  # by key: JAX's configuration, as far as sharding rules depend on it
        self.last_progress: Progress | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def all(self) -> list[Plan]:
        """In the order in which they were made."""
        return [plan for _, plan in self._by_key.values()]

    def latest(self) -> Plan | None:
        return self.all()[-1] if self._by_key else None

    def progress(self) -> Progress:
        """A new progress line of the step."""
        return Progress(f"autopar {self._name}", show=self._show_progress)

    def of(self, key: Any, trace: Callable[[], tuple[TracedStep, Trees]]) -> tuple[TracedStep, Plan]:
        """The traced step and the plan for a key. `trace` returns the step and its trees for a new key.

        Raises: the errors of tracing and planning.
        """
        if key in self._short_batches:
            return self._short_batches[key]
        if key not in self._by_key:
            progress = self.progress()
            with rare_garbage_collection():
                with progress.pass_("trace"):
                    traced, trees = trace()
                    traced = self._sources.with_example_dims(traced)
                self._flags[key] = jax_compat.lowering_flags()
                equal = self._of_equal_trace(traced)
                if equal is not None:
                    self._by_key[key] = traced, self._bound(equal, traced, trees)
                    return self._by_key[key]
                short = self._of_longer_batch(traced, progress)
                if short is not None:
                    self._short_batches[key] = traced, self._bound(short, traced, trees)
                    return self._short_batches[key]
                if self._by_key:
                    logger.warning("%s: arguments of new shapes or types: planning again", self._name)
                earlier = (before for before, _ in self._under_these_flags())
                if any(fewer_examples(before, traced) is not None for before in earlier):
                    self._shorter.add(key)
                plan = self._sources.plan(traced, trees, progress, is_shorter=key in self._shorter)
            if traced.placements or traced.written:
                note = placement_note(traced, self._sources.constraints)
                if not self._by_key:
                    logger.warning("%s: %s", self._name, note)
                plan = plan.with_note(note)
            self._by_key[key] = (traced, self._bound(plan, traced, trees))
            self.last_progress = progress
        return self._by_key[key]

    def improve(self, key: Any, effort: Effort, time_limit_s: float | None) -> bool:
        """Whether a new search finds a faster plan for a key that has one, which then takes the place of the old: for
        all keys that share the plan, and for what was carried over from it to short batches.

        Raises: InvalidArgumentError for the key of a short batch, which follows the plan of the longer one.
        """
        if key in self._short_batches:
            raise InvalidArgumentError(
                where=f"{self._name}.replan",
                expected="a batch of the size that the plan was made for",
                got="a shorter one, which keeps the layouts of that plan",
                hint="give a batch of the usual size, as an array or a jax.ShapeDtypeStruct",
            )
        traced, plan = self._by_key[key]
        assert plan.trees is not None, "the plan of a step knows its arguments"
        progress = Progress(f"autopar {self._name}, again", show=self._show_progress)
        with rare_garbage_collection():
            shorter = key in self._shorter
            other = self._sources.again(traced, plan.trees, progress, effort, time_limit_s, is_shorter=shorter)
        self.last_progress = progress
        if other.predicted.step_time_s >= plan.predicted.step_time_s:
            return False
        for shared, (its_trace, its_plan) in self._by_key.items():
            if its_plan.record is plan.record and its_plan.trees is not None:
                self._by_key[shared] = its_trace, self._bound(other, its_trace, its_plan.trees)
        self._short_batches.clear()
        return True

    def _bound(self, plan: Plan, traced: TracedStep, trees: Trees) -> Plan:
        """The plan with the arguments of its step, which it can plan anew."""

        def replan(request: PlanRequest) -> Plan:
            with rare_garbage_collection():
                return self._sources.replanned(plan, traced, trees, request)

        return dataclasses.replace(plan, trees=trees, replan=replan)

    def _of_equal_trace(self, traced: TracedStep) -> Plan | None:
        return next((plan for earlier, plan in self._under_these_flags() if is_same_step(earlier, traced)), None)

    def _under_these_flags(self) -> list[tuple[TracedStep, Plan]]:
        """The traced steps and plans that were made under JAX's configuration at the moment."""
        flags = jax_compat.lowering_flags()
        return [planned for key, planned in self._by_key.items() if self._flags[key] == flags]

    def _of_longer_batch(self, traced: TracedStep, progress: Progress) -> Plan | None:
        """A plan carried over to a batch of fewer examples."""
        for earlier, plan in reversed(self._under_these_flags()):
            with progress.pass_("short batch"):
                carried_over = for_short_batch(plan, earlier, traced, self._sources.rules())
            if carried_over is not None:
                self._sources.save_rules()
                return carried_over
        return None
