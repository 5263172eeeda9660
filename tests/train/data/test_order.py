"""The order of examples as pure functions: each once an epoch, in one order for any number of processes."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.train.data.sharded import NumberedReader, Order, Place, StreamReader, Tail, rows_of
from autopar.train.data.sources import ArrayExamples, StreamExamples

SIZES = st.integers(1, 40)
BATCHES = st.integers(1, 12)


class NoPlan:
    """A step without a plan."""

    def batch_shardings_for(self, shapes):
        return None


def order(examples, batch, tail=Tail.PAD, seed=3):
    return Order(num_examples=examples, batch_size=batch, seed=seed, tail=tail)


def taken(of, epoch=0):
    """(numbers of the examples, how many of them count) of each batch."""
    return [
        (of.examples(epoch, i, np.arange(of.num_rows(i))).tolist(), of.num_real(i)) for i in range(of.batches_per_epoch)
    ]


@settings(max_examples=40, deadline=None)
@given(SIZES, BATCHES, st.integers(0, 3), st.sampled_from([Tail.PAD, Tail.MASK, Tail.SHORT]))
def test_what_counts_is_each_example_once_an_epoch(examples, batch, epoch, tail):
    of_epoch = taken(order(examples, batch, tail), epoch)
    counted = [i for b, num_real in of_epoch for i in b[:num_real]]
    assert sorted(counted) == list(range(examples))
    sizes = {len(b) for b, _ in of_epoch}
    assert sizes == {batch} or (tail == Tail.SHORT and max(sizes) <= batch)


@settings(max_examples=20, deadline=None)
@given(SIZES, BATCHES)
def test_dropped_examples_are_fewer_than_a_batch(examples, batch):
    counted = collections.Counter(i for b, _ in taken(order(examples, batch, Tail.DROP)) for i in b)
    assert set(counted.values()) <= {1}
    assert 0 <= examples - len(counted) < batch


def test_the_last_batch_is_filled_from_the_beginning_of_the_epoch():
    (first, _), _, (last, num_real) = taken(order(10, 4))
    assert num_real == 2
    assert last[2:] == first[:2]


def test_each_epoch_and_seed_has_a_permutation_of_its_own():
    seen = {
        (seed, epoch): tuple(i for b, _ in taken(order(30, 6, seed=seed), epoch) for i in b)
        for seed in (0, 1, 2)
        for epoch in (0, 1, 2)
    }
    assert len(set(seen.values())) == 9  # Grain's own seed + epoch would repeat some
    assert seen[0, 0] == tuple(i for b, _ in taken(order(30, 6, seed=0)) for i in b)
    assert [b for b, _ in taken(order(5, 2, Tail.SHORT, seed=None))] == [[0, 1], [2, 3], [4]]


def test_many_examples_are_permuted_without_their_list(monkeypatch):
    monkeypatch.setattr("autopar.train.data.sharded.SORTED_EXAMPLES", 10_000)
    every = np.arange(10_001)
    orders = [Order(num_examples=10_001, batch_size=10_001, seed=seed, tail=Tail.PAD) for seed in (0, 1)]
    first, second, other = (orders[i].examples(epoch, 0, every) for i, epoch in ((0, 0), (0, 1), (1, 0)))
    for permuted in (first, second, other):
        assert (np.sort(permuted) == every).all()
    assert (first == second).mean() < 0.01
    assert (second == other).mean() < 0.01
    huge = Order(num_examples=2**32 - 1, batch_size=8, seed=0, tail=Tail.PAD)
    assert len(set(huge.examples(0, 10**8, np.arange(8)))) == 8


@st.composite
def splits(draw):
    """(rows of a batch, the parts of each of some processes): together all rows, with and without copies."""
    processes, batch = draw(st.integers(1, 4)), draw(BATCHES)
    cuts = sorted(draw(st.lists(st.integers(0, batch), min_size=processes - 1, max_size=processes - 1)))
    parts = [[(slice(a, b),)] for a, b in zip([0, *cuts], [*cuts, batch], strict=True)]
    if draw(st.booleans()):  # another leaf, whole on the devices of one of them
        parts[draw(st.integers(0, processes - 1))].append((slice(None),))
    return batch, parts


@settings(max_examples=40, deadline=None)
@given(SIZES, splits(), st.sampled_from(list(Tail)))
def test_processes_read_the_batches_that_one_process_reads(examples, split, tail):
    batch, parts = split
    if tail == Tail.DROP and examples < batch:
        return
    reader = NumberedReader(ArrayExamples(np.arange(examples)), order(examples, batch, tail), 2)
    alone = list(all_batches(reader, Place(epoch=0, batch=0), lambda n: np.arange(n)))
    of_each = [
        list(all_batches(reader, Place(epoch=0, batch=0), lambda n, own=own: rows_of(clipped(own, n), n)))
        for own in parts
    ]
    for number, whole in enumerate(alone):
        joined = {}
        for of_process in of_each:
            host = of_process[number]
            assert host.after == whole.after
            joined.update(zip(host.rows.tolist(), host.tree.tolist(), strict=False))
        assert [joined[i] for i in range(whole.num_rows)] == whole.tree.tolist()


def clipped(parts, num_rows):
    """The parts of a batch as those of a shorter one."""
    return [(slice(*part.indices(num_rows)[:2]),) for (part,) in parts]


def all_batches(reader, place, own):
    read, number = reader.begin(place), 0
    while (host := read(number, own)) is not None:
        yield host
        number += 1


@settings(max_examples=30, deadline=None)
@given(SIZES, BATCHES, st.sampled_from(list(Tail)), st.booleans(), st.data())
def test_a_restored_position_goes_on_with_the_next_example(examples, batch, tail, is_stream, data):
    numbers = np.arange(examples)
    if tail == Tail.DROP and examples < batch:
        return

    def new():
        source = Again(numbers) if is_stream else numbers
        return autopar.data.shard(source, NoPlan(), batch_size=batch, epochs=3, tail=tail, seed=5)

    whole = [as_lists(b) for b in new()]
    stop = data.draw(st.integers(0, len(whole)))
    first = new()
    begun = [as_lists(next(first)) for _ in range(stop)]
    second = new()
    second.restore(first.position())
    assert begun + [as_lists(b) for b in second] == whole


class Again:
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)


def as_lists(batch):
    return [x.tolist() for x in batch] if isinstance(batch, tuple) else batch.tolist()


@settings(max_examples=30, deadline=None)
@given(SIZES, BATCHES, st.sampled_from(list(Tail)))
def test_a_stream_has_the_batches_of_the_same_examples_by_number(examples, batch, tail):
    numbers = np.arange(examples)
    stream = StreamReader(StreamExamples(Again(numbers)), batch, tail, 2)
    by_number = NumberedReader(ArrayExamples(numbers), order(examples, batch, tail, seed=None), 2)
    if by_number._order.batches_per_epoch == 0:
        return
    start = Place(epoch=0, batch=0)
    pairs = zip(*(all_batches(r, start, lambda n: np.arange(n)) for r in (stream, by_number)), strict=True)
    for streamed, numbered in pairs:
        real = streamed.is_real
        assert streamed.after == numbered.after
        assert real.tolist() == numbered.is_real.tolist()
        assert streamed.tree[real].tolist() == numbered.tree[numbered.is_real].tolist()
        assert len(streamed.tree) == len(numbered.tree)


def test_no_examples_end_at_once():
    with pytest.raises(autopar.errors.InvalidArgumentError, match="an empty one"):
        next(autopar.data.shard(Again([]), NoPlan(), batch_size=2, epochs=None))
