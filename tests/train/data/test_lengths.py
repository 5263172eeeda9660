"""Sequences of several lengths: buckets with the least padding, and rows that they fill."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InvalidArgumentError
from autopar.fitting import LENGTH_UNIT, bucket_lengths, checked_lengths, packed_rows, rounded_up


def positions(lengths, buckets):
    return sum(min(bucket for bucket in buckets if bucket >= length) for length in lengths)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 4))
def test_buckets_have_the_least_padding(lengths, most):
    found = bucket_lengths(np.array(lengths), most)
    sizes = sorted({rounded_up(length) for length in lengths})
    every = (
        (*some, sizes[-1])
        for count in range(min(most, len(sizes)))
        for some in itertools.combinations(sizes[:-1], count)
    )
    assert found == tuple(sorted(found))
    assert found[-1] == sizes[-1]
    assert len(found) <= most
    assert positions(lengths, found) == min(positions(lengths, buckets) for buckets in every)


def test_two_buckets_of_many_short_sequences_and_a_long_one():
    assert bucket_lengths(np.array([100] * 50 + [120, 500, 2000]), 2) == (LENGTH_UNIT, 2048)
    assert bucket_lengths(np.array([100, 90]), 4) == (LENGTH_UNIT,)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=6))
def test_few_sequences_take_the_fewest_rows_or_one_more(lengths):
    assert 0 <= packed_rows(np.array(lengths), 64) - fewest_rows(lengths, []) <= 1


def fewest_rows(lengths, rooms):
    """By trying every row for every sequence."""
    if not lengths:
        return 0
    first, *others = lengths
    tried = [1 + fewest_rows(others, [*rooms, 64 - first])]
    for at, room in enumerate(rooms):
        if first <= room:
            tried.append(fewest_rows(others, [*rooms[:at], room - first, *rooms[at + 1 :]]))
    return min(tried)


def test_sequences_that_fill_rows_exactly():
    assert packed_rows(np.array([48, 16, 32, 32, 40, 24]), 64) == 3
    assert packed_rows(np.array([33, 33, 33]), 64) == 3


@pytest.mark.parametrize("lengths", [[], [0, 3], [1.5], [[1, 2]], [[1], [1, 2]]])
def test_lengths_are_positive_integers(lengths):
    with pytest.raises(InvalidArgumentError, match="whole positive numbers"):
        checked_lengths("autopar.fit(lengths=...)", lengths)
