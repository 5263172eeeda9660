"""Moves between any shardings: the pieces and their rounds, and arrays that move in programs of several processes."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from autopar.runtime.moves import Ends, NotHeldError, Send, num_elements, sends_in_rounds
from tests.in_processes import launch


def split(length, parts):
    return [(length * i // parts, length * (i + 1) // parts) for i in range(parts)]


def boxes(shape, grid):
    return list(itertools.product(*(split(n, k) for n, k in zip(shape, grid, strict=True))))


def laid_out(shape, grid, devices):
    """The devices in turn hold the boxes of a grid, more than once where there are more devices."""
    cut = boxes(shape, grid)
    return tuple((device, cut[i % len(cut)]) for i, device in enumerate(devices))


def carried(shape, ends, rounds):
    """What each receiver holds of a numbered array after the sends; each element is written once."""
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    index = {box: tuple(slice(*part) for part in box) for box in {b for _, b in (*ends.held, *ends.wanted)}}
    holds = dict(ends.held)
    result = {device: np.full(shape, -1) for device, _ in ends.wanted}
    for send in itertools.chain(*rounds):
        inside = holds[send.sender]
        assert all(a <= c and d <= b for (a, b), (c, d) in zip(inside, send.box, strict=True))
        at = tuple(slice(*part) for part in send.box)
        for device in send.receivers:
            assert (result[device][at] == -1).all()
            result[device][at] = whole[at]
    for device, box in ends.wanted:
        np.testing.assert_array_equal(result[device][index[box]], whole[index[box]])
        assert (result[device] >= 0).sum() == num_elements(box)


def bytes_each_way(rounds, itemsize):
    """The bytes that each device sends, and receives, in each round, but for whole shards."""
    for sends in rounds:
        found = {}
        for send in sends:
            for place in (("sends", send.sender), *(("receives", d) for d in send.receivers)):
                found[place] = found.get(place, 0) + (0 if send.is_whole else num_elements(send.box) * itemsize)
        yield from found.values()


def test_any_layouts_in_small_rounds():
    choice = random.Random(0)
    process_of = [0, 0, 1, 1, 2, 2, 3, 3]
    for shape, grids in (((24, 16), ((1, 1), (2, 1), (4, 1), (1, 4), (2, 2))), ((8,), ((1,), (2,), (4,))), ((), ((),))):
        for have, want, round_bytes in itertools.product(grids, grids, (32, 4096)):
            devices = [choice.sample(range(8), 4) for _ in range(2)]
            held, wanted = laid_out(shape, have, devices[0]), laid_out(shape, want, devices[1])
            ends = Ends(held=held, wanted=wanted, itemsize=4)
            rounds = sends_in_rounds([ends], process_of, round_bytes)
            carried(shape, ends, rounds)
            assert max(bytes_each_way(rounds, 4)) <= round_bytes
            for send in itertools.chain(*rounds):
                assert len({process_of[d] for d in send.receivers}) == 1


def test_what_crosses_between_processes_crosses_once_and_from_all_holders():
    """Two processes of two devices: all of the first hold the whole, all of the second want it."""
    whole = ((0, 64),)
    ends = Ends(held=((0, whole), (1, whole)), wanted=((2, whole), (3, whole)), itemsize=1)
    rounds = sends_in_rounds([ends, ends], [0, 0, 1, 1], 16)
    sends = [send for send in itertools.chain(*rounds) if not send.is_whole]
    assert sends == []  # whole shards: one of each array, from either holder
    assert sorted(send.sender for send in itertools.chain(*rounds)) == [0, 1]
    halves = (((0, 32),), ((32, 64),))
    ends = Ends(held=((0, whole), (1, whole)), wanted=tuple((d, halves[d % 2]) for d in (2, 3, 4, 5)), itemsize=1)
    rounds = sends_in_rounds([ends], [0, 0, 1, 1, 1, 1], 8)
    sends = list(itertools.chain(*rounds))
    assert sum(num_elements(s.box) for s in sends) == 64
    assert {s.receivers for s in sends} == {(2, 4), (4, 2), (3, 5), (5, 3)}
    assert [sum(s.sender == d for s in sends) for d in (0, 1)] == [4, 4]


def test_sends_literal():
    """Two halves of rows to two halves of columns, on the same devices: each keeps a quarter, and sends one."""
    rows, columns = (((0, 2), (0, 4)), ((2, 4), (0, 4))), (((0, 4), (0, 2)), ((0, 4), (2, 4)))
    ends = Ends(held=tuple(enumerate(rows)), wanted=tuple(enumerate(columns)), itemsize=4)
    assert sends_in_rounds([ends], [0, 1], 16) == (
        (
            Send(0, ((0, 2), (0, 2)), 0, (0,), False),
            Send(0, ((2, 4), (2, 4)), 1, (1,), False),
        ),
        (
            Send(0, ((2, 4), (0, 2)), 1, (0,), False),
            Send(0, ((0, 2), (2, 4)), 0, (1,), False),
        ),
    )


def test_the_nearest_holder_sends():
    whole = ((0, 4),)
    ends = Ends(held=((0, whole), (2, whole), (3, whole)), wanted=((3, whole), (1, whole)), itemsize=1)
    sends = itertools.chain(*sends_in_rounds([ends], [0, 0, 1, 1], 64))
    assert {(s.sender, s.receivers) for s in sends} == {(3, (3,)), (0, (1,))}


def test_a_part_that_nobody_holds():
    ends = Ends(held=((0, ((0, 4),)), (1, ((6, 8),))), wanted=((1, ((0, 8),)),), itemsize=1)
    with pytest.raises(NotHeldError, match=r"array 0: nobody holds \(\(4, 6\),\)"):
        sends_in_rounds([ends], [0, 0], 64)


@pytest.mark.slow
def test_arrays_move_in_two_processes(tmp_path):
    program = str(Path(__file__).with_name("moving.py"))
    for code, text, _ in launch(tmp_path, 2, 2, 60.0, program):
        assert code == 0, text
        assert text.splitlines()[-1] == "moved"


@pytest.mark.slow
def test_from_a_pipeline_of_two_processes_to_a_sampler_in_two_others(tmp_path):
    """Bit for bit, and the memory of each process grows by no more than 1.1 of its parts of both trees.

    Freed memory goes back to the system at once, so that it is not taken for memory in use.
    """
    program = str(Path(__file__).with_name("sampling.py"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        ended = launch(tmp_path, 4, 1, 240.0, program)
    for code, text, _ in ended:
        assert code == 0, text
        assert text.splitlines()[-1].startswith("peak "), text
