"""One of several hosts: its launcher asks that of node rank 0 what comes next."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from autopar.launch.hosts import Start
from autopar.launch.placement import Placement
from autopar.launch.ports import host_and_port, own_address_towards
from autopar.launch.rendezvous import JOIN_S, Leader, keep_alive, outcome_text, send
from autopar.launch.restart_policy import Outcome, Policy

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
            said = None if outcome is None else outcome_text(outcome)
            send(self._connection, {"node": self._node, "host": host, "offer": self._offer, "outcome": said})
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
            return Start(placement=Placement(**message["start"]), delay_s=float(message["delay_s"]))
        if "stop" in message:
            if "why" in message:
                self._say(str(message["why"]))
            return int(message["stop"])
        if "refused" in message:
            raise OSError(f"it refuses this host: {message['refused']}")
        self._end = str(message["end"])
        return None
