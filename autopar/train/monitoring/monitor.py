"""`Monitor`: follows a training run and compares it with the plan's prediction."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import operator
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from rich.console import Console

from autopar.common import jax_distributed
from autopar.common.progress import Progress
from autopar.common.text import text_of_bytes, text_of_count, text_of_s
from autopar.errors import InvalidArgumentError, MissingPackageError, expect_function, expect_positive, expect_step
from autopar.plan.plan import Plan
from autopar.train.monitoring.goodput import Goodput, RunRecord, RunsFile, goodput, now_s

# One row of a monitor: what it saw of the steps since the row before.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MonitorRow:
    """What was seen up to a step. A value that is not known is None.

    Attributes:
        step_time_s: The median of the steps since the row before that followed another one directly.
        predicted_s: The step time of the plan.
        mfu: The model's operations over what the devices do at their peak rate in the step's time.
        memory_bytes: The highest peak of this process's devices, where their runtime counts it.
        data_s: The mean wait of the loop for a batch.
        idle_s: The median of the time that devices have no work after the step before; `data_s` is a part of it.
    """

    step: int
    metrics: Mapping[str, float]
    step_time_s: float | None
    predicted_s: float | None
    examples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    memory_bytes: int | None
    data_s: float
    idle_s: float | None
    goodput: Goodput

    def scalars(self) -> dict[str, float]:
        """The numbers under names for loggers: metrics as they are called, the rest below `autopar/`."""
        own = {
            "step_time_s": self.step_time_s,
            "predicted_step_time_s": self.predicted_s,
            "examples_per_s": self.examples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "data_wait_s": self.data_s,
            "idle_s": self.idle_s,
            "goodput": self.goodput.fraction,
        }
        known = {f"autopar/{name}": float(value) for name, value in own.items() if value is not None}
        return dict(self.metrics) | known


# When the steps of a run end on the devices: a thread waits for their metrics, so that the training loop does not.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """A step as the loop called it. Times are those of `time.perf_counter`.

    Attributes:
        called_s: When its program was given to the devices; None where that is not known.
        data_s: The time that the loop waited for its batch.
        other_s: The time that went to something else since the step before: a checkpoint, an evaluation, a new plan.
    """

    step: int
    called_s: float | None
    data_s: float
    other_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A step that has ended."""

    call: StepCall
    ended_s: float
    metrics: Mapping[str, float]


class Completions:
    """Hands on the end of each step, in order, from a thread of its own."""

    def __init__(self, ended: Callable[[Completion], None]) -> None:
        self._ended = ended
        self._waiting: queue.SimpleQueue[tuple[StepCall, Any] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="autopar monitor", daemon=True)
        self._thread.start()

    def add(self, call: StepCall, metrics: Any) -> None:
        """A step that was called, and what it returned for the log. Raises: what an earlier `ended` raised."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        self._waiting.put((call, metrics))

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the steps that were called, at most `timeout_s`. Raises: what `ended` raised."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(timeout_s)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            call, metrics = item
            for leaf in jax.tree.leaves(metrics):
                _wait(leaf)
            ended_s = time.perf_counter()
            try:
                self._ended(Completion(call=call, ended_s=ended_s, metrics=numbers_of(metrics)))
            except Exception as error:  # raised where the loop waits
                self._failed = error


def _wait(leaf: Any) -> None:
    """Waits for an array. One that is a part of the state may be donated to the next step meanwhile; and of a step that
    failed the loop sees the error.
    """
    if isinstance(leaf, jax.Array):
        with contextlib.suppress(RuntimeError):
            leaf.block_until_ready()


def numbers_of(metrics: Any) -> dict[str, float]:
    """The scalars of a tree by their paths (`loss`, `norms/gradients`); other leaves are left out."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        value = _scalar(leaf)
        if value is not None:
            found[jax.tree_util.keystr(path, simple=True, separator="/") or "loss"] = value
    return found


def _scalar(leaf: Any) -> float | None:
    """A number, or None for what is none, is gone, or lies on the devices of other processes only."""
    if isinstance(leaf, jax.Array):
        if leaf.shape or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            return None
        if not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated or not leaf.addressable_shards:
                return None
            leaf = leaf.addressable_data(0)
    elif not isinstance(leaf, (bool, int, float, np.generic)):
        return None
    try:
        return None if np.iscomplexobj(leaf) else float(leaf)
    except RuntimeError:  # it was donated to a later step, or its own has failed
        return None


# A monitor in a process that does not report.

_MONITORS = "autopar/monitors/"
_REPORTS = "0"


def say_there_is_one() -> None:
    """Process 0 says to the others that it has a monitor."""
    store = jax_distributed.shared_store()
    if store is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store.set(_MONITORS + _REPORTS, "")


class OtherProcess:
    """Says once that process 0 reports, where process 0 has no monitor; else nobody would."""

    def __init__(self) -> None:
        self._has_looked = False
        self._first: Any = None  # an array

    def called(self, metrics: Any) -> None:
        """Looks as soon as the first step has ended: before, process 0 may be on its way to its monitor."""
        if self._has_looked:
            return
        if self._first is None:
            arrays = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)]
            self._first = min(arrays, key=lambda array: array.size, default=None)
        elif self._first.is_deleted() or self._first.is_ready():
            self.look()

    def look(self) -> None:
        if self._has_looked:
            return
        self._has_looked, self._first = True, None
        store = jax_distributed.shared_store()
        if store is None:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone: others say so
            if _REPORTS not in store.below(_MONITORS):
                logger.warning(
                    "Monitor in process %d: process 0 alone writes rows, its log and its callback, and it has no "
                    "Monitor; make one in every process, or in process 0",
                    jax.process_index(),
                )


# Where the rows of a monitor go: the terminal, TensorBoard, a function of the user's.


class Guard:
    """Lets a log fail without the training run: says its first error, once, and tries again with the next row."""

    def __init__(self, what: str, *, is_users_code: bool = False) -> None:
        self.what, self._is_users_code, self._has_said = what, is_users_code, False

    def __call__(self, write: Callable[..., object], *args: Any) -> None:
        try:
            write(*args)
        except Exception as error:
            if not self._has_said:
                self._has_said = True
                text = "%s has failed: %s: %s; training goes on, each row tries it again, and this is said once"
                logger.warning(text, self.what, type(error).__name__, error, exc_info=self._is_users_code)


class Sink(Protocol):
    @property
    def guard(self) -> Guard: ...

    def write(self, row: MonitorRow) -> None: ...

    def close(self, goodput: Goodput) -> None: ...


class Terminal:
    """A line for each row, on stderr."""

    def __init__(self) -> None:
        self.guard = Guard("Monitor(terminal=True)")
        self._console = Console(stderr=True, highlight=False)

    def write(self, row: MonitorRow) -> None:
        self._console.print(line_of(row), soft_wrap=True)

    def close(self, goodput: Goodput) -> None:
        self._console.print(summary_of(goodput), soft_wrap=True)


class TensorBoard:
    """Event files for TensorBoard in a folder. Raises: MissingPackageError, OSError.

    Written at once, in the thread of the caller: the queue of tensorboardX's `SummaryWriter` fills for ever once its
    own thread has died of an error.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.summary import scalar
        except ImportError as error:
            raise MissingPackageError(
                where="autopar.Monitor(log=...)",
                expected="tensorboardX, which writes files for TensorBoard",
                got=str(error),
                hint="pip install tensorboardX",
            ) from error
        self.guard = Guard(f"Monitor(log={str(folder)!r})")
        self._open = lambda: EventsWriter(str(folder / "events"))
        self._event, self._scalar = Event, scalar
        self._file: Any = self._open()

    def write(self, row: MonitorRow) -> None:
        if self._file is None:  # the last one may end in a part of an event, behind which nothing is read
            self._file = self._open()
        file, self._file = self._file, None
        for name, value in row.scalars().items():
            file.write_event(self._event(wall_time=time.time(), step=row.step, summary=self._scalar(name, value)))
        file.flush()
        self._file = file

    def close(self, goodput: Goodput) -> None:
        if self._file is not None:
            self._file.close()


class Callback:
    """Calls a function with the step and its scalars: `lambda step, values: wandb.log(values, step=step)`."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
        self.guard = Guard("Monitor(callback=...)", is_users_code=True)
        self._function = function

    def write(self, row: MonitorRow) -> None:
        self._function(row.step, row.scalars())

    def close(self, goodput: Goodput) -> None:
        pass


def line_of(row: MonitorRow) -> str:
    """A row as one line of text."""
    parts = [f"step {row.step}"]
    parts += [f"{name} {value:.5g}" for name, value in row.metrics.items()]
    if row.step_time_s is not None:
        predicted = "" if row.predicted_s is None else f" (predicted {text_of_s(row.predicted_s)})"
        parts.append(f"{text_of_s(row.step_time_s)}{predicted}")
    if row.tokens_per_s is not None:
        parts.append(f"{row.tokens_per_s:,.0f} tokens/s")
    elif row.examples_per_s is not None:
        parts.append(f"{row.examples_per_s:,.1f} examples/s")
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    if row.memory_bytes is not None:
        parts.append(f"memory {text_of_bytes(row.memory_bytes)}")
    parts.append(f"goodput {row.goodput.fraction:.1%}")
    return "  ".join(parts)


def summary_of(goodput: Goodput) -> str:
    """`goodput 71.2% of 246 s; lost: planning 31 s, compiling 22 s`, of what is at least a hundredth."""
    causes = [f"{name} {text_of_s(s)}" for name, s in goodput.lost_s.items() if s >= 0.01 * goodput.total_s]
    lost = f"; lost: {', '.join(causes)}" if causes else ""
    return f"goodput {goodput.fraction:.1%} of {text_of_s(goodput.total_s)}{lost}"


# Steps that take longer than predicted: how much, and where the time goes.

# From this ratio of measured to predicted on, a step is called slow: half of the predictions of steps that no constant
# was fitted to are within 10 % (benchmarks/results/ledger.md), and twice that is worth a look.
SLOW = 1.2


def slowness(row: MonitorRow) -> tuple[str, str] | None:
    """The lane in which a slow step loses most ("data", "host" or "devices"), and one sentence on it; None for a step
    as fast as predicted, and where one of the two times is not known.
    """
    step_s, predicted_s = row.step_time_s, row.predicted_s
    if step_s is None or not predicted_s or step_s < SLOW * predicted_s:
        return None
    lane = "devices"
    if row.idle_s is not None and row.idle_s >= (step_s - predicted_s) / 2:
        lane = "data" if row.data_s >= row.idle_s / 2 else "host"
    idle = "" if row.idle_s is None else text_of_s(row.idle_s)
    causes = {
        "data": f"the devices wait {idle} a step for the next batch; prefetch more, or make batches faster",
        "host": f"the devices wait {idle} a step for the loop; read the metrics of an earlier step, and less often, "
        "and take batches from monitor.batches(data), which tells the wait for them apart",
        "devices": "the programs on the devices take longer than predicted; step.profile(state, batch) says which "
        "modules and collectives do, and python -m autopar measure calibrates the predictions",
    }
    ratio = text_of_count(float(f"{step_s / predicted_s:.2g}"))
    step, predicted = text_of_s(step_s), text_of_s(predicted_s)
    return lane, f"a step takes {step}, {ratio} times the predicted {predicted}: {causes[lane]}"


# Step times from the ends of steps: medians, and the time that devices wait between two steps.

# From this share of the time between two steps on, something else that the loop did makes it no step's time. A call
# that does nothing, as that of a checkpointer in most steps, takes less.
INTERRUPTION = 0.01
# The steps whose median is the time of a step of the run.
KEPT_STEPS = 1000
WAITING_FOR_DATA, WAITING_FOR_PYTHON = "waiting for data", "waiting for Python"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeenSteps:
    """What was seen of some steps. `step_s`, from end to end, and `idle_s` are medians, `data_s` is a mean.

    None: no step followed another one without interruption; nobody said when steps were called.
    """

    last: Completion
    step_s: float | None
    data_s: float
    idle_s: float | None


class StepTimer:
    """Collects the ends of steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.waited_s: dict[str, float] = {}
        self._since: list[Completion] = []
        self._intervals_s: list[float] = []
        self._idle_s: list[float] = []
        self._busy_s: collections.deque[float] = collections.deque(maxlen=KEPT_STEPS)
        self._last: Completion | None = None

    @property
    def num_since_row(self) -> int:
        return len(self._since)

    @property
    def productive_s(self) -> float:
        """The median of the time that devices work on a step, over the latest steps; 0 before there is one."""
        return statistics.median(self._busy_s) if self._busy_s else 0.0

    def add(self, ended: Completion) -> None:
        last, self._last = self._last, ended
        self.num_steps += 1
        self._since.append(ended)
        if last is None:
            return
        interval_s = ended.ended_s - last.ended_s
        if ended.call.other_s > INTERRUPTION * interval_s:
            return
        self._intervals_s.append(interval_s)
        idle_s = 0.0
        if ended.call.called_s is not None:
            idle_s = max(0.0, ended.call.called_s - last.ended_s)
            self._idle_s.append(idle_s)
            for_data_s = min(idle_s, ended.call.data_s)
            self._wait(WAITING_FOR_DATA, for_data_s)
            self._wait(WAITING_FOR_PYTHON, idle_s - for_data_s)
        self._busy_s.append(interval_s - idle_s)

    def take(self) -> SeenSteps:
        """The steps since the last call of this."""
        assert self._since, "there is no row without a step"
        seen = SeenSteps(
            last=self._since[-1],
            step_s=statistics.median(self._intervals_s) if self._intervals_s else None,
            data_s=statistics.fmean(c.call.data_s for c in self._since),
            idle_s=statistics.median(self._idle_s) if self._idle_s else None,
        )
        self._since, self._intervals_s, self._idle_s = [], [], []
        return seen

    def _wait(self, cause: str, seconds: float) -> None:
        self.waited_s[cause] = self.waited_s.get(cause, 0.0) + seconds


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
        expect_step("autopar.Monitor(step)", step, ("latest_plan",), "decorate the function first")
        expect_positive("autopar.Monitor(every=...)", every, "a number of steps, at least 1", "leave it out for 10")
        if callback is not None:
            expected = "a function of a step and its numbers by name, or None"
            hint = "for example lambda step, values: wandb.log(values, step=step)"
            expect_function("autopar.Monitor(callback=...)", callback, expected, hint)
        self._step, self._every, self._tokens_per_step = step, every, tokens_per_step
        self._loop = _Loop(progress=step.last_progress)
        self._timer = StepTimer()
        self._began_s, self._first_step = now_s(), 0
        self._warned: set[tuple[float | None, str]] = set()
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
        slow = slowness(row)
        if slow is not None and (row.predicted_s, slow[0]) not in self._warned:
            self._warned.add((row.predicted_s, slow[0]))
            logger.warning("step %d: %s", row.step, slow[1])

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
