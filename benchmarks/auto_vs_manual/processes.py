"""Rows that other processes make: planned ones by several processes at once, those that are run by one."""

import collections
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from autopar.common.worker_processes import VARIABLE, worker_processes
from benchmarks.auto_vs_manual.planning import ROW_IS_MADE
from benchmarks.auto_vs_manual.rows import Row, Status, row_of
from benchmarks.auto_vs_manual.suites import Job

DEVICE_FLAG = "--xla_force_host_platform_device_count"
LAST_LINES = 3  # of what a process that failed wrote


def lines_of(
    command: Sequence[str],
    timeout_s: float,
    each: Callable[[str], object],
    given: Iterator[str] | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    """Runs a process and hands on its lines as they come; why it did not end well, or nothing.

    The process reads the first line of `given`, and another one with each line of its own for which `each` returns
    True, with which the time begins anew. `environment`: variables beside those of this process.
    """
    given = given or iter(())
    variables = dict(os.environ) | (environment or {})
    if DEVICE_FLAG not in variables.get("XLA_FLAGS", ""):
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {DEVICE_FLAG}=8".strip()
    errors: list[str] = []
    late = threading.Event()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=variables) as process:
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        reader = threading.Thread(target=lambda lines=process.stderr: errors.extend(lines), daemon=True)

        def stop() -> None:
            late.set()
            process.kill()

        def started() -> threading.Timer:
            timer = threading.Timer(timeout_s, stop)
            timer.start()
            return timer

        def give() -> None:
            try:
                if (line := next(given, None)) is None:
                    process.stdin.close()
                else:
                    print(line, file=process.stdin, flush=True)
            except BrokenPipeError:  # it is gone, as its status tells
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

        reader.start()
        timer = started()
        try:
            give()
            for line in process.stdout:
                if each(line) is True:
                    timer.cancel()
                    if late.is_set():
                        break
                    timer = started()
                    give()
            process.wait()
        finally:
            timer.cancel()
            process.kill()
        reader.join()
    if late.is_set():
        return f"stopped after {timeout_s:.0f} s"
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}"
    return " ".join("".join(errors).strip().splitlines()[-LAST_LINES:]) if process.returncode else ""


def planned(
    jobs: Sequence[Job], timeout_s: float, most_attempts: int, told: Callable[[Row], None], done: Callable[[Row], None]
) -> None:
    """The rows of one model on one cluster that are only predicted, by as many processes as plan one step, each of
    which takes one row after the other. `told` gets each row as far as it has come, `done` as it ends; where one ends
    the process, another process makes those that are left.
    """
    left, lock = collections.deque(jobs), threading.Lock()
    num_processes = min(1 + len(worker_processes()), len(jobs))
    # Rows are what is shared among processors, not the work of one row, unless there is one row only.
    environment = {VARIABLE: "1"} if num_processes > 1 else {}

    def rows() -> None:
        while left:
            process = _Process(left, lock, told, done)
            process.run(timeout_s, most_attempts, environment)

    with ThreadPoolExecutor(num_processes) as pool:
        for ended in [pool.submit(rows) for _ in range(num_processes)]:
            ended.result()


class _Process:
    """A process that makes rows of `left`, the first at first, for as long as it lives. `lock`: of what is told."""

    def __init__(
        self,
        left: collections.deque[Job],
        lock: threading.Lock,
        told: Callable[[Row], None],
        done: Callable[[Row], None],
    ) -> None:
        self.left, self.lock, self.told, self.done = left, lock, told, done
        self.job: Job | None = None
        self.row: Row | None = None

    def run(self, timeout_s: float, most_attempts: int, environment: dict[str, str]) -> None:
        jobs = self.jobs()
        if (first := next(jobs, None)) is None:
            return
        model, cluster, recipe = first.key
        command = [sys.executable, "-m", "benchmarks.auto_vs_manual.planning", model, cluster, str(most_attempts)]

        def recipes() -> Iterator[str]:
            yield recipe
            yield from (job.recipe for job in jobs)

        wrong = lines_of(command, timeout_s, self.each, recipes(), environment)
        if self.job is not None:
            self.end(wrong)

    def jobs(self) -> Iterator[Job]:
        while True:
            try:
                self.job, self.row = self.left.popleft(), None
            except IndexError:
                self.job = None
                return
            yield self.job

    def each(self, line: str) -> bool:
        if line.strip() == ROW_IS_MADE:
            self.end("")
            return True
        if line.startswith("{"):
            self.row = row_of(json.loads(line))
            with self.lock:
                self.told(self.row)
        return False

    def end(self, wrong: str) -> None:
        assert self.job is not None, "a row is being made"
        with self.lock:
            self.done(finished(self.job, self.row, wrong))
        self.job = None


def measured(jobs: Sequence[Job], timeout_s: float) -> list[Row]:
    """The rows of one small model, run in turns."""
    seen: dict[str, Row] = {}

    def each(line: str) -> None:
        if line.startswith("{"):
            row = row_of(json.loads(line))
            seen[row.recipe] = row

    first = jobs[0]
    command = [sys.executable, "-m", "benchmarks.auto_vs_manual.measuring", first.model.name, first.cluster]
    wrong = lines_of([*command, *(job.recipe for job in jobs)], timeout_s, each)
    return [finished(job, seen.get(job.recipe), wrong if job.recipe not in seen else "") for job in jobs]


def finished(job: Job, row: Row | None, wrong: str) -> Row:
    """A row as far as it came, with what cut it short."""
    if row is None:
        model, cluster, recipe = job.key
        return Row(model=model, cluster=cluster, recipe=recipe, devices=0, status=Status.FAILED, why=wrong)
    if not wrong:
        return row
    return dataclasses.replace(row, cut_short=f"{wrong} and {row.attempts} attempts")
