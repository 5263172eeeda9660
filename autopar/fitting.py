"""`autopar.fit`: the largest batch that fits, and the time and price of an example, on one cluster or several."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from rich.markup import escape
from rich.table import Table

from autopar.api import as_step
from autopar.common.jax_compat import evaluated, variables_of
from autopar.common.text import PLAIN, TextConsole, TextFormat, text_of_bytes, text_of_interval_s, text_of_s
from autopar.errors import (
    AutoparError,
    InvalidArgumentError,
    MemoryLimitError,
    expect_one_of,
    expect_positive,
)
from autopar.execute import nnx_objects
from autopar.frontend.static_leaves import set_apart
from autopar.hardware import step_errors
from autopar.hardware.cluster import Cluster
from autopar.plan.fit_data import FitRow, is_least
from autopar.plan.plan import Plan
from autopar.plan.summary import fullest
from autopar.step import Step
from autopar.step_views import (
    argument_names_of,
    batch_axes_of,
    beside,
    microbatches_named_by,
    on_cluster,
    peak_on_other_batch,
    with_whole_batch,
)

# Sequences of several lengths as batches: padded to the longest, in buckets of lengths, or packed into rows.


# Lengths are padded to multiples of this: a tile of attention kernels and of matrix units.
LENGTH_UNIT = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FilledRow:
    """One way to make batches of a sample of sequences, on a cluster.

    Attributes:
        way: "padded", "buckets" or "packed".
        lengths: Of the rows of a batch, of each bucket.
        batches: Rows of a batch, of each bucket.
        step_times_s: Of a step, of each bucket.
        padding: The share of all positions that hold no token.
        tokens_per_s: Tokens of sequences, without padding, a second of the whole cluster.
    """

    cluster: str
    way: str
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    step_times_s: tuple[float, ...]
    padding: float
    tokens_per_s: float


def checked_lengths(where: str, lengths: Sequence[int]) -> np.ndarray:
    """The lengths as an array of integers. Raises: InvalidArgumentError where one is none, or is not positive."""
    try:
        found = np.asarray(lengths)
    except ValueError:  # lists of several lengths
        found = np.empty((0, 0))
    is_row = found.ndim == 1 and found.size > 0
    if is_row and np.issubdtype(found.dtype, np.integer) and found.min() > 0:
        return found.astype(np.int64)
    numbers = f"{found.dtype} numbers, the least {found.min()}" if is_row else "none in a row"
    raise InvalidArgumentError(
        where=where,
        expected="the lengths of some sequences of the data, whole positive numbers",
        got=numbers,
        hint="give the tokens of each sequence of a sample: lengths=[len(tokens) for tokens in sample]",
    )


def rounded_up(length: int) -> int:
    return -(-length // LENGTH_UNIT) * LENGTH_UNIT


def bucket_lengths(lengths: np.ndarray, most: int) -> tuple[int, ...]:
    """The lengths of at most so many buckets, each of which takes the sequences up to its length, with the least
    padding, in rising order. The last is that of the longest sequence, rounded up.

    Exact: of all divisions of the rounded lengths into runs, by dynamic programming.
    """
    sizes, counts = np.unique(-(-lengths // LENGTH_UNIT) * LENGTH_UNIT, return_counts=True)
    num, up_to = len(sizes), np.concatenate([[0], np.cumsum(counts)])
    # By the number of lengths that buckets so far take, their fewest positions; and where the last of them begins.
    best, begins = np.array([0.0] + [np.inf] * num), list[np.ndarray]()
    for _ in range(min(most, num)):
        positions = best[:-1, None] + np.where(np.tri(num).T, (up_to[None, 1:] - up_to[:-1, None]) * sizes, np.inf)
        begins.append(positions.argmin(axis=0))
        best = np.concatenate([[np.inf], positions.min(axis=0)])
    found: list[int] = []
    end = num
    for begin in reversed(begins):
        found.append(int(sizes[end - 1]))
        end = int(begin[end - 1])
    return tuple(reversed(found))


def packed_rows(lengths: np.ndarray, row: int) -> int:
    """The rows of so many positions that all sequences fill, each whole in one of them: the longest first, each into
    the row with the least room that takes it. At most 11/9 of the fewest (Johnson et al., SIAM J. Comput. 3(4), 1974).
    """
    count, rooms, rows_with = 0, list[int](), collections.Counter[int]()  # distinct rooms that some row has, sorted
    for length in np.sort(lengths)[::-1].tolist():
        at = bisect.bisect_left(rooms, length)
        room = row if at == len(rooms) else rooms[at]
        if at == len(rooms):
            count += 1
        else:
            rows_with[room] -= 1
            if not rows_with[room]:
                rooms.pop(at)
        left = room - length
        if left and not rows_with[left]:
            bisect.insort(rooms, left)
        rows_with[left] += bool(left)
    return count


# By the number of an argument with examples, of each leaf the dimension that counts them; None: it has none.
Axes = Mapping[int, Sequence[int | None]]
HINT = (
    "name the arguments with examples (batch_argnums of parallelize) and their dimension (batch_axis), give dimensions "
    "of jax.export.symbolic_shape, or a function of the number of examples: lambda n: {...}"
)


def resized(args: Sequence[Any], axes: Axes, examples: int) -> list[Any]:
    """The arguments with batches of so many examples, as shapes.

    Symbolic dimensions, of whatever argument, are evaluated, their variable being the number of examples. A batch that
    is a function is called. Of a batch without either, the dimensions of examples are replaced.

    Raises: InvalidArgumentError for a number that the constraints of a symbolic dimension exclude.
    """
    names = variables(args)

    def resized_one(number: int, arg: Any) -> Any:
        if number in axes and callable(arg):
            return _shapes_of(arg, examples)
        if names:
            return jax.tree.map(at_size, arg) if variables([arg]) else arg
        if number not in axes:
            return arg
        leaves, tree = jax.tree.flatten(set_apart(arg))
        return jax.tree.unflatten(tree, map(with_examples, leaves, axes[number]))

    def with_examples(leaf: Any, dim: int | None) -> Any:
        if dim is None:
            return leaf
        return jax.ShapeDtypeStruct((*leaf.shape[:dim], examples, *leaf.shape[dim + 1 :]), leaf.dtype)

    def at_size(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if not variables_of(shape):
            return leaf
        try:
            sizes = evaluated(shape, dict.fromkeys(names, examples))
        except ValueError as error:
            raise InvalidArgumentError(
                where="autopar.fit",
                expected=f"batches for which {error} holds, as {_text(shape)} says",
                got=f"{examples} examples",
                hint="choose multiple=, or leave the constraint out: the sizes to be tried are not known before",
            ) from None
        return jax.ShapeDtypeStruct(sizes, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))

    return [resized_one(number, arg) for number, arg in enumerate(args)]


def variables(args: Sequence[Any]) -> set[str]:
    """The variables of symbolic dimensions in arguments."""
    leaves = [leaf for arg in args for leaf in jax.tree.leaves(arg)]
    return {name for leaf in leaves for name in variables_of(getattr(leaf, "shape", ()))}


def check_batch(name: str, args: Sequence[Any], axes: Axes) -> None:
    """Raises: InvalidArgumentError for symbolic dimensions of several variables, and, where there are none, for a batch
    whose leaves do not have one number of examples.
    """
    names = variables(args)
    if len(names) > 1:
        raise InvalidArgumentError(
            where=f"autopar.fit({name}, ...)",
            expected="symbolic dimensions of one variable, the number of examples",
            got=f"{len(names)}, {', '.join(sorted(names))}",
            hint="write the other dimensions as numbers",
        )
    given = [args[i] for i in axes if i < len(args)]
    if names or (given and all(map(callable, given))):
        return
    arrays = [i for i in axes if i < len(args) and not callable(args[i])]
    dims = [(leaf, dim) for i in arrays for leaf, dim in zip(jax.tree.leaves(set_apart(args[i])), axes[i], strict=True)]
    sizes = {getattr(leaf, "shape", ())[dim : dim + 1] for leaf, dim in dims if dim is not None}
    if len(sizes) != 1 or sizes == {()}:
        raise InvalidArgumentError(
            where=f"autopar.fit({name}, ...)",
            expected="a batch whose arrays all have one number of examples, first or in the dimension of batch_axis",
            got=f"sizes {', '.join(str(size[0]) if size else 'none' for size in sizes) or 'of no array'}",
            hint=HINT,
        )


def _text(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"


def _shapes_of(function: Callable[[int], Any], examples: int) -> Any:
    """What a function gives for so many examples, as shapes; arrays that it makes take no memory."""
    made: list[Any] = []

    def arrays() -> list[Any]:
        made.append(set_apart(function(examples)))
        return [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in jax.tree.leaves(made[-1])]

    shapes = jax.eval_shape(arrays)
    leaves, tree = jax.tree.flatten(made[-1])
    return jax.tree.unflatten(
        tree, [leaf if shape is None else shape for leaf, shape in zip(leaves, shapes, strict=True)]
    )


logger = logging.getLogger("autopar")
# Bars are as wide as numbers leave room for, less beside prices.
COLUMNS, BAR_COLUMNS, PRICED_BAR_COLUMNS = 100, 24, 9
# A batch of more examples than this is not looked for: what fits so often fits always.
MOST_EXAMPLES = 2**24
# Guesses that rest on a plan's own memory are all taken up to so many, then in turns with doubling or halving.
KNOWN_TAKEN = 5
# Binary digits of the numbers that are planned for: all of them where a user names a multiple, else about two decimal
# ones. Near a full memory each size may have another, leaner plan, and bisection to the last device takes dozens.
EXACT, BITS = 64, 7
S_PER_HOUR, MILLION = 3600, 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """All batch sizes that were planned for, by cluster and size. By cluster: the number that its sizes are `multiples`
    of, and the plan of its largest batch. `step` is the step's name.

    Where lengths are given, `filled` has the ways to make batches of them, and `bucket_plans` by cluster the plan of
    each bucket by its length, all with the state in the layouts of the longest one's, or where a recipe has it.
    """

    step: str
    rows: tuple[FitRow, ...]
    multiples: dict[str, int]
    plans: dict[str, Plan]
    filled: tuple[FilledRow, ...] = ()
    bucket_plans: dict[str, dict[int, Plan]] = dataclasses.field(default_factory=dict)

    def largest(self, cluster: str | None = None) -> int:
        """The largest batch that fits on a cluster, the first one where none is named; 0 where none fits."""
        cluster = next(iter(self.multiples)) if cluster is None else cluster
        return max((row.batch for row in self.rows if row.cluster == cluster and row.fits), default=0)

    def fastest(self, cluster: str | None = None) -> int:
        """The batch, of those that were planned for, in which an example takes the least time; 0 where none fits."""
        cluster = next(iter(self.multiples)) if cluster is None else cluster
        own = [row for row in self.rows if row.cluster == cluster and row.example_s is not None]
        return min(((row.example_s, -row.batch, row.batch) for row in own), default=(0.0, 0, 0))[-1]

    def report(self, path: str | Path) -> None:
        """Writes charts over batch sizes, with a line for each cluster, as one page for a browser."""
        from autopar.plan.page import fitting_of  # its templates are loaded where a page is wanted

        Path(path).write_text(fitting_of(self.step, self.rows, self.multiples), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The rows as plain values, as `json.dumps` takes them."""
        rows = [msgspec.to_builtins(row) | {"example_s": row.example_s} for row in self.rows]
        filled = [msgspec.to_builtins(row) for row in self.filled]
        largest = {name: self.largest(name) for name in self.multiples}
        return {"largest": largest, "rows": rows} | ({"filled": filled} if filled else {})

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The largest batches in sentences, all others in a table."""
        console = TextConsole(COLUMNS, text_format)
        for name, multiple in self.multiples.items():
            largest = self.largest(name)
            more = "at least " if largest and is_least([row for row in self.rows if row.cluster == name]) else ""
            found = f"the largest batch that fits is {more}{largest}" if largest else "no batch fits"
            best = self.fastest(name)
            least = f"; an example takes the least time in a batch of {best}" if best != largest else ""
            console.line(f"{name}: {found} (of multiples of {multiple}){least}", style="bold")
        priced = any(row.price is not None for row in self.rows)
        has_intervals = any(row.step_interval_s is not None for row in self.rows)
        between = (f"in {10 * step_errors.LEVEL:.0f} of 10",) if has_intervals else ()
        table = Table(
            "cluster", "batch", "step", *between, "an example", "", "peak", *(("a million",) if priced else ())
        )
        bar_columns = PRICED_BAR_COLUMNS if priced or has_intervals else BAR_COLUMNS
        longest_s = max((row.example_s or 0.0 for row in self.rows), default=0.0)
        for row in self.rows:
            peak = f"{text_of_bytes(row.peak_bytes)} of {text_of_bytes(row.limit_bytes)}"
            cells = [escape(row.cluster), str(row.batch), "[red]does not fit[/]", "", "", escape(peak)]
            if row.step_time_s is not None and row.example_s is not None:
                bar = "#" * max(1, round(bar_columns * row.example_s / longest_s)) if longest_s else ""
                cells[2:5] = [text_of_s(row.step_time_s), text_of_s(row.example_s), f"[green]{bar}[/]"]
            if has_intervals:
                cells.insert(3, "" if row.step_interval_s is None else text_of_interval_s(row.step_interval_s))
            if priced:
                cells.append("" if row.price is None else f"{row.price:.4g}")
            table.add_row(*cells)
        console.table(table)
        if self.filled:
            console.table(_table_of_filled(self.filled))
        return console.text()

    __str__ = text


def _table_of_filled(rows: Sequence[FilledRow]) -> Table:
    """A line for each length of rows."""
    table = Table("cluster", "sequences", "rows of", "a batch", "step", "padding", "tokens a second")
    for row in rows:
        first, told = [escape(row.cluster), row.way], [f"{row.padding:.1%}", f"{row.tokens_per_s:,.0f}"]
        for length, batch, step_s in zip(row.lengths, row.batches, row.step_times_s, strict=True):
            table.add_row(*first, str(length), str(batch), text_of_s(step_s), *told)
            first, told = ["", ""], ["", ""]
    return table


def fit(
    step: Step | Callable[..., Any],
    *args: Any,
    clusters: Cluster | str | Sequence[Cluster | str],
    multiple: int | None = None,
    prices: Mapping[str, float] | None = None,
    lengths: Sequence[int] | None = None,
    buckets: int = 4,
) -> Fitting:
    """Finds the largest batch that fits, by plans for batches of other sizes; nothing is run.

    The size to plan for next follows from the memory that the layouts of the last plan that fits take on another batch,
    which needs no search. The logger "autopar" says at level INFO what each size came to.

    The batch is whole, as in micro-batches nearly every batch fits: a step whose options name a number of them, stages
    or a schedule keeps these.

    Args:
        step: A step of `autopar.parallelize`, which keeps its options, or a function.
        args: Its arguments, arrays or shapes (`jax.ShapeDtypeStruct`). The leaves of the batch have their examples
            first, all of them as many; other numbers of examples take their place. Or shapes have symbolic dimensions
            of one variable (`jax.export.symbolic_shape`), which is the number of examples: only these change, in the
            state too. Or the batch is a function of the number of examples, which gives arrays or shapes.
        clusters: The hardware to plan for, one or several, also as text. Of each the largest batch is found.
        multiple: Batches are multiples of this; None: of the number of devices, and beyond 128 times that number of
            about a hundredth of the batch (`Fitting.multiples`), so that few plans are needed. Of the number of
            micro-batches that the step names too.
        prices: Of an hour on the whole cluster, by its name: rows then have the price of a million examples.
        lengths: Tokens of the sequences of a sample of the data. The batch is then a function of the number of
            examples and their length, and batches of the longest sequence are planned for. `Fitting.filled`
            says what padding costs: the tokens a second of batches padded to that length, of batches of buckets of
            lengths with as many tokens in each, and of sequences packed into rows of that length, for a step whose
            attention takes segments (priced as if its positions attended to the whole row).
        buckets: The most buckets of lengths, chosen for the least padding.

    Raises: InvalidArgumentError; what planning raises, except for what does not fit.
    """
    parallel = as_step(step)
    named = _by_name([clusters] if isinstance(clusters, Cluster | str) else clusters, prices or {})
    _check_numbers(multiple=multiple, buckets=buckets)
    sample = None if lengths is None else checked_lengths("autopar.fit(lengths=...)", lengths)
    of_length = _by_length(parallel.__name__, nnx_objects.split(args), sample is not None)
    shapes = of_length(0 if sample is None else rounded_up(int(sample.max())))
    axes = _checked_axes(parallel, shapes)
    rows, filled = list[FitRow](), list[FilledRow]()
    found = Fitting(step=parallel.__name__, rows=(), multiples={}, plans={})
    for name, cluster in named.items():
        size, bits = (cluster.num_devices, BITS) if multiple is None else (multiple, EXACT)
        size = math.lcm(size, microbatches_named_by(parallel))
        made = _weighed(on_it := on_cluster(parallel, cluster), name, shapes, axes, size, bits)
        found.multiples[name] = size * unit_of(max((row.batch // size for row, _ in made if row.fits), default=0), bits)
        rows += [_priced(dataclasses.replace(row, cluster=name), (prices or {}).get(name)) for row, _ in made]
        fitting = [(row, plan) for row, plan in made if plan is not None]
        if fitting:
            found.plans[name] = fitting[-1][1]
        if fitting and sample is not None:
            bounds = bucket_lengths(sample, buckets)
            batches, found.bucket_plans[name] = _buckets(on_it, fitting, of_length, axes, bounds, size)
            filled += _ways(name, sample, batches, found.bucket_plans[name])
    return dataclasses.replace(found, rows=tuple(rows), filled=tuple(filled))


def _by_length(name: str, args: Sequence[Any], has_lengths: bool) -> Callable[[int], tuple[Any, ...]]:
    """The arguments for sequences of a length: batches that are functions get it behind the number of examples.

    Raises: InvalidArgumentError where lengths are given and no argument is a function.
    """
    if not has_lengths:
        return lambda length: tuple(args)
    if not any(map(callable, args)):
        raise InvalidArgumentError(
            where=f"autopar.fit({name}, ..., lengths=...)",
            expected="a batch that is a function of the number of examples and their length",
            got="a batch of arrays or shapes",
            hint="write lambda examples, length: {'tokens': jax.ShapeDtypeStruct((examples, length), 'int32')}",
        )

    def of(function: Callable[..., Any], length: int) -> Callable[[int], Any]:
        return lambda examples: function(examples, length)

    return lambda length: tuple(of(arg, length) if callable(arg) else arg for arg in args)


def _buckets(
    step: Step,
    of_longest: Sequence[tuple[FitRow, Plan]],
    of_length: Callable[[int], Sequence[Any]],
    axes: Axes,
    lengths: Sequence[int],
    size: int,
) -> tuple[dict[int, int], dict[int, Plan]]:
    """The batch of each bucket, multiples of a size, and its plan: of the longest that in which an example takes the
    least time, of the others as many tokens, where these fit.
    """
    row, plan = min(of_longest, key=lambda each: (each[0].example_s or 0.0, -each[0].batch))
    batches, plans, longest = {lengths[-1]: row.batch}, {lengths[-1]: plan}, lengths[-1]
    for length in lengths[:-1]:
        examples = row.batch * longest // length
        found = _of_bucket(step, plan, of_length(length), axes, examples - examples % size, size)
        if found is not None:
            batches[length], plans[length] = found
    return batches, plans


def _of_bucket(
    step: Step, longest: Plan, args: Sequence[Any], axes: Axes, most: int, size: int
) -> tuple[int, Plan] | None:
    """The batch of a bucket and its plan, with the state as that of the longest has it: as many tokens, or half of them
    where these do not fit.
    """
    while most >= size:
        _, plan = planned_for(beside(with_whole_batch(step), longest), args, axes, most)
        if plan is not None:
            return most, plan
        most = most // 2 - most // 2 % size
    return None


def _ways(cluster: str, sample: Any, batches: Mapping[int, int], plans: Mapping[int, Plan]) -> list[FilledRow]:
    """The sample padded to the longest, in the buckets that have a plan, and packed. A sequence goes into the shortest
    bucket that takes it.
    """
    bounds, longest = sorted(batches), max(batches)
    step_s = {length: plan.predicted.step_time_s for length, plan in plans.items()}
    tokens = int(sample.sum())
    in_bucket = collections.Counter(bounds[bisect.bisect_left(bounds, length)] for length in sample.tolist())
    ways = {
        "padded": {longest: len(sample)},
        "buckets": {length: in_bucket[length] for length in bounds},
        "packed": {longest: packed_rows(sample, longest)},
    }
    return [
        FilledRow(
            cluster=cluster,
            way=way,
            lengths=tuple(rows),
            batches=tuple(batches[length] for length in rows),
            step_times_s=tuple(step_s[length] for length in rows),
            padding=1 - tokens / sum(length * count for length, count in rows.items()),
            tokens_per_s=tokens / sum(count / batches[length] * step_s[length] for length, count in rows.items()),
        )
        for way, rows in ways.items()
    ]


def _check_numbers(**options: int | None) -> None:
    """Raises: InvalidArgumentError for an option that is given and no positive whole number."""
    for option, value in options.items():
        if value is not None:
            expect_positive(f"autopar.fit({option}=...)", value, "a positive whole number", "leave it out")


def _checked_axes(step: Step, args: Sequence[Any]) -> Axes:
    """The dimensions of the examples. Raises: as of `check_batch`."""
    axes = batch_axes_of(step, [jax.ShapeDtypeStruct((1,), float) if callable(arg) else arg for arg in args])
    check_batch(step.__name__, args, axes)
    return axes


def _by_name(clusters: Sequence[Cluster | str], prices: Mapping[str, float]) -> dict[str, Cluster]:
    """Raises: InvalidArgumentError for no cluster, two of one name, and the price of one that is not asked for."""
    named = {c if isinstance(c, str) else c.name: Cluster.parse(c) if isinstance(c, str) else c for c in clusters}
    names, count = list(named), len(clusters)
    wrong = "none" if not names else f"{count} clusters, some of one name" if len(names) < count else ""
    if wrong:
        raise InvalidArgumentError(
            where="autopar.fit(clusters=...)",
            expected="one cluster or several, each of another name",
            got=wrong,
            hint="name them as text: clusters=['dgx-h100', 'tpu-v5e:2x4']",
        )
    for name in prices:
        expected = f"prices of {', '.join(map(repr, names))}"
        expect_one_of("autopar.fit(prices=...)", name, names, "write the name as in clusters", expected)
    return named


def _weighed(
    step: Step, cluster: str, args: Sequence[Any], axes: Axes, size: int, bits: int
) -> list[tuple[FitRow, Plan | None]]:
    """The batches, multiples of a size, that were planned for until the largest that fits was found, by size."""
    found: dict[int, tuple[FitRow, Plan | None]] = {}
    steps: dict[int, Step] = {}
    same_layouts: dict[int, float | None] = {}

    def share(count: int) -> float:
        # A step that has a plan keeps it for shorter batches: each size is a step of its own.
        steps[count], begun_s = with_whole_batch(step), time.perf_counter()
        found[count] = planned_for(steps[count], args, axes, count * size)
        row = found[count][0]
        fits = f"{text_of_s(row.step_time_s)} a step" if row.step_time_s is not None else "does not fit"
        memory = f"{text_of_bytes(row.peak_bytes)} of {text_of_bytes(row.limit_bytes)}"
        spent = text_of_s(time.perf_counter() - begun_s)
        logger.info(
            "%s on %s, batch %d: %s, %s (planned in %s)", step.__name__, cluster, row.batch, fits, memory, spent
        )
        return row.peak_bytes / row.limit_bytes

    def guess(fitting: Sequence[tuple[int, float]]) -> int:
        count, used = fitting[-1]
        if count == 0:
            return 1
        if count not in same_layouts:
            same_layouts[count] = _peak_of_twice(count * size, steps[count], args, axes)
        peak_bytes = same_layouts[count]
        if peak_bytes is None:
            return _guess(fitting)
        return _on_line((count, used), (2 * count, peak_bytes / found[count][0].limit_bytes))

    largest(share, MOST_EXAMPLES // size, guess, bits)
    return [found[count] for count in sorted(found)]


def _peak_of_twice(examples: int, step: Step, args: Sequence[Any], axes: Axes) -> int | None:
    """The peak of twice as many examples in the layouts that so many were planned in; None where that is not known."""
    try:
        with _telling_what_is_resized(step, args, axes, 2 * examples):
            return peak_on_other_batch(step, resized(args, axes, examples), resized(args, axes, 2 * examples))
    except AutoparError:
        return None  # a size that the step, or a constraint of its dimensions, does not admit


def unit_of(number: int, bits: int = BITS) -> int:
    """What numbers of this size are multiples of, where `bits` binary digits of them count: 2 above 128 for seven."""
    return 1 << max(0, number.bit_length() - bits)


def largest(
    share: Callable[[int], float],
    most: int,
    guess_of: Callable[[Sequence[tuple[int, float]]], int] | None = None,
    bits: int = EXACT,
) -> int:
    """The largest number up to `most` whose share of the memory is at most 1, where the share rises; 0 for none. Only
    numbers of so many binary digits are asked for (`unit_of`): the next one does not fit.

    Memory is nearly linear in the number, except where a full memory leads to a leaner plan. So the first guesses are
    by a line through the last two shares that fit, or by `guess_of` the numbers that fit and their shares; then guesses
    take turns with doubling, or with halving. Where the guess says that nothing larger fits, the next number is asked
    for at once.
    """
    guess_of = guess_of or _guess

    def next_to(number: int) -> int:
        return number + unit_of(number, bits)

    def rounded(number: int) -> int:
        return number - number % unit_of(number, bits)

    fitting, high, number = [(0, 0.0)], (most + 1, math.inf), 1
    num_asked, was_last = 0, False
    while True:
        found = (number, share(number))
        num_asked += 1
        if found[1] <= 1:
            fitting.append(found)
        else:
            high = found
        low, is_open = fitting[-1], math.isinf(high[1])
        if next_to(low[0]) >= high[0]:
            return low[0]
        guess = guess_of(fitting)
        if guess >= high[0] and not is_open:
            guess = _on_line(low, high)
        is_last = guess < next_to(low[0])
        steps = 2 * low[0] if is_open else (low[0] + high[0]) // 2
        # One more than the last number of a line fitted: it is another plan's, of which a line knows nothing yet.
        is_unknown = was_last and (is_last or guess_of is _guess)
        takes_guess = is_last or num_asked <= (2 if guess_of is _guess else KNOWN_TAKEN) or num_asked % 2 == 0
        number = guess if takes_guess and not is_unknown else steps
        number, was_last = min(max(rounded(number), next_to(low[0])), rounded(high[0] - 1)), is_last and not was_last


def _guess(fitting: Sequence[tuple[int, float]]) -> int:
    """The largest number by a line through the last two shares. Where the line rises by less than half as much as one
    before, or falls, its ends are of two plans; then by a line from nothing, which lies above that of the last plan.
    """
    if len(fitting) <= 2:
        return _on_line(fitting[0], fitting[-1]) if len(fitting) == 2 else 1
    slopes = [_slope(*pair) for pair in itertools.pairwise(fitting[1:])]
    is_of_one_plan = slopes[-1] > max(slopes) / 2
    return _on_line(fitting[-2] if is_of_one_plan else fitting[0], fitting[-1])


def _on_line(one: tuple[int, float], other: tuple[int, float]) -> int:
    """Where the line through two shares reaches 1; the larger number for one that does not rise."""
    slope = _slope(one, other)
    return math.floor(one[0] + (1 - one[1]) / slope) if slope > 0 else other[0]


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


@contextlib.contextmanager
def _telling_what_is_resized(step: Step, args: Sequence[Any], axes: Axes, examples: int) -> Iterator[None]:
    """Adds to an error of the step's function, as of shapes that do not agree, which arguments are of another size."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        symbolic = {i for i, arg in enumerate(args) if variables([arg])}
        numbers = sorted(symbolic.union(i for i in axes if callable(args[i])) if symbolic else axes)
        names = argument_names_of(step, args)
        others = [name for i, name in enumerate(names) if i not in numbers]
        error.add_note(
            f"autopar.fit gave {', '.join(names[i] for i in numbers)} {examples} examples, and left "
            f"{', '.join(others) or 'no argument'} as given. Where others hold examples, {HINT}"
        )
        raise


def planned_for(step: Step, args: Sequence[Any], axes: Axes, batch: int) -> tuple[FitRow, Plan | None]:
    """The row of a batch of so many examples, and its plan where it fits."""
    try:
        with _telling_what_is_resized(step, args, axes, batch):
            plan = step.plan(*resized(args, axes, batch))
    except MemoryLimitError as error:
        row = FitRow(cluster="", batch=batch, fits=False, peak_bytes=error.needed_bytes, limit_bytes=error.limit_bytes)
        return row, None
    full = fullest(plan.record)
    row = FitRow(
        cluster="",
        batch=batch,
        fits=True,
        peak_bytes=full.peak_bytes,
        limit_bytes=full.limit_bytes or plan.cluster.device.memory_bytes,
        step_time_s=plan.predicted.step_time_s,
        step_interval_s=plan.step_interval_s,
    )
    return row, plan


def _priced(row: FitRow, price: float | None) -> FitRow:
    if price is None or row.example_s is None:
        return row
    return dataclasses.replace(row, price=row.example_s * MILLION / S_PER_HOUR * price)
