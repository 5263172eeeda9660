"""Batches of a step: host data placed in the layouts of the plan, and rows of several processes joined to one batch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.calls import nnx_objects
from autopar.calls.batch_mode import GLOBAL, checked_mode
from autopar.calls.call_arguments import CallArguments
from autopar.calls.plans import StepPlans
from autopar.calls.process_batches import PlannedBatch, ProcessBatches
from autopar.calls.step_options import StepOptions
from autopar.errors import BatchMismatchError, UnsupportedError
from autopar.executables.multiprocess import with_process_lost_errors
from autopar.executables.step_leaves import put
from autopar.frontend.static_leaves import set_apart
from autopar.frontend.tracing import abstract
from autopar.plan.plan import Plan
from autopar.plan.schema import PlannedValue


class StepBatches:
    """The batches of a step's calls and of `put_batch`."""

    def __init__(self, arguments: CallArguments, options: StepOptions, plans: StepPlans) -> None:
        self._name, self._arguments, self._plans = arguments.step_name, arguments, plans
        self._given_plan = options.plan
        self._of_processes = ProcessBatches(self._name, options.batch)
        self._has_rows = options.batch_axis in (None, 0) or options.batch == GLOBAL
        self._looked_up: list[Plan] = []  # the plans that the layouts below are those of
        self._found: dict[Any, Sequence[NamedSharding] | None] = {}

    def with_whole_batch(self, args: Sequence[Any], *, is_run: bool = False) -> tuple[Any, ...]:
        """The arguments with the whole batch in place of this process's rows. `is_run`: the step runs on them."""
        if jax.process_count() == 1 or any(map(nnx_objects.holds_objects, args)):
            return tuple(args)
        if not self._has_rows:
            raise UnsupportedError(
                where=f"{self._name}, parallelize(batch_axis=...)",
                expected="in several processes, one whole batch that all of them pass, parallelize(batch='global')",
                got="a batch that may be the rows of each, which are joined in the first dimension",
                hint="add batch='global', or move the examples to the first dimension and transpose in the step",
            )
        placed = with_process_lost_errors(
            lambda: self._of_processes.arguments(
                self._arguments.dynamic(args),
                sorted(self._arguments.batch_numbers(args)),
                names=lambda: self._arguments.dynamic_names(len(args)),
                planned=self._planned,
                is_run=is_run,
            )
        )
        return self._arguments.with_dynamic(args, placed)

    def put(self, data: Any, batch: str | None) -> Any:
        """As `Step.put_batch`."""
        mode = None if batch is None else checked_mode(batch, f"{self._name}.put_batch(batch=...)")
        given, data = data, set_apart(data)
        if (latest := self._plans.latest()) is not None:
            self._check_structure(data, latest)
        for path, leaf in jax.tree_util.tree_flatten_with_path(data)[0]:
            abstract(leaf, f"batch{jax.tree_util.keystr(path)}")
        leaves, tree = jax.tree.flatten(data)
        if jax.process_count() > 1:
            placed = with_process_lost_errors(lambda: self._of_processes.put(mode, leaves, tree, self._planned))
            return jax.tree.unflatten(tree, placed)
        if latest is None:
            return given
        shapes, shardings = self._planned()[-1]
        if [tuple(np.shape(leaf)) for leaf in leaves] != shapes:
            return given  # the call makes the plan of another shape, and puts it itself
        return jax.tree.unflatten(tree, put(leaves, shardings()))

    def shardings_for(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[NamedSharding] | None:
        """As `Step.batch_shardings_for`; the same object as long as the plans are the same."""
        plans = self._plans.all()
        if len(plans) != len(self._looked_up) or any(map(operator.is_not, plans, self._looked_up)):
            self._looked_up, self._found = plans, {}
        key = tuple(map(tuple, shapes))
        if key not in self._found:
            batch = next((b for b in reversed(self._planned()) if b.shapes == list(key)), None)
            self._found[key] = None if batch is None else batch.shardings()
        return self._found[key]

    def _planned(self) -> list[PlannedBatch]:
        """The batch of each plan, the latest last."""

        def shardings(plan: Plan, values: Sequence[PlannedValue]) -> list[NamedSharding]:
            plan.check_devices()
            return [plan.sharding_of(v) for v in values]

        batches = []
        for plan in [self._given_plan, *self._plans.all()]:
            if plan is not None:
                values = (
                    plan.argument_leaves(plan.trees.batch)
                    if plan.trees
                    else [v for v in plan.record.arguments if v.kind == "batch"]
                )
                batches.append(PlannedBatch([v.shape for v in values], functools.partial(shardings, plan, values)))
        return batches

    def _check_structure(self, data: Any, planned: Plan) -> None:
        """Raises: BatchMismatchError for a batch of another structure than the plan's."""
        assert planned.trees is not None, "a step's plan has its trees"
        trees = [planned.trees.arguments[i] for i in sorted(planned.trees.batch)]
        expected = trees[0] if len(trees) == 1 else jax.tree_util.treedef_tuple(trees)
        if jax.tree.structure(data) != expected:
            raise BatchMismatchError(
                where=f"{self._name}.put_batch",
                expected=f"a batch with the structure {expected}",
                got=f"{jax.tree.structure(data)}",
                hint="pass what the step takes in batch_argnums, or plan for the new batch first",
            )
