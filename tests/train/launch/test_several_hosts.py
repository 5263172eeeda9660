"""Several hosts that start together: decisions as plain functions, and real launchers that meet on this host."""

import signal
import textwrap
from pathlib import Path

import pytest

from autopar.train.launch.placement import LOOPBACK, free_ports
from autopar.train.launch.rendezvous import (
    ELASTIC_JOIN_S,
    JOIN_S,
    enough,
    merged,
    placements,
)
from autopar.train.launch.restart_policy import Outcome, Policy, Stop
from tests.train.launch.launching import Launcher, launch, wait_for

ELASTIC = Policy(restarts=1, elastic=(2, 8))


def test_all_hosts_are_waited_for():
    assert enough({0: 2, 1: 2}, 2, Policy(), 0.0) is True
    assert enough({0: 2}, 2, Policy(), JOIN_S - 1.0) is False
    assert enough({0: 2}, 2, Policy(), JOIN_S + 1.0) is None


def test_elastic_hosts_go_on_without_those_that_do_not_come():
    assert enough({0: 2}, 2, ELASTIC, ELASTIC_JOIN_S - 1.0) is False
    assert enough({0: 2}, 2, ELASTIC, ELASTIC_JOIN_S + 1.0) is True
    assert enough({0: 1}, 2, ELASTIC, ELASTIC_JOIN_S + 1.0) is False
    assert enough({0: 1, 1: 0}, 2, ELASTIC, 0.0) is None  # all are there, with room for fewer than are asked for


def test_processes_are_numbered_by_node_rank():
    found = placements({1: 2, 0: 3}, {0: "a", 1: "b"}, 5, 2, "a:9")
    assert [(p.first_process, p.processes, p.num_processes, p.restart, p.host) for _, p in sorted(found.items())] == [
        (0, 3, 5, 2, "a"),
        (3, 2, 5, 2, "b"),
    ]
    fewer = placements({0: 3, 1: 2, 2: 2}, dict.fromkeys(range(3), "a"), 4, 0, "a:9")
    assert [p.processes for p in fewer.values()] == [3, 1, 0]


def ended(stop: Stop, processes: int = 2, code: int = 0, **more: bool) -> Outcome:
    return Outcome(stop=stop, processes=processes, code=code, **more)


def test_a_start_has_failed_where_it_failed_on_one_host():
    found = merged([ended(Stop.DONE), ended(Stop.FAILED, code=1), ended(Stop.FAILED, code=7, is_cause=True)], Policy())
    assert (found.stop, found.processes, found.code) == (Stop.FAILED, 6, 7)
    assert merged([ended(Stop.DONE), ended(Stop.DONE, stepped=True)], Policy()).stop is Stop.DONE


def test_a_host_that_somebody_ends_ends_all_unless_they_are_elastic():
    outcomes = [ended(Stop.DONE), ended(Stop.SIGNAL, code=143)]
    assert (merged(outcomes, Policy()).stop, merged(outcomes, Policy()).code) == (Stop.SIGNAL, 143)
    assert merged(outcomes, ELASTIC).stop is Stop.RESIZE


SCRIPT = """
    import os, sys, time
    who, count, restart = (int(os.environ[f"AUTOPAR_{name}"]) for name in ("PROCESS_ID", "NUM_PROCESSES", "RESTART"))
    print("is", who, "of", count, "restart", restart, flush=True)
"""


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(text))
        return path

    return write


def node(rank: int, coordinator: str, *arguments: object) -> Launcher:
    return Launcher("--nodes", 2, "--node-rank", rank, "--coordinator", coordinator, "--processes", 2, *arguments)


@pytest.fixture
def coordinator():
    return f"{LOOPBACK}:{free_ports(1)[0]}"


def test_two_hosts_are_one_program(script, coordinator):
    path = script("")
    with node(1, coordinator, path) as second, node(0, coordinator, path) as first:
        assert (first.wait(), second.wait()) == (0, 0)
    assert sorted(first.stdout.splitlines()) == [f"[{i}] is {i} of 4 restart 0" for i in (0, 1)]
    assert sorted(second.stdout.splitlines()) == [f"[{i}] is {i} of 4 restart 0" for i in (2, 3)]


def test_a_failure_on_one_host_starts_all_again(script, coordinator, tmp_path):
    path = script("""
        lost = f"{sys.argv[1]}/lost"
        if restart == 0 and who == 3:
            open(lost, "w").close()
            sys.exit(7)
        while restart == 0:  # as the heartbeat of real processes does
            time.sleep(0.01)
            if os.path.exists(lost):
                sys.exit("ProcessLostError: expected process 3 to take part, got process 3 has ended")
    """)
    with (
        node(0, coordinator, "--restarts", 1, path, tmp_path) as first,
        node(1, coordinator, "--restarts", 1, path, tmp_path) as second,
    ):
        assert (first.wait(), second.wait()) == (0, 0)
    assert "[1] is 1 of 4 restart 1" in first.stdout
    assert "[2] is 2 of 4 restart 1" in second.stdout
    assert "process 3 failed first: exit code 7" in second.stderr


def test_both_launchers_have_the_code_of_the_first_failure(script, coordinator):
    path = script("time.sleep(0.3); sys.exit(7 if who == 2 else 0)")
    with node(0, coordinator, path) as first, node(1, coordinator, path) as second:
        assert (first.wait(), second.wait()) == (7, 7)


def test_a_signal_to_one_launcher_ends_both(script, coordinator):
    path = script("""
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("ready", flush=True)
        until = time.monotonic() + (60 if who > 1 else 1)
        while time.monotonic() < until:
            time.sleep(0.01)
    """)
    with node(0, coordinator, path) as first, node(1, coordinator, path) as second:
        wait_for(lambda: second.stdout.count("ready") == 2)
        second.send(signal.SIGTERM)
        assert (first.wait(), second.wait()) == (0, 0)


def test_a_node_rank_that_is_taken_is_refused(script, coordinator):
    path = script("time.sleep(60)")
    with node(0, coordinator, path), node(1, coordinator, path) as second:
        wait_for(lambda: second.stdout.count("is") == 2)
        ended = launch("--nodes", 2, "--node-rank", 1, "--coordinator", coordinator, path)
    assert (ended.code, "it refuses this host: node rank 1 is there already" in ended.stderr) == (1, True)


@pytest.mark.slow
def test_a_host_that_is_lost_is_left_out_and_taken_in_again(script, coordinator, tmp_path):
    path = script("""
        lost, end = f"{sys.argv[1]}/lost", f"{sys.argv[1]}/end"
        while not os.path.exists(end):
            time.sleep(0.01)
            if count == 4 and restart == 0 and os.path.exists(lost):
                sys.exit("ProcessLostError: expected process 3 to take part, got process 3 has ended")
    """)
    options = ("--restarts", 1, "--elastic", "2:4", path, tmp_path)
    with node(0, coordinator, *options) as first:
        with node(1, coordinator, *options) as second:
            wait_for(lambda: "of 4 restart 0" in first.stdout and "of 4 restart 0" in second.stdout)
            second.send(signal.SIGKILL)
            second.wait()
        (tmp_path / "lost").touch()
        wait_for(lambda: first.stdout.count("of 2 restart 1") == 2, 40.0)
        with node(1, coordinator, *options) as second:
            wait_for(lambda: second.stdout.count("of 4 restart 2") == 2)
            (tmp_path / "end").touch()
            assert (first.wait(), second.wait()) == (0, 0)
