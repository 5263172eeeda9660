"""Orbax's emergency checkpoints, as docs/checkpoints.md says what they do: should that change, the page may."""

import shutil

import pytest

from tests.in_processes import launch
from tests.train.checkpoint import emergency

pytestmark = pytest.mark.slow


def ran(folder, kind, what):
    """(exit codes, output) of two processes."""
    ended = launch(folder, 2, 2, 90, program=emergency.__file__, kind=kind, what=what)
    return [code for code, _, _ in ended], ended[0][1] + ended[1][1]


@pytest.mark.parametrize(("lost", "step"), [(None, "2"), ("disk0", "2"), ("disk1", "1")])
def test_a_state_that_is_whole_in_each_process_is_restored_of_what_process_1_kept(tmp_path, lost, step):
    codes, text = ran(tmp_path, "whole", "save")
    assert codes == [0, 0], text
    if lost is not None:
        shutil.rmtree(tmp_path / lost)
    codes, text = ran(tmp_path, "whole", "restore")
    assert codes == [0, 0], text
    assert [(tmp_path / f"restored{i}").read_text() for i in range(2)] == [step, step]


@pytest.mark.parametrize("lost", [None, "disk1"])
def test_a_state_that_is_split_over_the_processes_is_saved_and_cannot_be_restored(tmp_path, lost):
    codes, text = ran(tmp_path, "split", "save")
    assert codes == [0, 0], text
    if lost is not None:
        shutil.rmtree(tmp_path / lost)
    codes, text = ran(tmp_path, "split", "restore")
    assert 0 not in codes
    assert "Encountered error while reading array index" in text


@pytest.mark.parametrize(
    ("kind", "said"), [("number", "TypeHandler lookup failed"), ("stage", "Cannot serialize host local jax.Array")]
)
def test_a_number_and_an_array_of_one_process_are_not_saved(tmp_path, kind, said):
    codes, text = ran(tmp_path, kind, "save")
    assert 0 not in codes
    assert said in text
