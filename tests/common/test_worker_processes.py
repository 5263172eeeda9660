"""Work that several processes share comes out as in one of them, whatever happens to the others."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from autopar.common import worker_processes
from autopar.common.worker_processes import SharedJob, WorkerProcess, shared_job


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

    def refuses(self, item):
        raise ValueError(f"no {item} in {'the worker' if os.getpid() != self.home else 'this process'}")


@pytest.fixture(scope="module")
def worker():
    made = WorkerProcess()
    yield made
    made.end()


def when_ready(job):
    until_s = time.monotonic() + 60
    while not job._ready and time.monotonic() < until_s:
        time.sleep(0.05)
    assert job._ready
    return job


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
    with shared_job(Squares(), [dies]) as job:  # it is not asked again
        assert job.run("square", [5]) == [(25, os.getpid())]
    assert dies.has_failed
    dies.end()


def test_nobody_waits_long_for_a_process_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(worker_processes, "PATIENCE_S", 0.5)
    hangs, begun_s = WorkerProcess(), time.monotonic()
    job = when_ready(SharedJob(Squares(slow=frozenset(range(4))), [hangs]))
    assert job.run("square", range(4)) == [(n**2, os.getpid()) for n in range(4)]
    assert time.monotonic() - begun_s < 50
    assert hangs.has_failed


def test_a_program_without_a_main_guard_runs_once(tmp_path):
    """A process that imports the user's program again would train again; and nothing is said when the program ends."""
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent("""
            import operator
            from autopar.common import worker_processes
            print("runs")
            workers = worker_processes.worker_processes()
            print(len(workers), workers[0].call(operator.add, 1, 2).result(60))
            """)
    )
    environment = {**os.environ, "LOKY_MAX_CPU_COUNT": "2"}
    ran = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.split() == ["runs", "1", "3"]
    assert ran.stderr == ""


def test_one_processor_has_no_workers():
    program = "from autopar.common.worker_processes import worker_processes; print(worker_processes())"
    environment = {**os.environ, "LOKY_MAX_CPU_COUNT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.strip() == "[]"
