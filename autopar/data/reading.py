"""Reading of batches on the host: by number, or from a stream one after the other, with the position after each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autopar.data.order import Order, Tail
from autopar.data.sources import NumberedExamples, StreamExamples, stacked

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
