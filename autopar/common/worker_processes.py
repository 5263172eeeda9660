"""Processes beside this one that plan with it: they import autopar, and run functions that they are sent.

They do not run the user's program again, as those of `multiprocessing` and of libraries on it may; they see no
accelerator and no terminal, and end when this process ends, however it does. Each starts when it is first sent
something, and leaves when there was no work for some time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from autopar.common.gc_policy import SELDOM

# Names the number of processes that plan, this one among them.
VARIABLE = "AUTOPAR_PLANNING_PROCESSES"
# Workers at most, and the memory of this machine for each of them: one holds a Python with jax and the tables of a few
# meshes, up to 1 GB.
MOST_WORKERS, MEMORY_A_WORKER_BYTES = 7, 4 << 30
IDLE_S = 60.0  # how long a worker stays without work

_BEGINS = "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
_BEGINS += "from autopar.common.worker_processes import serve; serve(int(sys.argv[2]))"
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TPU_SKIP_MDS_QUERY": "1"}


class WorkerError(RuntimeError):
    """What failed in a worker, as text; or the worker is gone."""


class WorkerProcess:
    """One process, which runs what it is sent in order."""

    def __init__(self) -> None:
        self.has_failed = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._asked: deque[Future[Any]] = deque()

    @property
    def is_running(self) -> bool:
        """Whether there is a process at the moment: it leaves where it has nothing to do."""
        return self._connection is not None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """What a function returns, which the worker finds by its name; a `WorkerError` where it fails there."""
        future: Future[Any] = Future()
        sent = pickle.dumps((function, arguments))
        with self._lock:
            try:
                connection = self._connection or self._started()
            except OSError:
                self.has_failed = True
            if not self.has_failed:
                self._asked.append(future)
                with contextlib.suppress(OSError):  # it is gone, as `_read` finds
                    connection.send_bytes(sent)
                return future
        future.set_exception(WorkerError("a worker is gone"))
        return future

    def end(self) -> None:
        """Ends the process with whatever it does."""
        self.has_failed = True
        if self._process is not None:
            self._process.kill()

    def _started(self) -> Connection:
        """The connection to a new process. Raises: OSError where the system has no more of them."""
        here, there = Pipe()
        with there:
            command = [sys.executable, "-c", _BEGINS, json.dumps(sys.path), str(there.fileno())]
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=(there.fileno(),),
                start_new_session=True,  # an interrupt from the keyboard is not for it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = here
        reader = threading.Thread(target=self._read, args=(here, self._process), name="autopar-worker", daemon=True)
        reader.start()
        return here

    def _read(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        """Hands on what the worker answers, until it is gone."""
        while True:
            try:
                answer = connection.recv_bytes()
            except (EOFError, OSError):
                break
            future = self._asked.popleft()
            is_result, value = pickle.loads(answer)
            if is_result:
                future.set_result(value)
            else:
                future.set_exception(WorkerError(value))
        process.wait()
        with self._lock:
            connection.close()
            self._connection, asked = None, list(self._asked)
            self._asked.clear()
            self.has_failed |= process.returncode != 0
        for future in asked:
            future.set_exception(WorkerError("a worker is gone"))


def worker_processes() -> list[WorkerProcess]:
    """The processes beside this one, as many as there are other processors, less those that failed; as many as the
    environment says (`VARIABLE`), less this one.
    """
    return [worker for worker in _workers_of(os.getpid()) if not worker.has_failed]


def begin_workers(*modules: str) -> None:
    """Starts the processes, which import these modules, before there is anything to do for them."""
    for worker in worker_processes():
        worker.call(_import, modules)


@functools.cache
def _workers_of(pid: int) -> list[WorkerProcess]:
    """The workers of the process with this number: a fork of it has none of them."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(MOST_WORKERS, memory_bytes // MEMORY_A_WORKER_BYTES)
    named = os.environ.get(VARIABLE, "")
    workers = [WorkerProcess() for _ in range(int(named) - 1 if named.isdigit() else min(most, num_processors() - 1))]
    atexit.register(_end_all, pid, workers)
    return workers


def _end_all(pid: int, workers: list[WorkerProcess]) -> None:
    for worker in workers if pid == os.getpid() else ():
        worker.end()


def num_processors() -> int:
    """The processors that this process may use, by its affinity and by the limit of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return min(allowed, max(1, round(int(quota) / int(period)))) if quota.isdigit() else allowed


def serve(descriptor: int) -> None:
    """What a worker does: it runs what it is sent, and ends with the other process at once, whatever it runs then."""
    gc.set_threshold(*SELDOM)  # a worker does nothing but plan
    connection, asked = Connection(descriptor), queue.SimpleQueue[bytes]()

    def read() -> None:
        try:
            while True:
                asked.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            function, arguments = pickle.loads(asked.get(timeout=IDLE_S))
            answer = True, function(*arguments)
        except queue.Empty:
            os._exit(0)
        except Exception as error:  # whatever it is, the other process is told
            answer = False, f"{type(error).__name__}: {error}"
        connection.send_bytes(pickle.dumps(answer))


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
