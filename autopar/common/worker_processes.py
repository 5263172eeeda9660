"""Processes beside this one that plan with it: they import autopar, and run functions that they are sent.

They do not run the user's program again, as those of `multiprocessing` and of libraries on it may; they see no
accelerator and no terminal, and end with this process at once, however it ends, or `IDLE_S` later where a fork of it
goes on. Each starts when it is first sent something, and leaves when there was no work for some time.
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
MOST_DEATHS = 3  # of a worker, after which it is left alone

_BEGINS = "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
_BEGINS += "from autopar.common.worker_processes import serve; serve(int(sys.argv[2]))"
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TPU_SKIP_MDS_QUERY": "1"}


class WorkerError(RuntimeError):
    """What failed in a worker, as text; or the worker is gone."""


class WorkerProcess:
    """One process, which runs what it is sent in order. Where it ended, another one takes its place."""

    def __init__(self) -> None:
        self.has_failed = False
        self._lock = threading.Lock()
        self._sends: threading.Thread | None = None
        self._to_send: queue.SimpleQueue[tuple[bytes, Future[Any]]] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: deque[Future[Any]] = deque()
        self._deaths = 0

    @property
    def is_running(self) -> bool:
        """Whether there is a process at the moment."""
        return self._process is not None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """What a function returns, which the worker finds by its name; a `WorkerError` where it fails there. Does not
        wait for the process to start.
        """
        future: Future[Any] = Future()
        sent = pickle.dumps((function, arguments))
        with self._lock:
            if self._sends is None:
                self._sends = threading.Thread(target=self._send, name="autopar-worker-sends", daemon=True)
                self._sends.start()
        self._to_send.put((sent, future))
        return future

    def end(self) -> None:
        """Ends the process with whatever it does."""
        process = self._process
        if process is not None:
            process.kill()

    def _send(self) -> None:
        connection: Connection | None = None
        while True:
            sent, future = self._to_send.get()
            try:
                if self.has_failed:
                    raise WorkerError("a worker is gone")
                if connection is None or connection.closed:
                    connection = self._started()
            except Exception as error:  # the system has no more processes, or no Python to start
                self.has_failed = True
                future.set_exception(WorkerError(str(error)))
                continue
            with self._lock:
                is_gone = connection.closed
                if not is_gone:
                    self._asked.append(future)
            if is_gone:
                future.set_exception(WorkerError("a worker is gone"))
                continue
            with contextlib.suppress(OSError):  # it is gone, as `_read` finds
                connection.send_bytes(sent)

    def _started(self) -> Connection:
        """The connection to a new process. Raises: OSError where the system has no more of them."""
        here, there = Pipe()
        folders = json.dumps([folder for folder in sys.path if isinstance(folder, str)])
        with there:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGINS, folders, str(there.fileno())],
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=(there.fileno(),),
                start_new_session=True,  # an interrupt from the keyboard is not for it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._process = process
        threading.Thread(target=self._read, args=(here, process), name="autopar-worker", daemon=True).start()
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
            self._process, asked = None, list(self._asked)
            self._asked.clear()
            self._deaths += process.returncode != 0
            self.has_failed |= self._deaths >= MOST_DEATHS
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
    most = min(MOST_WORKERS, num_processors() - 1, memory_bytes() // MEMORY_A_WORKER_BYTES)
    named = os.environ.get(VARIABLE, "")
    count = int(named) - 1 if named.isdecimal() else most
    has_python = bool(sys.executable) and not getattr(sys, "frozen", False)  # else it would start the user's program
    workers = [WorkerProcess() for _ in range(count if has_python else 0)]
    atexit.register(_end_all, pid, workers)
    return workers


def _end_all(pid: int, workers: list[WorkerProcess]) -> None:
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
        except BaseException as error:  # whatever it is, the other process is told
            answer = False, f"{type(error).__name__}: {error}"
        connection.send_bytes(pickle.dumps(answer))


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
