"""`Checkpointer`, the checkpoints of a training run in one folder."""

from __future__ import annotations

import collections
import concurrent.futures.thread  # noqa: F401 (its own end of the program comes after ours: later ones come first)
import contextlib
import datetime
import functools
import json
import logging
import operator
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol

import jax
import msgspec

from autopar.common.jax_distributed import shared_store
from autopar.common.launched import RESTART
from autopar.errors import (
    CheckpointFolderInUseError,
    CheckpointFormatError,
    CheckpointMismatchError,
    InvalidArgumentError,
    NonFiniteError,
    ProcessMismatchError,
    expect_positive,
    expect_step,
)
from autopar.execute import nnx_objects
from autopar.execute.step_leaves import with_process_lost_errors
from autopar.plan.plan import Plan, encode
from autopar.runtime.agreement import said_by_all
from autopar.train.checkpoint.folders import (
    folder_of,
    is_in_bucket,
    names_in,
    owner_file,
    put_owner,
    remove,
    rename_owner,
    touch,
    touched_s,
)
from autopar.train.checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    check_name,
    complete_steps,
    encoded,
    find,
    incomplete,
    named_leaves,
    read,
)
from autopar.train.checkpoint.preemption import ENDS_WITHOUT_THREADS, Preempted, PreemptionNotice, SpareThreads
from autopar.train.checkpoint.stored_arrays import record_of, stored_array
from autopar.train.checkpoint.targets import PlannedStep, array_files, like_created, restored, structure_of_plan

# One run writes to a folder: `.writer-N` in it says which, and shows signs of life.
#
# (1) `.writer-N` comes into being whole: by renaming a folder that has its file already, which fails where there is one
# with something in it; as an object, which a bucket makes only where there is none. Of two runs one gets it, also on
# network file systems, and without locks of files. (2) The
# owner is the highest N. A live one is never moved: who finds the owner gone makes N + 1, and then removes what is
# below. An owner that was taken for gone, and goes on, finds the higher one before its next save. (3) On the same
# machine the owner is gone where its process is, known by number and start. On another machine it is gone where its
# file was not touched for `LEASE_S` by the clock of the file system, and not while it was watched.

PREFIX = ".writer-"
_UNFINISHED = f"{PREFIX}new-"
BEAT_S = 5.0
LEASE_S = 30.0  # a process that holds Python's lock for 20 s in one call is taken for dead elsewhere too
WATCHED_S = 2 * BEAT_S
_LOOK_S = 1.0  # a bucket takes about one change of an object in a second
SEEN_S = 60.0  # so long a client of NFS may take a new file for absent (acdirmax)
LEFT_S = 3600.0  # to take a folder lasts seconds: whoever began longer ago was killed while at it


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process that writes. `begun`: when it began, as the system counts; `launcher`: (number, begun) of its parent,
    where that is autopar's launcher, and `restart` counts its starts.
    """

    run: str
    host: str = "an unknown host"
    machine: str = ""
    pid: int = 0
    begun: str = ""
    launcher: tuple[int, str] | None = None
    restart: int = 0
    since: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", since {self.since}" if self.since else "")


class FolderOwner:
    """The right of this process to write to a folder, which it takes and gives back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: tuple[int, Owner] | None = None
        self._stop = threading.Event()

    def take(self) -> None:
        """Returns when the folder is this process's. Raises: CheckpointFolderInUseError."""
        if self._own is not None:
            self._check_is_own(self._own[0])
            return
        own = this_process()
        probe = f"{_UNFINISHED}{own.run}"
        put_owner(self._folder, probe, msgspec.json.encode(own))
        try:
            while not self._claimed(own, probe):
                pass
        finally:
            remove(self._folder / probe)
        self._stop = threading.Event()
        beat = threading.Thread(target=self._beat, args=(self._stop,), name="autopar folder owner", daemon=True)
        beat.start()

    def give_back(self) -> None:
        """The folder is free, where it was this process's."""
        if self._own is None:
            return
        self._stop.set()
        (number, _), self._own = self._own, None
        for n in [*(n for n in self._numbers() if n < number), number]:  # or a lower one would be the owner
            remove(self._folder / f"{PREFIX}{n}")

    def _claimed(self, own: Owner, probe: str) -> bool:
        """Whether the folder is this process's now; else somebody was faster, and is looked at next."""
        number = max(self._numbers(), default=0)
        there = self._read(number)
        if there is not None and not self._is_gone(number, there, own, probe):
            raise CheckpointFolderInUseError(
                where=f"save to {self._folder}", expected="a folder that no other run writes to",
                got=f"one that {there} writes to",
                hint="take another folder for another run, or end the other one: a folder is free when its run has "
                "ended or closed its Checkpointer; what is there can be read all the while",
            )  # fmt: skip
        if max(self._numbers(), default=0) != number:
            return False  # while the owner was watched others came, and may have gone
        claimed = number + 1
        if not rename_owner(self._folder, probe, f"{PREFIX}{claimed}"):
            return False
        if max(self._numbers(), default=0) != claimed:  # the folder was listed while others came and went
            remove(self._folder / f"{PREFIX}{claimed}")
            put_owner(self._folder, probe, msgspec.json.encode(own))
            return False
        self._own = claimed, own
        gone = [f"{PREFIX}{n}" for n in self._numbers() if n < claimed]
        gone += self._unfinished(claimed)
        for name in gone:
            remove(self._folder / name)
        return True

    def _unfinished(self, claimed: int) -> list[str]:
        """What was left by who was killed before it had the folder; not that of who is at it now."""
        found = [name for name in names_in(self._folder) if name.startswith(_UNFINISHED)]
        now_s = self._touched_s(f"{PREFIX}{claimed}") or 0.0
        return [name for name in found if (self._touched_s(name) or now_s) < now_s - LEFT_S]

    @property
    def taken(self) -> tuple[int, str] | None:
        """(number, run) by which this process has the folder."""
        return None if self._own is None else (self._own[0], self._own[1].run)

    def is_own(self) -> bool:
        """Whether the folder is this process's: it was taken, and nobody has taken it over."""
        return self.taken is not None and self._has(*self.taken) and self.taken[0] == max(self._numbers(), default=0)

    def sees(self, number: int, run: str) -> bool:
        """Whether the folder, as this process sees it, is that of another one: waits for network file systems."""
        until_s = time.monotonic() + SEEN_S
        while not (is_seen := self._has(number, run)) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return is_seen

    def _has(self, number: int, run: str) -> bool:
        there = self._read(number)
        return there is not None and there.run == run

    def _check_is_own(self, number: int) -> None:
        """Raises: CheckpointFolderInUseError where another run took the folder, since this one seemed to be gone."""
        if self.is_own():
            return
        there = self._read(max(self._numbers(), default=0))
        raise CheckpointFolderInUseError(
            where=f"save to {self._folder}", expected="the folder of this run",
            got="one without a writer" if there is None else f"one that {there} has taken over",
            hint="this process stood still for so long that it was taken for gone, or somebody removed "
            f"{PREFIX}{number} in the folder: start again from the last checkpoint",
        )  # fmt: skip

    def _is_gone(self, number: int, there: Owner, own: Owner, probe: str) -> bool:
        if there.machine == own.machine:
            is_restart = there.launcher == own.launcher is not None and there.restart < own.restart
            return is_restart or begun(there.pid) != there.begun
        name = f"{PREFIX}{number}"
        first, until_s = self._touched_s(name), time.monotonic() + WATCHED_S
        while (touched_s := self._touched_s(name)) is not None and touched_s == first:
            touch(owner_file(self._folder, probe))
            now_s = self._touched_s(probe)  # by the same clock, that of the file system or the bucket
            if now_s is None or (now_s - touched_s > LEASE_S and time.monotonic() > until_s):
                return True
            time.sleep(_LOOK_S)
        return touched_s is None

    def _touched_s(self, name: str) -> float | None:
        return touched_s(owner_file(self._folder, name))

    def _numbers(self) -> list[int]:
        names = [name.removeprefix(PREFIX) for name in names_in(self._folder) if name.startswith(PREFIX)]
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def _read(self, number: int) -> Owner | None:
        """Who owns the folder by this; None where there is nobody. Of a damaged file nothing is known but its time."""
        try:
            return msgspec.json.decode(owner_file(self._folder, f"{PREFIX}{number}").read_bytes(), type=Owner)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except msgspec.DecodeError:
            return Owner(run="")

    def _beat(self, stop: threading.Event) -> None:
        assert self._own is not None, "taken before"
        file = owner_file(self._folder, f"{PREFIX}{self._own[0]}")
        while not stop.wait(BEAT_S):
            with contextlib.suppress(Exception):  # networks have any: the next save finds what has become of it
                touch(file)


def this_process() -> Owner:
    """This process, as an owner."""
    is_launched = RESTART in os.environ
    parent = os.getppid()
    return Owner(
        run=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        begun=begun(os.getpid()),
        launcher=(parent, begun(parent)) if is_launched else None,
        restart=int(os.environ.get(RESTART, "0")),
        since=datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
    )


def begun(pid: int) -> str:
    """When a process of this machine began, or that it is there, where nothing else is known; empty where it is not."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    else:
        return "" if after_name[0] in "ZX" else after_name[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "there"


def _machine() -> str:
    """Where numbers of processes mean the same: one start of one machine, and one container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


# The checked arguments of `Checkpointer`: the folder, the number of the step, the step, the plan, the data.


class HasPosition(Protocol):
    """Batches with a position that JSON can hold: those of `autopar.data.shard`, or any other with these methods."""

    def position(self) -> Any: ...

    def restore(self, position: Any) -> None: ...


def checked_folder(folder: str | Path) -> Path:
    """The absolute path of a folder, which may not exist yet. Raises: InvalidArgumentError, MissingPackageError."""
    path = folder_of(folder)
    if is_in_bucket(path):
        return path
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise InvalidArgumentError(
            where=f"Checkpointer({str(folder)!r})",
            expected="a folder, or a path where one can be made",
            got=f"a file, {there}",
            hint="give a folder of its own to each run: Checkpointer('runs/a')",
        )
    return path


def check_restoring(where: str, *, step: Any, data: Any, create: Any = None) -> None:
    """Raises: InvalidArgumentError for a step that is none, data without a position, a state in place of `create`."""
    if step is not None:
        hint = "pass what parallelize returned, or leave step out"
        expect_step(f"{where}(step=...)", step, ("latest_plan", "state_shardings"), hint)
    _check_has(where, data, "restore")
    if create is not None and not callable(create):
        raise InvalidArgumentError(
            where=f"{where}(create, ...)",
            expected="the function that makes the state",
            got=type(create).__name__,
            hint=f"pass the function and its arguments, and do not call it: {where}(create, key)",
        )


def _check_has(where: str, data: Any, method: str) -> None:
    if data is not None and not callable(getattr(data, method, None)):
        raise InvalidArgumentError(
            where=f"{where}(data=...)",
            expected="an object with position() and restore(position)",
            got=f"{type(data).__name__}, without {method}",
            hint="pass what autopar.data.shard returned, or an object with both methods; or leave data out",
        )


def checked_step_number(step_number: Any) -> int:
    """A number of steps. Raises: InvalidArgumentError."""
    if not hasattr(step_number, "__index__") or operator.index(step_number) < 0:
        raise InvalidArgumentError(
            where="save(step_number, ...)",
            expected="the number of steps done, a whole number from 0",
            got=repr(step_number)[:40],
            hint="such as save(i + 1, state) after step i",
        )
    return operator.index(step_number)


def position_of(data: HasPosition) -> Any:
    """Raises: InvalidArgumentError for a position that JSON cannot hold, and for data without one."""
    _check_has("save", data, "position")
    position = data.position()
    try:
        return json.loads(json.dumps(position, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            where="save(data=...)",
            expected="a position of numbers, texts, lists and dictionaries, as JSON has them",
            got=f"{position!r:.60} ({error})",
            hint="convert numbers of numpy and jax: int(x)",
        ) from error


def plan_of(plan: Plan | PlannedStep | None) -> Plan | None:
    """Raises: InvalidArgumentError for what is neither a plan nor a step."""
    if plan is None or isinstance(plan, Plan):
        return plan
    expected = "a plan, or a step made by autopar.parallelize"
    expect_step("save(plan=...)", plan, ("latest_plan",), "such as plan=train_step", expected)
    return plan.latest_plan


# What all processes do together with a folder of checkpoints: each says what it does, and all compare.


def together(call: str, folder: Path, answer: Any) -> list[Any]:
    """What each process knows, as JSON has it, in all processes; every process makes this call on this folder.

    Raises: ProcessMismatchError, in all processes alike where calls or folders differ; ProcessLostError.
    """
    if shared_store() is None or jax.process_count() == 1:
        return [answer]
    said = with_process_lost_errors(
        lambda: said_by_all(
            f"Checkpointer, {call}", "autopar/train/checkpoint", [call, str(folder), answer],
            together=f"all processes to call {call}",
            hint="call save, restore and restore_or in every process, after the same steps: each has a part of it",
        )
    )  # fmt: skip
    compare([(call, folder) for call, folder, _ in said], jax.process_index())
    return [answer for _, _, answer in said]


def compare(said: Sequence[tuple[str, str]], process: int) -> None:
    """Raises: ProcessMismatchError where (call, folder) differ between processes."""
    for i, expected, what, hint in (
        (0, "all processes to make the same call", "calls", "what is called must not depend on jax.process_index()"),
        (1, "one folder that all processes share", "folders", "each process writes its part of a checkpoint: give one "
         "folder that does not depend on the process, such as an absolute path of a shared file system"),
    ):  # fmt: skip
        other = next((p for p, own in enumerate(said) if own[i] != said[0][i]), None)
        if other is not None:
            raise ProcessMismatchError(
                where=f"Checkpointer, process {process} of {len(said)}", expected=expected,
                got=f"{what} differ: {said[0][i]} in process 0, {said[other][i]} in process {other}", hint=hint,
            )  # fmt: skip


def check_is_shared(folder: Path, sees: Sequence[bool]) -> None:
    """Raises: ProcessMismatchError where a process does not see what process 0 has in the folder."""
    if not all(sees):
        blind = ", ".join(str(process) for process, sees_it in enumerate(sees) if not sees_it)
        raise ProcessMismatchError(
            where=f"save to {folder}", expected="one folder that all processes share",
            got=f"one of its own, of the same name, in process {blind}",
            hint="each process writes its part of a checkpoint: give a folder of a shared file system, or of a bucket; "
            "disks and memory of one machine hold checkpoints of processes on that machine",
        )  # fmt: skip


# A program that ends while a checkpoint is being written waits for it.


logger = logging.getLogger("autopar")

HINT = "call checkpoints.close() before the program ends, or use a with block"
# Orbax writes in threads that it begins one after another. At the end of a program it began 8, for a state of 3 arrays
# as for one of 400 (orbax 0.12.8, Python 3.12).
NUM_SPARE_THREADS = 64

_waits: dict[int, Callable[[], None]] = {}
_spare: SpareThreads | None = None


def wait_at_exit(owner: Any, wait: Callable[[], None]) -> None:
    """Calls `wait` before the threads of Python's pools end, which `atexit` comes after, unless `no_wait` is called."""
    global _spare
    _register_once()
    _waits[id(owner)] = wait
    if ENDS_WITHOUT_THREADS and _spare is None:
        _spare = SpareThreads(NUM_SPARE_THREADS)


def no_wait(owner: Any) -> None:
    """Takes `wait_at_exit` back."""
    global _spare
    _waits.pop(id(owner), None)
    if not _waits and _spare is not None:
        _spare.release()
        _spare = None


@functools.cache
def _register_once() -> None:
    register: Any = threading._register_atexit  # type: ignore[attr-defined]  # private; before threads are joined
    register(_wait_for_all)


def _wait_for_all() -> None:
    with contextlib.nullcontext() if _spare is None else _spare.in_use():
        for wait in list(_waits.values()):
            try:
                wait()
            except Exception:  # whatever it was, the other checkpoints are waited for; orbax raises anything
                logger.exception("the last checkpoint could not be written: %s", HINT)
    if _spare is not None:
        _spare.release()


# Where checkpoints that are no longer kept go until they are removed: a removal that is cut off leaves nothing half
# there under the name of a checkpoint.
_DELETED = "deleted"
# Who in this process writes to a folder: another one waits for it and goes on from there.
_writing: dict[Path, Checkpointer] = {}


class Checkpointer:
    """Saves and restores the state of a training run, its plan and the position in its data.

    `folder` is one that all processes see. Every `every`-th step is saved, and the latest `keep` checkpoints are kept
    (None: all). With `on_preemption`, SIGTERM makes the next `save` write the state and end the program.

    Saving runs in the background: `save` returns when the state is copied to the memory of the host. A checkpoint
    counts once it is complete. `close`, or a `with` block, waits for the last one, and gives the signal back. So does a
    program that ends, but for the signal.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, keep: int | None = 3, on_preemption: bool = True) -> None:
        for name, number in (("every", every), ("keep", keep)):
            expected = "a whole number from 1" + (", or None to keep all" if name == "keep" else "")
            if number is not None:
                expect_positive(
                    f"Checkpointer({name}=...)", number, expected, f"such as Checkpointer(folder, {name}=3)"
                )
        self.folder = checked_folder(folder)
        self.every, self.keep = every, keep
        self._writer: Any = None
        self._owner = FolderOwner(self.folder)
        self._here: int | None = None  # the step that this run saved or restored last
        self._notice = PreemptionNotice() if on_preemption else None
        self._last_plan: tuple[Plan | None, str] | None = None
        self._removal: threading.Thread | None = None
        self._times_back: collections.Counter[int] = collections.Counter()

    def __repr__(self) -> str:
        return f"<Checkpointer of {self.folder}, steps {self.steps()}>"

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What is there

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints, ascending."""
        return complete_steps(self.folder)

    def latest(self) -> int | None:
        """The number of the latest complete checkpoint; None where there is none."""
        return next(iter(reversed(self.steps())), None)

    def plan(self, step_number: int | None = None) -> Plan | None:
        """The plan that a checkpoint was saved under, the latest by default. Raises: as `restore`."""
        number = find(self.folder, step_number)
        return read(self.folder, number).plan_of(str(self.folder / str(number)))

    # Saving

    def save(
        self,
        step_number: int,
        state: Any,
        *,
        plan: Plan | PlannedStep | None = None,
        data: HasPosition | None = None,
        force: bool = False,
    ) -> bool:
        """Saves the state after `step_number` steps where it is time, or with `force`; returns whether it does.

        Every process calls it after every step. `plan` is a plan, or the step, whose latest plan is taken. What `data`
        says of its position is saved with the state.

        Raises: Preempted when the program was told to end, once the state is on disk; CheckpointFolderInUseError where
        another run writes to the folder; InvalidArgumentError where it has a later step; ProcessMismatchError where
        another process does not save this step, or to another folder; UnsupportedError for leaves that are neither
        arrays nor numbers; DonatedStateError; the error of the checkpoint before, if it could not be written.
        """
        step_number = checked_step_number(step_number)
        preempted = self.preempted(step_number)
        if not (force or preempted or step_number % self.every == 0):
            return False
        is_new = step_number != self._here
        if is_new:
            self._write(step_number, state, plan, data)
        if preempted:
            self.wait()
            raise Preempted(step_number)
        return is_new

    def preempted(self, step_number: int) -> bool:
        """Whether the program was told to end, by SIGTERM, so that `save` will write the state of this step and end it.

        In a program of several processes all get the same answer for a step.
        """
        return self._notice is not None and self._notice.reached(step_number)

    def wait(self) -> None:
        """Returns when what was saved is complete. Raises: the error of what could not be written."""
        if self._writer is not None:
            self._await_writer()
            self._remove_deleted()
            if self._removal is not None:
                self._removal.join()

    def _await_writer(self) -> None:
        try:
            with_process_lost_errors(self._writer.wait_until_finished)
        except BaseException:
            self._here = None  # what could not be written is not there: the same step may be saved again
            raise

    def close(self) -> None:
        """Waits, and gives back the signal and the threads; `save` begins anew."""
        try:
            self.wait()
        finally:
            self._stop_writing()
            if self._notice is not None:
                self._notice.close()

    def _stop_writing(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        if not jax.process_index() and not is_in_bucket(self.folder):
            remove(self.folder / _DELETED)
        self._owner.give_back()
        no_wait(self)
        _writing.pop(self.folder, None)

    def _at_exit(self) -> None:
        try:
            self.wait()
        finally:
            self._owner.give_back()

    def _write(self, step_number: int, state: Any, plan: Plan | PlannedStep | None, data: HasPosition | None) -> None:
        leaves, _ = named_leaves(state)
        for leaf in leaves:
            check_name(leaf, f"save({step_number}, ...) in {self.folder}")
        records = [record_of(leaf) for leaf in leaves]
        file = Manifest(
            format_version=FORMAT_VERSION,
            step=step_number,
            leaves=tuple(records),
            plan=self._plan_text(plan_of(plan)),
            data=None if data is None else position_of(data),
        )
        files = array_files("Checkpointer.save")
        self._open(files, f"save of step {step_number}")
        self._check_is_later(step_number)
        self._remove_deleted(but=step_number)
        arrays = {
            record.name: stored_array(leaf.value, record)
            for leaf, record in zip(leaves, records, strict=True)
            if record.is_stored
        }
        self._here = None
        with_process_lost_errors(lambda: files.save(self._writer, step_number, arrays, encoded(file)))
        self._here = step_number

    def _plan_text(self, plan: Plan | None) -> str:
        """The file of a plan, which seldom is another than that of the last checkpoint."""
        if self._last_plan is None or self._last_plan[0] is not plan:
            self._last_plan = plan, "" if plan is None else encode(plan.record).decode()
        return self._last_plan[1]

    def _open(self, files: ModuleType, call: str) -> None:
        """Begins to write to the folder: what unfinished saves and removals left in it goes.

        Raises, in all processes: CheckpointFolderInUseError, ProcessMismatchError.
        """
        if self._writer is not None:
            self._await_writer()  # or, where a process is lost, the end of this one would wait for its part of that
        other = _writing.get(self.folder)
        if other is not None and other is not self:
            other.wait()
            other._stop_writing()
        refused: CheckpointFolderInUseError | None = None
        if jax.process_index() == 0:
            try:
                self._owner.take()
            except CheckpointFolderInUseError as error:
                refused = error
        fields = {} if refused is None else {k: vars(refused)[k] for k in ("where", "expected", "got", "hint")}
        fields, taken = together(call, self.folder, [fields, self._owner.taken])[0]
        if fields:
            raise refused or CheckpointFolderInUseError(**fields)
        if self._writer is None:
            sees = together(call, self.folder, jax.process_index() == 0 or self._owner.sees(*taken))
            if not all(sees):
                self._owner.give_back()
            check_is_shared(self.folder, sees)
            if not is_in_bucket(self.folder) and (self.folder / _DELETED).is_symlink():  # what lies there is removed
                raise CheckpointFormatError(
                    where=str(self.folder / _DELETED),
                    expected="a folder",
                    got="a symbolic link",
                    hint="remove the link: checkpoints that are no longer kept go there, and are removed",
                )
            self._writer = with_process_lost_errors(lambda: files.manager(self.folder, self.keep, _DELETED))
            _writing[self.folder] = self
            wait_at_exit(self, self._at_exit)

    def _check_is_later(self, step_number: int) -> None:
        latest = self._writer.latest_step()
        if latest is not None and latest >= step_number:
            raise InvalidArgumentError(
                where=f"save({step_number}, ...) in {self.folder}",
                expected=f"a step after {latest}, which the folder has",
                got=f"step {step_number}",
                hint="go on from it (Checkpointer.restore_or), take another folder for another run, or, where this run "
                f"went back on purpose, drop what came later: Checkpointer.discard_after({step_number - 1})",
            )

    def discard_after(self, step_number: int) -> list[int]:
        """Removes the checkpoints of later steps, of a run that went back to `step_number`; returns their numbers."""
        self.wait()
        self._open(array_files("Checkpointer.discard_after"), f"discard_after({step_number})")
        later = [step for step in self._writer.all_steps() if step > step_number]
        for step in later:
            self._writer.delete(step)
        self._here = None
        self.wait()
        return later

    def _remove_deleted(self, but: int | None = None) -> None:
        """Removes what is no longer kept, in the background, in one process; not a step that is saved next."""
        if jax.process_index():
            return
        if self._removal is not None and is_in_bucket(self.folder):
            self._removal.join()  # from under a name that the next checkpoint may have
        if self._removal is not None and self._removal.is_alive():
            return
        gone = [folder for folder in self._deleted() if folder.name != str(but)]
        if not gone:
            return
        removal = threading.Thread(target=_remove, args=(gone,))
        with contextlib.suppress(RuntimeError):  # a program that ends may begin none: the next one removes
            removal.start()
            self._removal = removal

    def _deleted(self) -> list[Path]:
        """What is no longer kept: in a bucket also what was never complete, which has the name of a step there."""
        if not is_in_bucket(self.folder):
            at = self.folder / _DELETED
            return list(at.iterdir()) if at.is_dir() else []  # the folder stays while more may come into it
        if not self._owner.is_own():  # a run that has taken the folder over may be saving
            return []
        return incomplete(self.folder)

    # Restoring

    def restore(
        self,
        step_number: int | None = None,
        *,
        step: PlannedStep | None = None,
        plan: Plan | None = None,
        shardings: Any = None,
        like: Any = None,
        data: HasPosition | None = None,
        partial: bool = False,
    ) -> Any:
        """The state of a checkpoint, the latest by default, bit for bit, under another plan or under none.

        `like` has the structure: a state, or its shapes (`jax.eval_shape(create)`); a `step` that has a plan knows it.
        Without either the result is dictionaries in dictionaries. The leaves are laid out by `shardings` (one, or one
        for each leaf), by the `step` or the `plan`, else as the arrays of `like` are, else on the first device. Each
        process reads only the parts of its devices. `data` goes to where it was. With `partial`, leaves of the
        checkpoint that `like` does not have are left out.

        Every process calls it. Raises: CheckpointNotFoundError; CheckpointMismatchError where the state has other
        leaves, shapes or types; CheckpointFormatError and PlanFormatError for a damaged or hostile checkpoint.
        """
        check_restoring("restore", step=step, data=data)
        number = find(self.folder, step_number, self._shared_steps("restore"))
        file = read(self.folder, number)
        where = f"restore({number}) from {self.folder}"
        planned = step.latest_plan if step is not None else plan
        if like is None and planned is not None and (planned.trees is not None or step is not None):
            like = structure_of_plan(planned, where)
        elif like is None and (step is not None or plan is not None or shardings is not None):
            raise InvalidArgumentError(
                where=where,
                expected="the structure of the state, in like, or by a step that has a plan",
                got="neither",
                hint="pass like=jax.eval_shape(create), or plan first: train_step.plan(shapes, batch)",
            )
        state = restored(self.folder, number, file, like, where, (step, plan, shardings), partial=partial)
        if data is not None:
            if file.data is None:
                raise CheckpointMismatchError(
                    where=where,
                    expected="a position of the data",
                    got="none: the checkpoint was saved without",
                    hint="leave data out, or give it to save: save(..., data=data)",
                )
            data.restore(file.data)
        self._here = number
        return state

    def restore_or(
        self,
        create: Callable[..., Any],
        *args: Any,
        step: Any = None,
        data: HasPosition | None = None,
    ) -> tuple[Any, int]:
        """(state, number of steps done): the latest checkpoint, or else `create(*args)` and 0.

        With a `step`, the state is made (`step.init`) and restored in its layouts. `data` goes to where it was.
        Raises: as `restore`.
        """
        check_restoring("restore_or", step=step, data=data, create=create)
        steps = self._shared_steps("restore_or")
        if not steps:
            return (create(*args) if step is None else step.init(create, *args)), 0
        like = like_created(create, args, in_jit=step is not None)
        return nnx_objects.merged(self.restore(steps[-1], step=step, like=like, data=data)), steps[-1]

    def roll_back(
        self,
        *,
        step: PlannedStep | None = None,
        like: Any = None,
        data: HasPosition | None = None,
        most: int = 3,
    ) -> tuple[Any, int]:
        """(state, number of steps done) of the latest checkpoint again, after a step that was not finite.

        Without `data`, the batches that were read since are skipped (as in PaLM, arXiv:2204.02311, section 5.1, where
        the same batches did no harm later); with it, they are read again. `step` and `like` as in `restore`. Every
        process calls it. Raises: NonFiniteError where the run has gone back to this checkpoint `most` times; as
        `restore`.
        """
        check_restoring("roll_back", step=step, data=data)
        number = find(self.folder, None, self._shared_steps("roll_back"))
        if self._times_back[number] == most:
            raise NonFiniteError(
                where=f"roll_back to step {number} in {self.folder}",
                expected=f"at most {most} steps after it that are not finite",
                got="one more",
                hint="clip gradients or lower the learning rate; autopar.mixed_precision.stop_if_not_finite names the "
                "first operation; discard_after, and then roll_back, go further back",
            )
        self._times_back[number] += 1
        return self.restore(number, step=step, like=like, data=data), number

    def _shared_steps(self, call: str) -> list[int]:
        """The steps that are there when all is written, the same in all processes: those that process 0 sees."""
        self.wait()
        steps: list[int] = together(call, self.folder, self.steps() if jax.process_index() == 0 else [])[0]
        return steps


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        remove(folder)
