"""Which of several processes failed first, from how each ended."""

import dataclasses

import pytest

from autopar.train.launch.supervisor import Ended, first_error, how_it_ended, report, shell_code

TRACEBACK = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: no data")
FOLLOWER = (
    "Traceback (most recent call last):",
    "autopar.errors.ProcessLostError: process 0, step 3: expected process 1 to take part, got process 1 has ended",
    "  hint: look into the log of process 1",
)


def ended(process: int, code: int, time_s: float, *lines: str, **more: bool) -> Ended:
    return Ended(
        process=process, code=code, time_s=time_s, stderr=tuple((time_s - 1.0, line) for line in lines), **more
    )


def test_nothing_failed():
    assert first_error([ended(0, 0, 1.0), ended(1, 0, 2.0)]) is None


def test_who_raised_first_is_first_even_if_it_ended_last():
    """It waits until the others know."""
    found = first_error([ended(0, 1, 8.0, *FOLLOWER), ended(1, 1, 9.0, *TRACEBACK)])
    assert found is not None
    assert (found.process, found.code, found.what, found.lines) == (1, 1, "exit code 1", TRACEBACK)


def test_of_two_that_raised_the_earlier_traceback_counts():
    found = first_error([ended(0, 3, 5.0, *TRACEBACK), ended(1, 4, 4.5, *TRACEBACK)])
    assert found is not None
    assert (found.process, found.code) == (1, 4)


def test_a_killed_process_has_its_last_lines_and_the_code_of_a_shell():
    found = first_error([ended(0, 1, 30.0, *FOLLOWER), ended(1, -9, 2.0, "step 3", "step 4")])
    assert found is not None
    assert (found.process, found.code, found.what, found.lines) == (1, 137, "killed by SIGKILL", ("step 3", "step 4"))


def test_what_was_printed_long_before_a_kill_is_not_its_error():
    old = ((2.0, "Very slow compile?"), *((3.0, line) for line in TRACEBACK))
    killed = Ended(process=1, code=-9, time_s=280.0, stderr=old)
    found = first_error([killed])
    assert found is not None
    assert found.lines == ("(it printed nothing on stderr in the 277 s before)",)
    found = first_error([dataclasses.replace(killed, stderr=(*old, (279.5, "out of memory")))])
    assert found is not None
    assert found.lines == ("out of memory",)
    raised = first_error([dataclasses.replace(killed, code=1)])
    assert raised is not None
    assert raised.lines == ("(printed 277 s before its end)", *TRACEBACK)


def test_another_process_with_an_error_of_its_own_has_it_in_the_report():
    both = [ended(1, 1, 2.0, *TRACEBACK), ended(0, -15, 3.5, *TRACEBACK, by_launcher=True)]
    found = first_error(both)
    assert found is not None
    assert report(found, both)[-1] == (
        "the others: 0 ended by the launcher after an error of its own (ValueError: no data)"
    )


def test_where_all_follow_the_process_that_they_name_is_first():
    """A stopped process, which the launcher ended."""
    found = first_error([ended(0, 1, 30.0, *FOLLOWER), ended(1, -9, 45.0, by_launcher=True)])
    assert found is not None
    assert (found.process, found.code, found.what) == (1, 1, "has ended, says process 0")
    assert report(found, [])[1] == f"  [0] {FOLLOWER[0]}"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (-6, "terminate called after throwing an instance of 'gloo::EnforceNotMet'"),
        (
            1,
            "ValueError: UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error: Connection reset by peer",
        ),
        (1, "jax.errors.JaxRuntimeError: INTERNAL: NCCL: remote process exited or there was a network error"),
    ],
    ids=["gloo aborts", "gloo raises", "nccl"],
)
def test_the_error_of_a_lost_connection_is_no_cause_where_there_is_another(code, line):
    aborted = ended(0, code, 2.0, line)
    found = first_error([aborted, ended(1, -9, 2.05)])
    assert found is not None
    assert found.process == 1
    alone = first_error([aborted])
    assert alone is not None
    assert (alone.process, alone.what) == (0, how_it_ended(code))


def test_a_process_that_was_stuck_names_itself_and_is_first():
    stood = (TRACEBACK[0], TRACEBACK[1], FOLLOWER[1])
    found = first_error([ended(0, 1, 8.0, *FOLLOWER), ended(1, 1, 9.0, *stood)])
    assert found is not None
    assert (found.process, found.lines) == (1, stood)


def test_what_the_launcher_ended_a_process_for_is_the_error():
    stopped = Ended(process=1, code=-9, time_s=20.0, why="stopped (SIGSTOP) for 15 s")
    found = first_error([stopped, ended(0, -15, 21.0, by_launcher=True)])
    assert found is not None
    assert (found.process, found.code, found.what) == (1, 137, "stopped (SIGSTOP) for 15 s")


def test_a_chain_of_exceptions_is_shown_from_its_start():
    chain = ("noise", TRACEBACK[0], "KeyError: 'a'", "", "During handling of the above exception, another exception:")
    found = first_error([ended(0, 1, 2.0, "Traceback (most recent call last):", "old", *chain, *TRACEBACK)])
    assert found is not None
    assert found.lines == (*chain[1:], *TRACEBACK)


def test_a_long_error_keeps_its_end():
    found = first_error([ended(0, 1, 2.0, TRACEBACK[0], *(f"line {i}" for i in range(300)), "ValueError: x")])
    assert found is not None
    assert len(found.lines) == 62
    assert found.lines[:2] == (TRACEBACK[0], "  ...")
    assert found.lines[-1] == "ValueError: x"


def test_the_report_has_the_error_on_top_and_a_line_on_the_others():
    all_of_them = [
        ended(0, 1, 30.0, *FOLLOWER),
        ended(1, 7, 2.0, *TRACEBACK),
        ended(2, -15, 9.0, by_launcher=True),
        ended(3, 0, 1.0),
    ]
    found = first_error(all_of_them)
    assert found is not None
    assert report(found, all_of_them) == [
        "process 1 failed first: exit code 7",
        *(f"  [1] {line}" for line in TRACEBACK),
        "the others: 0 exit code 1, 2 ended by the launcher, 3 exit code 0",
    ]


def test_codes():
    assert [shell_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]
    assert [how_it_ended(code) for code in (3, -11, -63)] == ["exit code 3", "killed by SIGSEGV", "killed by signal 63"]
