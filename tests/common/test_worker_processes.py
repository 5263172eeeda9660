"""Work that several processes share comes out as in one of them, whatever happens to the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.common import jax_pickle, worker_processes
from autopar.common.worker_processes import SharedJob, WorkerProcess, memory_bytes, num_processors


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


@pytest.fixture(scope="module")
def worker():
    made = WorkerProcess()
    yield made
    made.end()


def when_ready(job):
    """A job once all its workers have it, so that each does some of it."""
    until_s = time.monotonic() + 60
    while len(job._ready) < len(job.workers) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert len(job._ready) == len(job.workers)
    return job


def test_results_come_in_order_from_both_processes_which_get_the_same_items_again(worker):
    job = when_ready(SharedJob(Squares(), [worker]))
    found = job.run("square", range(12))
    assert [square for square, _ in found] == [n**2 for n in range(12)]
    assert len({process for _, process in found}) == 2
    again = job.run("place", range(12))
    assert [(process, process) for _, process in found] == again
    job.everywhere("forget", range(12))
    assert {known for known, _ in job.run("place", range(12))} == {None}


def test_a_worker_has_one_object_at_a_time(worker):
    before, after = (when_ready(SharedJob(Squares(), [worker])) for _ in range(2))
    assert len({process for _, process in after.run("square", range(8))}) == 2
    assert before.run("square", range(4)) == [(n**2, os.getpid()) for n in range(4)]


def test_without_workers_all_is_done_here():
    job = SharedJob(Squares(), ())
    assert job.run("square", [3, 2]) == [(9, os.getpid()), (4, os.getpid())]
    assert job.num_processes == 1


def test_what_cannot_be_pickled_is_done_here(worker):
    job_of_a_lock = Squares()
    job_of_a_lock.lock = worker  # holds a lock
    job = SharedJob(job_of_a_lock, [worker])
    assert job.num_processes == 1
    assert job.run("square", [3]) == [(9, os.getpid())]


def test_an_error_is_that_of_this_process(worker):
    with pytest.raises(ValueError, match="in this process"):
        when_ready(SharedJob(Squares(), [worker])).run("refuses", range(4))


@pytest.mark.slow
def test_the_work_of_a_process_that_died_is_done_here():
    dies = WorkerProcess()
    found = when_ready(SharedJob(Squares(fails=frozenset(range(6))), [dies])).run("square", range(6))
    assert found == [(n**2, os.getpid()) for n in range(6)]
    again = when_ready(SharedJob(Squares(), [dies]))  # another one takes its place
    assert {n for _, n in again.run("square", range(8))} > {os.getpid()}
    dies.end()
    assert [square for square, _ in again.run("square", range(6))] == [n**2 for n in range(6)]
    assert again.num_processes == 1


def test_an_item_may_fail_at_once(worker):
    for _ in range(3):
        assert when_ready(SharedJob(Refusing(), [worker])).run("square", range(3)) == [0, 1, 4]


@pytest.mark.slow
def test_a_process_without_work_leaves_and_another_one_comes(monkeypatch):
    begins = worker_processes._BEGINS.replace("import serve;", "import serve, IDLE_S; serve.__globals__['IDLE_S'] = 1;")
    monkeypatch.setattr(worker_processes, "_BEGINS", begins)
    worker = WorkerProcess()
    when_ready(SharedJob(Squares(), [worker]))
    first = worker.process
    assert first.wait(60) == 0
    when_ready(SharedJob(Squares(), [worker]))
    assert worker.process.pid != first.pid
    worker.end()


@pytest.mark.slow
def test_the_path_may_hold_what_is_no_text(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), None])
    worker = WorkerProcess()
    when_ready(SharedJob(Squares(), [worker]))
    worker.end()


def test_without_a_python_to_start_there_are_no_workers(monkeypatch):
    monkeypatch.setenv(worker_processes.VARIABLE, "3")
    assert len(worker_processes._workers_of(-3)) == 2
    monkeypatch.setattr(sys, "executable", None)
    assert worker_processes._workers_of(-4) == []


PROGRAM = """
import signal, sys, time
import jax
from autopar.common.jax_pickle import dumps
from autopar.common.progress import Deadline
from autopar.common.worker_processes import SharedJob, worker_processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
print("runs", len(jax.devices()), flush=True)
job = SharedJob([3, 1, 2], worker_processes())
while not job._ready:
    time.sleep(0.02)
print(job.num_processes, job.run("index", [2, 1, 3]), flush=True)
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


@pytest.mark.slow
def test_a_program_without_a_main_guard_runs_once_and_ends_quietly(program):
    """A process that imports the user's program again would train again."""
    ran = program()
    out, told = ran.communicate(timeout=120)
    assert out.split() == ["runs", "8", "2", "[2,", "1,", "0]"]
    assert told == ""
    assert ran.returncode == 0
    assert is_alone(ran.pid)


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_program(program, how):
    ran = program("print(job.workers[0].process.pid, flush=True)", "time.sleep(60)")
    for _ in range(3):
        line = ran.stdout.readline()
    ran.send_signal(how)
    ran.communicate(timeout=60)
    assert is_alone(int(line))  # which leads a session of its own


def test_a_fork_has_workers_of_its_own_and_ends_no_others(monkeypatch, worker):
    monkeypatch.setenv(worker_processes.VARIABLE, "2")
    known = worker_processes._workers_of(-1)
    assert worker_processes._workers_of(-2) != known
    when_ready(SharedJob(Squares(), [worker]))
    worker_processes._end_all(os.getpid() + 1, [worker])
    assert worker.process.poll() is None


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


def test_one_processor_has_no_workers():
    program = "from autopar.common.worker_processes import worker_processes; print(worker_processes())"
    environment = {**os.environ, "AUTOPAR_PLANNING_PROCESSES": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.strip() == "[]"
