"""Several hosts: the launcher of node rank 0 gathers the others, and decides on each start for all of them.

A launcher connects, and says in a line of JSON how many processes it has room for and how its last ones ended. When
all are there, each is told its next start, or its exit code. Where hosts are missing the others wait for `JOIN_S`; with
`--elastic` they go on without them as soon as there are enough processes, and a host that comes later makes all start
again with it. The launcher of node rank 0 is not to be lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autopar.train.launch.placement import Placement, address, free_ports, host_and_port, is_loopback
from autopar.train.launch.restart_policy import Again, Outcome, Policy, Stop, next_start, why_not_again

JOIN_S = 300.0
ELASTIC_JOIN_S = 20.0  # so long for more hosts than are needed
MOST_MESSAGE_BYTES = 1 << 16
_POLL_S = 0.1


def enough(offers: Mapping[int, int], nodes: int, policy: Policy, waited_s: float) -> bool | None:
    """Whether the processes can start on the hosts that are there, by node rank; None: never any more."""
    if len(offers) == nodes:
        return True if policy.elastic is None or sum(offers.values()) >= policy.elastic[0] else None
    if policy.elastic is not None and sum(offers.values()) >= policy.elastic[0] and waited_s > ELASTIC_JOIN_S:
        return True
    return None if waited_s > JOIN_S else False


def placements(
    offers: Mapping[int, int], hosts: Mapping[int, str], total: int, restart: int, coordinator: str
) -> dict[int, Placement]:
    """The part of each host, in the order of node ranks; the last ones have fewer where there is more room."""
    found, first = {}, 0
    for node, offer in sorted(offers.items()):
        here = min(offer, total - first)
        found[node] = Placement(
            restart=restart,
            first_process=first,
            processes=here,
            num_processes=total,
            coordinator=coordinator,
            host=hosts[node],
        )
        first += here
    return found


def merged(outcomes: Sequence[Outcome], policy: Policy) -> Outcome:
    """How a start ended on all hosts. A host that somebody ends leaves the others, where there may be fewer."""
    ran = [outcome for outcome in outcomes if outcome.processes] or list(outcomes)
    stops = {outcome.stop for outcome in ran}
    order = (Stop.SIGNAL, Stop.FAILED, Stop.RESIZE, Stop.DONE)
    stop = next(s for s in order if s in stops)
    if stop is Stop.SIGNAL and policy.elastic is not None:
        stop = Stop.RESIZE
    failed = sorted((o for o in ran if o.stop is stop and o.code), key=lambda o: not o.is_cause)
    return Outcome(
        stop=stop,
        processes=sum(outcome.processes for outcome in ran),
        code=failed[0].code if failed else 0,
        stepped=any(outcome.stepped for outcome in ran),
    )


@dataclasses.dataclass(kw_only=True)
class _Member:
    """A host as the leader sees it. `offer` is None until it is ready for the next start."""

    node: int
    host: str
    connection: socket.socket
    offer: int | None = None
    outcome: Outcome | None = None
    runs: bool = False


class Leader:
    """Gathers the launchers, in a thread."""

    def __init__(self, coordinator: str, nodes: int, policy: Policy) -> None:
        self._nodes, self._policy = nodes, policy
        self._host, port = host_and_port(coordinator)
        self._members: dict[int, _Member] = {}
        self._outcomes: list[Outcome] = []
        self._ended: list[Outcome] = []  # of the present start, of hosts that are gone
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._has_stopped = threading.Event()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._server = socket.create_server((_bound(self._host), port), family=family, backlog=nodes)
        for run in (self._accept, self._decide_again):
            threading.Thread(target=run, name="autopar rendezvous", daemon=True).start()

    def close(self) -> None:
        self._has_stopped.set()
        self._server.close()

    def _accept(self) -> None:
        while not self._has_stopped.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            keep_alive(connection)
            threading.Thread(target=self._follow, args=(connection,), name="autopar rendezvous", daemon=True).start()

    def _follow(self, connection: socket.socket) -> None:
        """Reads what a launcher says, until it goes."""
        member: _Member | None = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection.makefile("rb") as lines:
            while line := lines.readline(MOST_MESSAGE_BYTES):
                said = json.loads(line)
                with self._lock:
                    if member is None:
                        member = self._welcome(said, connection)
                        if member is None:
                            break
                    member.offer, member.runs = int(said["offer"]), False
                    member.outcome = msgspec.convert(said["outcome"], Outcome | None)
        connection.close()
        with self._lock:
            if member is not None and self._members.get(member.node) is member:
                del self._members[member.node]
                self._since = time.monotonic()
                if member.outcome is not None and member.offer is not None:
                    self._ended.append(member.outcome)

    def _welcome(self, said: dict[str, Any], connection: socket.socket) -> _Member | None:
        node = int(said["node"])
        if not 0 <= node < self._nodes or node in self._members:
            why = f"node rank {node} is there already" if node in self._members else f"there are {self._nodes} nodes"
            send(connection, {"refused": why})
            return None
        self._members[node] = member = _Member(node=node, host=str(said["host"]), connection=connection)
        if self._policy.elastic is not None:
            for other in self._members.values():
                if other.runs:
                    send(other.connection, {"end": f"node {node} has come"})
        return member

    def _decide_again(self) -> None:
        while not self._has_stopped.wait(_POLL_S):
            with self._lock:
                self._decide()

    def _decide(self) -> None:
        members = self._members
        if not members or 0 not in members or any(m.offer is None or m.runs for m in members.values()):
            return
        outcomes = [m.outcome for m in members.values() if m.outcome is not None] + self._ended
        delay_s, total = 0.0, sum(m.offer or 0 for m in members.values())
        following: Again | int | None = None
        if outcomes:
            last = merged(outcomes, self._policy)
            requested = self._policy.clamped(total) if self._policy.elastic is not None else None
            following = next_start(self._policy, [*self._outcomes, last], requested)
            if isinstance(following, int):
                why = why_not_again(self._policy, merged(outcomes, self._policy))
                self._tell_all({"stop": following} | ({"why": why} if why else {}))
                return
        leaving = [m for m in members.values() if m.outcome is not None and m.outcome.stop is Stop.SIGNAL]
        for m in leaving:  # the others go on without it
            assert m.outcome is not None, "it has one"
            send(m.connection, {"stop": m.outcome.code})
            del members[m.node]
            self._ended.append(m.outcome)
            self._since = time.monotonic()
        offers = {m.node: m.offer or 0 for m in members.values()}
        ready = enough(offers, self._nodes, self._policy, time.monotonic() - self._since)
        if ready is None:
            missing = sorted(set(range(self._nodes)) - set(offers))
            why = f"nodes {missing} have not come within {JOIN_S:.0f} s"
            if not missing:
                why = f"the hosts have room for {sum(offers.values())} processes, fewer than --elastic asks for"
            code = merged(outcomes, self._policy).code if outcomes else 0
            self._tell_all({"stop": code or 1, "why": why})
        elif ready and 0 in offers:
            if outcomes:
                self._outcomes.append(merged(outcomes, self._policy))
            self._ended = []
            if isinstance(following, Again):
                delay_s, total = following.delay_s, min(following.processes, sum(offers.values()))
            elif self._policy.elastic is not None:
                total = min(sum(offers.values()), self._policy.elastic[1])
            self._begin(offers, total, delay_s)

    def _begin(self, offers: Mapping[int, int], total: int, delay_s: float) -> None:
        coordinator = address(self._host, free_ports(1, _bound(self._host))[0])
        hosts = {node: member.host for node, member in self._members.items()}
        restart = len(self._outcomes)
        for node, placement in placements(offers, hosts, total, restart, coordinator).items():
            member = self._members[node]
            member.offer, member.outcome, member.runs = None, None, True
            send(member.connection, {"start": placement, "delay_s": delay_s})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for member in self._members.values():
            send(member.connection, message)
        self._has_stopped.set()


def keep_alive(connection: socket.socket) -> None:
    """Lets the loss of a host that says nothing more (power, network) be noticed, within half a minute."""
    options = {"SO_KEEPALIVE": (socket.SOL_SOCKET, 1)}
    options |= {"TCP_KEEPIDLE": (socket.IPPROTO_TCP, 10), "TCP_KEEPINTVL": (socket.IPPROTO_TCP, 5)}
    options["TCP_KEEPCNT"] = (socket.IPPROTO_TCP, 3)
    for name, (level, value) in options.items():
        if hasattr(socket, name):  # some are Linux's
            connection.setsockopt(level, getattr(socket, name), value)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """A launcher that is gone is noticed where its messages are read."""
    with contextlib.suppress(OSError):
        connection.sendall(msgspec.json.encode(message) + b"\n")


def _bound(host: str) -> str:
    """Where to listen to be reached at a host: an address of its own, or all of them where it is a name."""
    if host == "localhost":
        return "127.0.0.1"
    is_address = ":" in host or host.replace(".", "").isdigit()
    return host if is_address or is_loopback(host) else ""
