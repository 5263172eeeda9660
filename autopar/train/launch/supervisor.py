"""The launcher: starts the processes of this host, joins their output, finds the first error among them, and starts
them again as the policy says.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import msgspec

from autopar.common.launched import STUCK_AFTER_S, Reached, has_reached, say_lost
from autopar.train.launch.command_line import Options
from autopar.train.launch.placement import Placement, environments, host_and_port, own_address_towards
from autopar.train.launch.rendezvous import JOIN_S, Leader, keep_alive, send
from autopar.train.launch.restart_policy import Hosts, OneHost, Outcome, Policy, Start, Stop

# Which process failed first, and with what: the others mostly fail because of it.

MOST_LINES = 60  # of an error that are shown
_WITHOUT_TRACEBACK = 8  # last lines shown of a process that printed none
RECENT_S = 10.0  # what was printed longer before the end of a process has nothing to do with it
_TRACEBACK = "Traceback (most recent call last):"
_CHAINS = ("The above exception was the direct cause", "During handling of the above exception")
_FOLLOWS = re.compile(r"ProcessLostError: .*got process (\d+) (.*)")
# What JAX's client and collectives say of a connection to a process that has ended, within a hundredth of a second and
# before anybody knows which one it is: JAX's service, Gloo (CPU devices; it may abort the process), NCCL.
_CONNECTION_IS_LOST = re.compile(
    r"the JAX distributed service detected fatal errors|instance of 'gloo::"
    r"|Gloo \w+ failed: .*(Connection (reset|closed)|Broken pipe|[Tt]imed out)"
    r"|remote process exited or there was a network error"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended. `code` is negative for a signal; `time_s` and those of the lines are of one clock.

    `by_launcher`: the launcher ended it because another one had failed. `why`: it ended it for something of its own.
    """

    process: int
    code: int
    time_s: float
    by_launcher: bool = False
    why: str = ""
    stderr: tuple[tuple[float, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstError:
    """The process that failed first. `code` is its exit code as a shell has it, `what` a line.

    `lines` are its error; of a process that was stopped, that of another one, `printed_by`.
    """

    process: int
    code: int
    what: str
    lines: tuple[str, ...]
    printed_by: int


def first_error(ended: Sequence[Ended]) -> FirstError | None:
    """The first failure among processes that have all ended; None where none failed.

    A process whose error names another one follows. Where all that failed follow, the one they name is the first.
    """
    failed = sorted((e for e in ended if e.code != 0 and not e.by_launcher), key=_time_of_error)
    named = [e for e in failed if follows(e) is not None]
    causes = [e for e in failed if not is_follower(e)] or ([] if named else failed)
    if causes:
        first, code = causes[0], causes[0].code
        return FirstError(
            process=first.process,
            code=shell_code(code),
            what=first.why or how_it_ended(code),
            lines=_error(first),
            printed_by=first.process,
        )
    if named:
        process, what = follows(named[0]) or (0, "")
        own = next((e for e in ended if e.process == process), None)
        code = named[0].code if own is None or own.by_launcher or own.code == 0 else own.code
        says = f"{what}, says process {named[0].process}"
        lines = _error(named[0])
        return FirstError(process=process, code=shell_code(code), what=says, lines=lines, printed_by=named[0].process)
    return None


def report(error: FirstError, ended: Sequence[Ended]) -> list[str]:
    """The first error, on top, and one line on the others."""
    others = sorted((e for e in ended if e.process != error.process), key=lambda e: e.process)
    said = [f"{e.process} {_how_another_ended(e)}" for e in others]
    lines = [
        f"process {error.process} failed first: {error.what}",
        *(f"  [{error.printed_by}] {line}" for line in error.lines),
    ]
    return [*lines, *([f"the others: {', '.join(said)}"] if said else [])]


def _how_another_ended(ended: Ended) -> str:
    if not ended.by_launcher:
        return how_it_ended(ended.code)
    own = _error(ended) if _start_of_error(ended) is not None and not is_follower(ended) else ()
    return f"ended by the launcher after an error of its own ({own[-1].strip()})" if own else "ended by the launcher"


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def shell_code(code: int) -> int:
    """The exit code of a process that was killed by a signal as shells have it."""
    return 128 - code if code < 0 else code


def follows(ended: Ended) -> tuple[int, str] | None:
    """The process that this one's error says is lost, and what it says of it; None where it names none, or itself."""
    for _, line in reversed(ended.stderr):
        if named := _FOLLOWS.search(line):
            return None if int(named[1]) == ended.process else (int(named[1]), named[2])
    return None


def is_follower(ended: Ended) -> bool:
    """Whether it failed because of another process, which it may not name."""
    if follows(ended) is not None:
        return True
    return any(_CONNECTION_IS_LOST.search(line) for _, line in ended.stderr)


def _time_of_error(ended: Ended) -> float:
    start = _start_of_error(ended)
    return ended.stderr[start][0] if start is not None else ended.time_s


def _error(ended: Ended) -> tuple[str, ...]:
    """Its traceback, else what it printed shortly before its end."""
    start = _start_of_error(ended)
    if start is None:
        recent = [line for time_s, line in ended.stderr if ended.time_s - time_s <= RECENT_S]
        if not recent and ended.stderr:
            return (f"(it printed nothing on stderr in the {ended.time_s - ended.stderr[-1][0]:.0f} s before)",)
        return tuple(recent[-_WITHOUT_TRACEBACK:])
    error = [line for _, line in ended.stderr[start:]]
    if len(error) > MOST_LINES:  # the cause is at its end
        error = [error[0], "  ...", *error[-MOST_LINES:]]
    age_s = ended.time_s - ended.stderr[start][0]
    return (*([f"(printed {age_s:.0f} s before its end)"] if age_s > RECENT_S else []), *error)


def _start_of_error(ended: Ended) -> int | None:
    """The number of the first line of the last traceback, with those that it came from.

    What a signal killed did not end of an error that it had logged before. An exception may come long before the end of
    its process, which waits until the others know.
    """
    lines = [line for _, line in ended.stderr]
    starts = [i for i, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts or (ended.code < 0 and ended.time_s - ended.stderr[starts[-1]][0] > RECENT_S):
        return None
    start = starts.pop()
    while starts and any(line.startswith(_CHAINS) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return start


# The output of several processes as one: whole lines, each behind the number of its process.

MOST_KEPT_LINES = 400  # of the end of each process's output: where its error is looked for
MOST_LINE_BYTES = 1 << 16  # a longer line is written in parts, so that no process fills the launcher's memory


def tagged(process: int, line: bytes) -> bytes:
    return b"[%d] %s\n" % (process, line.removesuffix(b"\r"))


class Tagger:
    """Writes the lines of all processes to this process's own output; a line is one write."""

    def __init__(self, write: Callable[[int, bytes], object] | None = None) -> None:
        self._lock = threading.Lock()
        self._write = write or _write_all

    def write(self, to: int, process: int, line: bytes) -> None:
        """Writes to the file descriptor `to`."""
        with self._lock:
            self._write(to, tagged(process, line))

    def say(self, text: str) -> None:
        """A line of the launcher itself, on stderr."""
        with self._lock:
            self._write(2, f"autopar.launch: {text}\n".encode())


def _write_all(to: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(to, data) :]
    except BrokenPipeError:
        pass  # nobody reads: the processes go on


class OutputOfProcess:
    """Reads stdout and stderr of a process until both end, and keeps the end of stderr with its times."""

    def __init__(self, process: int, stdout: IO[bytes], stderr: IO[bytes], tagger: Tagger) -> None:
        self._process, self._tagger = process, tagger
        self._kept: collections.deque[tuple[float, str]] = collections.deque(maxlen=MOST_KEPT_LINES)
        self._threads = [
            threading.Thread(target=self._follow, args=(end, to), name=f"output of process {process}", daemon=True)
            for end, to in ((stdout, 1), (stderr, 2))
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def last_of_stderr(self) -> tuple[tuple[float, str], ...]:
        """(time by `time.monotonic`, line) of the last lines."""
        return tuple(self._kept)

    def _follow(self, end: IO[bytes], to: int) -> None:
        is_part = False
        with end:
            while line := end.readline(MOST_LINE_BYTES):
                ends_part, is_part = is_part and line == b"\n", not line.endswith(b"\n")
                if ends_part:
                    continue
                line = line.removesuffix(b"\n")
                if to == 2:
                    self._kept.append((time.monotonic(), line.decode(errors="replace")))
                self._tagger.write(to, self._process, line)


# One process that the launcher started: it ends when the launcher does, whatever ends that.

_OUTPUT_S = 2.0  # for the last lines of a process that has ended, where others of its group still hold its output
# Asks Linux to kill this process with its parent, and becomes the program. In a Python of its own, and not between fork
# and exec of the launcher, where other threads may hold locks for ever.
_BECOME = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class ChildProcess:
    """A running process, in a process group of its own, so that it gets the signals of a terminal once."""

    def __init__(self, process: int, command: Sequence[str], environment: Mapping[str, str], tagger: Tagger) -> None:
        self.process = process
        self._by_launcher, self._why = False, ""
        self._stopped_since_s: float | None = None
        # Started from the main thread: the signal comes with the end of the thread that started the process.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        streams = self._popen.stdout, self._popen.stderr
        assert streams[0] is not None, "a pipe"
        assert streams[1] is not None, "a pipe"
        self._output = OutputOfProcess(process, streams[0], streams[1], tagger)
        self._ended: Ended | None = None

    def poll(self) -> Ended | None:
        """How it ended; None while it runs."""
        if self._ended is None and (code := self._popen.poll()) is not None:
            ended_s = time.monotonic()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)  # what it has started and left
            self._output.join(_OUTPUT_S)
            self._ended = Ended(
                process=self.process,
                code=code,
                time_s=ended_s,
                why=self._why,
                by_launcher=self._by_launcher and not self._why and -code in (signal.SIGTERM, signal.SIGKILL),
                stderr=self._output.last_of_stderr,
            )
        return self._ended

    def stopped_s(self) -> float:
        """How long it has been seen to be stopped, as SIGSTOP does: then SIGTERM does not reach it."""
        try:
            state = Path(f"/proc/{self._popen.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            state = ""
        now = time.monotonic()
        if state != "T":  # under a debugger it is another one
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now
        return now - self._stopped_since_s if self._stopped_since_s is not None else 0.0

    def send(self, number: signal.Signals) -> None:
        """Sends a signal that somebody else sent the launcher."""
        if self.poll() is None:
            self._popen.send_signal(number)

    def end(self, number: signal.Signals, why: str = "") -> None:
        """Sends a signal of the launcher's own, to the whole group where it is SIGKILL.

        `why` is what the process itself has done; without it another one has failed, or somebody ends them all.
        """
        if self.poll() is not None:
            return
        self._by_launcher, self._why = True, why
        if number is signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.send_signal(number)


# One start of the processes of this host, from its beginning until all of them have ended.

_POLL_S = 0.05
_LOOK_S = 1.0  # how often it is looked whether another number of processes is asked for
# After a failure the others end by themselves, with an error that names who failed (runtime/heartbeat.py);
# SIGTERM comes to those that have not.
SETTLE_S = 10.0
STOPPED_AFTER_S = 15.0  # before the others find it silent: they may not have joined yet, and would wait for minutes
# Those that have not joined yet are told by nothing. What fails at its beginning mostly does in all of them: so long
# they may end by themselves, with an error of their own.
OWN_ERROR_S = 1.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """What the launcher still does to end the processes, by the clock of `time.monotonic`.

    SIGTERM comes at `terminate_s`, to those that have not joined the others at `terminate_unjoined_s`.
    """

    stop: Stop
    terminate_s: float | None
    terminate_unjoined_s: float | None = None
    kill_s: float
    number: int = 0  # of the signal that somebody sent


class OneStart:
    """The processes of one start."""

    def __init__(self, options: Options, placement: Placement, folder: Path, tagger: Tagger) -> None:
        self._folder, self._tagger, self._grace_s = folder, tagger, options.grace_s
        self._stopped_after_s = 0.0 if options.stuck_after_s == 0 else STOPPED_AFTER_S
        self._ending: Ending | None = None
        around = dict(os.environ)
        if options.stuck_after_s is not None:
            around[STUCK_AFTER_S] = str(options.stuck_after_s)
        self._running = [
            ChildProcess(placement.first_process + i, options.command, environment, tagger)
            for i, environment in enumerate(environments(placement, options.devices_per_process, folder, around))
        ]
        self.ended: dict[int, Ended] = {}

    def run(self, signals: deque[signal.Signals], asked_to_end: Callable[[], str | None]) -> Outcome:
        """Returns when all processes have ended. `signals` are those that the launcher has got, oldest first;
        `asked_to_end` says why they should, and start in another number.
        """
        count, looked_s = len(self._running), time.monotonic()
        while self._running:
            now = time.monotonic()
            while signals:
                self._pass_on(signals.popleft(), now)
            self._collect(now)
            if self._ending is None and now > looked_s + _LOOK_S:
                looked_s = now
                self._end_stopped()
                if (why := asked_to_end()) is not None:
                    self._tagger.say(f"{why}: ends these with SIGTERM")
                    self._begin_ending(Stop.RESIZE, now, signal.SIGTERM)
            self._carry_out(now)
            time.sleep(_POLL_S)
        return self._outcome(count)

    def _collect(self, now: float) -> None:
        for child in list(self._running):
            ended = child.poll()
            if ended is None:
                continue
            self._running.remove(child)
            self.ended[child.process] = ended
            if (
                ended.code == 0
                or ended.by_launcher
                or (self._ending is not None and self._ending.stop is not Stop.FAILED)
            ):
                continue
            if not is_follower(ended):
                say_lost(self._folder, child.process, f"has ended: {ended.why or how_it_ended(ended.code)}")
            if self._ending is not None:
                continue
            self._ending = Ending(
                stop=Stop.FAILED,
                terminate_unjoined_s=now + OWN_ERROR_S,
                terminate_s=now + SETTLE_S,
                kill_s=now + SETTLE_S + self._grace_s,
            )

    def _end_stopped(self) -> None:
        for child in self._running:
            if self._stopped_after_s and child.stopped_s() > self._stopped_after_s:
                child.end(signal.SIGKILL, f"stopped (SIGSTOP) for {self._stopped_after_s:.0f} s")

    def _pass_on(self, number: signal.Signals, now: float) -> None:
        again = self._ending is not None and self._ending.stop is Stop.SIGNAL and number is signal.SIGINT
        for child in self._running:
            child.send(number)
        if again:  # as a user who presses Ctrl-C twice means it
            self._ending = Ending(stop=Stop.SIGNAL, terminate_s=None, kill_s=now, number=number)
        elif number in _ENDING:
            self._ending = Ending(stop=Stop.SIGNAL, terminate_s=None, kill_s=now + self._grace_s, number=number)

    def _begin_ending(self, stop: Stop, now: float, number: signal.Signals) -> None:
        for child in self._running:
            child.end(number)
        self._ending = Ending(stop=stop, terminate_s=None, kill_s=now + self._grace_s)

    def _carry_out(self, now: float) -> None:
        ending = self._ending
        if ending is None:
            return
        if ending.terminate_unjoined_s is not None and now > ending.terminate_unjoined_s:
            for child in self._running:
                if not has_reached(self._folder, child.process, Reached.JOINED):
                    child.end(signal.SIGTERM)
            self._ending = ending = dataclasses.replace(ending, terminate_unjoined_s=None)
        if ending.terminate_s is not None and now > ending.terminate_s:
            for child in self._running:
                child.end(signal.SIGKILL if child.stopped_s() else signal.SIGTERM)
            self._ending = dataclasses.replace(ending, terminate_s=None)
        elif now > ending.kill_s:
            for child in self._running:
                child.end(signal.SIGKILL)

    def _outcome(self, count: int) -> Outcome:
        ended = list(self.ended.values())
        error = first_error(ended)
        stop = self._ending.stop if self._ending is not None else Stop.DONE
        failed = [e for e in ended if e.code != 0 and not e.by_launcher and not is_follower(e)]
        code = error.code if error is not None else 0
        if code == 0 and self._ending is not None and any(e.by_launcher for e in ended):
            code = 128 + self._ending.number  # the signal came, and they did not end of it
        stepped, joined, has_checkpoint = (
            any(has_reached(self._folder, process, reached) for process in self.ended)
            for reached in (Reached.STEPPED, Reached.JOINED, Reached.CHECKPOINT)
        )
        return Outcome(
            stop=stop,
            processes=count,
            code=code,
            stepped=stepped,
            # A process that is alone does not say that a step has ended; until its number changed it made some.
            is_lost=not has_checkpoint and (stepped or (joined and stop is Stop.RESIZE)),
            is_cause=error is not None and error.printed_by == error.process,
            not_started=sum(not has_reached(self._folder, e.process, Reached.JOINED) for e in failed),
        )


# One of several hosts: its launcher asks that of node rank 0 what comes next.

_AGAIN_S = 0.2
LEADER_IS_LOST = 1


class SeveralHosts:
    """This host among others; on node rank 0 with the leader of all. `say` tells the user."""

    def __init__(
        self, coordinator: str, nodes: int, node: int, processes: int, policy: Policy, say: Callable[[str], object]
    ) -> None:
        self._coordinator, self._node, self._policy, self._say = coordinator, node, policy, say
        self._offer = processes
        self._leader = Leader(coordinator, nodes, policy) if node == 0 else None
        self._connection: socket.socket | None = None
        self._unread = b""
        self._end: str | None = None

    def next(self, outcome: Outcome | None, is_interrupted: Callable[[], bool]) -> Start | int | None:
        self._end = None
        if outcome is not None and self._policy.elastic is not None:
            # Process 0 runs on node rank 0, at whose address the others meet.
            self._offer = max(int(self._node == 0), self._offer - outcome.not_started)
        try:
            if self._connection is None and not self._connect(is_interrupted):
                return None
            assert self._connection is not None, "connected"
            host = own_address_towards(*host_and_port(self._coordinator))
            send(self._connection, {"node": self._node, "host": host, "offer": self._offer, "outcome": outcome})
            while not is_interrupted():
                for message in self._messages(_AGAIN_S):
                    if (found := self._read(message)) is not None:
                        return found
        except OSError as error:
            self._say(f"the launcher of node 0 is not there at {self._coordinator} ({error.strerror or error})")
            return LEADER_IS_LOST
        return None

    def asked_to_end(self) -> str | None:
        with contextlib.suppress(OSError):  # its loss is found at the next start
            for message in self._messages(0.0):
                self._read(message)
        return self._end

    def close(self) -> None:
        if self._leader is not None:
            time.sleep(_AGAIN_S)  # what it has said may still be on its way
            self._leader.close()
        if self._connection is not None:
            self._connection.close()

    def _connect(self, is_interrupted: Callable[[], bool]) -> bool:
        """False where `is_interrupted` came first. Raises: OSError."""
        deadline = time.monotonic() + JOIN_S
        while not is_interrupted():
            try:
                self._connection = socket.create_connection(host_and_port(self._coordinator), timeout=_AGAIN_S * 10)
                keep_alive(self._connection)
                return True
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)
        return False

    def _messages(self, timeout_s: float) -> list[dict[str, Any]]:
        """What has come from the leader. Raises: OSError where it is gone."""
        assert self._connection is not None, "connected"
        self._connection.settimeout(timeout_s)
        try:
            data = self._connection.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return []
        if not data:
            raise ConnectionResetError("it has closed its connection")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _read(self, message: dict[str, Any]) -> Start | int | None:
        if "start" in message:
            return Start(placement=msgspec.convert(message["start"], Placement), delay_s=float(message["delay_s"]))
        if "stop" in message:
            if "why" in message:
                self._say(str(message["why"]))
            return int(message["stop"])
        if "refused" in message:
            raise OSError(f"it refuses this host: {message['refused']}")
        self._end = str(message["end"])
        return None


WRONG_ARGUMENTS = 2
WITHOUT_CHECKPOINT = (
    "neither autopar nor orbax has saved or restored a checkpoint: unless the script saves by itself, it begins at its "
    "first step again (autopar.checkpoint.Checkpointer)"
)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(options: Options) -> int:
    """Runs the program until it has ended for good, and returns the exit code of the launcher."""
    tagger, signals = Tagger(), _receive_signals()
    hosts = _hosts(options, tagger)
    try:
        return _launch(options, hosts, tagger, signals)
    finally:
        hosts.close()


def _launch(options: Options, hosts: Hosts, tagger: Tagger, signals: deque[signal.Signals]) -> int:
    outcome: Outcome | None = None
    has_said = False
    while True:
        start = hosts.next(outcome, lambda: bool(signals))
        if isinstance(start, int):
            return start
        if start is not None and outcome is not None:
            count, delay_s = start.placement.num_processes, start.delay_s
            tagger.say(f"starts {count} processes again in {delay_s:.0f} s (restart {start.placement.restart})")
            if outcome.is_lost and not has_said:
                has_said = True
                tagger.say(WITHOUT_CHECKPOINT)
        if start is not None:
            _wait(start.delay_s, signals)
        if (number := _ending_signal(signals)) is not None:
            return 128 + number
        if start is not None:
            try:
                outcome = _start(options, start.placement, hosts, tagger, signals)
            except ValueError as error:  # too few GPUs
                tagger.say(str(error))
                return WRONG_ARGUMENTS


def _hosts(options: Options, tagger: Tagger) -> Hosts:
    if options.nodes == 1:
        return OneHost(options.processes, options.policy, options.size_file, tagger.say)
    assert options.coordinator is not None, "checked with the arguments"
    return SeveralHosts(
        options.coordinator, options.nodes, options.node_rank, options.processes, options.policy, tagger.say
    )


def _start(
    options: Options, placement: Placement, hosts: Hosts, tagger: Tagger, signals: deque[signal.Signals]
) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="autopar-launch-", ignore_cleanup_errors=True) as folder:
        start = OneStart(options, placement, Path(folder), tagger)
        outcome = start.run(signals, hosts.asked_to_end)
    error = first_error(list(start.ended.values()))
    if error is not None and outcome.stop is Stop.FAILED:
        for line in report(error, list(start.ended.values())):
            tagger.say(line)
    return outcome


def _receive_signals() -> deque[signal.Signals]:
    signals: deque[signal.Signals] = deque()

    def receive(number: int, _: FrameType | None) -> None:
        signals.append(signal.Signals(number))

    for number in _PASSED_ON:
        signal.signal(number, receive)
    return signals


def _wait(delay_s: float, signals: deque[signal.Signals]) -> None:
    end_s = time.monotonic() + delay_s
    while time.monotonic() < end_s and not signals:
        time.sleep(0.05)


def _ending_signal(signals: deque[signal.Signals]) -> int | None:
    """The number of a signal that ends the launcher between two starts; the others have nobody to go to."""
    ending = [s for s in signals if s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    signals.clear()
    return int(ending[0]) if ending else None
