"""Every kind of source, and what is refused."""

import json
import sys

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import InvalidArgumentError
from tests.train.data.test_order import NoPlan


def batches(source, **options):
    return list(autopar.data.shard(source, NoPlan(), **{"batch_size": 2, "seed": None, **options}))


class Rows:
    """As a Hugging Face dataset: examples by number, as dicts with lists and numbers."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return {"tokens": [int(number), 7], "label": int(number) % 2}


@pytest.mark.parametrize(
    "source",
    [
        np.arange(4),
        jnp.arange(4),
        [0, 1, 2, 3],
        range(4),
        grain.MapDataset.range(4),
        grain.sources.RangeDataSource(0, 4, 1),
        grain.MapDataset.range(4).to_iter_dataset(),
        (i for i in range(4)),
        iter(grain.MapDataset.range(4).to_iter_dataset()),
    ],
    ids=["numpy", "jax", "list", "range", "grain map", "grain source", "grain iter", "generator", "grain iterator"],
)
def test_sources_of_numbers(source):
    assert [b.tolist() for b in batches(source)] == [[0, 1], [2, 3]]


def test_sources_of_numbers_in_a_second_epoch():
    for source in (grain.sources.RangeDataSource(0, 4, 1), grain.MapDataset.range(4), range(4)):
        assert [b.tolist() for b in batches(source, epochs=2)] == [[0, 1], [2, 3]] * 2


def test_trees_of_arrays_and_of_examples():
    first, second = batches({"x": np.arange(8).reshape(4, 2), "y": (np.arange(4),)})
    assert second["x"].tolist() == [[4, 5], [6, 7]]
    assert second["y"][0].tolist() == [2, 3]
    assert first["y"][0].tolist() == [0, 1]
    first, second = batches(Rows())
    assert second["tokens"].tolist() == [[2, 7], [3, 7]]
    assert first["label"].tolist() == [0, 1]


def test_a_mask_says_what_counts():
    (first, mask), (last, last_mask) = batches(np.arange(3), tail="mask")
    assert (mask.tolist(), last_mask.tolist()) == ([True, True], [True, False])
    assert (first.tolist(), last.tolist()) == ([0, 1], [2, 0])
    assert batches({"x": np.arange(3)}, tail="mask")[1]["mask"].tolist() == [True, False]
    with pytest.raises(InvalidArgumentError, match="rename it"):
        batches({"mask": np.arange(3)}, tail="mask")


def test_grains_random_transformations_draw_anew_in_each_epoch():
    noisy = grain.MapDataset.range(4).seed(1).random_map(lambda x, rng: x + rng.random())
    first, second = np.array(batches(noisy, epochs=2)).reshape(2, 4)
    assert first.astype(int).tolist() == second.astype(int).tolist() == [0, 1, 2, 3]
    assert not np.isclose(first, second).any()


def test_windows_of_a_token_file(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(11, dtype=np.uint16).tofile(path)
    windows = autopar.data.tokens(path, length=4)
    assert [w.tolist() for w in windows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows[-1].dtype == np.int32
    overlapping = autopar.data.tokens(path, length=5, stride=4)
    assert [w.tolist() for w in overlapping] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert [b.shape for b in batches(overlapping, batch_size=2)] == [(2, 5)]
    with pytest.raises(IndexError):
        windows[2]
    for wrong, said in (
        (dict(length=12), "at least 12 of them"),
        (dict(length=4, dtype="uint32"), "22 bytes"),
        (dict(length=4, dtype="float32"), "an integer type"),
        (dict(length=0), "length and stride"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            autopar.data.tokens(path, **wrong)


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (np.arange(4), dict(batch_size=0), "a whole number from 1"),
        (np.arange(0), {}, "from 1 to"),
        (np.arange(4), dict(tail="wrap"), "'pad' or 'drop' or 'mask' or 'short'"),
        (np.arange(4), dict(batch_size=5, tail="drop"), "at least 5 examples"),
        ({"x": np.arange(4), "y": np.arange(3)}, {}, "one number of examples"),
        (object(), {}, "arrays, a Grain dataset"),
        ([np.zeros(2), np.zeros(3)], {}, "examples of one shape"),
        ([{"x": 1}, {"y": 1}], {}, "examples of one structure"),
        (grain.MapDataset.range(4).repeat(), {}, "leave repeat"),
        (grain.MapDataset.range(4).filter(lambda x: x != 1), {}, "to_iter_dataset"),
        (iter(range(4)), dict(epochs=2), "an iterable that can begin again"),
    ],
    ids=[
        "batches of none", "no examples", "another tail", "no whole batch", "unequal numbers", "an object",
        "unequal shapes", "unequal structures", "repeated", "filtered", "an iterator twice",
    ],
)  # fmt: skip
def test_what_is_refused(source, options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        batches(source, **options)
    with pytest.raises(InvalidArgumentError, match="a step made by"):
        autopar.data.shard(np.arange(4), lambda state, batch: state, batch_size=2)


def test_positions_of_other_data_are_refused():
    data = autopar.data.shard(np.arange(8), NoPlan(), batch_size=np.int64(2), epochs=2)
    assert json.loads(json.dumps(data.position())) == data.position()
    assert len(data) == 8
    next(data)
    assert data.position() == {"epoch": 0, "batch": 1, "seed": 0, "batch_size": 2, "tail": "pad", "examples": 8}
    for other in (dict(batch_size=4), dict(seed=1), dict(tail="drop")):
        with pytest.raises(InvalidArgumentError, match=f"a position with {next(iter(other))}"):
            autopar.data.shard(np.arange(8), NoPlan(), **{"batch_size": 2, **other}).restore(data.position())
    with pytest.raises(InvalidArgumentError, match="examples 9, as here"):
        autopar.data.shard(np.arange(9), NoPlan(), batch_size=2).restore(data.position())
    with pytest.raises(InvalidArgumentError, match="from 0 on"):
        data.restore({**data.position(), "batch": -1})
    with pytest.raises(InvalidArgumentError, match="expected one of the 4 batches of an epoch, from 0 on, got batch 4"):
        data.restore({**data.position(), "batch": 4})


def test_without_grain_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match="pip install grain"):
        autopar.data.shard(np.arange(4), NoPlan(), batch_size=2)
    assert len(batches(np.arange(4), prefetch=0)) == 2


def test_tokens_that_int32_does_not_hold_are_refused(tmp_path):
    path = tmp_path / "tokens.bin"
    np.array([1, 2, 3, 2**31], np.uint32).tofile(path)
    windows = autopar.data.tokens(path, length=2, dtype="uint32")
    assert windows[0].tolist() == [1, 2]
    with pytest.raises(InvalidArgumentError, match="2147483648"):
        windows[1]


def test_an_iterable_that_ends_before_the_position_is_refused():
    class Numbers:
        def __init__(self, size):
            self.size = size

        def __iter__(self):
            return iter(range(self.size))

    def shard(size):
        return autopar.data.shard(Numbers(size), NoPlan(), batch_size=4, seed=None)

    data = shard(16)
    for _ in range(3):
        next(data)
    position = data.position()
    for size in (10, 12):
        shorter = shard(size)
        shorter.restore(position)
        with pytest.raises(InvalidArgumentError, match=f"epoch 0: expected .* more than 12 examples.* got {size} in"):
            next(shorter)
    shorter = shard(13)
    shorter.restore(position)
    assert [batch.tolist() for batch in shorter] == [[12] * 4]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "got 0 in list\n  hint: look for where the examples are read or filtered"),
        (grain.MapDataset.range(4).repeat(), {}, r"leave repeat\(\) out"),
        (
            grain.MapDataset.range(8).batch(2),
            {},
            "one of batches \\(BatchMapDataset\\)\n  hint: leave batch\\(...\\) out",
        ),
        (grain.MapDataset.range(8).batch(2).shuffle(seed=1).to_iter_dataset(), {}, "one of batches"),
        (iter(grain.MapDataset.range(8).to_iter_dataset().batch(2)), {}, "one of batches"),
        ([1, 2.5], {}, "examples of one type, got float64, int64"),
        ([1, 2], {"seed": "a"}, "hint: it is that of the permutation"),
        ([1, 2], {"epochs": 0}, "hint: it says how many epochs there are"),
        ([1, 2], {"prefetch": -1}, "hint: it is the number of batches that are read ahead"),
    ],
)
def test_what_is_refused_says_what_to_do(source, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        batches(source, **options)


def test_batches_that_were_made_examples_again_are_examples():
    source = grain.MapDataset.range(8).batch(2).map(lambda pair: pair.sum())
    assert [b.tolist() for b in batches(source)] == [[1, 5], [9, 13]]


def test_positions_and_types_of_tokens_that_are_none_are_refused(tmp_path):
    data = autopar.data.shard([1, 2], NoPlan(), batch_size=2)
    with pytest.raises(InvalidArgumentError, match="a dict, as position\\(\\) returns it, got None"):
        data.restore(None)
    np.arange(8, dtype="uint16").tofile(tmp_path / "tokens")
    with pytest.raises(InvalidArgumentError, match="an integer type of tokens, got 'uint17'"):
        autopar.data.tokens(tmp_path / "tokens", length=2, dtype="uint17")
