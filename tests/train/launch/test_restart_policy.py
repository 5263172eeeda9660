"""Whether processes start again, how many and how soon, and what is made of the size file of --elastic."""

import pytest

from autopar.train.launch.restart_policy import (
    Again,
    OneHost,
    Outcome,
    Policy,
    SizeFile,
    Stop,
    Wanted,
    backoff_s,
    next_start,
    why_not_again,
)


def failed(processes: int = 4, *, stepped: bool = True, not_started: int = 0, code: int = 9) -> Outcome:
    return Outcome(stop=Stop.FAILED, processes=processes, code=code, stepped=stepped, not_started=not_started)


def test_all_is_done():
    assert next_start(Policy(restarts=3), [failed(), Outcome(stop=Stop.DONE, processes=4)], None) == 0


def test_a_failure_without_restarts_keeps_its_code():
    assert next_start(Policy(), [failed()], None) == 9


def test_restarts_are_counted():
    assert next_start(Policy(restarts=2), [failed()] * 2, None) == Again(processes=4, delay_s=1.0)
    assert next_start(Policy(restarts=2), [failed()] * 3, None) == 9


def test_the_end_of_the_restarts_is_said():
    used_up = "the restarts are used up (--restarts 2): ends with exit code 9"
    assert why_not_again(Policy(restarts=2), failed()) == used_up
    assert why_not_again(Policy(), failed()) == ""
    assert why_not_again(Policy(restarts=2), Outcome(stop=Stop.DONE, processes=4)) == ""


def test_a_signal_ends_the_launcher_too():
    assert next_start(Policy(restarts=2), [Outcome(stop=Stop.SIGNAL, processes=4, code=143)], None) == 143


def test_another_number_counts_as_no_failure():
    policy = Policy(restarts=1, elastic=(2, 4))
    resize = Outcome(stop=Stop.RESIZE, processes=4)
    assert next_start(policy, [resize], 2) == Again(processes=2, delay_s=0.0)
    assert next_start(policy, [resize, resize, failed(2)], 4) == Again(processes=4, delay_s=1.0)


@pytest.mark.parametrize(("not_started", "processes"), [(0, 4), (1, 3), (2, 2), (3, 2)])
def test_processes_that_did_not_start_are_left_out(not_started, processes):
    policy = Policy(restarts=1, elastic=(2, 4))
    again = next_start(policy, [failed(stepped=False, not_started=not_started)], None)
    assert again == Again(processes=processes, delay_s=1.0)


def test_without_elastic_the_number_stays():
    assert next_start(Policy(restarts=1), [failed(not_started=1)], 2) == Again(processes=4, delay_s=1.0)


def test_a_number_that_is_asked_for_is_kept_within_its_limits():
    policy = Policy(elastic=(2, 4))
    assert [policy.clamped(n) for n in (-1, 2, 3, 9)] == [2, 2, 3, 4]


def test_the_delay_doubles_until_a_step_has_ended_and_is_bounded():
    quick = failed(stepped=False)
    assert [backoff_s([quick] * n) for n in (1, 2, 3, 4, 20)] == [1.0, 2.0, 4.0, 8.0, 60.0]
    assert backoff_s([quick, quick, failed()]) == 1.0
    assert backoff_s([quick, failed(), quick, quick]) == 2.0


POLICY = Policy(elastic=(1, 3))
STAYS = "; expected a number of processes, such as 2: it stays at 2"


def looks(path, times=3):
    """What is wanted at the last of several looks, and what was said, without the name of the file."""
    said = []
    size = SizeFile(path, POLICY, said.append)
    wanted = [size.wanted(2) for _ in range(times)][-1]
    return wanted, [text.removeprefix(f"--size-file {path}: ") for text in said]


@pytest.mark.parametrize("data", [b"3", b" 3\n", b"+3"])
def test_a_number_is_taken_in_silence(tmp_path, data):
    (tmp_path / "size").write_bytes(data)
    assert looks(tmp_path / "size") == (Wanted(processes=3), [])


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (b"rubbish", "'rubbish'"),
        (b"2.5", "'2.5'"),
        (b"1 2", "'1 2'"),
        (b"0x2", "'0x2'"),
        (b"", "''"),
        (b"\xff\x00", r"'\\xff\x00'"),
    ],
    ids=repr,
)
def test_what_is_no_number_is_said_once(tmp_path, data, read):
    (tmp_path / "size").write_bytes(data)
    assert looks(tmp_path / "size") == (None, [f"read {read}{STAYS}"])
    assert looks(tmp_path / "size", times=1) == (None, [])  # it may just be being written


def test_what_cannot_be_read_is_said_once(tmp_path):
    assert looks(tmp_path) == (None, [f"it cannot be read (Is a directory){STAYS}"])
    assert looks(tmp_path / "none" / "size") == (None, [f"there is no folder {tmp_path / 'none'}{STAYS}"])
    assert looks(tmp_path / "size") == (None, [])  # it may come


def test_a_number_outside_of_the_limits_names_them(tmp_path):
    path = tmp_path / "size"
    host = OneHost(3, POLICY, path, print)
    path.write_text("-1")
    assert host.asked_to_end() == "-1 are asked for, and --elastic allows 1 to 3: 1 instead of 3 processes"
    path.write_text("2")
    assert host.asked_to_end() == "2 are asked for instead of 3 processes"
    said = []
    path.write_text("99")
    host = OneHost(3, POLICY, path, said.append)
    assert [host.asked_to_end() for _ in range(3)] == [None] * 3
    assert said == [f"--size-file {path}: 99 are asked for, and --elastic allows 1 to 3: it stays at 3"]
