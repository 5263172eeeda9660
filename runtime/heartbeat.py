"""Heartbeat failure detection for the processes of a program.

jax ends all processes when one has been silent for its heartbeat timeout (100 s unless `jax.distributed.initialize` is
told otherwise), or at once, with a C++ stack and nothing else, when process 0 is gone. This is quicker, names the
process, and lets Python say so:

(1) Every process writes a sign of life each second: how many steps it has begun and ended, how much joint work (steps,
    moves of rows), whether it stands still, and whether it is ending.
(2) Process 0 finds one lost that is silent for `LOST_AFTER_S`, that ended on an exception, that ended before a step
    that another has begun, or that is alive but stuck (below); and tells all. The others find process 0 lost where
    its store does not answer for as long, or where the link to it breaks (`coordinator`, after
    `autopar.distributed.initialize`). Under `python -m autopar.launch` all hear from it who has ended.
(3) Every process that hears of it logs it, and raises `ProcessLostError` at its next step. One that hangs in a wait,
    where no exception reaches it, is ended after `GRACE_S`, with the error and where it stood; so is, after `MOST_S`,
    one that computes on.
(4) A process that ends on an exception tells the others, and does not stay in jax's own barrier for them. One that ends
    as it should waits for what is sent to it, then in that barrier, and is watched, and watches, until it has left it.
    From then on nobody needs anything of another, and XLA's clients are not destroyed: a client's destructor waits for
    the processes at the other ends of its connections, for ever where one of them is stopped.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import msgspec

from autopar.common import jax_distributed
from autopar.common.jax_distributed import SharedStore
from autopar.common.launched import STUCK_AFTER_S as STUCK_AFTER_VARIABLE
from autopar.common.launched import Reached, lost_by_launcher, say_reached
from autopar.errors import AutoparError, ProcessLostError, ProcessMismatchError
from autopar.runtime.coordinator import CoordinatorLink, when_service_goes

GRACE_S = 5.0
MOST_S = 25.0


def lost_error(here: int, lost: int, what: str, at: str) -> ProcessLostError:
    return ProcessLostError(
        where=f"process {here}, {at}",
        expected=f"process {lost} to take part",
        got=f"process {lost} {what}",
        hint=f"look into the log of process {lost}; then start all processes again from the last checkpoint",
    )


def mismatch_error(here: int, other: int, what: str, at: str) -> ProcessMismatchError:
    return ProcessMismatchError(
        where=f"process {here}, {at}",
        expected="all processes to call the same steps in the same order",
        got=f"process {other} {what}",
        hint="what is called must not depend on jax.process_index()",
    )


def wait_until_stuck(is_told: Callable[[], bool]) -> str | None:
    """Where the main thread stands, once it has stood still for `GRACE_S` or `MOST_S` are over; None: it was told."""
    main, stood_still_s, at = threading.main_thread().ident, 0.0, None
    begun = time.monotonic()
    while stood_still_s < GRACE_S and time.monotonic() < begun + MOST_S:
        if is_told():
            return None
        frame = sys._current_frames().get(main or 0)
        here = (id(frame), frame.f_lasti if frame is not None else 0)
        stood_still_s = stood_still_s + 0.5 if here == at else 0.0
        at = here
        del frame  # it would keep alive what the main thread has left
        time.sleep(0.5)
    frame = sys._current_frames().get(main or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def leave(error: BaseException | None = None, stack: str = "") -> NoReturn:
    """Ends the process at once, with an error as Python prints it."""
    if error is not None:
        kind = type(error)
        text = f"Traceback (most recent call last):\n{stack}{kind.__module__}.{kind.__qualname__}: {error}\n"
        os.write(2, text.encode())

    def flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    flushing = threading.Thread(target=flush, daemon=True)  # the main thread may hold their locks for ever
    try:
        flushing.start()
        flushing.join(1.0)
    except RuntimeError:  # from 3.12 on Python starts no thread at its end; then this is the main thread itself
        flush()
    os._exit(1)


# How far a process is, and which one is alive but stuck: a heartbeat of steps, not of processes.
#
# (1) A step has begun when a process calls it, and has ended when its results are there: its devices have done it.
# (2) A process stands still while none of its Python threads moves, it uses hardly any processor time, and it does not
#     wait for a disk. A process that compiles, computes, loads or writes does not stand still.
# (3) It is stuck where it stands still, its devices have nothing left to do, and others have begun what it has not.
# (4) It is stuck too where it stands still, its devices do not end a step, and no other process has ended one, for much
#     longer than any step took: the others wait for their devices as well, or have begun more. Until `SEEN` steps have
#     ended nothing is known of steps, and the limit is `UNSEEN_S`.
# (5) Two processes differ where the n-th that they begin, a step or an agreement before one, is not the same.
# Who is behind but does not stand still is no error: the first process may write a checkpoint. It is worth a warning.

STUCK_AFTER_S = 40.0  # the others end within 60 s: GRACE_S and a few beats of the heartbeat come to it
SEEN = 3  # steps of which the first ones are left out: they may wait for compilation in another process
TIMES_LONGEST = 5.0
UNSEEN_S = 600.0
IDLE_SHARE = 0.2  # of a processor, also with the threads that watch
ALIVE = "is alive but"  # begins what is said of a process that is stuck
_DIFFERS = "has begun another step"
RECENT = 8  # steps and meetings by which two processes are compared: one may be a few ahead


class Sign(msgspec.Struct, frozen=True, kw_only=True):
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
        where = self.where.encode(errors="replace").decode()  # a path may be no text
        return msgspec.json.encode(msgspec.structs.replace(self, where=where)).decode()

    @classmethod
    def read(cls, text: str) -> Sign:
        return msgspec.json.decode(text, type=cls)


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
_PACKAGE = str(Path(__file__).parents[1])


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


logger = logging.getLogger("autopar")

BEAT_S = 1.0
LOST_AFTER_S = 20.0  # a process that holds Python's lock this long in one call is taken for dead
_ALIVE, _FAILED, _ENDED = "alive", "failed", "ended"
_PREFIX = "autopar/alive/"
_VERDICT = "autopar/lost"
_WARN_EVERY_S = 30.0  # of a process that is behind


class Watch:
    """Shows that this process is there, and knows when another is not, from the start of the program to its end.

    `others` are known to take part from now on: `autopar.distributed.initialize` has met them. Else they are looked for
    as soon as they show themselves.
    """

    def __init__(
        self,
        store: SharedStore,
        process: int,
        others: frozenset[int] = frozenset(),
        link: CoordinatorLink | None = None,
    ) -> None:
        self._store, self._process, self._lost_after_s = store, process, LOST_AFTER_S
        self._joint, self._met, self._beats, self._state = 0, 0, 0, _ALIVE
        self._steps, self._stillness, self._stuck_after_s = Steps(), Stillness(), stuck_after_s()
        begun = time.monotonic()
        self._seen: dict[int, tuple[str, float]] = dict.fromkeys(others, ("", begun))
        self._answered, self._differ_since, self._warn_at = begun, begun, begun + self._stuck_after_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_told, self._lost_at, self._has_stepped = False, begun, False
        self.lost: AutoparError | None = None
        if process == 0:
            # Each wait for a key that nobody has written takes memory for good (`SharedStore.wait_for`).
            store.set(_VERDICT, "")
        runs = (self._show, self._look)
        self._threads = [threading.Thread(target=run, name="autopar liveness", daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()
        if link is not None:
            link.when_lost(lambda: self._link_broke(link))
        elif process != 0:
            when_service_goes(jax_distributed.coordinator_address(), self._service_went)
        atexit.register(self._end)

    def begin_step(self, name: str, fingerprint: str) -> None:
        """Counts a step; `fingerprint` is the same in all processes that call it. Raises: ProcessLostError."""
        self._steps.begin(name, fingerprint)
        self.begin_joint_work()

    def await_result(self, array: Any) -> None:
        """`array` is there when this process's devices have done the last step; None where it has no such."""
        self._steps.await_result(array)

    def begin_meeting(self, name: str, key: str) -> None:
        """Counts what all processes agree upon before they go on; `key` is the same in all."""
        self._met += 1
        self._steps.note(name, key)

    def begin_joint_work(self) -> None:
        """Counts what all processes have to do together, such as a step, or moving rows. Raises: ProcessLostError."""
        self._joint += 1
        self.check()

    def check(self) -> None:
        """Raises: ProcessLostError."""
        if self.lost is not None:
            self._is_told = True
            raise self.lost

    def ahead(self) -> list[int]:
        """The processes that have begun more joint work than this one, or have ended."""
        return sorted(p for p, s in self._signs().items() if s.joint > self._joint or s.state != _ALIVE)

    def blame(self, error: BaseException) -> NoReturn:
        """Raises what made jax fail: the loss of a process, as soon as it is known, or else the error itself.

        Raises: ProcessLostError.
        """
        self._await_verdict()
        if self.lost is None and (late := self._one_behind()) is not None:
            self.lost = self._error_of(*late)
        if self.lost is None:
            raise error
        self._is_told = True
        raise self.lost from error

    def _one_behind(self) -> tuple[int, str] | None:
        """Another process for which this one may have waited in vain."""
        try:
            late = behind(self._signs())
        except jax.errors.JaxRuntimeError:
            return None
        return None if late is None or late[0] == self._process else late

    def _await_verdict(self) -> None:
        deadline = time.monotonic() + self._lost_after_s + 3 * BEAT_S
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(0.1)

    # The threads

    def _show(self) -> None:
        """Shows signs of life. Writing one may wait for ever, where process 0 is stopped."""
        while not self._is_over():
            try:
                self._beat()
            except jax.errors.JaxRuntimeError:
                return  # the other thread finds the same
            self._stop.wait(BEAT_S / 2)

    def _beat(self) -> None:
        self._steps.look()
        self._stillness.look()
        if self._steps.ended > 0 and not self._has_stepped:
            self._has_stepped = True
            say_reached(Reached.STEPPED)
        with self._lock:
            self._beats += 1
            beats = self._beats
        steps = self._steps
        sign = Sign(
            beats=beats,
            steps=steps.begun,
            joint=self._joint,
            state=self._state,
            met=self._met,
            ended=steps.ended,
            last_ended_s=steps.last_ended_s,
            longest_s=steps.longest_s,
            still_s=self._stillness.seconds,
            recent=steps.recent,
            name=steps.name,
            where=self._stillness.where,
        )
        self._store.set(f"{_PREFIX}{self._process}", sign.text())

    def _signs(self) -> dict[int, Sign]:
        return {int(process): Sign.read(text) for process, text in self._store.below(_PREFIX).items()}

    def _look(self) -> None:
        """Looks for who is lost."""
        while not self._is_over():
            try:
                verdict = lost_by_launcher()
                if verdict is not None and self._process == 0:
                    self._store.set(_VERDICT, verdict)  # for other hosts
                verdict = verdict or (self._judge() if self._process == 0 else self._look_at_the_judge())
                # Read after the sign of process 0, which writes its verdict before it fails of it.
                verdict = self._store.wait_for(_VERDICT, BEAT_S / 2) or verdict
            except jax.errors.JaxRuntimeError as error:
                if self._is_over_soon():
                    return
                verdict = f"0 does not answer any more ({str(error).splitlines()[0][:100]})"
            if verdict is not None:
                self._hear(verdict)
                return
            self._stop.wait(BEAT_S / 2)

    def _is_over(self) -> bool:
        return self._stop.is_set() or jax_distributed.shared_store() is None  # after `jax.distributed.shutdown`

    def _is_over_soon(self) -> bool:
        """The same, some time after all have left jax's barrier, where this process ends or shuts jax down."""
        if self._state != _ALIVE or jax_distributed.is_shutting_down():
            self._stop.wait(GRACE_S)
        return self._is_over()

    def _judge(self) -> str | None:
        """The verdict, `number of the process, what is known`, when one is lost."""
        signs, now = self._signs(), time.monotonic()
        furthest = max((sign.steps for sign in signs.values()), default=0)
        verdict = None
        for process in sorted(self._seen.keys() | signs.keys()):
            sign = signs.get(process)
            beats = str(sign.beats) if sign is not None else ""
            if self._seen.get(process, (None, 0.0))[0] != beats:
                self._seen[process] = (beats, now)
            silent_s = now - self._seen[process][1]
            state, steps = (sign.state, sign.steps) if sign is not None else (_ALIVE, 0)
            if state == _FAILED:
                verdict = f"{process} ended on an exception in or after step {steps}"
            elif state == _ENDED and steps < furthest:
                verdict = f"{process} ended after step {steps}, before step {furthest} that others have begun"
            elif silent_s > self._lost_after_s and process != self._process:
                verdict = f"{process} has shown no sign of life for {silent_s:.0f} s, since step {steps}"
        if verdict is None and self._stuck_after_s:
            found = self._differing_for_long(signs, now) or stuck(signs, self._stuck_after_s)
            verdict = None if found is None else f"{found[0]} {found[1]}"
            self._warn_of_one_behind(signs, now)
        if verdict is not None:
            self._store.set(_VERDICT, verdict)
        return verdict

    def _differing_for_long(self, signs: dict[int, Sign], now: float) -> tuple[int, str] | None:
        """What differs, once those that wait for one another have had the time to say more about it."""
        found = differing(signs)
        if found is None:
            self._differ_since = now
        return found if now > self._differ_since + GRACE_S else None

    def _warn_of_one_behind(self, signs: dict[int, Sign], now: float) -> None:
        late = behind(signs)
        if late is None:
            self._warn_at = now + self._stuck_after_s
        elif now > self._warn_at:
            logger.warning("process %d %s; the others wait for it", *late)
            self._warn_at = now + _WARN_EVERY_S

    def _look_at_the_judge(self) -> str | None:
        """The verdict on process 0, which does not judge any more once it has ended."""
        now = time.monotonic()
        sign = self._store.wait_for(f"{_PREFIX}0", BEAT_S / 2)
        if sign is not None or (self._beats > 0 and self._store.wait_for(f"{_PREFIX}{self._process}", BEAT_S / 2)):
            self._answered = time.monotonic()
        shown = Sign.read(sign) if sign is not None else Sign()
        if now - self._answered > self._lost_after_s:
            return f"0 has not answered for {now - self._answered:.0f} s"
        if shown.state == _FAILED:
            return f"0 ended on an exception in or after step {shown.steps}"
        if shown.state == _ENDED and shown.steps < self._steps.begun:
            return f"0 has ended after step {shown.steps}"
        return None

    def _link_broke(self, link: CoordinatorLink) -> None:
        if self._is_over_soon():
            return
        if self._state == _FAILED:
            leave()  # its error is printed, and its main thread may wait for an answer of process 0 for ever
        self._hear(f"0 {link.lost}")

    def _service_went(self, why: str) -> None:
        if not self._is_over_soon():
            self._hear(f"0 {why}")

    def _hear(self, verdict: str) -> None:
        number, text = verdict.split(" ", 1)
        process, is_alive = int(number), text.startswith(ALIVE) or is_mismatch(text)
        with self._lock:
            if (process == self._process and not is_alive) or self._state == _FAILED or self.lost is not None:
                return
            self._lost_at = time.monotonic()
            self.lost = self._error_of(process, text)
        logger.error("%s: %s", type(self.lost).__name__, self.lost)
        where = wait_until_stuck(lambda: self._is_told or self._is_over())
        if where is None:
            return  # the main thread ends with the error by itself
        logger.error("process %d waits in vain: ended", self._process)
        self._stay_until_heard()
        leave(self.lost, where)

    def _error_of(self, process: int, text: str) -> AutoparError:
        at = f"step {self._steps.begun}"
        return (mismatch_error if is_mismatch(text) else lost_error)(self._process, process, text, at)

    def _stay_until_heard(self) -> None:
        """Process 0 keeps what is told: it stays until all have had the time to hear it."""
        if self._process == 0:
            time.sleep(max(0.0, self._lost_at + 4 * BEAT_S - time.monotonic()))

    # The end

    def _end(self) -> None:
        error = getattr(sys, "last_value", None)  # what Python has just printed on its way out
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._await_verdict()
        if error is None and self.lost is None and not self._is_over():
            jax_distributed.await_arrays()  # before the others may end
        self._state = _FAILED if error is not None else _ENDED
        if self.lost is not None:
            error, self._is_told = None if self._is_told else self.lost, True
            self._stay_until_heard()
            leave(error)
        if self._is_over():
            return
        if not self._say_so(linger=error is not None):
            leave()  # jax would wait minutes for the others, and then for the one that is lost
        jax.distributed.shutdown()  # here, while the others are watched
        jax_distributed.never_destroy_clients()
        # Python aborts threads that are in C++ when it ends.
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * BEAT_S)

    def _say_so(self, linger: bool) -> bool:
        """Tells the others that this process ends, and whether jax's own end, which waits for all, can follow.

        After an exception it can where the others end too. Process 0 keeps what is told: it stays until they know.
        """
        try:
            self._beat()
            deadline = time.monotonic() + (GRACE_S if linger else 0.0)
            while time.monotonic() < deadline:
                if self._process == 0:
                    self._judge()
                if all(sign.state != _ALIVE for sign in self._signs().values()):
                    return True
                time.sleep(BEAT_S / 4)
        except jax.errors.JaxRuntimeError:
            return False  # process 0 is gone: nobody is left to be told
        return not linger


@functools.cache
def the_watch() -> Watch | None:
    """The watch of this process, begun by the first who asks; None in a program of one process."""
    store = jax_distributed.shared_store()
    if store is None or jax.process_count() == 1:
        return None
    return watch_from_the_start() or Watch(store, jax.process_index())


_from_the_start: list[Watch] = []


def watch_from_the_start() -> Watch | None:
    """The watch that `autopar.distributed.initialize` has begun."""
    return _from_the_start[0] if _from_the_start else None


def begin_watch(store: SharedStore, process: int, num_processes: int, link: CoordinatorLink | None) -> None:
    """Begins the watch of a program that all of its processes have joined."""
    others = frozenset(range(num_processes)) - {process}
    _from_the_start.append(Watch(store, process, others, link))
