"""One stage under ZeRO in other numbers of micro-batches than those of the search over layers."""

from types import SimpleNamespace

from autopar import Cluster
from autopar.inter_op.other_numbers import refine_in_other_numbers
from autopar.inter_op.pipeline_candidate import PipelineEstimate

LIMIT_BYTES = 100
CHOICE = SimpleNamespace(policies=("nothing",) * 2, terms=())
RECOMPUTES = SimpleNamespace(policies=("matmuls",) * 2, terms=())


def estimate(m, name, step_time_s, peak_bytes=10, choice=CHOICE):
    return PipelineEstimate(
        num_microbatches=m, choice=choice, step_time_s=step_time_s, peak_bytes=peak_bytes, to_beat_s=0.0, name=name
    )


def walked(times, *, best_s=4.0, cut=lambda n: SimpleNamespace(layers=(0, 1)), recomputes=()):
    """What is evaluated, in order, where a step under a name takes so many seconds in a number of micro-batches; all
    were evaluated in 16 of them. Numbers of seconds below zero do not fit. `recomputes`: names of what does.
    """
    seen = []

    def found(m, name):
        seconds = times[name][m]
        choice = RECOMPUTES if name in recomputes else CHOICE
        return estimate(m, name.split(" ")[0], abs(seconds), 10 if seconds > 0 else 2 * LIMIT_BYTES, choice)

    def refined(m, choice, name, binding):
        name = next(
            each for each in times if each.split(" ")[0] == name and (each in recomputes) == (choice is RECOMPUTES)
        )
        seen.append((name, m))
        return found(m, name)

    fake = SimpleNamespace(
        cluster=Cluster.preset("dgx-h100"),
        best=estimate(16, "", best_s),
        limit_bytes=LIMIT_BYTES,
        deadline=SimpleNamespace(passed=False),
        refinements=[found(16, name) for name in times],
        refined=refined,
    )
    refine_in_other_numbers(fake, cut, [2, 4, 8, 16, 32])
    return seen


def test_each_stage_of_zero_goes_on_while_that_is_faster():
    times = {"ZeRO-1": {8: 4.2, 16: 4.1, 32: 4.3}, "ZeRO-3": {4: 3.0, 8: 3.5, 16: 4.1, 2: 3.1}}
    assert walked(times) == [("ZeRO-1", 8), ("ZeRO-1", 32), ("ZeRO-3", 8), ("ZeRO-3", 4), ("ZeRO-3", 2)]


def test_more_micro_batches_are_tried_where_fewer_are_slower():
    assert walked({"ZeRO-3": {8: 4.2, 16: 4.1, 32: 3.9}}) == [("ZeRO-3", 8), ("ZeRO-3", 32)]


def test_what_does_not_fit_ends_the_walk():
    assert walked({"ZeRO-3": {8: 3.8, 4: -3.5, 16: 4.1}}) == [("ZeRO-3", 8), ("ZeRO-3", 4)]


def test_what_does_not_fit_is_tried_in_more_micro_batches_only():
    assert walked({"ZeRO-3": {8: -3.5, 16: -4.1, 32: 4.15}}) == [("ZeRO-3", 32)]


def test_what_keeps_all_and_does_not_fit_is_walked_beside_what_recomputes_and_does():
    times = {"ZeRO-3 recomputing": {8: 4.2, 16: 4.1, 32: 4.3}, "ZeRO-3": {16: -3.0, 32: 3.5}}
    found = walked(times, recomputes={"ZeRO-3 recomputing"})
    assert found == [("ZeRO-3 recomputing", 8), ("ZeRO-3 recomputing", 32), ("ZeRO-3", 32)]


def test_what_is_far_from_the_best_goes_on_as_far_as_it_may_become_that():
    """In one micro-batch it would take 3.81 s: of 16 to 8 each takes off 12.5 ms."""
    assert walked({"ZeRO-3": {8: 3.9, 16: 4.0}}, best_s=3.0) == [("ZeRO-3", 8)]


def test_what_gathers_for_each_micro_batch_is_walked_from_afar():
    times = {"ZeRO-3": {16: 5.0, 8: 3.8, 4: 3.2, 2: 2.9}}
    assert walked(times, best_s=3.0) == [("ZeRO-3", 8), ("ZeRO-3", 4), ("ZeRO-3", 2)]


def test_more_micro_batches_of_what_is_far_from_the_best_are_left():
    assert walked({"ZeRO-3": {8: 4.1, 16: 4.0, 32: 2.0}}, best_s=3.0) == [("ZeRO-3", 8)]


def test_a_number_that_the_step_does_not_admit_is_left_out():
    assert walked({"ZeRO-3": {8: 1.0, 16: 4.0, 32: 1.0}}, cut=lambda n: None) == []
