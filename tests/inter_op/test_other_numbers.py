"""ZeRO on one stage in other numbers of micro-batches than those of the search over layers."""

from types import SimpleNamespace

import pytest

from autopar import Cluster
from autopar.inter_op.evaluate import PipelineEvaluator

NAMES = ("ZeRO-3", "ZeRO-3 in groups of 8")


def candidate(m, name, step_time_s):
    return SimpleNamespace(
        name=name,
        step_time_s=step_time_s,
        num_microbatches=m,
        choice=SimpleNamespace(policies=("nothing",) * 2),
    )


def walked(times, name="ZeRO-3", cut=lambda n: SimpleNamespace(layers=(0, 1))):
    """(the number of micro-batches of the best, all that was evaluated), where a number takes so many seconds."""
    seen = []

    def refined(m, choice, name, binding):
        seen.append((m, name))
        if times[m] < fake.best.step_time_s:
            fake.best = candidate(m, name, times[m])

    fake = SimpleNamespace(
        cluster=Cluster.preset("dgx-h100", hosts=2),
        best=candidate(16, name, times[16]),
        deadline=SimpleNamespace(passed=False),
        refined=refined,
    )
    PipelineEvaluator.refine_in_other_numbers(fake, cut, sorted(times))
    return fake.best.num_microbatches, seen


def test_it_goes_on_while_that_is_faster_and_tries_each_number_once():
    best, seen = walked({2: 5.0, 4: 2.0, 8: 3.0, 16: 4.0, 32: 5.0})
    assert best == 4
    assert seen == [(m, name) for m in (8, 32, 4, 2) for name in NAMES]


@pytest.mark.parametrize("name", ["", "data parallelism in stages"])
def test_other_pipelines_are_left_as_they_are(name):
    assert walked({8: 1.0, 16: 4.0}, name) == (16, [])


def test_a_number_that_the_step_does_not_admit_is_left_out():
    assert walked({8: 1.0, 16: 4.0}, cut=lambda n: None) == (16, [])
