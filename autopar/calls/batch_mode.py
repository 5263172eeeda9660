"""The batch mode of a program of several processes: local rows of each process, or one global batch.

(1) Equal rows in all processes are the whole batch ("global"). Different rows are the rows of each process ("local"),
    and the batch consists of the rows of all processes in order. Where the step has a plan, its batch must agree.
(2) Leaves without rows (numbers, keys, arguments other than the batch) must be equal in all processes.

Rows are counted in dimension 0; their number is the leading size that most leaves of the batch have. Global arrays are
used as they are.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
from collections.abc import Sequence

import jax

from autopar.errors import ProcessMismatchError, expect_one_of

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

    def encode(self) -> str:
        return json.dumps([self.requested, [dataclasses.astuple(leaf) for leaf in self.batch], self.others, self.step])

    @classmethod
    def decode(cls, text: str) -> PassedBatch:
        requested, batch, others, step = json.loads(text)
        leaves = tuple(Leaf(path, glob, tuple(shape), dtype, hash_) for path, glob, shape, dtype, hash_ in batch)
        return cls(requested, leaves, tuple((path, hash_) for path, hash_ in others), step)

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
