"""A cache that is damaged, foreign, unreadable or unwritable never stops a step: named once, planned anew."""

import builtins
import errno
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autopar
from autopar.common import files
from autopar.hardware.cluster import Cluster
from tests.small_steps import (
    MLP_BATCH,
    MLP_STATE,
    assert_close,
    grouped,
    mlp_batch,
    mlp_step,
    new_mlp_state,
    slow_cluster,
)


@pytest.fixture(autouse=True)
def nothing_said_yet():
    files.warn_once.cache_clear()


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A cache with a plan and rules."""
    directory = tmp_path_factory.mktemp("filled")
    step_with(directory).plan(MLP_STATE, MLP_BATCH)
    return directory


def step_with(directory, function=mlp_step, **options):
    options = {"cluster": slow_cluster(2), "cache_dir": directory} | options
    return autopar.parallelize(function, **grouped(**options))


def searched(step) -> bool:
    return any(name.startswith("mesh") for name in step.last_progress.spent_s)


def warnings(caplog) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name == "autopar" and r.getMessage().startswith(("cache", "no"))
    ]


def the_plan(directory: Path) -> Path:
    (path,) = directory.glob("plan-*.json")
    return path


def copied(filled: Path, folder: Path) -> Path:
    return Path(shutil.copytree(filled, folder / "cache"))


def assert_runs(step) -> None:
    assert_close(step(new_mlp_state(), mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


def deep(data: bytes) -> bytes:
    return data.replace(b'"plan":', b'"plan":' + b"[" * 100_000 + b"]" * 100_000 + b',"was":', 1)


DAMAGES = {
    "empty": (lambda data: b"", "got an empty file"),
    "cut": (lambda data: data[:500], r"got no JSON \(input data was truncated\)"),
    "zeros": (lambda data: bytes(len(data)), r"got no JSON \(JSON is malformed: .*byte 0"),
    "another format": (lambda data: re.sub(rb'"format_version":\d+', b'"format_version":1', data, count=1), "format"),
    "a changed number": (lambda data: data.replace(b'"split":2', b'"split":1', 1), "checksum"),
    # msgspec names the byte where it makes a text of it, and only the kind of fault where it skips it.
    "a byte that is no text": (lambda data: data.replace(b"mlp_step", b"\xedlp_step", 1), "not UTF-8|invalid UTF-8"),
    "nested": (deep, "too deep to be read"),
    "the plan of another key": (
        lambda data: data.replace(b'"key":"', b'"key":"other', 1), "expected the plan of key .*, got that of key 'other"
    ),
}  # fmt: skip


@pytest.mark.cases(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_plan_is_named_once_and_planned_anew(damage, filled, tmp_path, caplog):
    directory = copied(filled, tmp_path)
    path, (change, message) = the_plan(directory), DAMAGES[damage]
    data = path.read_bytes()
    assert change(data) != data, "else this shows nothing"
    path.write_bytes(change(data))
    step = step_with(directory)
    assert_runs(step)
    assert searched(step)
    (said,) = warnings(caplog)
    assert said.startswith(f"cache {path}: ")
    assert re.search(message, said)
    again = step_with(directory)
    assert_runs(again)
    assert not searched(again)
    assert len(warnings(caplog)) == 1


def test_a_plan_of_another_step_under_the_key_is_planned_anew(filled, tmp_path, caplog):
    """The key inside of the file is forged too: the plan itself is held against the step."""

    def other(state, batch):
        new, metrics = mlp_step(state, batch)
        return new, {"loss": metrics["loss"] + 1}

    directory = copied(filled, tmp_path)
    path = the_plan(directory)
    step_with(tmp_path / "others", other).plan(MLP_STATE, MLP_BATCH)
    others = json.loads(the_plan(tmp_path / "others").read_bytes())
    key = json.loads(path.read_bytes())["key"]
    data = the_plan(tmp_path / "others").read_bytes().replace(others["key"].encode(), key.encode(), 1)
    path.write_bytes(data)
    step = step_with(directory)
    assert_runs(step)
    assert searched(step)
    (said,) = warnings(caplog)
    assert "expected a plan for mlp_step as it is traced now" in said


@pytest.mark.parametrize("change", [lambda d: d[:100], lambda d: d.replace(b'"pass"', b'"sum"', 1), lambda d: b"[[]]"])
def test_damaged_rules_are_named_once_and_asked_for_anew(change, filled, tmp_path, caplog):
    directory = copied(filled, tmp_path)
    the_plan(directory).unlink()
    (rules,) = directory.glob("rules-*")
    data = rules.read_bytes()
    assert change(data) != data, "else this shows nothing"
    rules.write_bytes(change(data))
    assert_runs(step_with(directory))
    (said,) = warnings(caplog)
    assert said.startswith(f"cache {rules}: ")
    assert rules.read_bytes() == data


def in_the_way(directory: Path) -> list[Path]:
    """Directories where files should be."""
    paths = list(directory.iterdir())
    for path in paths:
        path.unlink()
        path.mkdir()
        (path / "kept").write_text("")
    return paths


def test_directories_where_files_should_be(filled, tmp_path, caplog):
    directory = copied(filled, tmp_path)
    paths = in_the_way(directory)
    step = step_with(directory)
    assert_runs(step)
    said = warnings(caplog)
    assert sorted(said[:-1]) == sorted(f"cache {p}: not a file; left aside, what it held is made anew" for p in paths)
    assert said[-1].startswith(f"cache {directory}: cannot be written (")
    assert all((path / "kept").exists() for path in paths)
    assert not list(directory.glob(".*"))


def test_a_pipe_where_a_file_should_be_is_not_waited_for(filled, tmp_path, caplog):
    directory = copied(filled, tmp_path)
    path = the_plan(directory)
    path.unlink()
    os.mkfifo(path)
    assert_runs(step_with(directory))
    assert warnings(caplog) == [f"cache {path}: not a file; left aside, what it held is made anew"]


def test_a_file_where_the_directory_should_be(tmp_path, caplog):
    (tmp_path / "cache").write_text("mine")
    for _ in range(2):
        assert_runs(step_with(tmp_path / "cache"))
    (said,) = warnings(caplog)
    assert said.startswith(f"cache {tmp_path / 'cache'}: cannot be written (")
    assert (tmp_path / "cache").read_text() == "mine"


@pytest.fixture
def as_another_user(monkeypatch):
    """Files that their owner alone may read: as root, who may read everything, tests are told what others are told."""
    real = builtins.open

    def guarded(file, mode="r", *args, **kwargs):
        path = Path(file) if isinstance(file, (str, os.PathLike)) else None
        if path is not None and path.exists() and not path.stat().st_mode & 0o004:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(file, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", guarded)
    monkeypatch.setattr("io.open", guarded)


def test_files_of_another_user(filled, tmp_path, caplog, as_another_user):
    directory = copied(filled, tmp_path)
    paths = sorted(directory.iterdir())
    for path in paths:
        path.chmod(0o600)
    step = step_with(directory)
    assert_runs(step)
    assert searched(step)
    said = warnings(caplog)
    assert sorted(said) == [
        f"cache {path}: cannot be read (Permission denied); left aside, what it held is made anew" for path in paths
    ]
    again = step_with(directory)  # in their place there are files of this user now
    assert_runs(again)
    assert not searched(again)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_kept_files_can_be_read_by_whom_the_user_lets_read_others(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        assert files.write_whole(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.cases(2)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_is_full_or_read_only(code, tmp_path, caplog, monkeypatch):
    class Full:
        """A file that takes half of what is written."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            raise OSError(code, os.strerror(code))

    real = builtins.open

    def filling(file, mode="r", *args, **kwargs):
        opened = real(file, mode, *args, **kwargs)
        return Full(opened) if str(file).startswith(str(tmp_path)) and "x" in mode else opened

    monkeypatch.setattr("builtins.open", filling)
    for _ in range(2):
        step = step_with(tmp_path / "cache")
        assert_runs(step)
        assert searched(step)
    assert warnings(caplog) == [
        f"cache {tmp_path / 'cache'}: cannot be written ({os.strerror(code)}); what is missing there is made anew in "
        "every run"
    ]
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half-written is left"


def test_a_user_without_a_home(monkeypatch, caplog):
    for name in ("AUTOPAR_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000 - 1)  # of whom the system knows nothing
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert files.default_directory() is None
    assert_runs(autopar.parallelize(mlp_step, cluster=slow_cluster(2)))
    Cluster.local(2)
    (said,) = warnings(caplog)
    assert said.startswith("no cache: ~/.cache needs a home directory")


def test_names_of_directories(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", "~/plans")
    assert files.default_directory() == Path("/home/somebody/plans")
    monkeypatch.delenv("AUTOPAR_CACHE_DIR")
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert files.default_directory() == Path("/home/somebody/.cache/autopar")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert files.default_directory() == Path("/scratch/autopar")


def test_writers_at_once_never_tear_a_file(tmp_path):
    path = tmp_path / "cache" / "plan-0.json"

    def write(whose: bytes) -> int:
        for _ in range(100):
            assert files.write_whole(path, whose * 100_000)
            data = files.read_whole(path)
            assert data is not None
            assert (len(data), len(set(data))) == (100_000, 1), "torn"
        return len(data)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(write, [b"a", b"b", b"c", b"d"])) == [100_000] * 4
    assert list(path.parent.iterdir()) == [path]


def check_damages(filled: Path, folder: Path, count: int) -> None:
    """Bytes changed, taken out and put in, anywhere in any file of a cache."""
    files = {path.name: path.read_bytes() for path in filled.iterdir()}
    plan = autopar.Plan.load(the_plan(filled))
    directory = folder / "cache"

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for name, content in files.items():
            at = data.draw(st.integers(0, len(content) - 1))
            end = at + data.draw(st.integers(0, 40))
            new = data.draw(st.binary(max_size=40))
            (directory / name).write_bytes(content[:at] + new + content[end:])
        step = step_with(directory)
        found = step.plan(MLP_STATE, MLP_BATCH).record
        assert (found.decisions, found.arguments) == (plan.record.decisions, plan.record.arguments)

    check()


def test_damaged_caches_lead_to_the_same_plan(filled, tmp_path):
    check_damages(filled, tmp_path, 20)


@pytest.mark.slow
def test_many_damaged_caches_lead_to_the_same_plan(filled, tmp_path):
    check_damages(filled, tmp_path, 200)
