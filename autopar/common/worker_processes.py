"""Processes beside this one that plan with it, and work that they share with it item by item.

They import autopar, and run functions that they are sent. They do not run the user's program again, as those of
`multiprocessing` and of libraries on it may; they see no accelerator and no terminal, and end with this process at
once, however it ends, or `IDLE_S` later where a fork of it goes on. Each starts when it is first sent something, and
leaves when there was no work for some time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
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


# How long this process waits for a worker before it does the work itself, and how many times as long as any item took.
PATIENCE_S, MANY_TIMES = 120.0, 10.0
_LOG = logging.getLogger("autopar")


@contextlib.contextmanager
def shared_job(job: object, workers: Sequence[WorkerProcess]) -> Iterator[SharedJob]:
    """A job, shared with these processes; with none where it cannot be pickled."""
    try:
        shared = SharedJob(job, workers)
    except Exception:  # pickle raises all kinds of errors; the job is done here then
        shared = SharedJob(job, ())
    try:
        yield shared
    finally:
        shared.close()


class SharedJob:
    """An object whose methods several processes run, for one item after the other.

    What a method makes of an item depends on nothing else, so that it is the same in every process. A process keeps
    what it knows of an item from one method to the next, and gets the same items again as long as it has time for them.
    Whatever fails in a worker is done here, where its error is raised if it fails again.
    """

    _tokens = itertools.count()

    def __init__(self, job: object, workers: Sequence[WorkerProcess]) -> None:
        """Raises: what `pickle` raises for a job that it cannot write, where there are workers."""
        self.job, self.workers, self.token = job, list(workers), next(self._tokens)
        self._changed = threading.Condition()
        self._ready: set[WorkerProcess] = set()
        self._place_of: dict[Any, WorkerProcess | None] = {}
        self._took_s: dict[Any, float] = {}  # the method before, in whichever process
        self._method, self._pending = "", list[Any]()
        self._running: dict[WorkerProcess, Any] = {}
        self._results: dict[Any, bytes] = {}
        payload = dumps(job) if workers else b""
        for worker in workers:
            # A worker gets items once it has the job, so that no item waits for a process to start.
            installed = worker.call(_install, self.token, payload)
            installed.add_done_callback(functools.partial(self._is_ready, worker))

    @property
    def num_processes(self) -> int:
        """How many processes there may be, with this one."""
        return 1 + len(self.workers)

    def run(self, method: str, items: Sequence[Any]) -> list[Any]:
        """What a method of the job makes of each item."""
        here: dict[Any, Any] = {}
        with self._changed:
            # What takes longest is begun first, so that no process waits long for another one at the end.
            pending = sorted(items, key=lambda item: -self._took_s.get(item, 0.0))
            self._method, self._pending, self._results = method, pending, {}
            for worker in list(self._ready):  # one that is gone leaves them
                self._feed(worker)
        try:
            while (item := self._next_here()) is not None:
                begun_s = time.perf_counter()
                here[item[0]] = getattr(self.job, method)(item[0])
                self._took_s[item[0]] = time.perf_counter() - begun_s
        finally:
            with self._changed:
                self._pending = []
        return [here[item] if item in here else pickle.loads(self._results[item]) for item in items]

    def everywhere(self, method: str, *arguments: Any) -> None:
        """Calls a method here and in all workers that take part."""
        getattr(self.job, method)(*arguments)
        for worker in list(self._ready):
            worker.call(_call, self.token, method, arguments)

    def close(self) -> None:
        """The workers forget the job."""
        for worker in self.workers:
            if worker.is_running:
                worker.call(_forget, self.token)

    def _next_here(self) -> tuple[Any] | None:
        """The next item for this process, in a tuple; None where all are done."""
        with self._changed:
            while True:
                if self._pending:
                    return (self._take(None),)
                if not self._running:
                    return None
                longest_s = max(self._took_s.values(), default=0.0)
                if not self._changed.wait(max(PATIENCE_S, MANY_TIMES * longest_s)):
                    for worker, item in self._running.items():
                        worker.end()
                        self._ready.discard(worker)
                        self._pending.append(item)
                    self._running.clear()

    def _take(self, place: WorkerProcess | None) -> Any:
        """An item of the place, or of nobody, or else of another one."""
        unknown = object()
        of = {item: self._place_of.get(item, unknown) for item in self._pending}
        fit = [item for item in self._pending if of[item] is place] or [i for i in self._pending if of[i] is unknown]
        item = fit[0] if fit else self._pending[-1]
        self._pending.remove(item)
        self._place_of[item] = place
        return item

    def _feed(self, worker: WorkerProcess) -> None:
        """Gives a worker that has nothing to do its next item. The lock is held."""
        if worker in self._running or worker not in self._ready or not self._pending:
            return
        item = self._running[worker] = self._take(worker)
        done = worker.call(_run, self.token, self._method, item)
        done.add_done_callback(functools.partial(self._is_done, worker, item))

    def _is_ready(self, worker: WorkerProcess, installed: Future[None]) -> None:
        with self._changed:
            if (error := installed.exception()) is not None:
                _LOG.debug("a worker does not take part: %s", error)
            else:
                self._ready.add(worker)
                self._feed(worker)

    def _is_done(self, worker: WorkerProcess, item: Any, done: Future[tuple[bytes, float]]) -> None:
        with self._changed:
            if worker not in self._running:
                return  # it took too long, and was ended
            del self._running[worker]
            if (error := done.exception()) is not None:
                _LOG.debug("%s of item %s is done here, for a worker failed: %s", self._method, item, error)
                self._ready.discard(worker)
                self._pending.append(item)
            else:
                self._results[item], self._took_s[item] = done.result()
                self._feed(worker)
            self._changed.notify_all()


_jobs: dict[int, Any] = {}  # in a worker, by their tokens


def _install(token: int, payload: bytes) -> None:
    _jobs[token] = pickle.loads(payload)


def _run(token: int, method: str, item: Any) -> tuple[bytes, float]:
    """(what the method makes of the item, the seconds that it took)"""
    begun_s = time.perf_counter()
    result = getattr(_jobs[token], method)(item)
    return dumps(result), time.perf_counter() - begun_s


def _call(token: int, method: str, arguments: tuple[Any, ...]) -> None:
    getattr(_jobs[token], method)(*arguments)


def _forget(token: int) -> None:
    _jobs.pop(token, None)
