"""The batch in a program of several processes: rows of each process (local), or one batch in all of them (global).

What the processes passed is compared before the first step is traced, and for every batch of new shapes:

(1) All tell each other the shapes and hashes of their leaves, over the store that they share.
(2) The same rows in all are the whole batch ("global"); other rows in each are each one's own ("local"), and the batch
    is the rows of all processes in their order. What the step is planned for must agree with that, where it has a plan.
(3) What is no rows (numbers, keys, arguments that are no batch) must be the same in all.

Later batches of these shapes are taken likewise without a word between processes, but that the 2nd, 4th, 8th ... batch
taken for the whole one is compared again: the first may have been all zeros.

Rows are counted in dimension 0: of as many as most leaves of the batch have. A batch that is made of global arrays
already is taken as it is.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, ProcessMismatchError
from autopar.frontend.tracing import abstract, flatten_arguments
from autopar.runtime.execution.global_arrays import aval_of, is_whole, place
from autopar.runtime.processes.agreement import exchange
from autopar.runtime.processes.process_rows import ProcessRows, place_rows

logger = logging.getLogger("autopar")

AUTO, LOCAL, GLOBAL = "auto", "local", "global"
WORDS = (AUTO, LOCAL, GLOBAL)

Shape = tuple[int, ...]


def batch_word(given: str | None, where: str) -> str:
    """Raises: InvalidArgumentError."""
    if given is not None and given not in WORDS:
        raise InvalidArgumentError(
            where=where,
            expected="'local' (each process passes its own rows), 'global' (all pass the whole batch), or None",
            got=repr(given),
            hint="None finds out by the first batch",
        )
    return given or AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf as a process passed it: `hash` of its data, or of the devices it lies on where it `is_global` already."""

    path: str
    is_global: bool
    shape: Shape
    dtype: str
    hash: str


@dataclasses.dataclass(frozen=True, slots=True)
class PassedBatch:
    """What one process passed, to which step: the word it was told, its batch, hashes of its other arguments."""

    word: str
    batch: tuple[Leaf, ...]
    others: tuple[tuple[str, str], ...] = ()
    step: str = ""

    def encode(self) -> str:
        return json.dumps([self.word, [dataclasses.astuple(leaf) for leaf in self.batch], self.others, self.step])

    @classmethod
    def decode(cls, text: str) -> PassedBatch:
        word, batch, others, step = json.loads(text)
        leaves = tuple(Leaf(path, glob, tuple(shape), dtype, hash_) for path, glob, shape, dtype, hash_ in batch)
        return cls(word, leaves, tuple((path, hash_) for path, hash_ in others), step)

    def num_rows(self) -> int | None:
        """The leading size that most leaves of its own share; None where no leaf has one."""
        sizes = collections.Counter(leaf.shape[0] for leaf in self.batch if leaf.shape and not leaf.is_global)
        return sizes.most_common(1)[0][0] if sizes else None


@dataclasses.dataclass(frozen=True, slots=True)
class TakenBatch:
    """How a batch is taken: `counts` are the rows of each process for each leaf, None where it is taken as it is.

    `by_data`: nothing but the data said so.
    """

    mode: str
    counts: tuple[tuple[int, ...] | None, ...]
    by_data: bool = False


def decide(
    name: str, passed: Sequence[PassedBatch], planned: Sequence[Sequence[Shape]], before: str | None
) -> TakenBatch:
    """How the batches of all processes are taken, the same in all.

    `planned` are the shapes of the batch in each plan of the step, `before` how an earlier batch was taken.

    Raises: ProcessMismatchError.
    """
    _check_alike(name, passed)
    first, counts = passed[0], [p.num_rows() for p in passed]
    if None in counts:  # nothing but global arrays and numbers
        _check_equal(name, passed, range(len(first.batch)))
        return TakenBatch(GLOBAL, (None,) * len(first.batch))
    per_process = tuple(n for n in counts if n is not None)
    rows = [
        i
        for i, leaf in enumerate(first.batch)
        if not leaf.is_global and all(p.batch[i].shape[:1] == (n,) for p, n in zip(passed, per_process, strict=True))
    ]
    _check_equal(name, passed, [i for i in range(len(first.batch)) if i not in rows])
    as_local = tuple(per_process if i in rows else None for i in range(len(first.batch)))
    local, whole = TakenBatch(LOCAL, as_local), TakenBatch(GLOBAL, (None,) * len(first.batch))
    other = [i for i in rows if any(p.batch[i] != first.batch[i] for p in passed)]
    _check_rest_of_shape(name, passed, other)
    if first.word == LOCAL:
        if not other and rows:
            logger.warning("%s, batch='local': all processes passed the same rows; each is taken for other rows", name)
        return local
    if first.word == GLOBAL:
        if other:
            raise _told_apart(name, passed, other, "batch='global' says so", whole, local)
        return whole
    by_data = local if other else whole
    by_shape = {GLOBAL: whole, LOCAL: local}.get(_as_planned(passed, as_local, planned) or "", by_data)
    if by_shape == by_data:
        return dataclasses.replace(local, by_data=True) if other and before != LOCAL else by_data
    if before == LOCAL:
        return local
    if other:
        raise _told_apart(name, passed, other, "its shape is that of the plan", whole, local)
    raise _told_apart(name, passed, rows, "the rows of all processes are those of the plan", local, whole)


def _as_planned(
    passed: Sequence[PassedBatch], as_local: Sequence[tuple[int, ...] | None], planned: Sequence[Sequence[Shape]]
) -> str | None:
    """Whether a plan is for the batch that each process passed, or for their rows together."""
    whole = [leaf.shape for leaf in passed[0].batch]
    together = [s if counts is None else (sum(counts), *s[1:]) for s, counts in zip(whole, as_local, strict=True)]
    plans = [list(shapes) for shapes in planned]
    if whole in plans and all([leaf.shape for leaf in p.batch] == whole for p in passed):
        return GLOBAL
    return LOCAL if together in plans else None


def _check_alike(name: str, passed: Sequence[PassedBatch]) -> None:
    """Raises: ProcessMismatchError where processes differ in more than rows."""
    first = passed[0]
    for p, one in enumerate(passed[1:], 1):
        if one.step != first.step:
            raise _mismatch(
                name,
                "the same step in all processes",
                f"another one in process {p} than in process 0 ({one.step} and {first.step})",
                "run the same program in all processes; what a step does must not depend on jax.process_index()",
            )
        if one.word != first.word:
            raise _mismatch(name, "the same batch=... in all", f"{first.word!r} in process 0, {one.word!r} in {p}")
        paths = [[leaf.path for leaf in each.batch] for each in (first, one)]
        if paths[0] != paths[1]:
            differing = sorted(set(paths[0]) ^ set(paths[1])) or paths[1]
            raise _mismatch(
                name, "batches of one structure in all", f"{', '.join(differing[:3])} not in both of process 0 and {p}"
            )
        for a, b in zip(first.batch, one.batch, strict=True):
            if a.is_global != b.is_global or (a.is_global and a.hash != b.hash):
                raise _mismatch(
                    name,
                    f"{a.path} to be one global array in all processes, or rows of each process",
                    f"arrays on other devices in process {p} than in process 0",
                    "pass each process's rows as numpy arrays, or make one array of them with "
                    "jax.make_array_from_process_local_data",
                )
        unequal = [a for (a, hash_), (_, other) in zip(first.others, one.others, strict=False) if hash_ != other]
        if unequal or len(first.others) != len(one.others):
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
        differing = [p for p, one in enumerate(passed) if one.batch[i] != first.batch[i]]
        if differing:
            shapes = " and ".join(str(passed[p].batch[i].shape) for p in (0, differing[0]))
            raise _mismatch(
                name,
                f"the same {first.batch[i].path} in all processes: it has no dimension of {first.num_rows()} examples",
                f"other data in process {differing[0]} than in process 0, of shapes {shapes}",
                "pass what is no rows (numbers, random keys, step counts) alike in all processes; rows are counted in "
                "dimension 0",
            )


def _check_rest_of_shape(name: str, passed: Sequence[PassedBatch], rows: Sequence[int]) -> None:
    """Raises: ProcessMismatchError where the rows of a leaf differ in shape or type."""
    for i in rows:
        first = passed[0].batch[i]
        for p, one in enumerate(passed):
            if (one.batch[i].shape[1:], one.batch[i].dtype) != (first.shape[1:], first.dtype):
                raise _mismatch(
                    name,
                    f"rows of one shape and type of {first.path} in all processes",
                    f"{first.dtype}{list(first.shape)} in process 0, "
                    f"{one.batch[i].dtype}{list(one.batch[i].shape)} in process {p}",
                )


def _told_apart(
    name: str, passed: Sequence[PassedBatch], leaves: Sequence[int], why: str, taken: TakenBatch, other: TakenBatch
) -> ProcessMismatchError:
    """The error for a batch that was taken for one of the two and looks like the other."""
    meaning = {GLOBAL: "the whole batch, the same in all processes", LOCAL: "rows of its own in each process"}
    leaf = passed[0].batch[leaves[0]]
    differing = [p for p, one in enumerate(passed) if one.batch[leaves[0]] != leaf]
    rows = " + ".join(str(p.num_rows()) for p in passed)
    found = (
        f"other {leaf.path} in process {differing[0]} than in process 0"
        if differing
        else f"the same {leaf.path} in all"
    )
    return _mismatch(
        name,
        f"{meaning[taken.mode]}: the batch was taken for that, since {why}",
        found,
        f"say batch={other.mode!r} to parallelize or put_batch where it is {meaning[other.mode]} ({rows} rows), "
        f"batch={taken.mode!r} where it is {meaning[taken.mode]}",
    )


def _mismatch(name: str, expected: str, got: str, hint: str = "run the same program in all processes") -> Any:
    where = f"{name}, process {jax.process_index()} of {jax.process_count()}"
    return ProcessMismatchError(where=where, expected=expected, got=got, hint=hint)


class PlannedBatch(NamedTuple):
    """The batch in a plan: the shapes of its leaves, and a function to their shardings."""

    shapes: list[Shape]
    shardings: Callable[[], Sequence[Any]]


class ProcessBatches:
    """How a step takes its batches in a program of several processes, found by the first of each shape."""

    _numbers = itertools.count()  # of the steps, as they first pass a batch: in the same order in all processes

    def __init__(self, name: str, word: str) -> None:
        self._name, self._word = name, word
        self._number: int | None = None
        self._taken: dict[Any, tuple[TakenBatch, int]] = {}
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
            called = names()
            rest = [] if self._others_are_checked else [i for i in range(len(args)) if i not in batch]
            mine, others = (_paths([args[i] for i in which], [called[i] for i in which]) for which in (batch, rest))
            return _passed(self._word, mine, others)

        if any(map(jax_compat.is_tracer, jax.tree.leaves(args) if not self._taken else leaves)):
            return list(args)  # inside of another transformation, which is refused
        found = self._as_taken("call", self._word, leaves, tree, passed, planned, is_run)
        if not any(isinstance(x, ProcessRows) for x in found):
            return list(args)
        new = dict(zip(batch, jax.tree.unflatten(tree, _rows_placed(found, planned())), strict=True))
        return [new.get(i, arg) for i, arg in enumerate(args)]

    def put(
        self, word: str | None, leaves: list[Any], tree: Any, planned: Callable[[], Sequence[PlannedBatch]]
    ) -> list[Any]:
        """The leaves of a batch as global arrays where a plan for it wants them.

        Without a plan rows of this process become global arrays by process, and what is whole stays as it is.
        Raises: ProcessMismatchError, ProcessLostError, InvalidArgumentError.
        """
        word = word or self._word
        batch = jax.tree.unflatten(tree, leaves)
        found = self._as_taken(
            "put_batch", word, leaves, tree, lambda: _passed(word, _paths([batch], ["batch"]), ()), planned
        )
        plans = planned()
        found = _rows_placed(found, plans)
        plan = next((p for p in reversed(plans) if p.shapes == [tuple(np.shape(x)) for x in found]), None)
        if plan is None:
            return found
        return [place(x, aval_of(x), s) for x, s in zip(found, plan.shardings(), strict=True)]

    def _as_taken(
        self,
        entry: str,
        word: str,
        leaves: list[Any],
        tree: Any,
        passed: Callable[[], PassedBatch],
        planned: Callable[[], Sequence[PlannedBatch]],
        is_run: bool = True,
    ) -> list[Any]:
        """The leaves, with `ProcessRows` for those that are rows of this process."""
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return leaves  # shapes are those of the whole
        key = (entry, word, tree, tuple((_where(x), *_shape_and_type(x, "batch")) for x in leaves))
        taken, calls = self._taken.get(key, (None, 0))
        calls += is_run
        if taken is None or (is_run and taken.mode == GLOBAL and calls > 1 and calls & (calls - 1) == 0):
            taken = self._compared(entry, passed(), [p.shapes for p in planned()])
        self._taken[key] = taken, calls
        return [x if counts is None else ProcessRows(x, counts) for x, counts in zip(leaves, taken.counts, strict=True)]

    def _compared(self, entry: str, mine: PassedBatch, planned: Sequence[Sequence[Shape]]) -> TakenBatch:
        if self._number is None:
            self._number = next(self._numbers)
        key = f"autopar/batches/{self._number}/{entry}/{self._exchanges[entry]}"
        self._exchanges[entry] += 1
        said = exchange(self._name, key, dataclasses.replace(mine, step=self._name).encode())
        taken = decide(self._name, [PassedBatch.decode(text) for text in said], planned, self._mode)
        if taken.by_data and jax.process_index() == 0:
            rows = next(counts for counts in taken.counts if counts is not None)
            logger.warning(
                "%s: each of the %d processes passed other rows: together they are the batch of %d (%s); "
                "batch='local' says so",
                self._name, len(rows), sum(rows), " + ".join(map(str, rows)),
            )  # fmt: skip
        self._mode = taken.mode
        self._others_are_checked |= bool(mine.others)
        return taken


def _rows_placed(leaves: Sequence[Any], planned: Sequence[PlannedBatch]) -> list[Any]:
    """The same with global arrays for the rows of each process, where the latest plan for their shape wants them."""
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
    new = dict(zip(rows, arrays, strict=True))
    return [new.get(i, leaf) for i, leaf in enumerate(leaves)]


def _paths(args: Sequence[Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    leaves, _, paths, _ = flatten_arguments(args, names)
    return list(zip(paths, leaves, strict=True))


def _passed(word: str, batch: Sequence[tuple[str, Any]], others: Sequence[tuple[str, Any]]) -> PassedBatch:
    leaves = tuple(
        Leaf(path, not is_whole(x), *_shape_and_type(x, path), _where(x) or _hash(x, path)) for path, x in batch
    )
    values = [(path, x) for path, x in others if is_whole(x) and not isinstance(x, jax.ShapeDtypeStruct)]
    return PassedBatch(word, leaves, tuple((path, _hash(x, path)) for path, x in values))


def _where(leaf: Any) -> str:
    """The devices that a global array lies on; nothing for what a process has whole."""
    if is_whole(leaf):
        return ""
    return f"{leaf.sharding.spec} on {[d.id for d in leaf.sharding.mesh.devices.flat]}"


def _shape_and_type(leaf: Any, path: str) -> tuple[Shape, str]:
    """Raises: InvalidArgumentError for what is no array."""
    aval = abstract(leaf, path)
    return tuple(aval.shape), str(aval.dtype)


def _hash(leaf: Any, path: str) -> str:
    """Of shape, type and data, as jax would take them."""
    aval = abstract(leaf, path)
    array = jax.numpy.asarray(leaf) if hasattr(leaf, "__jax_array__") else leaf
    data = jax.random.key_data(array) if jax_compat.is_key_dtype(aval.dtype) else np.asarray(array, aval.dtype)
    digest = hashlib.blake2b(f"{aval.dtype}{aval.shape}".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(data).tobytes())
    return digest.hexdigest()
