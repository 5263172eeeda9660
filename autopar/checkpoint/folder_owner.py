"""One run writes to a folder: a folder `.writer-N` in it says which, and shows signs of life.

(1) `.writer-N` comes into being whole, by renaming a folder that has its file already. Renaming fails where there is
    one with something in it: of two runs one gets it, also on network file systems, and without locks of files.
(2) The owner is the highest N. A live one is never moved: who finds the owner gone makes N + 1, and then removes what
    is below. An owner that was taken for gone, and goes on, finds the higher one before its next save.
(3) On the same machine the owner is gone where its process is, known by number and start. On another machine it is gone
    where its file was not touched for `LEASE_S` by the clock of the file system, and not while it was watched.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import shutil
import socket
import threading
import time
import uuid
from pathlib import Path

import msgspec

from autopar.common.launched import RESTART
from autopar.errors import CheckpointFolderInUseError

PREFIX = ".writer-"
_UNFINISHED = f"{PREFIX}new-"
_FILE = "owner.json"
BEAT_S = 5.0
LEASE_S = 30.0  # a process that holds Python's lock for 20 s in one call is taken for dead elsewhere too
WATCHED_S = 2 * BEAT_S
_LOOK_S = 0.5
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
            self._check_is_own(*self._own)
            return
        own = this_process()
        probe = self._folder / f"{_UNFINISHED}{own.run}"
        probe.mkdir(parents=True)
        (probe / _FILE).write_bytes(msgspec.json.encode(own))
        try:
            while not self._claimed(own, probe):
                pass
        finally:
            shutil.rmtree(probe, ignore_errors=True)
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
            shutil.rmtree(self._folder / f"{PREFIX}{n}", ignore_errors=True)

    def _claimed(self, own: Owner, probe: Path) -> bool:
        """Whether the folder is this process's now; else somebody was faster, and is looked at next."""
        number = max(self._numbers(), default=0)
        there = self._read(number)
        if there is not None and not self._is_gone(number, there, own, probe / _FILE):
            raise CheckpointFolderInUseError(
                where=f"save to {self._folder}", expected="a folder that no other run writes to",
                got=f"one that {there} writes to",
                hint="take another folder for another run, or end the other one: a folder is free when its run has "
                "ended or closed its Checkpointer; what is there can be read all the while",
            )  # fmt: skip
        if max(self._numbers(), default=0) != number:
            return False  # while the owner was watched others came, and may have gone
        claimed = number + 1
        try:
            os.rename(probe, self._folder / f"{PREFIX}{claimed}")
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        if max(self._numbers(), default=0) != claimed:  # the folder was listed while others came and went
            shutil.rmtree(self._folder / f"{PREFIX}{claimed}", ignore_errors=True)
            probe.mkdir(exist_ok=True)
            (probe / _FILE).write_bytes(msgspec.json.encode(own))
            return False
        self._own = claimed, own
        gone = [f"{PREFIX}{n}" for n in self._numbers() if n < claimed]
        gone += self._unfinished(claimed)
        for name in gone:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        return True

    def _unfinished(self, claimed: int) -> list[str]:
        """What was left by who was killed before it had the folder; not that of who is at it now."""
        found = [entry.name for entry in os.scandir(self._folder) if entry.name.startswith(_UNFINISHED)]
        now_s = _touched_s(self._folder / f"{PREFIX}{claimed}" / _FILE) or 0.0
        return [name for name in found if (_touched_s(self._folder / name / _FILE) or now_s) < now_s - LEFT_S]

    def _check_is_own(self, number: int, own: Owner) -> None:
        """Raises: CheckpointFolderInUseError where another run took the folder, since this one seemed to be gone."""
        latest = max(self._numbers(), default=0)
        if latest == number and (there := self._read(number)) is not None and there.run == own.run:
            return
        there = self._read(latest)
        raise CheckpointFolderInUseError(
            where=f"save to {self._folder}", expected="the folder of this run",
            got="one without a writer" if there is None else f"one that {there} has taken over",
            hint="this process stood still for so long that it was taken for gone, or somebody removed "
            f"{PREFIX}{number} in the folder: start again from the last checkpoint",
        )  # fmt: skip

    def _is_gone(self, number: int, there: Owner, own: Owner, probe: Path) -> bool:
        if there.machine == own.machine:
            is_restart = there.launcher == own.launcher is not None and there.restart < own.restart
            return is_restart or begun(there.pid) != there.begun
        file = self._folder / f"{PREFIX}{number}" / _FILE
        first, until_s = _touched_s(file), time.monotonic() + WATCHED_S
        while (touched_s := _touched_s(file)) is not None and touched_s == first:
            os.utime(probe)
            now_s = _touched_s(probe)  # by the same clock, that of the file system
            if now_s is None or (now_s - touched_s > LEASE_S and time.monotonic() > until_s):
                return True
            time.sleep(_LOOK_S)
        return touched_s is None

    def _numbers(self) -> list[int]:
        names = [entry.name.removeprefix(PREFIX) for entry in os.scandir(self._folder) if entry.name.startswith(PREFIX)]
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def _read(self, number: int) -> Owner | None:
        """Who owns the folder by this; None where there is nobody. Of a damaged file nothing is known but its time."""
        try:
            return msgspec.json.decode((self._folder / f"{PREFIX}{number}" / _FILE).read_bytes(), type=Owner)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except msgspec.DecodeError:
            return Owner(run="")

    def _beat(self, stop: threading.Event) -> None:
        assert self._own is not None, "taken before"
        file = self._folder / f"{PREFIX}{self._own[0]}" / _FILE
        while not stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the next save finds what has become of it
                os.utime(file)


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


def _touched_s(file: Path) -> float | None:
    """When a file was touched; None where there is none. Opened, or a network file system may answer from memory."""
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_mtime
    except OSError:
        return None
