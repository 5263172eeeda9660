"""A local relay between JAX and the coordination service in process 0, which outlives process 0.

JAX's client ends its process, with only a C++ stack trace, as soon as its connection to the service breaks; no option
prevents this (`missed_heartbeat_callback` ends in `std::bad_cast`, jaxlib 0.10 to 0.12). So JAX connects to a relay in
its own process instead. When process 0 is lost, the relay keeps JAX's end open and silent, and reports the loss: Python
then has the time to name process 0 and to end.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable

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
        _thread(self._accept)

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
                _thread(functools.partial(relay, ours, theirs, closed))

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

    _thread(look)


_kept_open: list[socket.socket] = []  # until this process ends


def _thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="autopar link to process 0", daemon=True).start()
