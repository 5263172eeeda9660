"""A log or a callback of a monitor that fails: refused at first, later on said once while training goes on."""

import json
import logging
import shutil
import threading

import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import InvalidArgumentError
from autopar.train.monitoring.goodput import RUNS_FILE, RunRecord, RunsFile
from autopar.train.monitoring.monitor import OtherProcess


def monitor_of(**options):
    parallel = autopar.parallelize(lambda state, batch: (state, batch.sum()), cache_dir=None)
    return autopar.Monitor(parallel, every=1, terminal=False, **options)


def run(first_step):
    return RunRecord(began_s=0.0, last_s=1.0, first_step=first_step, steps=1, step_time_s=1.0, spent_s={})


def first_steps(folder):
    return [json.loads(line)["first_step"] for line in (folder / RUNS_FILE).read_text().splitlines()]


@pytest.mark.parametrize("log", ["file", "file/below", "/proc/x", 3], ids=str)
def test_a_log_that_cannot_be_written_is_refused_at_first(tmp_path, log):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match=r"Monitor\(log=.*expected a folder that can be made and written"):
        monitor_of(log=log if log == 3 else tmp_path / log)


def test_a_callback_that_raises_is_said_once_and_called_again(caplog):
    called = []

    def callback(step, values):
        called.append(step)
        if step < 3:
            raise OSError("network unreachable")

    with caplog.at_level(logging.WARNING, "autopar"), monitor_of(callback=callback) as monitor:
        for i in range(5):
            monitor(i, {"loss": 1.0})
    assert called == [0, 1, 2, 3, 4]
    (record,) = [r for r in caplog.records if "callback" in r.getMessage()]
    assert "OSError: network unreachable; training goes on" in record.getMessage()
    assert record.exc_info is not None


def test_a_log_that_goes_is_said_once_and_training_goes_on(tmp_path, caplog):
    folder = tmp_path / "log"
    with caplog.at_level(logging.WARNING, "autopar"), monitor_of(log=folder) as monitor:
        shutil.rmtree(folder)
        for i in range(5):
            monitor(i, {"loss": 1.0})
    assert [row.step for row in monitor.rows] == [0, 1, 2, 3, 4]
    (said,) = [text for text in caplog.messages if "has failed" in text]
    assert said.startswith(f"Monitor(log={str(folder)!r}) has failed: FileNotFoundError")


def test_two_monitors_on_a_folder_keep_their_lines_and_say_so(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "autopar")
    with monitor_of(log=tmp_path) as one, monitor_of(log=tmp_path) as other:
        for i in range(3):
            one(i, {"loss": 1.0})
            other(i + 10, {"loss": 1.0})
    assert sorted(first_steps(tmp_path)) == [0, 10]
    assert any("another Monitor writes there too" in text for text in caplog.messages)


def test_a_line_that_another_lost_is_added_again(tmp_path):
    one, other = RunsFile(tmp_path), RunsFile(tmp_path)
    assert (one.write(run(1)), other.write(run(2)), one.write(run(3)), one.write(run(4))) == (False, True, True, False)
    assert first_steps(tmp_path) == [4, 2]
    (tmp_path / RUNS_FILE).write_text("")
    other.write(run(5))
    one.write(run(6))
    assert first_steps(tmp_path) == [5, 6]
    assert [path.name for path in tmp_path.iterdir()] == [RUNS_FILE]


def test_a_line_that_another_replaced_by_an_older_one_is_mended(tmp_path):
    one, other = RunsFile(tmp_path), RunsFile(tmp_path)
    one.write(run(1))
    older = (tmp_path / RUNS_FILE).read_text()
    one.write(run(2))
    other.write(run(3))
    newer = (tmp_path / RUNS_FILE).read_text().splitlines(keepends=True)[1]
    (tmp_path / RUNS_FILE).write_text(older + newer)
    one.write(run(4))
    assert first_steps(tmp_path) == [4, 3]


def test_many_monitors_at_once_lose_and_double_no_line(tmp_path):
    files = [RunsFile(tmp_path) for _ in range(4)]

    def write(i):
        for step in range(20):
            files[i].write(run(100 * i + step))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(len(files))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(first_steps(tmp_path)) == [19, 119, 219, 319]


def test_the_other_processes_say_once_that_process_0_reports(monkeypatch, caplog):
    keys = {}

    class Store:
        def below(self, prefix):
            return {key.removeprefix(prefix): "" for key in keys if key.startswith(prefix)}

        def set(self, key, value):
            keys[key] = value

    monkeypatch.setattr("autopar.common.jax_distributed.shared_store", lambda: Store())
    with caplog.at_level(logging.WARNING, "autopar"):
        other = OtherProcess()
        for _ in range(3):
            other.called({"loss": jnp.float32(1.0)})
        other.look()
        monitor_of().close()
        OtherProcess().look()
    (said,) = caplog.messages
    assert "process 0 alone writes rows" in said
