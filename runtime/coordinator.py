"""The coordination service in process 0: a roll call before JAX joins the processes, and a relay that outlives process
0.

The roll call names a missing or lost process. JAX ends a process with only a C++ stack trace when another one does not
come. So process 0 first listens at the address of the coordination service itself. Every other process connects and
sends its number. When all have connected, all are informed, and process 0 releases the address to JAX. The connections
stay open until JAX has joined the processes: both ends send a sign of life each second, and process 0 tells all which
process is lost.

The relay lies between JAX and the service. JAX's client ends its process, with only a C++ stack trace, as soon as its
connection to the service breaks; no option prevents this (`missed_heartbeat_callback` ends in `std::bad_cast`, jaxlib
0.10 to 0.12). So JAX connects to a relay in its own process instead. When process 0 is lost, the relay keeps JAX's end
open and silent, and reports the loss: Python then has the time to name process 0 and to end.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable

_BEAT_S = 1.0
_SILENT_S = 20.0
_HELLO = "autopar.distributed"


class RollCall:
    """The meeting, as one process sees it. `lost` is (process, what is known) of the first that is lost."""

    def __init__(self, process: int, num_processes: int, address: str, timeout_s: float) -> None:
        self._process, self._num_processes, self._address = process, num_processes, _host_and_port(address)
        self._timeout_s = timeout_s
        self._ends: dict[int, socket.socket] = {}
        self._all_here, self._closed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self.lost: tuple[int, str] | None = None
        self._lost_at = 0.0
        self._on_lost: list[Callable[[], None]] = []

    def hold(self) -> None:
        """Returns when all are here, or `lost` says who is not."""
        deadline = time.monotonic() + self._timeout_s
        if self._process == 0:
            self._listen(deadline)
        else:
            self._connect(deadline)

    def when_lost(self, call: Callable[[], None]) -> None:
        """Calls `call`, in another thread, when a process goes before `close`."""
        self._on_lost.append(call)
        if self.lost is not None:
            call()

    def close(self) -> None:
        """Ends the meeting: jax has joined the processes."""
        self._closed.set()
        for end in self._ends.values():
            _say(end, "bye")
            end.close()

    # Process 0

    def _listen(self, deadline: float) -> None:
        host, port = self._address
        any_host = host in ("", "::")
        family = socket.AF_INET6 if any_host and socket.has_dualstack_ipv6() else socket.AF_INET
        both = family == socket.AF_INET6
        where = ("" if any_host else host, port)
        with socket.create_server(where, family=family, dualstack_ipv6=both, backlog=self._num_processes) as server:
            server.settimeout(0.2)
            while len(self._ends) < self._num_processes - 1:
                if self.lost is not None:  # who comes now is told, and not left to wait for this process
                    deadline = min(deadline, self._lost_at + _SILENT_S)
                missing = sorted(set(range(1, self._num_processes)) - set(self._ends))
                if time.monotonic() > deadline:
                    others = f", nor have {', '.join(map(str, missing[1:]))}" if missing[1:] else ""
                    self._lose(missing[0], f"has not come within {self._timeout_s:.0f} s{others}")
                    return
                with contextlib.suppress(TimeoutError):
                    end, _ = server.accept()
                    _begin(functools.partial(self._welcome, end))
        if self.lost is None:
            for end in list(self._ends.values()):
                _say(end, "all")
        self._all_here.set()

    def _welcome(self, end: socket.socket) -> None:
        end.settimeout(_SILENT_S)
        with contextlib.suppress(OSError, ValueError), end.makefile("r") as lines:
            hello, number = lines.readline().split()
            if hello != _HELLO:
                return
            process = int(number)
            with self._lock:
                self._ends[process] = end
                lost = self.lost
            if lost is not None:
                _say(end, f"lost {lost[0]} {lost[1]}")
            _begin(functools.partial(self._beat, end))
            self._read(process, lines)

    # All

    def _connect(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                end = socket.create_connection(self._address, timeout=5.0)
            except OSError:
                time.sleep(0.2)  # process 0 has not begun
                continue
            end.settimeout(_SILENT_S)
            _say(end, f"{_HELLO} {self._process}")
            self._ends[0] = end
            _begin(functools.partial(self._beat, end))
            _begin(functools.partial(self._follow, end))
            while not self._all_here.wait(0.1):
                if self.lost is not None:
                    return
                if time.monotonic() > deadline + _SILENT_S:  # process 0 says sooner who has not come
                    break
            else:
                return
        self._lose(0, f"has not been reached at {':'.join(map(str, self._address))} within {self._timeout_s:.0f} s")

    def _follow(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError), end.makefile("r") as lines:
            self._read(0, lines)

    def _read(self, process: int, lines: object) -> None:
        """Reads what the other end says until it is done."""
        why = "has closed its connection"
        try:
            for line in lines:  # type: ignore[attr-defined]
                word, _, rest = line.strip().partition(" ")
                if word == "all":
                    self._all_here.set()
                elif word == "lost":
                    number, _, text = rest.partition(" ")
                    if int(number) != self._process:
                        self._lose(int(number), text)
                    return
                elif word == "bye":
                    return
        except TimeoutError:
            why = f"has shown no sign of life for {_SILENT_S:.0f} s"
        except OSError as error:
            why = f"has closed its connection ({error.strerror or error})"
        self._lose(process, why)

    def _beat(self, end: socket.socket) -> None:
        while not self._closed.wait(_BEAT_S):
            if not _say(end, "here"):
                return

    def _lose(self, process: int, text: str) -> None:
        with self._lock:
            if self.lost is not None or self._closed.is_set():
                return
            self.lost, self._lost_at = (process, text), time.monotonic()
            ends = list(self._ends.items())
        if self._process == 0:
            for number, end in ends:
                if number != process:
                    _say(end, f"lost {process} {text}")
        for call in self._on_lost:
            call()


def _host_and_port(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _say(end: socket.socket, line: str) -> bool:
    try:
        end.sendall(f"{line}\n".encode())
    except OSError:
        return False
    return True


_AGAIN_S = 0.001
_CLOSING_S = 2.0  # after the service has closed a connection: what jax takes to close its end too, when all is well


class CoordinatorLink:
    """Relays connections to `address`, host:port; jax connects to `self.address`. `lost` says why the other is gone."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._service = host.strip("[]"), int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.was_up = False
        self.lost: str | None = None
        self._on_lost: list[Callable[[], None]] = []
        _begin(self._accept)

    def when_lost(self, call: Callable[[], None]) -> None:
        """Calls `call`, in another thread, when the service is gone."""
        self._on_lost.append(call)
        if self.lost is not None:
            call()

    def _accept(self) -> None:
        while True:
            ours, _ = self._server.accept()
            try:
                theirs = socket.create_connection(self._service, timeout=10.0)
            except OSError as error:
                if self.was_up:
                    self._lose(f"takes no connections any more ({error.strerror or error})", ours)
                else:
                    ours.close()  # jax tries again until the service is up
                continue
            for end in (ours, theirs):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            closed = threading.Event()
            for relay in (self._from_jax, self._from_service):
                _begin(functools.partial(relay, ours, theirs, closed))

    def _from_jax(self, ours: socket.socket, theirs: socket.socket, closed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := ours.recv(1 << 16):
                with contextlib.suppress(OSError):  # to a service that is gone: jax hears nothing of it
                    theirs.sendall(data)
        closed.set()
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)
        theirs.close()
        ours.close()

    def _from_service(self, ours: socket.socket, theirs: socket.socket, closed: threading.Event) -> None:
        why = "has closed its connection"
        try:
            while data := theirs.recv(1 << 16):
                self.was_up = True
                ours.sendall(data)
        except OSError as error:
            why = f"has closed its connection ({error.strerror or error})"
        if closed.wait(_CLOSING_S):
            return
        if not self.was_up:
            ours.close()
            return
        self._lose(why, ours)

    def _lose(self, why: str, kept_open: socket.socket) -> None:
        _kept_open.append(kept_open)
        if self.lost is None:
            self.lost = why
            for call in self._on_lost:
                call()


def when_service_goes(address: str, call: Callable[[str], None]) -> None:
    """Calls `call` with what is known when nobody listens at `address` any more, in another thread.

    For a client that is connected to the service itself: it ends its process about a hundredth of a second later, which
    is enough to say why.
    """
    host, port = address.rsplit(":", 1)

    def look() -> None:
        while True:
            try:
                with socket.create_connection((host.strip("[]"), int(port)), timeout=10.0) as end:
                    end.settimeout(None)
                    while end.recv(1 << 12):
                        pass  # the service says what it expects, and closes the connection after a while
            except ConnectionRefusedError as error:
                call(f"takes no connections any more ({error.strerror or error})")
                return
            except OSError:
                pass
            time.sleep(_AGAIN_S)

    _begin(look)


_kept_open: list[socket.socket] = []  # until this process ends


def _begin(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="autopar link to process 0", daemon=True).start()
