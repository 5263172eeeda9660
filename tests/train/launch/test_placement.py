"""Addresses, devices and variables of the processes of a host."""

import socket

import pytest

from autopar.common.launched import Launched, Reached, has_reached, lost_by_launcher, say_lost, say_reached
from autopar.train.launch.placement import (
    Placement,
    address,
    count_gpus,
    environments,
    free_ports,
    gpus_of,
    host_and_port,
    is_loopback,
    own_address_towards,
)

TWO_OF_FOUR = Placement(
    restart=1, first_process=2, processes=2, num_processes=4, coordinator="10.0.0.1:9001", host="127.0.0.1"
)


def test_what_the_launcher_sets_is_what_a_process_reads(tmp_path):
    launched = Launched(
        coordinator="10.0.0.1:9001",
        num_processes=4,
        process_id=3,
        local_devices=2,
        device_ids=(4, 5),
        transfer_address="10.0.0.2:7000",
        restart=6,
        folder=tmp_path,
    )
    assert Launched.read(launched.variables()) == launched
    least = Launched(coordinator="a:1", num_processes=1, process_id=0)
    assert Launched.read(least.variables()) == least
    assert Launched.read({"HOME": "/"}) is None


def test_processes_of_a_host_have_their_numbers_and_no_variables_of_another_launcher(tmp_path):
    inherited = {"JAX_PLATFORMS": "cpu", "AUTOPAR_LOCAL_DEVICE_IDS": "7", "HOME": "/"}
    first, second = environments(TWO_OF_FOUR, 2, tmp_path, inherited)
    read = [Launched.read(first), Launched.read(second)]
    assert [(r.process_id, r.num_processes, r.local_devices, r.device_ids, r.restart) for r in read if r] == [
        (2, 4, 2, None, 1),
        (3, 4, 2, None, 1),
    ]
    assert first["AUTOPAR_TRANSFER_ADDRESS"] != second["AUTOPAR_TRANSFER_ADDRESS"]
    assert first["HOME"] == "/"


def test_gpus_are_found_without_jax(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({"JAX_PLATFORMS": "cpu"}, tmp_path) == 0
    assert count_gpus({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == 2
    assert count_gpus({}, tmp_path / "nothing") == 0


def test_processes_share_the_gpus_of_their_host():
    assert [gpus_of(i, 2, None, 8) for i in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [gpus_of(i, 3, 1, 8) for i in range(3)] == [(0,), (1,), (2,)]
    assert gpus_of(0, 1, None, 8) is None
    assert gpus_of(0, 1, 2, 8) == (0, 1)
    assert gpus_of(0, 4, 2, 0) is None


@pytest.mark.parametrize(("processes", "each", "needed"), [(2, 5, 10), (9, None, 9)])
def test_too_few_gpus_are_refused(processes, each, needed):
    with pytest.raises(ValueError, match=f"need {needed}, this host has 8"):
        gpus_of(0, processes, each, 8)


def test_addresses():
    assert host_and_port("10.0.0.1:80") == ("10.0.0.1", 80)
    assert host_and_port("[::1]:80") == ("::1", 80)
    assert [address("::1", 80), address("a", 80)] == ["[::1]:80", "a:80"]
    assert [is_loopback(h) for h in ("localhost", "127.0.0.7", "::1", "10.0.0.1", "node1")] == [True] * 3 + [False] * 2
    assert own_address_towards("127.0.0.1", 80) == "127.0.0.1"
    for wrong in ("host", ":80", "host:port"):
        with pytest.raises(ValueError):  # noqa: PT011
            host_and_port(wrong)


def test_free_ports_are_different_and_free():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_the_folder_says_who_is_lost_and_how_far_each_is(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_LAUNCH_FOLDER", str(tmp_path))
    monkeypatch.setenv("AUTOPAR_PROCESS_ID", "3")
    assert lost_by_launcher() is None
    assert not has_reached(tmp_path, 3, Reached.JOINED)
    say_reached(Reached.JOINED)
    assert has_reached(tmp_path, 3, Reached.JOINED)
    assert not has_reached(tmp_path, 3, Reached.STEPPED)
    say_lost(tmp_path, 1, "has ended: exit code 3")
    say_lost(tmp_path, 0, "has ended because of it")
    assert lost_by_launcher() == "1 has ended: exit code 3"
    monkeypatch.delenv("AUTOPAR_LAUNCH_FOLDER")
    assert lost_by_launcher() is None
