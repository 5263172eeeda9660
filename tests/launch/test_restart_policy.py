"""Whether processes start again, how many and how soon."""

import pytest

from autopar.launch.restart_policy import Again, Outcome, Policy, Stop, backoff_s, next_start, why_not_again


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
