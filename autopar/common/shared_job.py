"""Work that several processes share, item by item."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from autopar.common.jax_pickle import dumps
from autopar.common.worker_processes import WorkerProcess

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
