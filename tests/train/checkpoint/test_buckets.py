"""Checkpoints in a bucket, `gs://`: saved and restored as in a folder, complete or not there, and nobody else's."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import autopar
from autopar.__main__ import main
from autopar.checkpoint import Checkpointer
from autopar.errors import CheckpointNotFoundError, InvalidArgumentError, MissingPackageError
from autopar.train.checkpoint.description import describe
from benchmarks.zoo import CASES
from tests.in_processes import ROOT, launch
from tests.train.checkpoint import in_processes
from tests.train.checkpoint.bucket_server import Fault
from tests.train.checkpoint.trees import assert_equal


class Position:
    def __init__(self):
        self.at = {"batch": 7}

    def position(self):
        return self.at

    def restore(self, position):
        self.at = position


def test_a_state_comes_back_bit_for_bit_under_another_plan_and_is_described_and_exported(bucket, tmp_path, capsys):
    case, folder = CASES["mlp"](), f"gs://{bucket}/runs/a"
    shapes = jax.eval_shape(case.init, jax.random.key(0))
    sharded, replicated = (
        autopar.parallelize(case.step, plan=plan, cache_dir=None)
        for plan in (autopar.recipes.zero(3), autopar.recipes.zero(1))
    )
    state = sharded.init(case.init, jax.random.key(0))
    state, _ = sharded(state, case.batch(0))
    replicated.plan(shapes, case.batch(0))
    with Checkpointer(folder, on_preemption=False) as checkpoints:
        assert repr(checkpoints) == f"<Checkpointer of {folder}, steps []>"
        checkpoints.save(1, state, plan=sharded, data=Position())
        data = Position()
        data.at = None
        back = checkpoints.restore(step=replicated, like=shapes, data=data)
        assert_equal(back, state)
        assert data.at == {"batch": 7}
        wanted = jax.tree.leaves(replicated.latest_plan.state_shardings)
        assert [leaf.sharding for leaf in jax.tree.leaves(back)] == wanted
        assert_equal(checkpoints.restore(like=shapes), state)
        assert checkpoints.plan() is not None
    assert Path("gs:").exists() is False
    assert describe(folder).steps == (1,)
    assert main(["checkpoint", "show", folder]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: steps 1\nStep 1: ")
    name = next(leaf.name for leaf in describe(folder).leaves if leaf.kind == "array")
    assert main(["checkpoint", "export", folder, str(tmp_path / "a.safetensors"), "--select", name]) == 0
    exported = load_file(tmp_path / "a.safetensors")
    leaf = checkpoints.restore()
    for part in name.split("/"):
        leaf = leaf[part]
    assert [array.tobytes() for array in exported.values()] == [np.asarray(leaf).tobytes()]


def steps_in(buckets, bucket):
    """The folders of a run, by the names of the objects."""
    return sorted({name.split("/")[1] for name in buckets.names(bucket)})


def test_the_latest_are_kept_and_what_others_have_in_the_bucket_stays(buckets, bucket):
    buckets.put(bucket, "run/logs/today", b"text", {})
    buckets.put(bucket, "run/deleted/mine", b"text", {})
    buckets.put(bucket, "run/2024/mine", b"text", {})
    with Checkpointer(f"gs://{bucket}/run", keep=2, on_preemption=False) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, {"n": step, "w": jnp.full(4, float(step))})
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4]
        assert steps_in(buckets, bucket) == [".writer-1", "2024", "3", "4", "deleted", "logs"]
        assert checkpoints.discard_after(3) == [4]
        assert float(checkpoints.restore()["w"][0]) == 3.0
        assert steps_in(buckets, bucket) == [".writer-1", "2024", "3", "deleted", "logs"]
        checkpoints.save(4, {"n": 40})
        assert checkpoints.restore() == {"n": 40}
    assert steps_in(buckets, bucket) == ["2024", "3", "4", "deleted", "logs"]


def copied(buckets, bucket, names, at):
    """Puts objects below `other/` also below another folder, as another process would."""
    for name in names:
        buckets.put(bucket, name.replace("other/", f"{at}/", 1), buckets.objects[bucket, name][0], {})


def test_a_process_sees_what_others_saved_since_it_looked(buckets, bucket):
    reader = Checkpointer(f"gs://{bucket}/run", on_preemption=False)
    assert reader.latest() is None
    for step in (1, 2):
        with Checkpointer(f"gs://{bucket}/other", on_preemption=False) as checkpoints:
            checkpoints.save(step, {"n": step})
        copied(buckets, bucket, [name for name in buckets.names(bucket) if name.startswith(f"other/{step}/")], "run")
        assert reader.latest() == step
        assert reader.restore() == {"n": step}


def test_a_save_that_is_cut_off_anywhere_leaves_no_checkpoint(buckets, bucket, monkeypatch):
    written = []
    monkeypatch.setattr(buckets, "before_put", written.append)
    with Checkpointer(f"gs://{bucket}/other", on_preemption=False) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(4.0), "n": 1})
    monkeypatch.setattr(buckets, "before_put", None)
    names = [name for name in written if name.startswith("other/1/")]
    assert len(names) > 8
    reader = Checkpointer(f"gs://{bucket}/run", on_preemption=False)
    for name in names[:-1]:
        copied(buckets, bucket, [name], "run")
        assert reader.steps() == []
    copied(buckets, bucket, names[-1:], "run")
    assert reader.steps() == [1]
    np.testing.assert_array_equal(reader.restore()["w"], np.arange(4.0))


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_saved_is_followed_by_another(buckets, bucket, monkeypatch):
    folder = f"gs://{bucket}/run"
    text = """
import sys
from autopar.checkpoint import Checkpointer
checkpoints = Checkpointer(sys.argv[1])
checkpoints.save(1, {"n": 1})
checkpoints.wait()
checkpoints.save(2, {"n": 2})
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", text, folder], env=environment)

    def kill(name):
        if name == "run/2/commit_success.txt":
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise Fault(503)

    monkeypatch.setattr(buckets, "before_put", kill)
    process.wait(120)
    assert process.returncode == -signal.SIGKILL
    assert steps_in(buckets, bucket) == [".writer-1", "1", "2"]
    with Checkpointer(folder, on_preemption=False) as checkpoints:
        assert checkpoints.restore_or(lambda: {"n": 0}) == ({"n": 1}, 1)
        checkpoints.save(3, {"n": 3})
        checkpoints.wait()
        assert steps_in(buckets, bucket) == [".writer-2", "1", "3"]


def test_a_step_is_saved_where_an_unfinished_one_of_its_number_is_left(buckets, bucket):
    buckets.put(bucket, "run/2/state/old", b"left", {})
    with Checkpointer(f"gs://{bucket}/run", on_preemption=False) as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(2, {"w": jnp.arange(4.0)})
        np.testing.assert_array_equal(checkpoints.restore()["w"], np.arange(4.0))
    assert "run/2/state/old" not in buckets.names(bucket)


def test_a_checkpoint_that_is_being_removed_is_none_from_the_first_object_on(buckets, bucket):
    with Checkpointer(f"gs://{bucket}/run", keep=1, on_preemption=False) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(4)})
        checkpoints.wait()
        gone = []
        delete = buckets.delete
        buckets.delete = lambda *at: (gone.append(at[1]), delete(*at))
        try:
            checkpoints.save(2, {"w": jnp.ones(4)})
            checkpoints.wait()
        finally:
            del buckets.delete
    of_first = [name for name in gone if name.startswith("run/1/")]
    assert of_first[0] == "run/1/commit_success.txt"
    assert len(of_first) > 5


def test_a_run_that_was_taken_over_removes_nothing_of_the_other(buckets, bucket):
    checkpoints = Checkpointer(f"gs://{bucket}/run", on_preemption=False)
    checkpoints.save(1, {"n": 1})
    checkpoints.wait()
    buckets.put(bucket, "run/.writer-2", json.dumps({"run": "other"}).encode(), {})
    buckets.put(bucket, "run/2/state/new", b"being saved", {})
    checkpoints.close()
    assert "run/2/state/new" in buckets.names(bucket)


def test_a_folder_is_taken_where_the_answer_that_it_is_was_lost(buckets, bucket, monkeypatch):
    put, lost = buckets.put, []

    def put_and_lose(at, name, *rest):
        about = put(at, name, *rest)
        if name.endswith("/.writer-1") and not lost:
            lost.append(name)
            raise Fault(503)
        return about

    monkeypatch.setattr(buckets, "put", put_and_lose)
    with Checkpointer(f"gs://{bucket}/run", on_preemption=False) as checkpoints:
        assert checkpoints.save(1, {"n": 1})
    assert lost


def test_a_bucket_that_does_not_let_in_is_an_error_and_no_empty_folder(buckets, bucket):
    buckets.forbidden.add(bucket)
    checkpoints = Checkpointer(f"gs://{bucket}/run", on_preemption=False)
    with pytest.raises(OSError, match="Forbidden"):
        checkpoints.restore_or(dict)
    buckets.forbidden.remove(bucket)
    with pytest.raises(CheckpointNotFoundError, match="no folder"):
        checkpoints.restore()


def test_a_checkpoint_of_which_the_bucket_does_not_tell_is_an_error(buckets, bucket, monkeypatch):
    buckets.put(bucket, "run/1/commit_success.txt", b"", {})
    checkpoints, get = Checkpointer(f"gs://{bucket}/run", on_preemption=False), buckets.get
    assert checkpoints.steps() == [1]

    def refuse(at, name, query):
        if name.endswith("commit_success.txt"):
            raise Fault(403)
        return get(at, name, query)

    monkeypatch.setattr(buckets, "get", refuse)
    with pytest.raises(OSError, match="Forbidden"):
        checkpoints.steps()


@pytest.mark.parametrize("folder", ["s3://bucket/run", Path("gs://bucket/run"), "file:/run"])
def test_other_stores_and_paths_that_lost_a_slash_are_refused(folder):
    with pytest.raises(InvalidArgumentError, match="gs://BUCKET/FOLDER as text"):
        Checkpointer(folder)


def test_a_name_that_is_a_pattern_of_others_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"without \*, \?, \[ and \]"):
        Checkpointer("gs://bucket/run[lr=1]")


def test_the_package_that_a_bucket_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingPackageError, match="pip install gcsfs"):
        Checkpointer("gs://bucket/run")


@pytest.mark.slow
def test_two_processes_save_together_and_one_opens_what_they_saved(buckets, bucket, tmp_path):
    ended = launch(tmp_path, 2, 2, 400, program=in_processes.__file__, what="matrix", runs=f"gs://{bucket}/runs")
    assert [code for code, _, _ in ended] == [0, 0], ended[0][1] + ended[1][1]
    results = [json.loads((tmp_path / f"result{i}").read_text()) for i in range(2)]
    assert [result["unequal"] for result in results] == [[], []]
    assert [result["mixed"] for result in results] == [True, True]
    shapes = jax.eval_shape(CASES["mlp"]().init, jax.random.key(0))
    for kind in in_processes.KINDS:
        checkpoints = Checkpointer(f"gs://{bucket}/runs/{kind}", on_preemption=False)
        here = in_processes.digest(checkpoints.restore(like=shapes))
        assert {here} == {result["digests"][kind] for result in results}
