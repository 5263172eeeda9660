"""Numbers of micro-batches of one stage, tried one after the other until the fastest is between slower ones."""

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from autopar.search.inter_op.search_space import (
    Tried,
    largest_peak_bytes,
    next_for_stages,
    next_numbers,
    numbers_within,
)

NUMBERS = [1, 2, 4, 8, 16, 32, 64]
KEEPS = ("nothing",) * 2
RECOMPUTES = ("input",) * 2


def test_the_fewest_that_surely_fit_are_tried_first():
    tried = {64: Tried(step_time_s=3.0, peak_bytes=10, policies=KEEPS)}
    assert next_numbers(NUMBERS, tried, 50, 64) == [16]  # 40 bytes if all of the 10 grow; 80 with 8
    tried[16] = Tried(step_time_s=2.0, peak_bytes=16, policies=KEEPS)  # so 8 stay, and 2 grow
    assert next_numbers(NUMBERS, tried, 50, 64) == [4]  # 40; 72 with 2; 32 with the same recomputation is no faster
    tried[4] = Tried(step_time_s=1.0, peak_bytes=40, policies=KEEPS)
    assert next_numbers(NUMBERS, tried, 50, 64) == [2]  # half: with other recomputation it may fit
    tried[2] = Tried(step_time_s=1.5, peak_bytes=45, policies=RECOMPUTES)
    assert next_numbers(NUMBERS, tried, 50, 64) == []


def test_numbers_in_which_one_stage_cannot_come_near_the_best_are_left_out():
    tried = {16: Tried(step_time_s=3.0), 32: Tried(step_time_s=4.0)}
    assert numbers_within(NUMBERS, tried, 3.0) == NUMBERS
    assert numbers_within(NUMBERS, tried, 1.4) == [1, 2, 4]  # 0.75 s at least in four, 1.5 s in eight or in many more
    assert numbers_within(NUMBERS, tried, 0.1) == []


def test_a_peak_by_the_tables_is_as_good_as_one_that_was_built():
    assert next_numbers(NUMBERS, {64: Tried(step_time_s=3.0, most_bytes=10, policies=KEEPS)}, 50, 64) == [16]


def test_what_was_jumped_over_is_tried_where_the_recomputation_differs():
    tried = {
        64: Tried(step_time_s=3.0, peak_bytes=10, policies=KEEPS),
        8: Tried(step_time_s=2.0, peak_bytes=40, policies=RECOMPUTES),
        4: Tried(step_time_s=math.inf),
    }
    assert next_numbers(NUMBERS, tried, 50, 64) == [16]


def test_between_a_number_that_was_jumped_to_and_a_faster_one_half_is_tried():
    tried = {
        64: Tried(step_time_s=2.0, peak_bytes=10, policies=KEEPS),
        16: Tried(step_time_s=3.0, peak_bytes=40, policies=KEEPS),
    }
    assert next_numbers(NUMBERS, tried, 50, 64) == [32]


def test_beyond_a_slower_number_one_is_tried_whose_examples_all_devices_share():
    numbers, whole = [1, 2, 3, 4, 6, 8, 12], (1, 3)  # of 768 examples on 256 devices
    tried = {
        8: Tried(step_time_s=4.5, peak_bytes=14, policies=RECOMPUTES),
        4: Tried(step_time_s=3.2, peak_bytes=31, policies=KEEPS),
        2: Tried(step_time_s=3.7, peak_bytes=45, policies=RECOMPUTES),
    }
    assert next_numbers(numbers, tried, 32, 12) == []
    assert next_numbers(numbers, tried, 32, 12, whole) == [3]  # one would take 124 bytes, and three may take 41
    assert next_numbers(numbers, tried, 200, 12, whole) == [1]
    tried[3] = Tried(step_time_s=3.5)
    assert next_numbers(numbers, tried, 32, 12, whole) == []  # three says that one is slower too
    tried[3], tried[1] = Tried(step_time_s=3.1), Tried(step_time_s=3.3)
    assert next_numbers(numbers, tried, 32, 12, whole) == []


def test_more_micro_batches_are_tried_whose_examples_all_devices_share():
    tried = {2: Tried(step_time_s=3.0), 1: Tried(step_time_s=4.0), 4: Tried(step_time_s=3.5)}
    assert next_numbers([1, 2, 3, 4], tried, 32, 12) == []
    assert next_numbers([1, 2, 3, 4], tried, 32, 12, (1, 3)) == [3]
    del tried[1]
    assert next_numbers([1, 2, 3, 4], tried, 32, 12, (1, 3)) == [1, 3]
    alike = {m: dataclasses.replace(known, policies=KEEPS) for m, known in tried.items()}
    assert next_numbers([2, 3, 4, 6], alike, 32, 12, (3,)) == [3]


def test_without_a_peak_half_and_twice_are_tried():
    assert next_numbers(NUMBERS, {8: Tried(step_time_s=1.0)}, 50, 64) == [4, 16]
    assert next_numbers(NUMBERS, {1: Tried(step_time_s=1.0)}, 50, 2) == []


@given(stays=st.integers(0, 100), grows=st.integers(1, 100), limit=st.integers(1, 4000))
def test_the_fewest_that_fit_are_found_where_fewer_are_faster(stays, grows, limit):
    peak = {m: stays + grows * 64 // m for m in NUMBERS}
    if peak[64] > limit:
        return
    tried, count = {64: Tried(step_time_s=64.0, peak_bytes=peak[64], policies=KEEPS)}, 0
    while near := next_numbers(NUMBERS, tried, limit, 64):
        for m in near:
            assert largest_peak_bytes(tried, min(tried), m) >= peak[m] - 1e-6  # an upper bound, or the line itself
            tried[m] = Tried(step_time_s=m if peak[m] <= limit else math.inf, peak_bytes=peak[m], policies=KEEPS)
            count += 1
    best = min(tried, key=lambda m: tried[m].step_time_s)
    assert best == min(m for m in NUMBERS if peak[m] <= limit)
    assert count <= 4


BATCH_1152 = [1, 2, 4, 8, 16, 24, 32, 48, 64, 72, 96, 128, 144, 192, 288, 384, 576, 1152]


def test_between_numbers_for_stages_the_middle_is_tried():
    assert next_for_stages(BATCH_1152, {64, 288}, 288) == [576, 144]  # twice as many; 136 is in the middle
    assert next_for_stages(BATCH_1152, {64, 144, 288}, 144) == [96, 192]


def test_beyond_the_numbers_for_stages_half_and_double_are_tried():
    assert next_for_stages(BATCH_1152, {64, 288}, 64) == [32, 144]  # what lies between comes last
    assert next_for_stages(BATCH_1152, {1152}, 1152) == [576]
    assert next_for_stages([1, 3, 9], {1}, 1) == [3]
    assert next_for_stages([1], {1}, 1) == []
    assert next_for_stages([1, 2, 4, 8], {4}, 4) == [8, 2]  # more first: stages wait less for one another


@given(st.sets(st.integers(1, 500), min_size=1), st.data())
def test_what_is_tried_for_stages_is_new_if_it_lies_between(numbers, data):
    tried = data.draw(st.sets(st.sampled_from(sorted(numbers)), min_size=1))
    best = data.draw(st.sampled_from(sorted(tried)))
    for m in next_for_stages(sorted(numbers), tried, best):
        assert m in numbers
        assert m not in tried
