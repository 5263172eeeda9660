"""Processes beside this one that plan with it, and work that they share with it item by item.

They import autopar, and do not run the user's program again, as those of `multiprocessing` and of libraries on it may;
they see no accelerator and no terminal, and end with this process, or `IDLE_S` after their last work. Whatever fails in
one is done here.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from autopar.common.jax_pickle import dumps
from autopar.common.progress import SELDOM

# Names the number of processes that plan, this one among them.
VARIABLE = "AUTOPAR_PLANNING_PROCESSES"
# Workers at most, and the memory of this machine for each of them: one holds a Python with jax and the tables of a few
# meshes, up to 1 GB.
MOST_WORKERS, MEMORY_A_WORKER_BYTES = 7, 4 << 30
IDLE_S = 60.0  # how long a worker stays without work

_BEGINS = "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
_BEGINS += "from autopar.common.worker_processes import serve; serve(int(sys.argv[2]))"
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TPU_SKIP_MDS_QUERY": "1"}


class WorkerProcess:
    """One process, which holds a copy of one object and calls its methods; it starts when it is first given one."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()  # of one question and its answer

    def install(self, payload: bytes) -> None:
        """Gives it an object, in bytes. Raises: OSError, EOFError where it is gone, or none can be started."""
        with self._lock:
            if self._connection is None or self.process is None or self.process.poll() is not None:
                self._connection = self._started()
            self._ask(payload)

    def call(self, number: int, method: str, item: Any) -> Any:
        """What a method makes of an item, of the object with this number. Raises: OSError, EOFError where it fails, the
        process is gone, or holds another object.
        """
        with self._lock:
            return self._ask(pickle.dumps((number, method, item)))

    def end(self) -> None:
        """Ends the process with whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _ask(self, sent: bytes) -> Any:
        if self._connection is None:  # another object's question was its last
            raise OSError("the process is gone")
        try:
            self._connection.send_bytes(sent)
            answer = self._connection.recv_bytes()
        except BaseException:  # of an interrupt too: its answer must not be taken for that of the next question
            self.end()
            self._connection = None
            raise
        is_result, value = pickle.loads(answer)
        if not is_result:
            raise OSError(value)
        return value

    def _started(self) -> Connection:
        """The connection to a new process."""
        here, there = Pipe()
        folders = json.dumps([folder for folder in sys.path if isinstance(folder, str)])
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGINS, folders, str(there.fileno())],
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=(there.fileno(),),
                start_new_session=True,  # an interrupt from the keyboard is not for it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return here


def serve(descriptor: int) -> None:
    """What a worker does: it runs what it is sent, and ends with the other process at once, whatever it runs then."""
    gc.set_threshold(*SELDOM)  # a worker does nothing but plan
    connection, parent, number, job = Connection(descriptor), os.getppid(), -1, None

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    while connection.poll(IDLE_S):
        try:
            sent = pickle.loads(connection.recv_bytes())
            answer: tuple[bool, Any] = True, None
            if len(sent) == 2:
                number, job = sent
            elif sent[0] != number:
                answer = False, "another object was sent since"
            else:
                answer = True, getattr(job, sent[1])(sent[2])
        except EOFError:
            return
        except BaseException as error:  # whatever it is, the other process is told
            answer = False, f"{type(error).__name__}: {error}"
        connection.send_bytes(dumps(answer))


def worker_processes() -> list[WorkerProcess]:
    """The processes beside this one: as many as there are other processors, or as the environment says (`VARIABLE`)."""
    return _workers_of(os.getpid())


@functools.cache
def _workers_of(pid: int) -> list[WorkerProcess]:
    """The workers of the process with this number: a fork of it has none of them."""
    most = min(MOST_WORKERS, num_processors() - 1, memory_bytes() // MEMORY_A_WORKER_BYTES)
    named = os.environ.get(VARIABLE, "")
    count = int(named) - 1 if named.isdecimal() else most
    has_python = bool(sys.executable) and not getattr(sys, "frozen", False)  # else it would start the user's program
    workers = [WorkerProcess() for _ in range(count if has_python else 0)]
    atexit.register(_end_all, pid, workers)
    return workers


def _end_all(pid: int, workers: Sequence[WorkerProcess]) -> None:
    for worker in workers if pid == os.getpid() else ():
        worker.end()


def num_processors() -> int:
    """The processors that this process may use, by its affinity and by the limit of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, *period = _of_control_group("cpu.max")
    return min(allowed, max(1, round(int(quota) / int(period[0])))) if quota.isdecimal() and period else allowed


def memory_bytes() -> int:
    """The memory of the machine, or of the control group of this process where that is less."""
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, *_ = _of_control_group("memory.max")
    return min(of_machine, int(limit)) if limit.isdecimal() else of_machine


def _of_control_group(name: str) -> list[str]:
    """The words of a limit of the control group, `max` where there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().split() or ["max"]
    except OSError:
        return ["max"]


class SharedJob:
    """An object whose methods several processes run, for one item after the other.

    What a method makes of an item depends on nothing else, so that it is the same in every process. A process keeps
    what it knows of an item from one method to the next, and gets the same items again. An object that cannot be
    pickled has no other process.
    """

    _numbers = itertools.count()

    def __init__(self, job: object, workers: Sequence[WorkerProcess]) -> None:
        self._number = next(self._numbers)
        try:
            payload = dumps((self._number, job)) if workers else b""
        except Exception:  # pickle raises all kinds of errors
            payload, workers = b"", ()
        self.job, self.workers = job, list(workers)
        self._lock = threading.Lock()
        self._place_of: dict[Any, WorkerProcess | None] = {}
        self._ready: set[WorkerProcess] = set()
        for worker in workers:
            threading.Thread(target=self._install, args=(worker, payload), daemon=True).start()

    @property
    def num_processes(self) -> int:
        """How many processes there may be, with this one."""
        return 1 + len(self.workers)

    def run(self, method: str, items: Sequence[Any]) -> list[Any]:
        """What a method of the job makes of each item."""
        pending, results = list(items), dict[Any, Any]()

        def of(place: WorkerProcess | None) -> Iterator[Any]:
            """Items of this place, or of none, until there are no more."""
            while True:
                with self._lock:
                    item = next(([i] for i in pending if self._place_of.get(i, place) is place), None)
                    if item is None:
                        return
                    pending.remove(item[0])
                    self._place_of[item[0]] = place
                yield item[0]

        def there(worker: WorkerProcess) -> None:
            for item in of(worker):
                try:
                    results[item] = worker.call(self._number, method, item)
                except Exception:  # done here, where its error is raised if it fails again
                    pending.append(item)
                    self._gone(worker)
                    return

        # A worker gets items once it has the job, so that no item waits for a process to start.
        running = [threading.Thread(target=there, args=(worker,), daemon=True) for worker in list(self._ready)]
        for thread in running:
            thread.start()
        try:
            for _ in range(2):  # again what a worker that is gone leaves
                for item in of(None):
                    results[item] = getattr(self.job, method)(item)
                for thread in running:
                    thread.join()
        finally:
            pending.clear()
        return [results[item] for item in items]

    def everywhere(self, method: str, items: Sequence[Any]) -> None:
        """Calls a method with these items, in each process with those of its own."""
        for place in {self._place_of[item] for item in items}:
            own = [item for item in items if self._place_of[item] is place]
            try:
                getattr(self.job, method)(own) if place is None else place.call(self._number, method, own)
            except (OSError, EOFError):
                assert place is not None, "nothing is sent in this process"
                self._gone(place)

    def _install(self, worker: WorkerProcess, payload: bytes) -> None:
        try:
            worker.install(payload)
        except Exception:  # whatever it is, work is done here
            self._gone(worker)
        else:
            self._ready.add(worker)

    def _gone(self, worker: WorkerProcess) -> None:
        """Its items are done here; another job may try it again."""
        with self._lock:
            self.workers = [w for w in self.workers if w is not worker]
            self._ready.discard(worker)
            self._place_of = {item: None if at is worker else at for item, at in self._place_of.items()}
