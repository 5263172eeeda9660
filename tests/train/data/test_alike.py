"""Processes that shard data in different ways are told before their first batch, all of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import ProcessMismatchError
from autopar.train.data.sharded import CONTENT, EXAMPLE, NumberedReader, Order, Tail, compare, seen_of
from autopar.train.data.sources import numbered
from tests.in_processes import launch

OWN = {"seed": 0, "number of examples": 40, EXAMPLE: "int64[]", CONTENT: "a"}


def test_the_error_names_what_differs_and_in_which_process():
    compare([OWN, OWN], 1)
    said = [OWN, {**OWN, "seed": 1, "number of examples": 38, CONTENT: "b"}]
    with pytest.raises(ProcessMismatchError) as caught:
        compare(said, 1)
    assert caught.value.where == "autopar.data.shard, process 1 of 2"
    assert caught.value.expected == "the same seed, number of examples in all processes"
    assert caught.value.got == (
        "seed 0 in process 0, 1 in process 1; number of examples 40 in process 0, 38 in process 1"
    )
    with pytest.raises(ProcessMismatchError, match="another content of some examples in process 1 than in process 0"):
        compare([OWN, {**OWN, CONTENT: "b"}, OWN], 0)


def test_nothing_is_said_of_the_content_of_examples_that_change_at_random():
    compare([OWN, {**OWN, CONTENT: None}], 0)

    class Augmented:
        def __len__(self):
            return 40

        def __getitem__(self, number):
            return number + np.random.default_rng().normal()

    order = Order(num_examples=40, batch_size=8, seed=0, tail=Tail.PAD)
    seen = [seen_of(NumberedReader(numbered(source), order, 1)) for source in (Augmented(), list(range(40)))]
    assert [own[CONTENT] is None for own in seen] == [True, False]
    assert [own[EXAMPLE] for own in seen] == ["float64[]", "int64[]"]


@pytest.mark.slow
def test_two_processes_that_differ(tmp_path):
    program = str(Path(__file__).parent / "processes_that_differ.py")
    ended = launch(tmp_path, 2, 1, 120.0, program=program)
    assert [code for code, _, _ in ended] == [0, 0], "\n".join(text[-3000:] for _, text, _ in ended)
    for process in range(2):
        found = json.loads((tmp_path / f"result{process}.json").read_text())
        assert found.pop("alike") == 5
        for way, named in {
            "seed": "seed 0 in process 0, 1 in process 1",
            "examples": "number of examples 40 in process 0, 38 in process 1",
            "batch size and tail": "batch_size 8 in process 0, 16 in process 1; tail pad in process 0, drop in process",
            "epochs": "epochs 1 in process 0, 2 in process 1",
            "content": "another content of some examples in process 1",
            "type": "type of an example int32[] in process 0, float32[] in process 1",
            "iterable": "another content of some examples in process 1",
        }.items():
            assert f"process {process} of 2" in found[way]
            assert named in found[way], found[way]
