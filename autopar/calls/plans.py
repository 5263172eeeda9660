"""The plans of a step by the shapes of its arguments."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from autopar.calls.plan_sources import PlanSources
from autopar.common import jax_compat
from autopar.common.gc_policy import collected_seldom
from autopar.common.progress import Progress
from autopar.errors import InvalidArgumentError
from autopar.executables.smaller_batch import fewer_examples, for_short_batch
from autopar.frontend.drop_shardings import placement_note
from autopar.ir.traced_step import TracedStep, is_same_step
from autopar.plan.options import Effort, PlanRequest
from autopar.plan.plan import Plan, Trees

logger = logging.getLogger("autopar")


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
            with collected_seldom():
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
            if traced.placements:
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
        with collected_seldom():
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
            with collected_seldom():
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
