"""Processes that are killed or stopped: the others end with an error that names them."""

import socket
import threading
from pathlib import Path

import pytest

from autopar.runtime.coordinator import RollCall
from tests.in_processes import free_ports
from tests.runtime.lost_program import Case, run
from tests.runtime.test_coordinator import wait_for


def meeting(num_processes: int, present: list[int], timeout_s: float) -> list[RollCall]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    calls = [RollCall(process, num_processes, address, timeout_s) for process in present]
    threads = [threading.Thread(target=call.hold, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 5.0)
        assert not thread.is_alive()
    return calls


def test_a_roll_call_ends_when_all_are_here():
    calls = meeting(3, [0, 1, 2], 20.0)
    assert [call.lost for call in calls] == [None] * 3
    for call in calls:
        call.close()


def test_a_process_that_does_not_come_is_named_by_all():
    for call in meeting(4, [0, 2], 1.0):
        assert call.lost == (1, "has not come within 1 s, nor have 3")


def test_process_0_is_named_where_nobody_listens():
    (call,) = meeting(2, [1], 1.0)
    assert call.lost is not None
    assert call.lost[0] == 0
    assert "has not been reached at 127.0.0.1:" in call.lost[1]


def test_a_process_that_goes_while_jax_joins_them_is_named_by_all():
    first, second, third = meeting(3, [0, 1, 2], 20.0)
    second._ends[0].shutdown(socket.SHUT_RDWR)  # as the end of a process does
    wait_for(lambda: first.lost is not None and third.lost is not None)
    assert first.lost == third.lost == (1, "has closed its connection")


def test_a_process_that_comes_after_another_was_lost_is_told_which():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    first, second, late = (RollCall(process, 3, address, 20.0) for process in range(3))
    threads = [threading.Thread(target=call.hold, daemon=True) for call in (first, second)]
    for thread in threads:
        thread.start()
    wait_for(lambda: 1 in first._ends and 0 in second._ends)
    second._ends[0].shutdown(socket.SHUT_RDWR)
    wait_for(lambda: first.lost is not None)
    late.hold()
    assert first.lost == late.lost == (1, "has closed its connection")
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "signal", "phase", "after_s", "said"),
    [
        (0, "SIGKILL", "starts", 0.1, "has not been reached"),
        (1, "SIGKILL", "starts", 0.1, "has not come within"),
        (0, "SIGKILL", "first step", 2.0, "has closed its connection"),
        (0, "SIGSTOP", "first step", 2.0, "has not answered for"),
        (0, "SIGKILL", "step 5", 0.5, "has closed its connection"),
        (1, "SIGKILL", "step 5", 0.5, "has shown no sign of life"),
        (1, "SIGSTOP", "step 1", 0.1, "has shown no sign of life"),
    ],
)
def test_the_others_end_within_a_minute_with_its_name(tmp_path: Path, victim, signal, phase, after_s, said):
    case = Case(processes=2, stages=2, victim=victim, signal=signal, phase=phase, after_s=after_s)
    found = run(case, tmp_path)
    assert found is not None
    for ended in found[1]:
        assert said in ended.error, (tmp_path / f"log{1 - victim}").read_text()[-3000:]
        assert ended.seconds < 60.0
        assert ended.code == 1
