"""`Monitor`: follows a training run and compares it with the plan's prediction."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from autopar.common.progress import Progress
from autopar.errors import InvalidArgumentError
from autopar.monitoring.completions import Completion, Completions, StepCall
from autopar.monitoring.goodput import Goodput, RunRecord, RunsFile, goodput, now_s
from autopar.monitoring.other_process import OtherProcess, say_there_is_one
from autopar.monitoring.row import MonitorRow
from autopar.monitoring.sinks import Callback, Guard, Sink, TensorBoard, Terminal
from autopar.monitoring.slow_steps import StepTimes, slow_lane, warning_text
from autopar.monitoring.step_timer import SeenSteps, StepTimer
from autopar.plan.plan import Plan

logger = logging.getLogger("autopar")

KEPT_ROWS = 1000
AFTER_AN_ERROR_S = 5.0
COMPILING, PLANNING = "compiling", "planning"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class _HasPlan(Protocol):
    """A step made by `autopar.parallelize`."""

    @property
    def latest_plan(self) -> Plan | None: ...

    @property
    def last_progress(self) -> Progress | None: ...

    @property
    def last_called_s(self) -> float | None: ...


class Monitor:
    """Step time, throughput, MFU, memory and goodput of a training run, beside the plan's prediction.

    Call it once a step, after the step: `monitor(i, metrics)`. It does not wait for the step: a thread does. In a
    program of several processes all may call it, and process 0 alone reports.

    Args:
        step: The step that is watched; its latest plan is what is predicted.
        log: A folder for TensorBoard's files (with tensorboardX) and `runs.jsonl`, from which goodput is counted over
            restarts.
        callback: Called with (step, numbers by name) for each row, in a thread of the monitor's: for wandb, MLflow.
        every: Steps between two rows.
        tokens_per_step: Tokens of a whole batch, for tokens/s; without them examples/s.
        terminal: Whether rows are printed to stderr.

    `rows` are the latest ones. A log that cannot be written, or a callback that raises, later on ends no training: the
    logger `autopar` warns once, and each row tries again.

    Raises: InvalidArgumentError, also where the log cannot be written at first; MissingPackageError.
    """

    def __init__(
        self,
        step: _HasPlan,
        *,
        log: str | os.PathLike[str] | None = None,
        callback: Callable[[int, Mapping[str, float]], object] | None = None,
        every: int = 10,
        tokens_per_step: int | None = None,
        terminal: bool = True,
    ) -> None:
        if not hasattr(step, "latest_plan"):
            raise InvalidArgumentError(
                where="autopar.Monitor(step)",
                expected="a step made by autopar.parallelize",
                got=type(step).__name__,
                hint="decorate the function first",
            )
        if not isinstance(every, int) or every < 1:
            raise InvalidArgumentError(
                where="autopar.Monitor(every=...)",
                expected="a number of steps, at least 1",
                got=repr(every),
                hint="leave it out for 10",
            )
        if callback is not None and not callable(callback):
            raise InvalidArgumentError(
                where="autopar.Monitor(callback=...)",
                expected="a function of a step and its numbers by name, or None",
                got=f"{callback!r:.60}",
                hint="for example lambda step, values: wandb.log(values, step=step)",
            )
        self._step, self._every, self._tokens_per_step = step, every, tokens_per_step
        self._loop = _Loop(progress=step.last_progress)
        self._timer = StepTimer()
        self._began_s, self._first_step = now_s(), 0
        self._warned: set[tuple[float, str]] = set()
        self._lock = threading.Lock()
        self._spent_s: dict[str, float] = {}
        self._runs: RunsFile | None = None
        self._runs_guard, self._warned_of_another = Guard(f"Monitor(log={str(log)!r})"), False
        self._sinks: list[Sink] = []
        self._completions: Completions | None = None
        self.rows: collections.deque[MonitorRow] = collections.deque(maxlen=KEPT_ROWS)
        self._elsewhere = OtherProcess() if jax.process_index() else None
        if self._elsewhere is not None:
            return
        say_there_is_one()
        if log is not None:
            self._runs, board = _opened(log)
            self._sinks.append(board)
        if callback is not None:
            self._sinks.append(Callback(callback))
        if terminal:
            self._sinks.append(Terminal())
        self._completions = Completions(self._ended)
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    # In the loop

    def __call__(self, step: int, metrics: Any) -> None:
        """Notes a step that was called, and what it returned: a tree whose scalars are logged by their paths.

        Raises: InvalidArgumentError for a step that is no whole number.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise InvalidArgumentError(
                where="monitor(step, metrics)",
                expected="the number of the step, an integer",
                got=f"{step!r:.60}",
                hint="call monitor(i, metrics) with the i of enumerate(batches)",
            ) from None
        if self._elsewhere is not None:
            self._elsewhere.called(metrics)
        if self._completions is None:
            return
        loop = self._loop
        progress = self._step.last_progress
        if progress is not loop.progress and progress is not None:
            self._spend(PLANNING, progress.total_s)
            loop.progress = progress
        called_s = self._step.last_called_s
        is_new = called_s != loop.called_s  # else another function than the step was called
        call = StepCall(step=step, called_s=called_s if is_new else None, data_s=loop.data_s, other_s=loop.other_s)
        loop.called_s, loop.data_s, loop.other_s = called_s, 0.0, 0.0
        self._completions.add(call, metrics)

    def batches(self, data: Iterable[Any]) -> Iterator[Any]:
        """The batches of `data`, with the time that the loop waits for each; else waiting counts as Python's."""
        iterator = iter(data)
        while True:
            begun_s = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._loop.data_s = time.perf_counter() - begun_s
            yield batch

    @contextlib.contextmanager
    def time(self, activity: str) -> Iterator[None]:
        """What else the loop does, under its name in the goodput: `with monitor.time("evaluation"): ...`."""
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            self._spend(activity, time.perf_counter() - begun_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the steps that were called, at most `timeout_s`, writes the last row, and closes the files."""
        if self._elsewhere is not None:
            self._elsewhere.look()
        if self._completions is None:
            return
        completions, self._completions = self._completions, None
        jax.monitoring.unregister_event_duration_listener(self._heard)
        try:
            completions.close(timeout_s)
            if self._timer.num_steps and self._timer.num_since_row:
                self._report()
        finally:
            for sink in self._sinks:
                sink.guard(sink.close, self.goodput)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error a step may never end: another process may be gone.
        self.close(None if kind is None else AFTER_AN_ERROR_S)

    # What is heard, from any thread

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            self._spend(COMPILING, duration_secs)

    def _spend(self, activity: str, seconds: float) -> None:
        with self._lock:
            self._spent_s[activity] = self._spent_s.get(activity, 0.0) + seconds
            self._loop.other_s += seconds

    # In the thread that waits for steps

    def _ended(self, completion: Completion) -> None:
        if not self._timer.num_steps:
            self._first_step = completion.call.step
        self._timer.add(completion)
        if self._timer.num_since_row >= self._every:
            self._report()

    def _report(self) -> None:
        """Writes a row of the steps since the last one, and warns where they are slow."""
        plan = self._step.latest_plan
        row = self._row(plan, self._timer.take())
        self.rows.append(row)
        for sink in self._sinks:
            sink.guard(sink.write, row)
        if plan is not None and row.step_time_s is not None and row.predicted_s:
            times = StepTimes(step_s=row.step_time_s, predicted_s=row.predicted_s, data_s=row.data_s, idle_s=row.idle_s)
            lane = slow_lane(times)
            if lane is not None and (row.predicted_s, lane) not in self._warned:
                self._warned.add((row.predicted_s, lane))
                logger.warning("step %d: %s", row.step, warning_text(times, lane))

    def _row(self, plan: Plan | None, seen: SeenSteps) -> MonitorRow:
        predicted = None if plan is None else plan.predicted
        examples = None if plan is None else _batch_size(plan)
        per_s = 1 / seen.step_s if seen.step_s else None
        return MonitorRow(
            step=seen.last.call.step,
            metrics=seen.last.metrics,
            step_time_s=seen.step_s,
            predicted_s=None if predicted is None else predicted.step_time_s,
            examples_per_s=None if per_s is None or examples is None else examples * per_s,
            tokens_per_s=None if per_s is None or self._tokens_per_step is None else self._tokens_per_step * per_s,
            mfu=None if per_s is None or predicted is None else predicted.mfu * predicted.step_time_s * per_s,
            memory_bytes=_peak_bytes(),
            data_s=seen.data_s,
            idle_s=seen.idle_s,
            goodput=self.goodput,
        )

    @property
    def goodput(self) -> Goodput:
        """The goodput of the run until now, over its restarts where it has a log."""
        with self._lock:
            spent_s = dict(self._spent_s)
        run = RunRecord(
            began_s=self._began_s,
            last_s=now_s(),
            first_step=self._first_step,
            steps=self._timer.num_steps,
            step_time_s=self._timer.productive_s,
            spent_s=spent_s | self._timer.waited_s,
        )
        if self._runs is None:
            return goodput([run])
        self._runs_guard(self._write_run, run)
        return goodput([*self._runs.earlier, run])

    def _write_run(self, run: RunRecord) -> None:
        assert self._runs is not None, "it has a log"
        if self._runs.write(run) and not self._warned_of_another:
            self._warned_of_another = True
            text = (
                "%s: another Monitor writes there too, and the goodput of the next start counts both; give each its own"
            )
            logger.warning(text, self._runs_guard.what)


@dataclasses.dataclass(slots=True)
class _Loop:
    """What the training loop did since its last step, and when that was called."""

    progress: Progress | None
    called_s: float | None = None
    data_s: float = 0.0
    other_s: float = 0.0


def _opened(log: str | os.PathLike[str]) -> tuple[RunsFile, TensorBoard]:
    """Raises: InvalidArgumentError where the folder cannot be written, MissingPackageError."""
    try:
        folder = Path(log)
        return RunsFile(folder), TensorBoard(folder)
    except (OSError, TypeError) as error:
        raise InvalidArgumentError(
            where=f"autopar.Monitor(log={log!r})",
            expected="a folder that can be made and written",
            got=f"{type(error).__name__}: {error}",
            hint="name another folder, or leave it out for rows on the terminal alone",
        ) from error


def _batch_size(plan: Plan) -> int | None:
    """The examples of a batch."""
    sizes = {value.shape[0] for value in plan.record.arguments if value.kind == "batch" and value.shape}
    return sizes.pop() if len(sizes) == 1 else None


def _peak_bytes() -> int | None:
    """The most memory that a device of this process has used, where its runtime counts it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks, default=None)
