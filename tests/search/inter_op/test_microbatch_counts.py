"""One stage under ZeRO in other numbers of micro-batches than those of the search over layers."""

from types import SimpleNamespace

from autopar import Cluster
from autopar.search.inter_op.one_stage import MicrobatchCounts, refine_in_other_counts
from autopar.search.inter_op.pipeline_candidate import PipelineEstimate

LIMIT_BYTES = 100
CHOICE = SimpleNamespace(policies=("nothing",) * 2, terms=())
RECOMPUTES = SimpleNamespace(policies=("matmuls",) * 2, terms=())


def estimate(m, name, step_time_s, peak_bytes=10, choice=CHOICE):
    return PipelineEstimate(
        num_microbatches=m, choice=choice, step_time_s=step_time_s, peak_bytes=peak_bytes, to_beat_s=0.0, name=name,
        binding=name or None,
    )  # fmt: skip


def numbers(cut=lambda n: SimpleNamespace(layers=(0, 1)), num_devices=1, least_s=0.0):
    return MicrobatchCounts(
        numbers=(2, 4, 8, 16, 32), cut=cut, num_examples=32, num_devices=num_devices, least_s=least_s
    )  # fmt: skip


def walked(times, *, best_s=4.0, others=None, recomputes=(), cannot_fit=(), cannot_gain=()):
    """What is evaluated, in order, where a step under a name takes so many seconds in a number of micro-batches; all
    were evaluated in 16 of them. Numbers of seconds below zero do not fit. `recomputes`: names of what does;
    `cannot_fit`: the numbers in which no decisions fit, `cannot_gain`: those in which all take too long.
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
        may_gain=lambda m, choice: m not in cannot_gain,
        least_bytes=lambda m, choice: 2 * LIMIT_BYTES if m in cannot_fit else 10,
    )
    refine_in_other_counts(fake, others or numbers())
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
    assert walked({"ZeRO-3": {8: 1.0, 16: 4.0, 32: 1.0}}, others=numbers(cut=lambda n: None)) == []


def test_fewer_micro_batches_in_which_nothing_fits_are_not_evaluated():
    times = {"ZeRO-3": {16: 4.1, 8: 3.9, 4: 3.0}}
    assert walked(times, cannot_fit={4}) == [("ZeRO-3", 8)]


def test_recipes_are_not_walked_to_where_devices_repeat_work_for_too_long():
    """Of 32 examples two are in one of 16 micro-batches, and one in one of 32: for one of the two devices."""
    times = {"ZeRO-3": {8: 4.2, 16: 4.1, 32: 3.9}}
    assert walked(times, others=numbers(num_devices=2, least_s=1.9)) == [("ZeRO-3", 8), ("ZeRO-3", 32)]
    assert walked(times, others=numbers(num_devices=2, least_s=2.1)) == [("ZeRO-3", 8)]


def test_the_most_micro_batches_of_which_all_devices_have_examples():
    others = numbers(num_devices=8)
    assert [others.shared_by_most(m) for m in (2, 4, 8, 32)] == [2, 4, 4, 4]
    assert numbers(num_devices=64).shared_by_most(32) == 2


def test_numbers_in_which_nothing_can_become_the_best_are_not_even_cut():
    times, cut = {"ZeRO-3": {8: 4.2, 16: 4.1, 32: 3.9}}, []
    others = numbers(cut=lambda n: cut.append(n) or SimpleNamespace(layers=(0, 1)))
    assert walked(times, others=others, cannot_gain={32}) == [("ZeRO-3", 8)]
    assert cut == [8]
