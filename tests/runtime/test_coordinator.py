"""The relay between jax and the coordination service: it stays open when the service goes, and says so."""

import contextlib
import socket
import time
from collections.abc import Callable

import pytest

from autopar.runtime.coordinator import CoordinatorLink


def wait_for(happens: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def linked():
    """(link, jax's end, the service's end)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = CoordinatorLink(f"127.0.0.1:{server.getsockname()[1]}")
        host, port = link.address.split(":")
        client = socket.create_connection((host, int(port)))
        service, _ = server.accept()
        for end in (client, service):
            end.settimeout(5.0)
        with client, service:
            yield link, client, service


def test_both_ends_hear_each_other(linked):
    _, client, service = linked
    client.sendall(b"question")
    assert service.recv(100) == b"question"
    service.sendall(b"answer")
    assert client.recv(100) == b"answer"


def test_the_client_hears_nothing_when_the_service_goes(linked):
    link, client, service = linked
    told = []
    link.when_lost(lambda: told.append(link.lost))
    service.sendall(b"hello")
    assert client.recv(100) == b"hello"
    service.close()
    wait_for(lambda: bool(told))
    assert told == ["has closed its connection"]
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(100)
    client.sendall(b"still open")


def test_nothing_is_lost_where_the_client_closes(linked):
    link, client, service = linked
    service.sendall(b"hello")
    assert client.recv(100) == b"hello"
    client.close()
    assert service.recv(100) == b""
    service.close()
    time.sleep(0.3)
    assert link.lost is None


def test_a_service_that_is_not_there_yet_is_tried_again():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    link = CoordinatorLink(f"127.0.0.1:{port}")
    where = "127.0.0.1", int(link.address.split(":")[1])
    with socket.create_connection(where, timeout=5.0) as client, contextlib.suppress(ConnectionError):
        assert client.recv(10) == b""
    assert link.lost is None
