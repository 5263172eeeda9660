"""Batches of a step: host data placed in the layouts of the plan, and rows of several processes joined to one batch.

The batch mode of a program of several processes is local rows of each process, or one global batch:

(1) Equal rows in all processes are the whole batch ("global"). Different rows are the rows of each process ("local"),
    and the batch consists of the rows of all processes in order. Where the step has a plan, its batch must agree.
(2) Leaves without rows (numbers, keys, arguments other than the batch) must be equal in all processes.

Rows are counted in dimension 0; their number is the leading size that most leaves of the batch have. Global arrays are
used as they are.
"""

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
import msgspec
import numpy as np
from jax.sharding import NamedSharding

from autopar.common import jax_compat
from autopar.errors import BatchMismatchError, ProcessMismatchError, UnsupportedError, expect_one_of
from autopar.execute import nnx_objects
from autopar.execute.call_arguments import CallArguments, StepOptions
from autopar.execute.plan_sources import StepPlans
from autopar.execute.step_leaves import put, with_process_lost_errors
from autopar.frontend.static_leaves import set_apart
from autopar.frontend.tracing import abstract, flatten_arguments
from autopar.plan.plan import Plan
from autopar.plan.schema import PlannedValue
from autopar.runtime.agreement import said_by_all
from autopar.runtime.process_rows import ProcessRows, place, place_rows
from autopar.runtime.transfers import aval_of, is_whole

logger = logging.getLogger("autopar")

AUTO, LOCAL, GLOBAL = "auto", "local", "global"
MODES = (AUTO, LOCAL, GLOBAL)

Shape = tuple[int, ...]


def checked_mode(given: str | None, where: str) -> str:
    """Raises: InvalidArgumentError."""
    expected = "'local' (each process passes its own rows), 'global' (all pass the whole batch), or None"
    if given is not None:
        expect_one_of(where, given, MODES, "None finds out by the first batch", expected)
    return given or AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf as a process passed it: `hash` of its data, or of its devices where it `is_global` already."""

    path: str
    is_global: bool
    shape: Shape
    dtype: str
    hash: str


@dataclasses.dataclass(frozen=True, slots=True)
class PassedBatch:
    """The arguments of one process: the step, the mode requested, its batch, hashes of its other arguments."""

    requested: str
    batch: tuple[Leaf, ...]
    others: tuple[tuple[str, str], ...] = ()
    step: str = ""

    def num_rows(self) -> int | None:
        """The leading size that most leaves of this process share; None where no leaf has one."""
        sizes = collections.Counter(leaf.shape[0] for leaf in self.batch if leaf.shape and not leaf.is_global)
        return sizes.most_common(1)[0][0] if sizes else None


@dataclasses.dataclass(frozen=True, slots=True)
class BatchDecision:
    """The mode of a batch: `counts` are the rows of each process for each leaf, None where the leaf is global already.

    `by_data`: decided by the data alone, not by a request or a plan.
    """

    mode: str
    counts: tuple[tuple[int, ...] | None, ...]
    by_data: bool = False


def decide(
    name: str, passed: Sequence[PassedBatch], planned: Sequence[Sequence[Shape]], earlier_mode: str | None
) -> BatchDecision:
    """The mode of the batches that all processes passed; each process comes to the same decision.

    `planned` are the shapes of the batch in each plan of the step, `earlier_mode` the mode of an earlier batch.

    Raises: ProcessMismatchError.
    """
    _check_same_step(name, passed)
    first, counts = passed[0], [p.num_rows() for p in passed]
    if None in counts:  # nothing but global arrays and numbers
        _check_equal(name, passed, range(len(first.batch)))
        return BatchDecision(GLOBAL, (None,) * len(first.batch))
    per_process = tuple(n for n in counts if n is not None)
    rows = [
        i
        for i, leaf in enumerate(first.batch)
        if not leaf.is_global and all(p.batch[i].shape[:1] == (n,) for p, n in zip(passed, per_process, strict=True))
    ]
    _check_equal(name, passed, [i for i in range(len(first.batch)) if i not in rows])
    as_local = tuple(per_process if i in rows else None for i in range(len(first.batch)))
    local, as_global = BatchDecision(LOCAL, as_local), BatchDecision(GLOBAL, (None,) * len(first.batch))
    differing = [i for i in rows if any(p.batch[i] != first.batch[i] for p in passed)]
    _check_rest_of_shape(name, passed, differing)
    if first.requested == LOCAL:
        if not differing and rows:
            logger.warning("%s, batch='local': all processes passed the same rows; each is taken for other rows", name)
        return local
    if first.requested == GLOBAL:
        if differing:
            raise _ambiguous(name, passed, differing, "batch='global' says so", as_global, local)
        return as_global
    by_data = local if differing else as_global
    by_shape = {GLOBAL: as_global, LOCAL: local}.get(_planned_mode(passed, as_local, planned) or "", by_data)
    if by_shape == by_data:
        return dataclasses.replace(local, by_data=True) if differing and earlier_mode != LOCAL else by_data
    if earlier_mode == LOCAL:
        return local
    if differing:
        raise _ambiguous(name, passed, differing, "its shape is that of the plan", as_global, local)
    raise _ambiguous(name, passed, rows, "the rows of all processes are those of the plan", local, as_global)


def _planned_mode(
    passed: Sequence[PassedBatch], as_local: Sequence[tuple[int, ...] | None], planned: Sequence[Sequence[Shape]]
) -> str | None:
    """Whether a plan is for the batch that each process passed, or for their joined rows."""
    passed_shapes = [leaf.shape for leaf in passed[0].batch]
    joined_shapes = [
        s if counts is None else (sum(counts), *s[1:]) for s, counts in zip(passed_shapes, as_local, strict=True)
    ]
    plans = [list(shapes) for shapes in planned]
    if passed_shapes in plans and all([leaf.shape for leaf in p.batch] == passed_shapes for p in passed):
        return GLOBAL
    return LOCAL if joined_shapes in plans else None


def _check_same_step(name: str, passed: Sequence[PassedBatch]) -> None:
    """Raises: ProcessMismatchError where processes differ in more than rows."""
    first = passed[0]
    for p, passed_by in enumerate(passed[1:], 1):
        if passed_by.step != first.step:
            raise _mismatch(
                name,
                "the same step in all processes",
                f"another one in process {p} than in process 0 ({passed_by.step} and {first.step})",
                "run the same program in all processes; what a step does must not depend on jax.process_index()",
            )
        if passed_by.requested != first.requested:
            raise _mismatch(
                name, "the same batch=... in all", f"{first.requested!r} in process 0, {passed_by.requested!r} in {p}"
            )
        paths = [[leaf.path for leaf in passed_batch.batch] for passed_batch in (first, passed_by)]
        if paths[0] != paths[1]:
            differing = sorted(set(paths[0]) ^ set(paths[1])) or paths[1]
            raise _mismatch(
                name, "batches of one structure in all", f"{', '.join(differing[:3])} not in both of process 0 and {p}"
            )
        for a, b in zip(first.batch, passed_by.batch, strict=True):
            if a.is_global != b.is_global or (a.is_global and a.hash != b.hash):
                raise _mismatch(
                    name,
                    f"{a.path} to be one global array in all processes, or rows of each process",
                    f"arrays on other devices in process {p} than in process 0",
                    "pass each process's rows as numpy arrays, or make one array of them with "
                    "jax.make_array_from_process_local_data",
                )
        unequal = [a for (a, hash_), (_, other) in zip(first.others, passed_by.others, strict=False) if hash_ != other]
        if unequal or len(first.others) != len(passed_by.others):
            raise _mismatch(
                name,
                "the same state, and whatever else is no batch, in all processes",
                f"{', '.join(unequal[:3]) or 'another structure'}: other data in process {p} than in process 0",
                "make it from the same random key everywhere, or with step.init; arguments with examples are named in "
                "batch_argnums",
            )


def _check_equal(name: str, passed: Sequence[PassedBatch], leaves: Sequence[int]) -> None:
    """Raises: ProcessMismatchError where leaves without rows of each process differ between processes."""
    first = passed[0]
    for i in leaves:
        differing = [p for p, passed_by in enumerate(passed) if passed_by.batch[i] != first.batch[i]]
        if differing:
            shapes = " and ".join(str(passed[p].batch[i].shape) for p in (0, differing[0]))
            rows = first.num_rows()
            if first.batch[i].is_global:
                why = "it is a global array, which all processes have together"
            else:
                why = "it has no rows" if rows is None else f"it has no dimension of {rows} examples"
            raise _mismatch(
                name,
                f"the same {first.batch[i].path} in all processes: {why}",
                f"other data in process {differing[0]} than in process 0, of shapes {shapes}",
                "pass what is no rows (numbers, random keys, step counts) alike in all processes; rows are counted in "
                "dimension 0",
            )


def _check_rest_of_shape(name: str, passed: Sequence[PassedBatch], rows: Sequence[int]) -> None:
    """Raises: ProcessMismatchError where the rows of a leaf differ in shape or type."""
    for i in rows:
        first = passed[0].batch[i]
        for p, passed_by in enumerate(passed):
            if (passed_by.batch[i].shape[1:], passed_by.batch[i].dtype) != (first.shape[1:], first.dtype):
                raise _mismatch(
                    name,
                    f"rows of one shape and type of {first.path} in all processes",
                    f"{first.dtype}{list(first.shape)} in process 0, "
                    f"{passed_by.batch[i].dtype}{list(passed_by.batch[i].shape)} in process {p}",
                )


def _ambiguous(
    name: str,
    passed: Sequence[PassedBatch],
    leaves: Sequence[int],
    why: str,
    decided: BatchDecision,
    opposite: BatchDecision,
) -> ProcessMismatchError:
    """The error for a batch whose data contradict the mode that a request or a plan implies."""
    meaning = {GLOBAL: "the whole batch, the same in all processes", LOCAL: "rows of its own in each process"}
    leaf = passed[0].batch[leaves[0]]
    differing = [p for p, passed_by in enumerate(passed) if passed_by.batch[leaves[0]] != leaf]
    rows = " + ".join(str(p.num_rows()) for p in passed)
    got = (
        f"other {leaf.path} in process {differing[0]} than in process 0"
        if differing
        else f"the same {leaf.path} in all"
    )
    return _mismatch(
        name,
        f"{meaning[decided.mode]}: the batch was taken for that, since {why}",
        got,
        f"say batch={opposite.mode!r} to parallelize or put_batch where it is {meaning[opposite.mode]} ({rows} rows), "
        f"batch={decided.mode!r} where it is {meaning[decided.mode]}",
    )


def _mismatch(
    name: str, expected: str, got: str, hint: str = "run the same program in all processes"
) -> ProcessMismatchError:
    where = f"{name}, process {jax.process_index()} of {jax.process_count()}"
    return ProcessMismatchError(where=where, expected=expected, got=got, hint=hint)


# Batches in a program of several processes, each of which passes its own rows or the whole batch.
#
# The processes compare their arguments before the first step is traced, and for every batch of new shapes: they
# exchange the shapes and hashes of their leaves over their shared store, and each comes to the same decision
# (`autopar.execute.batches`).
#
# Later batches of these shapes have the same mode without communication, except that the 2nd, 4th, 8th ... batch in
# mode "global" is compared again: the first may have been all zeros.


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
        said = msgspec.to_builtins(dataclasses.replace(own_batch, step=self._name))
        passed = said_by_all(self._name, f"autopar/batches/{self._number}/{entry}", said)
        decision = decide(self._name, msgspec.convert(passed, list[PassedBatch]), planned, self._mode)
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
