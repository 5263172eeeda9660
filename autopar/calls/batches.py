"""Batches of a step: host data placed in the layouts of the plan, and rows of several processes joined to one batch."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.calls import nnx_objects
from autopar.calls.batch_mode import GLOBAL, BatchDecision, Leaf, PassedBatch, Shape, checked_mode, decide
from autopar.calls.call_arguments import CallArguments, StepOptions
from autopar.calls.plan_sources import StepPlans
from autopar.common import jax_compat
from autopar.errors import BatchMismatchError, UnsupportedError
from autopar.executables.multiprocess import with_process_lost_errors
from autopar.executables.step_leaves import put
from autopar.frontend.static_leaves import set_apart
from autopar.frontend.tracing import abstract, flatten_arguments
from autopar.plan.plan import Plan
from autopar.plan.schema import PlannedValue
from autopar.runtime.agreement import exchange
from autopar.runtime.process_rows import ProcessRows, place, place_rows
from autopar.runtime.transfers import aval_of, is_whole

# Batches in a program of several processes, each of which passes its own rows or the whole batch.
#
# The processes compare their arguments before the first step is traced, and for every batch of new shapes: they
# exchange the shapes and hashes of their leaves over their shared store, and each comes to the same decision
# (`autopar.calls.batch_mode`).
#
# Later batches of these shapes have the same mode without communication, except that the 2nd, 4th, 8th ... batch in
# mode "global" is compared again: the first may have been all zeros.


logger = logging.getLogger("autopar")


class PlannedBatch(NamedTuple):
    """The batch in a plan: the shapes of its leaves, and a function to their shardings."""

    shapes: list[Shape]
    shardings: Callable[[], Sequence[Any]]


class ProcessBatches:
    """The modes of a step's batches in a program of several processes, decided by the first batch of each shape."""

    _numbers = itertools.count()  # of the steps, as they first pass a batch: in the same order in all processes

    def __init__(self, name: str, requested: str) -> None:
        self._name, self._requested = name, requested
        self._number: int | None = None
        self._decisions: dict[Any, tuple[BatchDecision, int]] = {}
        self._exchanges: collections.Counter[str] = collections.Counter()
        self._mode: str | None = None
        self._others_are_checked = False

    def arguments(
        self,
        args: Sequence[Any],
        batch: Sequence[int],
        *,
        names: Callable[[], Sequence[str]],
        planned: Callable[[], Sequence[PlannedBatch]],
        is_run: bool,
    ) -> list[Any]:
        """The dynamic arguments of a call, with global arrays in place of rows of this process.

        `batch` are the numbers of those with examples, `names` those of all. `is_run`: the step runs on them, in all
        processes; one alone may ask for the plan of a batch that is known.
        Raises: ProcessMismatchError, ProcessLostError, InvalidArgumentError.
        """
        leaves, tree = jax.tree.flatten([args[i] for i in batch])

        def passed() -> PassedBatch:
            names_of_all = names()
            other_numbers = [] if self._others_are_checked else [i for i in range(len(args)) if i not in batch]
            leaves_of = [
                _paths([args[i] for i in numbers], [names_of_all[i] for i in numbers])
                for numbers in (batch, other_numbers)
            ]
            return _passed(self._requested, *leaves_of)

        if any(map(jax_compat.is_tracer, jax.tree.leaves(args) if not self._decisions else leaves)):
            return list(args)  # inside of another transformation, which is refused
        with_rows = self._with_rows("call", self._requested, leaves, tree, passed, planned, is_run)
        if not any(isinstance(x, ProcessRows) for x in with_rows):
            return list(args)
        placed = dict(zip(batch, jax.tree.unflatten(tree, _rows_placed(with_rows, planned())), strict=True))
        return [placed.get(i, arg) for i, arg in enumerate(args)]

    def put(
        self, requested: str | None, leaves: list[Any], tree: Any, planned: Callable[[], Sequence[PlannedBatch]]
    ) -> list[Any]:
        """The leaves of a batch as global arrays in the layouts of a plan for it.

        Without a plan, rows of this process become global arrays by process, and whole arrays stay as they are. Raises:
        ProcessMismatchError, ProcessLostError, InvalidArgumentError.
        """
        requested = requested or self._requested
        batch = jax.tree.unflatten(tree, leaves)
        with_rows = self._with_rows(
            "put_batch", requested, leaves, tree, lambda: _passed(requested, _paths([batch], ["batch"]), ()), planned
        )
        plans = planned()
        arrays = _rows_placed(with_rows, plans)
        plan = next((p for p in reversed(plans) if p.shapes == [tuple(np.shape(x)) for x in arrays]), None)
        if plan is None:
            return arrays
        return [place(x, aval_of(x), s) for x, s in zip(arrays, plan.shardings(), strict=True)]

    def _with_rows(
        self,
        entry: str,
        requested: str,
        leaves: list[Any],
        tree: Any,
        passed: Callable[[], PassedBatch],
        planned: Callable[[], Sequence[PlannedBatch]],
        is_run: bool = True,
    ) -> list[Any]:
        """The leaves, with `ProcessRows` for those that are rows of this process."""
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return leaves  # shapes are those of the whole
        key = (entry, requested, tree, tuple((_placement(x), *_shape_and_type(x, "batch")) for x in leaves))
        decision, calls = self._decisions.get(key, (None, 0))
        calls += is_run
        if decision is None or (is_run and decision.mode == GLOBAL and calls > 1 and calls & (calls - 1) == 0):
            decision = self._decide_again(entry, passed(), [p.shapes for p in planned()])
        self._decisions[key] = decision, calls
        return [
            x if counts is None else ProcessRows(x, counts) for x, counts in zip(leaves, decision.counts, strict=True)
        ]

    def _decide_again(self, entry: str, own_batch: PassedBatch, planned: Sequence[Sequence[Shape]]) -> BatchDecision:
        if self._number is None:
            self._number = next(self._numbers)
        key = f"autopar/batches/{self._number}/{entry}/{self._exchanges[entry]}"
        self._exchanges[entry] += 1
        passed = exchange(self._name, key, dataclasses.replace(own_batch, step=self._name).encode())
        decision = decide(self._name, [PassedBatch.decode(text) for text in passed], planned, self._mode)
        if decision.by_data and jax.process_index() == 0:
            rows = next(counts for counts in decision.counts if counts is not None)
            logger.warning(
                "%s: each of the %d processes passed other rows: together they are the batch of %d (%s); "
                "batch='local' says so",
                self._name, len(rows), sum(rows), " + ".join(map(str, rows)),
            )  # fmt: skip
        self._mode = decision.mode
        self._others_are_checked |= bool(own_batch.others)
        return decision


def _rows_placed(leaves: Sequence[Any], planned: Sequence[PlannedBatch]) -> list[Any]:
    """The leaves with global arrays in place of rows, in the layouts of the latest plan for their shape."""
    rows = [i for i, leaf in enumerate(leaves) if isinstance(leaf, ProcessRows)]
    if not rows:
        return list(leaves)
    shapes = [tuple(np.shape(x)) for x in leaves]
    plan = next((p for p in reversed(planned) if p.shapes == shapes), None)
    if plan is None:
        arrays = [leaves[i].as_array() for i in rows]
    else:
        shardings = plan.shardings()
        arrays = place_rows([leaves[i] for i in rows], [shardings[i] for i in rows])
    placed = dict(zip(rows, arrays, strict=True))
    return [placed.get(i, leaf) for i, leaf in enumerate(leaves)]


def _paths(args: Sequence[Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    leaves, _, paths, _ = flatten_arguments(args, names)
    return list(zip(paths, leaves, strict=True))


def _passed(requested: str, batch: Sequence[tuple[str, Any]], others: Sequence[tuple[str, Any]]) -> PassedBatch:
    leaves = tuple(
        Leaf(path, not is_whole(x), *_shape_and_type(x, path), _placement(x) or _hash(x, path)) for path, x in batch
    )
    values = [(path, x) for path, x in others if is_whole(x) and not isinstance(x, jax.ShapeDtypeStruct)]
    return PassedBatch(requested, leaves, tuple((path, _hash(x, path)) for path, x in values))


def _placement(leaf: Any) -> str:
    """The sharding and devices of a global array; an empty string for arrays of one process."""
    if is_whole(leaf):
        return ""
    return f"{leaf.sharding.spec} on {[d.id for d in leaf.sharding.mesh.devices.flat]}"


def _shape_and_type(leaf: Any, path: str) -> tuple[Shape, str]:
    """Raises: InvalidArgumentError for what is no array."""
    aval = abstract(leaf, path)
    return tuple(aval.shape), str(aval.dtype)


def _hash(leaf: Any, path: str) -> str:
    """A hash of shape, type and data, after jax's conversion of types."""
    aval = abstract(leaf, path)
    array = jax.numpy.asarray(leaf) if hasattr(leaf, "__jax_array__") else leaf
    data = jax.random.key_data(array) if jax_compat.is_key_dtype(aval.dtype) else np.asarray(array, aval.dtype)
    digest = hashlib.blake2b(f"{aval.dtype}{aval.shape}".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(data).tobytes())
    return digest.hexdigest()


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
