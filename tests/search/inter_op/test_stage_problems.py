"""Decisions that are kept from one number of micro-batches to another."""

import contextlib
from types import SimpleNamespace

from autopar.plan.options import PlanRequest
from autopar.search.inter_op import stage_problems
from autopar.search.inter_op.stage_problems import PosedProblems
from tests.search.inter_op.test_stage_costs import cluster, cut


def options_in(numbers, monkeypatch):
    """How many options each number of micro-batches of a long step has on two devices, one after the other.

    Of 256 examples, 64 and more in a micro-batch crowd the memory, so that their options save less of them.
    """
    monkeypatch.setattr(stage_problems, "is_long", lambda traced: True)
    cuts = {m: cut(m, batch=256) for m in numbers}
    context = SimpleNamespace(
        cluster=cluster(),
        request=PlanRequest(),
        limit_bytes=4 * 10**6,
        keep_tolerance=1.0,
        traced=cuts[numbers[0]].step.traced,
        progress=SimpleNamespace(pass_=lambda _: contextlib.nullcontext()),
        deadline=SimpleNamespace(solve_s=lambda: 5.0),
    )
    posed = PosedProblems(context, cuts[numbers[0]].step, None)
    posed.sizes = lambda *given: [2]
    return {m: len(posed.of(cuts[m])[0][1]) for m in numbers}


def test_numbers_without_crowded_memory_leave_the_options_of_crowded_ones(monkeypatch):
    assert options_in((128, 8, 64, 4), monkeypatch)[4] == options_in((128, 8, 4), monkeypatch)[4] > 3
