"""How far a process is, and which one is alive but stuck: a heartbeat of steps, not of processes.

(1) A step has begun when a process calls it, and has ended when its results are there: its devices have done it.
(2) A process stands still while none of its Python threads moves, it uses hardly any processor time, and it does not
    wait for a disk. A process that compiles, computes, loads or writes does not stand still.
(3) It is stuck where it stands still, its devices have nothing left to do, and others have begun what it has not.
(4) It is stuck too where it stands still, its devices do not end a step, and no other process has ended one, for much
    longer than any step took: the others wait for their devices as well, or have begun more. Until `SEEN` steps have
    ended nothing is known of steps, and the limit is `UNSEEN_S`.
(5) Two processes differ where the n-th that they begin, a step or an agreement before one, is not the same.
Who is behind but does not stand still is no error: the first process may write a checkpoint. It is worth a warning.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import sysconfig
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from autopar.common.launched import STUCK_AFTER_S as STUCK_AFTER_VARIABLE

STUCK_AFTER_S = 40.0  # the others end within 60 s: GRACE_S and a few beats of the heartbeat come to it
SEEN = 3  # steps of which the first ones are left out: they may wait for compilation in another process
TIMES_LONGEST = 5.0
UNSEEN_S = 600.0
IDLE_SHARE = 0.2  # of a processor, also with the threads that watch
ALIVE = "is alive but"  # begins what is said of a process that is stuck
_DIFFERS = "has begun another step"
RECENT = 8  # steps and meetings by which two processes are compared: one may be a few ahead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign:
    """What a process shows of itself. `joint` counts work of all together, `met` what is agreed upon before it.

    `ended` counts steps that the devices have done, `last_ended_s` is how long ago the last was, `longest_s` the
    longest time between two. `recent` are the last steps and agreements, (number, digest of all up to it), `name` is
    that of the last one. `still_s` says how long the process has stood still, `where` at which line.
    """

    beats: int = 0
    steps: int = 0
    joint: int = 0
    state: str = "alive"
    met: int = 0
    ended: int = 0
    last_ended_s: float = 0.0
    longest_s: float = 0.0
    still_s: float = 0.0
    recent: tuple[tuple[int, int], ...] = ()
    name: str = "-"
    where: str = ""

    @property
    def begun(self) -> int:
        return self.joint + self.met

    def text(self) -> str:
        recent = ",".join(f"{number}:{digest:08x}" for number, digest in self.recent) or "-"
        counts = f"{self.beats} {self.steps} {self.joint} {self.state} {self.met} {self.ended}"
        seconds = f"{self.last_ended_s:.1f} {self.longest_s:.1f} {self.still_s:.1f}"
        return f"{counts} {seconds} {recent} {self.name} {self.where}"

    @classmethod
    def read(cls, text: str) -> Sign:
        beats, steps, joint, state, met, ended, last_s, longest_s, still_s, recent, name, where = text.split(" ", 11)
        pairs = [] if recent == "-" else [pair.split(":") for pair in recent.split(",")]
        return cls(
            beats=int(beats),
            steps=int(steps),
            joint=int(joint),
            state=state,
            met=int(met),
            ended=int(ended),
            last_ended_s=float(last_s),
            longest_s=float(longest_s),
            still_s=float(still_s),
            recent=tuple((int(number), int(digest, 16)) for number, digest in pairs),
            name=name,
            where=where,
        )


def stuck(signs: Mapping[int, Sign], stuck_after_s: float) -> tuple[int, str] | None:
    """(process, what is known) of one that is stuck, by (3) or (4); None where none is, or `stuck_after_s` is 0."""
    if not stuck_after_s or len(signs) < 2:
        return None
    furthest = max(sign.begun for sign in signs.values())
    for process, sign in sorted(signs.items()):
        is_behind = sign.begun < furthest and sign.ended == sign.steps
        if is_behind and sign.state == "alive" and sign.still_s > stuck_after_s:
            return (
                process,
                f"{ALIVE} has stood still for {sign.still_s:.0f} s after step {sign.steps}, {_at(sign)}",
            )
    waiting = {p: s for p, s in signs.items() if s.ended < s.steps}
    if not waiting or any(sign.state != "alive" for sign in signs.values()):
        return None
    process = min(waiting, key=lambda p: (waiting[p].ended, p))
    sign = signs[process]
    if any(p not in waiting and s.begun <= sign.begun for p, s in signs.items()):
        return None  # that one has to come yet
    since_s = min(*(s.last_ended_s for s in signs.values()), *(s.still_s for s in waiting.values()))
    limit_s = UNSEEN_S
    if all(s.ended >= SEEN for s in waiting.values()):
        limit_s = max(stuck_after_s, TIMES_LONGEST * max(s.longest_s for s in waiting.values()))
    if since_s <= limit_s:
        return None
    is_alone = any(s.ended > sign.ended for s in signs.values())
    others = "and the others wait for it" if is_alone else "nor has any other process"
    return process, f"{ALIVE} has not ended step {sign.ended + 1} in {since_s:.0f} s, {others}, {_at(sign)}"


def behind(signs: Mapping[int, Sign]) -> tuple[int, str] | None:
    """(process, what is known) of one whose devices are done with all that it has begun, and others have begun more."""
    furthest = max((sign.begun for sign in signs.values()), default=0)
    late = {p: s for p, s in signs.items() if s.begun < furthest and s.ended == s.steps and s.state == "alive"}
    if not late:
        return None
    process = min(late, key=lambda p: (late[p].begun, p))
    return process, f"{ALIVE} has begun nothing after step {late[process].steps}, {_at(late[process])}"


def differing(signs: Mapping[int, Sign]) -> tuple[int, str] | None:
    """(process, what is known) of one whose steps are not those of process 0, by (5)."""
    first = signs.get(0)
    if first is None:
        return None
    known = dict(first.recent)
    for process, sign in sorted(signs.items()):
        for number, digest in sign.recent:
            if known.get(number, digest) != digest:
                return process, f"{_DIFFERS} than process 0, {sign.name} where that of process 0 is {first.name}"
    return None


def is_mismatch(text: str) -> bool:
    """Whether a verdict is that of `differing`."""
    return text.startswith(_DIFFERS)


def _at(sign: Sign) -> str:
    return f"at {sign.where}" if sign.where else "where Python does not see it"


class Steps:
    """Counts the steps of this process: begun, and ended on its devices."""

    def __init__(self) -> None:
        self.begun, self.ended, self.longest_s = 0, 0, 0.0
        self.name, self._digest = "-", 0
        self._noted, self._recent = 0, collections.deque[tuple[int, int]](maxlen=RECENT)
        self._results: collections.deque[tuple[int, Any]] = collections.deque()
        self._last_ended = time.monotonic()

    def begin(self, name: str, fingerprint: str) -> None:
        if self.ended == self.begun:  # the devices had nothing to do
            self._last_ended = time.monotonic()
        self.begun += 1
        self.note(name, fingerprint)

    def note(self, name: str, fingerprint: str) -> None:
        """Notes what all processes have to do in the same order."""
        self.name = name.replace(" ", "_") or "-"
        self._noted += 1
        self._digest = zlib.crc32(fingerprint.encode(), self._digest)
        self._recent.append((self._noted, self._digest))

    def await_result(self, array: Any) -> None:
        """`array` is there when the devices have done the last step that has begun; None: nobody knows when."""
        self._results.append((self.begun, array))

    def look(self) -> None:
        """Counts the steps that have ended since the last look."""
        while self._results and _is_there(self._results[0][1]):
            number, _ = self._results.popleft()
            now = time.monotonic()
            if number > SEEN:
                self.longest_s = max(self.longest_s, now - self._last_ended)
            self.ended, self._last_ended = number, now

    @property
    def recent(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._recent)

    @property
    def last_ended_s(self) -> float:
        return time.monotonic() - self._last_ended


def _is_there(array: Any) -> bool:
    try:
        return array is None or array.is_ready()
    except RuntimeError:  # it was donated to a later step, or the step has failed
        return True


class Stillness:
    """How long this process has stood still, by (2)."""

    def __init__(self) -> None:
        self._positions: dict[int, tuple[int, int]] = {}
        self._cpu_s, self._looked_s = _processor_s(), time.monotonic()
        self._since_s = self._looked_s
        self.where = ""

    @property
    def seconds(self) -> float:
        return self._looked_s - self._since_s

    def look(self) -> None:
        now, cpu_s = time.monotonic(), _processor_s()
        own = {t.ident for t in threading.enumerate() if t.name.startswith("autopar ")}
        frames = {ident: frame for ident, frame in sys._current_frames().items() if ident not in own}
        positions = {ident: (id(frame), frame.f_lasti) for ident, frame in frames.items()}
        self.where = place_of(frames.get(threading.main_thread().ident or 0))
        del frames  # they would keep alive what the threads have left
        is_busy = cpu_s - self._cpu_s > IDLE_SHARE * (now - self._looked_s)
        if positions != self._positions or is_busy or _waits_for_disk():
            self._since_s = now
        self._positions, self._cpu_s, self._looked_s = positions, cpu_s, now


def _processor_s() -> float:
    """Processor time of this process and of those that it has started, as a download or an export may be."""
    seconds = time.process_time()
    with contextlib.suppress(OSError, ValueError):
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
                seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own, and of its children
    return seconds


_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).parents[2])


def place_of(frame: FrameType | None) -> str:
    """`train.py:12 in load`: the innermost line outside of libraries, else the innermost one."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(
        (*_LIBRARIES, "<", f"{_PACKAGE}/autopar", f"{_PACKAGE}/runtime")
    ):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _waits_for_disk() -> bool:
    """Whether the main thread is in a wait that no signal ends, as reads and writes are."""
    try:
        state = Path(f"/proc/self/task/{os.getpid()}/stat").read_text()
    except OSError:
        return False
    return state.rsplit(")", 1)[1].split()[0] == "D"


def stuck_after_s() -> float:
    """Seconds of standing still after which a process is stuck; 0: never. As the environment has it."""
    text = os.environ.get(STUCK_AFTER_VARIABLE)
    return float(text) if text else STUCK_AFTER_S
