"""Two processes of two devices save together and restore onto each other's plans; one process opens what they saved."""

import json
import os
import shutil
import subprocess
import sys

import jax
import pytest

from autopar.checkpoint import Checkpointer
from benchmarks.zoo import CASES
from tests.in_processes import ROOT, launch
from tests.train.checkpoint import in_processes, restarted

pytestmark = pytest.mark.slow


def test_states_of_two_processes_open_under_any_plan_and_in_one_process(tmp_path):
    ended = launch(tmp_path, 2, 2, 240, program=in_processes.__file__, what="matrix")
    assert [code for code, _, _ in ended] == [0, 0], ended[0][1] + ended[1][1]
    results = [json.loads((tmp_path / f"result{i}").read_text()) for i in range(2)]
    assert [result["unequal"] for result in results] == [[], []]
    assert results[0]["in_host"] > 0
    assert [result["mixed"] for result in results] == [True, True]
    shapes = jax.eval_shape(CASES["mlp"]().init, jax.random.key(0))
    for kind in in_processes.KINDS:
        checkpoints = Checkpointer(tmp_path / kind, on_preemption=False)
        here = in_processes.digest(checkpoints.restore(like=shapes))
        assert {here} == {result["digests"][kind] for result in results}
        assert checkpoints.plan() is not None


def test_the_loss_of_a_process_while_it_saves_is_named_and_leaves_a_checkpoint(tmp_path):
    ended = launch(tmp_path, 2, 1, 120, program=in_processes.__file__, what="kill")
    (code, text, seconds), (killed, _, killed_s) = ended
    assert killed == -9
    assert code not in (0, -9), text
    assert "process 1" in text
    assert seconds - killed_s < 60
    checkpoints = Checkpointer(tmp_path / "run", on_preemption=False)
    state = checkpoints.restore()
    assert int(state["n"]) == checkpoints.latest() >= 4
    assert state["w"].min() == state["w"].max() == float(checkpoints.latest())


def test_a_signal_to_one_process_ends_all_after_the_same_step(tmp_path):
    ended = launch(tmp_path, 2, 1, 120, program=in_processes.__file__, what="preemption")
    assert [code for code, _, _ in ended] == [143, 143], ended[0][1] + ended[1][1]
    checkpoints = Checkpointer(tmp_path / "run", on_preemption=False)
    assert 5 < checkpoints.latest() < 2000
    assert int(checkpoints.restore()["n"]) == checkpoints.latest()


def test_a_folder_that_is_another_one_in_each_process_is_refused_before_anything_is_lost(tmp_path):
    ended = launch(tmp_path, 2, 1, 120, program=in_processes.__file__, what="own folders")
    assert [code for code, _, _ in ended] == [0, 0], ended[0][1] + ended[1][1]
    for i in range(2):
        said = (tmp_path / f"result{i}").read_text()
        assert (
            "expected one folder that all processes share, got one of its own, of the same name, in process 1" in said
        )
    assert [path.name for path in (tmp_path / "disk0" / "run").iterdir()] == []


def launched(folder, what, restarts):
    """(exit code, output) of tests/train/checkpoint/restarted.py in two processes."""
    command = [sys.executable, "-m", "autopar.launch", "--processes", "2", "--devices-per-process", "1"]
    command += ["--restarts", str(restarts), restarted.__file__, str(folder), what]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("what", ["killed", "twice"])
def test_a_run_that_is_restarted_or_that_another_one_disturbs_goes_on_to_its_end(tmp_path, what):
    code, text = launched(tmp_path, what, restarts=1)
    assert code == 0, text[-4000:]
    ends = [json.loads((tmp_path / f"end{i}").read_text()) for i in range(2)]
    starts = (5, 6, 7) if what == "killed" else (0,)
    assert ends[0] == ends[1]
    assert ends[0][0] in starts
    assert ends[0][1] == restarted.LAST
    names = sorted((path.name for path in (tmp_path / "run").iterdir()), key=int)
    assert names == [str(i) for i in range(1, restarted.LAST + 1)]
    if what == "twice":
        assert "expected a folder that no other run writes to" in (tmp_path / "another").read_text()


def test_a_process_that_does_not_save_is_named(tmp_path):
    code, text = launched(tmp_path, "alone", restarts=0)
    assert code != 0
    assert "expected all processes to call save of step 6, got process 1 has begun another step" in text, text[-4000:]


def test_a_run_whose_process_was_killed_goes_on_from_memory_of_its_machine_or_else_from_the_folder(tmp_path):
    code, text = launched(tmp_path, "near", restarts=1)
    assert code == 0, text[-4000:]
    ends = [json.loads((tmp_path / f"end{i}").read_text()) for i in range(2)]
    assert ends[0] == ends[1]
    assert ends[0][0] in (6, 7)  # the folder has step 5
    assert ends[0][1] == restarted.LAST
    assert Checkpointer(tmp_path / "run", on_preemption=False).steps() == [5, 10]
    shutil.rmtree(tmp_path / "memory")
    code, text = launched(tmp_path, "near", restarts=0)
    assert code == 0, text[-4000:]
    assert json.loads((tmp_path / "end0").read_text()) == [10, restarted.LAST]
