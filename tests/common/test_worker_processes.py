"""Work that several processes share comes out as in one of them, whatever happens to the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.common import jax_pickle, worker_processes
from autopar.common import worker_processes as shared_jobs
from autopar.common.worker_processes import (
    SharedJob,
    WorkerError,
    WorkerProcess,
    memory_bytes,
    num_processors,
    shared_job,
)
from tests.workers import when_ready


class Squares:
    """A job; each result says in which process it was made. Some are slow, or fail, in workers only."""

    def __init__(self, slow=frozenset(), fails=frozenset()):
        self.slow, self.fails, self.home = slow, fails, os.getpid()
        self.known = {}

    def square(self, item):
        if os.getpid() != self.home:
            time.sleep(60 if item in self.slow else 0)
            if item in self.fails:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)  # so that each process gets some
        self.known[item] = os.getpid()
        return item**2, os.getpid()

    def place(self, item):
        time.sleep(0.1)
        return self.known.get(item), os.getpid()

    def forget(self, items):
        for item in items:
            self.known.pop(item, None)

    def refuses(self, item):
        raise ValueError(f"no {item} in {'the worker' if os.getpid() != self.home else 'this process'}")


class Refusing(Squares):
    def square(self, item):
        if os.getpid() != self.home:
            raise BaseException("whatever it is")
        return item**2


@pytest.fixture(autouse=True)
def jobs_of_this_file(monkeypatch):
    monkeypatch.setattr(jax_pickle, "_KNOWN", jax_pickle._KNOWN | {__name__.split(".")[0]})


def settled(worker):
    """Waits until a process that ends is gone."""
    until_s = time.monotonic() + 60
    while worker.is_running and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not worker.is_running


@pytest.fixture(scope="module")
def worker():
    made = WorkerProcess()
    yield made
    made.end()


def test_results_come_in_order_from_both_processes(worker):
    with shared_job(Squares(), [worker]) as job:
        found = when_ready(job).run("square", range(12))
    assert [square for square, _ in found] == [n**2 for n in range(12)]
    assert len({process for _, process in found}) == 2


def test_a_process_gets_the_same_items_again(worker):
    with shared_job(Squares(), [worker]) as job:
        first = when_ready(job).run("square", range(8))
        again = job.run("place", range(8))
    same = [before == process == now for (_, process), (before, now) in zip(first, again, strict=True)]
    assert sum(same) >= 6  # at the end one process may take an item of the other


def test_without_workers_all_is_done_here():
    with shared_job(Squares(), ()) as job:
        assert job.run("square", [3, 2]) == [(9, os.getpid()), (4, os.getpid())]
        assert job.num_processes == 1


def test_what_cannot_be_pickled_is_done_here(worker):
    job_of_a_lock = Squares()
    job_of_a_lock.lock = worker  # holds threads
    with shared_job(job_of_a_lock, [worker]) as job:
        assert job.num_processes == 1
        assert job.run("square", [3]) == [(9, os.getpid())]


def test_an_error_is_that_of_this_process(worker):
    with shared_job(Squares(), [worker]) as job, pytest.raises(ValueError, match="in this process"):
        when_ready(job).run("refuses", range(4))


def test_the_work_of_a_process_that_died_is_done_here():
    dies = WorkerProcess()
    with shared_job(Squares(fails=frozenset(range(6))), [dies]) as job:
        found = when_ready(job).run("square", range(6))
    assert found == [(n**2, os.getpid()) for n in range(6)]
    with shared_job(Squares(), [dies]) as job:  # another one takes its place
        assert {n for _, n in when_ready(job).run("square", range(8))} > {os.getpid()}
    dies.end()


def test_a_process_that_dies_again_and_again_is_left_alone():
    dies = WorkerProcess()
    for _ in range(worker_processes.MOST_DEATHS):
        assert not dies.has_failed
        with pytest.raises(WorkerError):
            dies.call(os._exit, 1).result(60)
        settled(dies)
    assert dies.has_failed
    with pytest.raises(WorkerError, match="gone"):
        dies.call(int).result(60)


def test_a_process_may_die_between_two_methods(worker):
    with shared_job(Squares(), [worker]) as job:
        when_ready(job).run("square", range(4))
        worker.end()
        settled(worker)
        assert [square for square, _ in job.run("square", range(6))] == [n**2 for n in range(6)]


def test_an_item_may_fail_at_once(worker):
    for _ in range(20):
        with shared_job(Refusing(), [worker]) as job:
            assert when_ready(job).run("square", range(3)) == [0, 1, 4]


def test_a_worker_forgets_what_this_process_forgets(worker):
    with shared_job(Squares(), [worker]) as job:
        first = when_ready(job).run("square", range(8))
        job.everywhere("forget", range(8))
        again = job.run("place", range(8))
    assert len({process for _, process in first}) == 2
    assert {before for before, _ in again} == {None}


def test_a_call_waits_for_no_process_to_start():
    worker, large = WorkerProcess(), b"x" * (4 << 20)
    begun_s = time.monotonic()
    answers = [worker.call(len, large) for _ in range(3)]
    assert time.monotonic() - begun_s < 0.5
    assert [answer.result(60) for answer in answers] == [len(large)] * 3
    worker.end()


def test_the_path_may_hold_what_is_no_text(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), None])
    worker = WorkerProcess()
    assert worker.call(int).result(60) == 0
    worker.end()


def test_without_a_python_to_start_there_are_no_workers(monkeypatch):
    monkeypatch.setenv(worker_processes.VARIABLE, "3")
    assert len(worker_processes._workers_of(-3)) == 2
    monkeypatch.setattr(sys, "executable", None)
    assert worker_processes._workers_of(-4) == []
    with pytest.raises(WorkerError):
        WorkerProcess().call(int).result(60)


def test_nobody_waits_long_for_a_process_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(shared_jobs, "PATIENCE_S", 0.5)
    hangs, begun_s = WorkerProcess(), time.monotonic()
    job = when_ready(SharedJob(Squares(slow=frozenset(range(4))), [hangs]))
    assert job.run("square", range(4)) == [(n**2, os.getpid()) for n in range(4)]
    assert time.monotonic() - begun_s < 50
    settled(hangs)


PROGRAM = """
import operator, signal, sys, time
import jax
from autopar.common import worker_processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
print("runs", len(jax.devices()), flush=True)
workers = worker_processes.worker_processes()
print(len(workers), workers[0].call(operator.add, 1, 2).result(60), flush=True)
"""


@pytest.fixture
def program(tmp_path):
    def begun(*lines):
        file = tmp_path / "train.py"
        file.write_text(PROGRAM + "\n".join(lines))
        environment = {**os.environ, "AUTOPAR_PLANNING_PROCESSES": "2"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, str(file)], env=environment, start_new_session=True, **pipes)

    return begun


def is_alone(group):
    """Whether no process of a group is left; a process may take a moment to end."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("behind", [(), ("workers[0].call(time.sleep, 60)", "time.sleep(0.5)")], ids=["idle", "busy"])
def test_a_program_without_a_main_guard_runs_once_and_ends_quietly(program, behind):
    """A process that imports the user's program again would train again."""
    ran = program(*behind)
    out, told = ran.communicate(timeout=120)
    assert out.split() == ["runs", "8", "1", "3"]
    assert told == ""
    assert ran.returncode == 0
    assert is_alone(ran.pid)


def test_a_fork_has_workers_of_its_own_and_ends_no_others(monkeypatch, worker):
    monkeypatch.setenv(worker_processes.VARIABLE, "2")
    known = worker_processes._workers_of(-1)
    assert worker_processes._workers_of(-2) != known
    worker.call(int).result(60)
    worker_processes._end_all(os.getpid() + 1, [worker])
    assert worker.call(int).result(60) == 0


def test_an_error_comes_back_as_text_and_the_process_goes_on(worker):
    with pytest.raises(WorkerError, match="ValueError: invalid literal"):
        worker.call(int, "x").result(60)
    assert worker.call(int, "12").result(60) == 12


def test_a_process_without_work_leaves_and_another_one_comes(monkeypatch):
    monkeypatch.setattr(
        worker_processes,
        "_BEGINS",
        worker_processes._BEGINS.replace(
            "import serve;", "import serve; import autopar.common.worker_processes as w; w.IDLE_S = 0.2;"
        ),
    )
    worker = WorkerProcess()
    first = worker.call(os.getpid).result(60)
    settled(worker)
    assert not worker.has_failed
    assert worker.call(os.getpid).result(60) != first
    worker.end()


def test_there_are_no_more_processors_than_the_control_group_has(monkeypatch, tmp_path):
    class Limits:
        text = "150000 100000"

        def __init__(self, folder, name):
            assert folder == "/sys/fs/cgroup"
            self.name = name

        def read_text(self):
            return self.text if self.name == "cpu.max" else str(1 << 30)

    monkeypatch.setattr(worker_processes, "Path", Limits)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert num_processors() == 2
    Limits.text = "max 100000"
    assert num_processors() == 8
    Limits.text = "50000 100000"
    assert num_processors() == 1
    assert memory_bytes() == 1 << 30


def test_an_interrupt_ends_the_program_and_says_so_once(program):
    ran = program("workers[0].call(time.sleep, 60)", "print('sleeps', flush=True)", "time.sleep(60)")
    while "sleeps" not in ran.stdout.readline():
        pass
    time.sleep(0.5)
    os.killpg(ran.pid, signal.SIGINT)  # as a key does, to all processes
    _, told = ran.communicate(timeout=60)
    assert told.count("Traceback") == 1
    assert told.rstrip().endswith("KeyboardInterrupt")
    assert is_alone(ran.pid)


def test_workers_end_where_their_program_is_killed(program):
    ran = program("print('sleeps', flush=True)", "time.sleep(60)")
    while "sleeps" not in ran.stdout.readline():
        pass
    ran.kill()
    ran.communicate(timeout=60)
    assert is_alone(ran.pid)


def test_one_processor_has_no_workers():
    program = "from autopar.common.worker_processes import worker_processes; print(worker_processes())"
    environment = {**os.environ, "AUTOPAR_PLANNING_PROCESSES": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.strip() == "[]"
