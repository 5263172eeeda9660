"""The sources of a step's plan: the user, the cache on disk, the search, or process 0 of several."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from autopar.calls.following import with_followed_layouts
from autopar.calls.step_options import StepOptions, WarnOnce
from autopar.common import jax_compat
from autopar.common.cache_dir import cache_directory, default_directory
from autopar.common.progress import Progress
from autopar.compiler.materialize import check_plan
from autopar.compiler.memory_errors import check_given_plan_fits
from autopar.compiler.planner import make_plan
from autopar.frontend.fingerprints import module_fingerprint
from autopar.frontend.tracing import IMPURE, checked_when_traced_again
from autopar.hardware.cluster import Cluster
from autopar.ir.traced_step import ShardingsInCode, TracedStep
from autopar.kernels.known import entries
from autopar.microbatch.example_axis import with_example_dims
from autopar.microbatch.smaller_step import num_examples
from autopar.passes.split_scan import divisors
from autopar.plan.cache import DiskCache, plan_key
from autopar.plan.file import decode, encode
from autopar.plan.options import Effort, PlanRequest
from autopar.plan.plan import Plan, Trees
from autopar.plan.schema import PlanRecord
from autopar.runtime.processes.agreement import agree
from autopar.sharding.rules import RuleBook

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
