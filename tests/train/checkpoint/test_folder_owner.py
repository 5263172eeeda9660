"""One run writes to a folder while it is alive; another one is refused, and takes it over when the owner is gone."""

import dataclasses
import datetime
import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from autopar.checkpoint import Checkpointer
from autopar.errors import CheckpointFolderInUseError, ProcessMismatchError
from autopar.train.checkpoint import checkpointer
from autopar.train.checkpoint.checkpointer import FolderOwner, Owner, begun, check_is_shared, compare, this_process
from autopar.train.checkpoint.folders import folder_of, names_in, owner_file, put_owner, touch, touched_s

STATE = {"n": 1}


@dataclasses.dataclass
class OtherRun:
    """Another process that owns a folder, as far as its file says."""

    process: subprocess.Popen

    def own(self, folder, number=1, **fields):
        owner = msgspec.structs.replace(
            this_process(), run="other", pid=self.process.pid, begun=begun(self.process.pid), **fields
        )
        written(folder, number, owner)


def written(folder, number, owner):
    put_owner(folder_of(folder), f".writer-{number}", msgspec.json.encode(owner))


def set_time(buckets, folder, number, seconds):
    """Makes a time that of the last sign of life."""
    file = owner_file(folder_of(folder), f".writer-{number}")
    if str(file).startswith("gs://"):
        updated = datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        bucket, name = str(file).removeprefix("gs://").split("/", 1)
        buckets.patch(bucket, name, {"updated": updated})
    else:
        os.utime(file, (seconds, seconds))


def time_of(folder, number):
    return touched_s(owner_file(folder_of(folder), f".writer-{number}"))


@pytest.fixture
def other():
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield OtherRun(process)
    process.kill()
    process.communicate()


def writers(folder):
    return sorted(name for name in names_in(folder_of(folder)) if name.startswith(".writer-"))


def test_a_folder_of_a_live_process_is_refused_and_read_and_taken_over_when_it_is_killed(any_folder, other):
    with Checkpointer(any_folder, on_preemption=False) as checkpoints:
        checkpoints.save(1, STATE)
    assert writers(any_folder) == []
    other.own(any_folder)
    with pytest.raises(CheckpointFolderInUseError, match=f"one that process {other.process.pid} on .* writes to"):
        checkpoints.save(2, STATE)
    assert checkpoints.restore() == STATE
    assert writers(any_folder) == [".writer-1"]
    other.process.kill()
    deadline = time.monotonic() + 20
    while begun(other.process.pid) and time.monotonic() < deadline:  # it is a zombie then, which counts as gone
        time.sleep(0.01)
    assert checkpoints.save(2, STATE)
    assert writers(any_folder) == [".writer-2"]
    checkpoints.close()
    assert writers(any_folder) == []


def test_the_number_of_an_ended_process_that_another_one_has_now_is_no_owner(any_folder):
    written(any_folder, 1, msgspec.structs.replace(this_process(), run="earlier", begun="12"))
    owner = FolderOwner(folder_of(any_folder))
    owner.take()
    assert writers(any_folder) == [".writer-2"]
    owner.give_back()


def test_what_was_left_long_ago_by_who_did_not_get_the_folder_is_removed(any_folder, buckets):
    for name, age_s in (("new-a", 5000), ("new-b", 5)):
        written(any_folder, name, this_process())
        set_time(buckets, any_folder, name, time.time() - age_s)
    owner = FolderOwner(folder_of(any_folder))
    owner.take()
    assert writers(any_folder) == [".writer-1", ".writer-new-b"]
    owner.give_back()


def test_a_restart_of_the_same_launch_takes_the_folder(any_folder, other, monkeypatch):
    monkeypatch.setenv("AUTOPAR_RESTART", "0")
    other.own(any_folder)
    with pytest.raises(CheckpointFolderInUseError):
        FolderOwner(folder_of(any_folder)).take()
    monkeypatch.setenv("AUTOPAR_RESTART", "1")
    owner = FolderOwner(folder_of(any_folder))
    owner.take()
    owner.give_back()


def test_an_owner_on_another_machine_is_gone_when_its_file_is_not_touched(any_folder, buckets, monkeypatch):
    monkeypatch.setattr(checkpointer, "WATCHED_S", 0.1)
    monkeypatch.setattr(checkpointer, "LEASE_S", 30.0)
    monkeypatch.setattr(checkpointer, "_LOOK_S", 0.02)
    written(any_folder, 4, msgspec.structs.replace(this_process(), run="other", machine="elsewhere"))
    file = owner_file(folder_of(any_folder), ".writer-4")
    refused = threading.Event()
    touching = threading.Thread(target=lambda: [touch(file) for _ in iter(lambda: refused.wait(0.05), True)])
    touching.start()
    with pytest.raises(CheckpointFolderInUseError):
        FolderOwner(folder_of(any_folder)).take()
    refused.set()
    touching.join()
    set_time(buckets, any_folder, 4, time.time() - 31)
    owner = FolderOwner(folder_of(any_folder))
    owner.take()
    assert writers(any_folder) == [".writer-5"]
    owner.give_back()


def test_an_owner_touches_its_file_and_finds_out_that_it_was_taken_for_gone(any_folder, buckets, monkeypatch):
    monkeypatch.setattr(checkpointer, "BEAT_S", 0.01)
    owner = FolderOwner(folder_of(any_folder))
    owner.take()
    set_time(buckets, any_folder, 1, 1.0)
    deadline = time.monotonic() + 20
    while time_of(any_folder, 1) == 1.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time_of(any_folder, 1) > 1.0
    owner.take()  # is it still
    written(any_folder, 2, Owner(run="faster", host="node7", pid=5))
    with pytest.raises(CheckpointFolderInUseError, match="one that process 5 on node7 has taken over"):
        owner.take()
    owner.give_back()
    assert writers(any_folder) == [".writer-2"]


@pytest.mark.parametrize("left", ["nothing", "a dead owner", "a damaged file"])
def test_of_many_at_once_one_gets_the_folder(any_folder, left, monkeypatch):
    monkeypatch.setattr(checkpointer, "WATCHED_S", 0.05)
    monkeypatch.setattr(checkpointer, "LEASE_S", -1.0)
    if left == "a dead owner":
        written(any_folder, 3, msgspec.structs.replace(this_process(), run="earlier", begun="12"))
    elif left == "a damaged file":
        put_owner(folder_of(any_folder), ".writer-3", b"[")
    of_one_of_many(any_folder)


def test_of_many_at_once_one_gets_a_folder_where_an_owner_is_empty(tmp_path, monkeypatch):
    (tmp_path / ".writer-3").mkdir()
    of_one_of_many(tmp_path)


def of_one_of_many(folder):
    owners, got = [FolderOwner(folder_of(folder)) for _ in range(8)], []

    def take(owner):
        try:
            owner.take()
        except CheckpointFolderInUseError:
            return
        got.append(owner)

    threads = [threading.Thread(target=take, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(got) == 1
    got[0].take()
    assert len(writers(folder)) == 1
    got[0].give_back()
    assert writers(folder) == []


def test_checkpointers_of_one_process_write_in_turn(tmp_path):
    first, second = (Checkpointer(tmp_path, keep=2, on_preemption=False) for _ in range(2))
    for step in range(1, 5):
        (first if step % 2 else second).save(step, {"n": step})
    first.close()
    second.close()
    assert Checkpointer(tmp_path, on_preemption=False).restore() == {"n": 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_the_error_names_folders_and_calls_that_differ():
    compare([("save of step 10", "/a")] * 2, 1)
    with pytest.raises(ProcessMismatchError, match="folders differ: /a in process 0, /b in process 1"):
        compare([("restore_or", "/a"), ("restore_or", "/b")], 1)
    with pytest.raises(ProcessMismatchError, match="save of step 10 in process 0, save of step 11 in process 2"):
        compare([("save of step 10", "/a"), ("save of step 10", "/a"), ("save of step 11", "/a")], 1)


def test_a_process_sees_an_owner_that_comes_into_sight_late_and_not_one_of_another_run(any_folder, monkeypatch):
    monkeypatch.setattr(checkpointer, "_LOOK_S", 0.01)
    late = threading.Thread(target=lambda: [time.sleep(0.1), written(any_folder, 1, Owner(run="first"))])
    late.start()
    assert FolderOwner(folder_of(any_folder)).sees(1, "first")
    late.join()
    monkeypatch.setattr(checkpointer, "SEEN_S", 0.05)
    assert not FolderOwner(folder_of(any_folder)).sees(1, "second")
    assert not FolderOwner(folder_of(any_folder)).sees(2, "first")


def test_the_error_names_the_processes_whose_folder_is_another_one():
    check_is_shared("/a", [True, True])
    with pytest.raises(ProcessMismatchError, match="one of its own, of the same name, in process 1, 3"):
        check_is_shared("/a", [True, False, True, False])
