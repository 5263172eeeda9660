"""`shard`: batches of a source in the layouts of a step's plan, read ahead, from a position that can be saved."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.errors import InvalidArgumentError, ProcessMismatchError, expect_one_of, expect_step
from autopar.execute.step_leaves import put, with_process_lost_errors
from autopar.runtime.agreement import said_by_all
from autopar.runtime.transfers import absent, aval_of, is_here
from autopar.train.data.sources import NumberedExamples, StreamExamples, check_not_batched, is_stream, numbered, stacked

# The library that reads data, imported where it is needed: `import autopar` does without.


def grain_library() -> Any:
    """The module `grain`. Raises: ImportError, which says how to install it."""
    try:
        return importlib.import_module("grain")
    except ImportError as error:
        raise ImportError(
            f"autopar.data reads through Grain, which is not here: pip install grain ({error})"
        ) from error


# Which examples are in which batch: numbers only, the same in all processes, whatever their number.
#
# The examples of an epoch are permuted by seed and epoch, as `torch.utils.data.DistributedSampler` does. Where they are
# many, by Grain's index shuffle: each place is computed alone, so that the order of all examples takes no memory.

_ROUNDS = 4  # of the cipher that permutes, as Grain's own shuffle has
# The cipher's smallest block has 16 bits. For fewer numbers it is run again and again until it gives one of them, which
# takes milliseconds an example for some tens of them; so few are sorted by random keys instead.
SORTED_EXAMPLES = 2**16


class Tail(enum.StrEnum):
    """What happens to the last examples of an epoch, where they are fewer than a batch."""

    PAD = "pad"  # the batch is filled with the first examples of the epoch
    DROP = "drop"  # they are left out
    MASK = "mask"  # as PAD, and each batch says which of its examples count
    SHORT = "short"  # the batch is shorter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of all examples. `seed` None leaves them in the order of the source."""

    num_examples: int
    batch_size: int
    seed: int | None
    tail: Tail

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(self.num_examples, self.batch_size)
        return whole + bool(rest and self.tail != Tail.DROP)

    def num_rows(self, batch: int) -> int:
        """The rows of a batch of an epoch."""
        return self.num_real(batch) if self.tail == Tail.SHORT else self.batch_size

    def num_real(self, batch: int) -> int:
        """How many of its rows count: the first ones."""
        assert 0 <= batch < self.batches_per_epoch, f"there is no batch {batch} in {self}"
        return min(self.batch_size, self.num_examples - batch * self.batch_size)

    def examples(self, epoch: int, batch: int, rows: np.ndarray) -> np.ndarray:
        """The numbers of the examples in some rows of a batch."""
        places = (batch * self.batch_size + rows) % self.num_examples
        if self.seed is None:
            return places
        if self.num_examples <= SORTED_EXAMPLES:
            return _sorted_by_key(self.num_examples, self.seed, epoch)[places]
        # Grain's `MapDataset.shuffle` adds the epoch to the seed: an epoch of one seed is the next one of the seed
        # before. Mixed, all of them differ.
        mixed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
        shuffled = grain_library().experimental.index_shuffle
        last = self.num_examples - 1
        return np.array([shuffled(int(i), max_index=last, seed=mixed, rounds=_ROUNDS) for i in places], np.int64)


@functools.lru_cache(maxsize=4)
def _sorted_by_key(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    keys = np.random.SeedSequence((seed, epoch)).generate_state(num_examples, np.uint64)
    return np.argsort(keys, kind="stable")


# Reading of batches on the host: by number, or from a stream one after the other, with the position after each.

# Examples that processes compare. Each is read twice: where that gives other data, nothing is said of their content.
NUM_COMPARED = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """The next batch: its epoch, and its number in it."""

    epoch: int
    batch: int


# The rows of a batch that this process reads, from the number of rows of the batch.
OwnRows = Callable[[int], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """Some rows of a batch, stacked; `is_real`: which of them count; `after`: the place of the next batch."""

    tree: Any
    rows: np.ndarray
    num_rows: int
    is_real: np.ndarray
    after: Place


class NumberedReader:
    """Batches of examples that are read by number; any of them at any time, from several threads too."""

    is_sequential = False
    can_begin_again = True

    def __init__(self, examples: NumberedExamples, order: Order, stop_epoch: int | None) -> None:
        self._examples, self._order, self._stop_epoch = examples, order, stop_epoch

    @property
    def batches_per_epoch(self) -> int:
        return self._order.batches_per_epoch

    def example(self) -> Any:
        """An example, as a stack of one."""
        return self._examples.rows(np.arange(1), 0)

    def sample(self) -> Any:
        """A few examples, stacked: the first, the last and some by the seed, by which processes compare their data."""
        last, seed = self._order.num_examples - 1, self._order.seed or 0
        others = np.random.SeedSequence(seed).generate_state(NUM_COMPARED - 2, np.uint64) % (last + 1)
        return self._examples.rows(np.unique([0, last, *others.tolist()]), 0)

    def num_batches(self, first: Place) -> int | None:
        """From a place at the beginning of an epoch on; None where there is no end."""
        return None if self._stop_epoch is None else (self._stop_epoch - first.epoch) * self._order.batches_per_epoch

    def begin(self, place: Place) -> Callable[[int, OwnRows], HostRows | None]:
        """A function from the number of a batch, counted from this place, and the rows of it, to these rows; None
        behind the last epoch.
        """
        per_epoch = self._order.batches_per_epoch

        def read(number: int, own: OwnRows) -> HostRows | None:
            further, batch = divmod(place.batch + number, per_epoch)
            epoch = place.epoch + further
            if self._stop_epoch is not None and epoch >= self._stop_epoch:
                return None
            after = Place(epoch=epoch, batch=batch + 1)
            if after.batch == per_epoch:
                after = Place(epoch=epoch + 1, batch=0)
            return self._rows(epoch, batch, own, after)

        return read

    def _rows(self, epoch: int, batch: int, own: OwnRows, after: Place) -> HostRows:
        num_rows = self._order.num_rows(batch)
        rows = own(num_rows)
        # A process that holds nothing of a batch reads one example, for its shapes.
        examples = self._order.examples(epoch, batch, rows if rows.size else np.arange(1))
        is_real = rows < self._order.num_real(batch)
        return HostRows(
            tree=self._examples.rows(examples, epoch), rows=rows, num_rows=num_rows, is_real=is_real, after=after
        )


class StreamReader:
    """Batches of consecutive examples of a stream. Every process passes over all examples and keeps its own."""

    is_sequential = True

    def __init__(self, examples: StreamExamples, batch_size: int, tail: Tail, stop_epoch: int | None) -> None:
        self._examples, self._batch_size, self._tail, self._stop_epoch = examples, batch_size, tail, stop_epoch

    batches_per_epoch = None  # not known before the end

    @property
    def can_begin_again(self) -> bool:
        return self._examples.can_begin_again

    def example(self) -> Any:
        """An example, as a stack of one. Raises: InvalidArgumentError where there is none."""
        return stacked([self._examples.first()])

    def sample(self) -> Any:
        """As `NumberedReader.sample`: the first example alone, since an iterable has no numbers."""
        return self.example()

    def num_batches(self, first: Place) -> int | None:
        """Not known before the end."""
        return None

    def begin(self, place: Place) -> Callable[[int, OwnRows], HostRows | None]:
        """As `NumberedReader.begin`, for numbers that are asked for in order."""
        batches = self._batches(place)
        numbers = itertools.count()

        def read(number: int, own: OwnRows) -> HostRows | None:
            expected = next(numbers)
            assert number == expected, f"a stream is read in order: {number} is not {expected}"
            found = next(batches, None)
            if found is None:
                return None
            examples, num_real, after = found
            rows = own(len(examples))
            tree = stacked([examples[i] for i in rows] or examples[:1])
            return HostRows(tree=tree, rows=rows, num_rows=len(examples), is_real=rows < num_real, after=after)

        return read

    def _batches(self, place: Place) -> Iterator[tuple[list[Any], int, Place]]:
        """(examples, how many of them count, the place after) of each batch."""
        size, epoch, batch = self._batch_size, place.epoch, place.batch
        while self._stop_epoch is None or epoch < self._stop_epoch:
            examples = self._examples.epoch(epoch, batch * size)
            ahead = list(itertools.islice(examples, size))
            while ahead:
                following = list(itertools.islice(examples, size))
                is_last = len(following) < size and (not following or self._tail == Tail.DROP)
                after = Place(epoch=epoch + 1, batch=0) if is_last else Place(epoch=epoch, batch=batch + 1)
                if len(ahead) == size or self._tail != Tail.DROP:
                    batch += 1
                    yield self._filled(ahead), len(ahead), after
                ahead = [] if is_last else following
            if batch == 0:
                return  # without a batch, epochs would have no end
            epoch, batch = epoch + 1, 0

    def _filled(self, examples: list[Any]) -> list[Any]:
        """As many examples as a batch has: those that are there again. What came first in the epoch is not kept."""
        if self._tail == Tail.SHORT:
            return examples
        return [examples[i % len(examples)] for i in range(self._batch_size)]


# All processes shard the same data in the same way. Before the first batch each says how, and all compare.
#
# A process reads only its own rows of a batch. With another seed, batch size or source than the others it would read
# rows of another batch, and nothing later would notice: the shapes are the same.

EXAMPLE, CONTENT = "type of an example", "content of some examples"
_SHOWN = 3  # values of an option in an error
_HINT = (
    "pass the same source and the same options in every process, not a part of the data in each: shard lets each "
    "process read its own rows of the whole batch"
)
_HINT_OF_CONTENT = _HINT + "; where the source changes examples at random, seed that alike in all processes"


def check_alike(reader: NumberedReader | StreamReader, options: Mapping[str, Any]) -> None:
    """Every process calls it before its first batch. Raises: ProcessMismatchError, in all alike; ProcessLostError."""
    if jax.process_count() == 1:
        return
    said = with_process_lost_errors(
        lambda: said_by_all(
            "autopar.data.shard", "autopar/train/data", {**options, **seen_of(reader)},
            together="all processes to take the first batch of their data together",
            hint="make the same data in every process, and take its batches in all of them, in the same order",
        )
    )  # fmt: skip
    compare(said, jax.process_index())


def seen_of(reader: NumberedReader | StreamReader) -> dict[str, str | None]:
    """The type of an example, and a digest of some; None where the source gives others when it is asked again."""
    sample = reader.sample()
    digest: str | None = _digest(sample)
    if isinstance(reader, NumberedReader) and _digest(reader.sample()) != digest:
        digest = None
    return {EXAMPLE: _type(sample), CONTENT: digest}


def compare(said: Sequence[Mapping[str, Any]], process: int) -> None:
    """Raises: ProcessMismatchError where processes differ in an option, or in what they read."""
    differing = [name for name in said[0] if name != CONTENT and len({str(own[name]) for own in said}) > 1]
    content = [own[CONTENT] for own in said]
    if not differing and (None in content or len(set(content)) == 1):
        return
    if differing:
        got, hint = "; ".join(_values(name, [own[name] for own in said]) for name in differing), _HINT
    else:
        others = ", ".join(str(p) for p, digest in enumerate(content) if digest != content[0])
        got, hint = f"another {CONTENT} in process {others} than in process 0", _HINT_OF_CONTENT
    raise ProcessMismatchError(
        where=f"autopar.data.shard, process {process} of {len(said)}",
        expected=f"the same {', '.join(differing or [CONTENT])} in all processes", got=got, hint=hint,
    )  # fmt: skip


def _values(name: str, values: Sequence[Any]) -> str:
    """`seed 0 in process 0, 1 in process 1`."""
    processes = collections.defaultdict(list)
    for process, value in enumerate(values):
        processes[str(value)].append(process)
    shown = [f"{value} in process {', '.join(map(str, by[:8]))}" for value, by in processes.items()]
    return f"{name} {', '.join(shown[:_SHOWN])}{', ...' if len(shown) > _SHOWN else ''}"


def _type(sample: Any) -> str:
    leaves, _ = jax.tree_util.tree_flatten_with_path(sample)
    return ", ".join(f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape[1:])}".strip() for path, x in leaves)


def _digest(sample: Any) -> str:
    total = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(sample):
        array = np.asarray(leaf)
        total.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


# The rows of a batch that the devices of this process hold, and global arrays made of them: nothing is sent.
#
# The leaves of a batch may lie on different devices: of a pipeline each on the stages that read it. A process reads the
# rows that any leaf has on its devices.


Index = tuple[slice, ...]


def rows_of(parts: Iterable[Index], num_rows: int) -> np.ndarray:
    """The numbers of the rows in some parts of arrays with `num_rows` rows, in ascending order, each once."""
    ranges = {index[0].indices(num_rows)[:2] for index in parts}
    return np.unique(np.concatenate([np.arange(0), *(np.arange(*r) for r in ranges)]))


def own_rows(shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding]) -> np.ndarray:
    """The rows of the leaves' parts on the devices of this process."""
    parts: list[Index] = []
    for shape, sharding in zip(shapes, shardings, strict=True):
        parts += _parts(sharding, tuple(shape)).values()
    return rows_of(parts, shapes[0][0])


def from_rows(
    leaves: Sequence[np.ndarray], rows: np.ndarray, num_rows: int, shardings: Sequence[NamedSharding]
) -> list[Any]:
    """Global arrays of `num_rows` rows, of those that this process has: `rows` are their numbers, ascending."""
    if jax.process_count() == 1 and len(rows) == num_rows:
        return list(put(leaves, shardings))
    return [_from_rows(x, rows, num_rows, s) for x, s in zip(leaves, shardings, strict=True)]


def _from_rows(own: np.ndarray, rows: np.ndarray, num_rows: int, sharding: NamedSharding) -> Any:
    shape, dtype = (num_rows, *own.shape[1:]), aval_of(own).dtype
    if not is_here(sharding):
        return absent(shape, dtype, sharding)
    shards = []
    for device, (whole, *rest) in _parts(sharding, shape).items():
        start, stop, _ = whole.indices(num_rows)
        first = int(np.searchsorted(rows, start))
        part = np.asarray(own[(slice(first, first + stop - start), *rest)], dtype)
        shards.append(jax.device_put(part, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _parts(sharding: NamedSharding, shape: tuple[int, ...]) -> Mapping[Any, Index]:
    return dict(sharding.addressable_devices_indices_map(shape))


@functools.lru_cache(maxsize=64)
def evenly(num_rows: int) -> NamedSharding:
    """Rows over all devices, as many to each as divides; for batches that no plan has a layout for."""
    devices = np.array(jax.devices())
    groups = math.gcd(num_rows, devices.size)
    mesh = Mesh(devices.reshape(groups, -1), ("rows", "copies"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec("rows"))


MASK = "mask"
_HINTS = {
    "batch_size": "it is that of the whole batch, of all processes together",
    "seed": "it is that of the permutation; None leaves the examples in the order of the source",
    "epoch": "it is the number of the first epoch, 0 unless a run goes on",
    "epochs": "it says how many epochs there are; with None the batches have no end",
    "prefetch": "it is the number of batches that are read ahead; 0 reads each when it is asked for",
}
_SAID = {"examples": "number of examples", "epoch": "first epoch"}  # what errors call these options

Shapes = tuple[tuple[int, ...], ...]


class PlansBatches(Protocol):
    """What data are sharded for: an `autopar.Step`."""

    def batch_shardings_for(self, shapes: Shapes) -> Sequence[NamedSharding] | None:
        """The layouts of a batch's leaves in the latest plan for these shapes; None before there is one."""


class _Placed(NamedTuple):
    """A batch as the step takes it, and the place of the next one; `after` None: the place behind the last batch."""

    batch: Any
    after: Place | None


class _Ahead(NamedTuple):
    """Batches that are read ahead, and the layouts that they get."""

    batches: Iterator[_Placed]
    shardings: Sequence[NamedSharding]


class ShardedData:
    """An iterator of batches. Made by `autopar.data.shard`.

    A loop goes on where the one before was left; after the last batch it begins again, with the same epochs.
    """

    def __init__(
        self,
        reader: NumberedReader | StreamReader,
        step: PlansBatches,
        settings: dict[str, Any],
        epochs: tuple[int, int | None],
        prefetch: int,
    ) -> None:
        """`epochs`: the first, and how many."""
        self._reader, self._step, self._settings, self._prefetch = reader, step, settings, prefetch
        self._options = {**settings, "epoch": epochs[0], "epochs": epochs[1]}
        self._is_alike = False  # in all processes, as far as is known
        self._batch_size, self._masks = settings["batch_size"], settings["tail"] == Tail.MASK
        self._first = self._next = Place(epoch=epochs[0], batch=0)
        self._shapes: Shapes | None = None
        self._ahead: _Ahead | None = None
        self._num_taken, self._is_over = 0, False
        self._begin(self._first)

    def __iter__(self) -> ShardedData:
        """Itself. Raises: InvalidArgumentError where all batches were taken from a source that cannot begin again."""
        if self._is_over:
            if not self._reader.can_begin_again:
                raise InvalidArgumentError(
                    where="autopar.data, another pass", expected="a source that can begin again",
                    got="an iterator, of which all examples were taken",
                    hint="pass the dataset itself, or an object whose __iter__ opens the data anew",
                )  # fmt: skip
            self._begin(self._first)
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if not self._is_alike:
            options = {_SAID.get(name, name): value for name, value in self._options.items()}
            check_alike(self._reader, options | {"position": [self._next.epoch, self._next.batch]})
            self._is_alike = True
        try:
            placed = self._following()
        except BaseException:  # also of Ctrl-C, after which a notebook goes on
            self._begin(self._next)  # or what was read ahead would follow, without the batch that failed
            raise
        self._num_taken += 1
        if placed.after is None:
            self.close()
            self._is_over = True
            raise StopIteration
        self._next = placed.after
        return placed.batch

    def __len__(self) -> int:
        """The number of batches of all epochs. Raises: TypeError where the source or the epochs have no end."""
        number = self._reader.num_batches(self._first)
        if number is None:
            raise TypeError("the number of batches is not known: the source is an iterable, or epochs is None")
        return number

    def position(self) -> dict[str, Any]:
        """The place of the next batch, as values that JSON has: the same in all processes, whatever their number."""
        return {"epoch": self._next.epoch, "batch": self._next.batch, **self._settings}

    def restore(self, position: dict[str, Any]) -> None:
        """Goes on from a position. Raises: InvalidArgumentError for one of other data or of batches of another size."""
        where = "autopar.data, restore(position)"
        if not isinstance(position, dict):
            raise InvalidArgumentError(
                where=where, expected="a dict, as position() returns it", got=f"{position!r}"[:60],
                hint="give what position() returned; without a position, restore nothing",
            )  # fmt: skip
        for name, value in self._settings.items():
            if name not in position or position[name] != value:
                raise InvalidArgumentError(
                    where=where, expected=f"a position with {name} {value!r}, as here",
                    got=repr(position.get(name, "none")),
                    hint="shard the same data with the same options as in the run that saved it; for others, begin "
                    "with shard(..., epoch=...) and restore nothing",
                )  # fmt: skip
        epoch, batch = position.get("epoch"), position.get("batch")
        if not all(isinstance(n, int) and n >= 0 for n in (epoch, batch)):
            raise InvalidArgumentError(
                where=where, expected="an epoch and a batch from 0 on", got=f"{epoch!r} and {batch!r}",
                hint="give what position() returned",
            )  # fmt: skip
        assert isinstance(epoch, int), "checked above"
        assert isinstance(batch, int), "checked above"
        per_epoch = self._reader.batches_per_epoch
        if per_epoch is not None and batch >= per_epoch:
            raise InvalidArgumentError(
                where=where, expected=f"one of the {per_epoch} batches of an epoch, from 0 on", got=f"batch {batch}",
                hint="give what position() returned",
            )  # fmt: skip
        self._is_alike = False
        self._begin(Place(epoch=epoch, batch=batch))

    def close(self) -> None:
        """Ends the reading ahead. The next batch begins it again, where the source is no iterator that is used up."""
        if self._ahead is not None:
            self._begin(self._next)

    def _begin(self, place: Place) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.batches.close()  # type: ignore[attr-defined]  # a generator
        self._next, self._num_taken, self._is_over, self._read = place, 0, False, self._reader.begin(place)

    def _following(self) -> _Placed:
        shardings = self._shardings()
        if shardings is None or self._prefetch == 0:
            return self._placed(self._read, shardings, self._num_taken)
        if self._ahead is not None and self._ahead.shardings is not shardings and self._reader.can_begin_again:
            # In the same batch in all processes, and not when a thread sees the new plan.
            self._begin(self._next)
        if self._ahead is None:
            self._ahead = _Ahead(self._reading_ahead(shardings), shardings)
        return next(self._ahead.batches)

    def _shardings(self) -> Sequence[NamedSharding] | None:
        if self._shapes is None:
            example = self._with_mask(self._reader.example(), np.ones(1, bool))
            self._shapes = tuple((self._batch_size, *x.shape[1:]) for x in jax.tree.leaves(example))
        return self._step.batch_shardings_for(self._shapes)

    def _reading_ahead(self, shardings: Sequence[NamedSharding]) -> Iterator[_Placed]:
        grain = grain_library()
        numbers = grain.MapDataset.range(self._num_taken, sys.maxsize)
        threads = 1 if self._reader.is_sequential else self._prefetch
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=self._prefetch)
        read = functools.partial(self._placed, self._read, shardings)
        batches: Iterator[_Placed] = iter(numbers.map(read).to_iter_dataset(options))
        return batches

    def _placed(
        self, read: Callable[..., HostRows | None], shardings: Sequence[NamedSharding] | None, number: int
    ) -> _Placed:
        """A batch in the layouts of the plan; one that the plan has none for as host data, or evenly over devices."""
        host = read(number, lambda num_rows: self._own_rows(shardings, num_rows))
        if host is None:
            return _Placed(None, None)
        leaves, tree = jax.tree.flatten(self._with_mask(host.tree, host.is_real))
        if shardings is None or host.num_rows != self._batch_size:
            if jax.process_count() == 1:
                return _Placed(jax.tree.unflatten(tree, leaves), host.after)
            shardings = [evenly(host.num_rows)] * len(leaves)
        arrays = from_rows(leaves, host.rows, host.num_rows, shardings)
        return _Placed(jax.tree.unflatten(tree, arrays), host.after)

    def _own_rows(self, shardings: Sequence[NamedSharding] | None, num_rows: int) -> np.ndarray:
        if jax.process_count() == 1:
            return np.arange(num_rows)
        if shardings is None or num_rows != self._batch_size:
            return own_rows([(num_rows,)], [evenly(num_rows)])
        assert self._shapes is not None, "known before there are layouts for them"
        return own_rows(self._shapes, shardings)

    def _with_mask(self, tree: Any, is_real: np.ndarray) -> Any:
        if not self._masks:
            return tree
        if not isinstance(tree, dict):
            return tree, is_real
        if MASK in tree:
            raise InvalidArgumentError(
                where="autopar.data.shard(tail='mask')", expected=f"examples without an entry {MASK!r}",
                got=", ".join(map(str, tree)), hint="rename it: the mask of the batch is put there",
            )  # fmt: skip
        return {**tree, MASK: is_real}


def shard(
    source: Any,
    step: PlansBatches,
    *,
    batch_size: int,
    seed: int | None = 0,
    epoch: int = 0,
    epochs: int | None = 1,
    tail: str = Tail.PAD,
    prefetch: int = 2,
) -> ShardedData:
    """Batches of a source for a step: each process reads the examples of its own devices, for the plan at hand.

    The batches are those of all processes together, in the same order whatever their number. Before the step has a
    plan they are host data (in several processes, rows over all devices); from then on they come in the plan's layouts.

    Args:
        source: Examples: a NumPy array or a pytree of arrays (dimension 0 counts examples), `autopar.data.tokens`, a
            `grain.MapDataset`, anything with `__len__` and `__getitem__` (a list, a Hugging Face dataset), or an
            iterable (a `grain.IterDataset`), which is read in its own order, by every process in full.
        step: The step that takes the batches, made by `autopar.parallelize`.
        batch_size: The number of examples of a whole batch, over all processes.
        seed: Of the permutation, another one in each epoch; None leaves the order of the source.
        epoch: The first epoch.
        epochs: How many; None has no end.
        tail: The last examples of an epoch where they are no whole batch: "pad" (filled with the first examples of the
            epoch; of an iterable, with the same ones again), "drop", "mask" (as "pad", and each batch has an array of
            bools, True for what counts: under "mask" where examples are dicts, else as the second of a pair), "short".
        prefetch: The number of batches that are read and put on the devices ahead of the step, in threads; 0: none.

    Raises: InvalidArgumentError; ImportError without Grain.
    """
    kind = _checked(batch_size, seed, epoch, epochs, tail, prefetch, step)
    if prefetch:
        grain_library()
    batch_size, seed, epoch = int(batch_size), None if seed is None else int(seed), int(epoch)
    epochs = None if epochs is None else int(epochs)
    stop_epoch = None if epochs is None else epoch + epochs
    settings = {"seed": seed, "batch_size": batch_size, "tail": str(kind)}
    check_not_batched(source)
    if is_stream(source):
        stream = StreamReader(StreamExamples(source), batch_size, kind, stop_epoch)
        return ShardedData(stream, step, {**settings, "seed": None, "examples": None}, (epoch, epochs), prefetch)
    examples = numbered(source)
    order = Order(num_examples=len(examples), batch_size=batch_size, seed=seed, tail=kind)
    if order.batches_per_epoch == 0:
        raise InvalidArgumentError(
            where="autopar.data.shard", expected=f"at least {batch_size} examples, a batch (tail='drop')",
            got=f"{len(examples)}", hint="take a smaller batch_size, or tail='pad'",
        )  # fmt: skip
    reader = NumberedReader(examples, order, stop_epoch)
    return ShardedData(reader, step, {**settings, "examples": len(examples)}, (epoch, epochs), prefetch)


def _checked(batch_size: Any, seed: Any, epoch: Any, epochs: Any, tail: Any, prefetch: Any, step: Any) -> Tail:
    """Raises: InvalidArgumentError."""
    numbers: tuple[tuple[str, Any, int, bool], ...] = (
        ("batch_size", batch_size, 1, False),
        ("seed", seed, 0, True),
        ("epoch", epoch, 0, False),
        ("epochs", epochs, 1, True),
        ("prefetch", prefetch, 0, False),
    )
    for name, value, least, may_be_none in numbers:
        is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= least
        if not is_number and not (value is None and may_be_none):
            raise InvalidArgumentError(
                where=f"autopar.data.shard({name}=...)",
                expected=f"a whole number from {least} on" + (", or None" if may_be_none else ""),
                got=repr(value), hint=_HINTS[name],
            )  # fmt: skip
    expect_one_of("autopar.data.shard(tail=...)", tail, Tail, "'pad' is what DistributedSampler does")
    hint = "decorate the step first, and pass what parallelize returned"
    expect_step("autopar.data.shard(source, step)", step, ("batch_shardings_for",), hint)
    return Tail(tail)
